"""The simulated clock: how long a round takes, who is late, and who can be reached. Pure functions of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .profile import Profile

if TYPE_CHECKING:
    from .fleet import Fleet


def round_seconds(profile: Profile, bytes_down: float, bytes_up: float, flops: float) -> float:
    """One client's part of a round: receive, compute, send, one after the other.

    `flops` is the whole local work: for plain training `cost.train_flops` times the images seen (samples x epochs).
    """
    transfer = 8e-6 * (bytes_down / profile.down_mbit + bytes_up / profile.up_mbit)  # bytes to 10^6 bits
    return transfer + flops / profile.flops_per_second


class Round(NamedTuple):
    """How a synchronous round ended."""

    seconds: float
    on_time: tuple[int, ...]  # in client order
    late: tuple[int, ...]  # slower than the deadline: their replies are dropped


@dataclass(frozen=True)
class Clock:
    """Simulated time of a synchronous federation. A value: `round` returns the next one."""

    deadline: float = 0.0  # seconds after which the server stops waiting; 0 = it waits for everybody
    seconds: float = 0.0  # simulated so far

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    def round(self, times: Mapping[int, float]) -> tuple[Clock, Round]:
        """Adds a round, given the seconds of each participant: the slowest one's, or the deadline if one is late.

        A client that needs exactly the deadline is on time. A round without participants takes no time.
        """
        limit = self.deadline or math.inf
        late = tuple(c for c in sorted(times) if times[c] > limit)
        on_time = tuple(c for c in sorted(times) if times[c] <= limit)
        seconds = self.deadline if late else max(times.values(), default=0.0)
        return replace(self, seconds=self.seconds + seconds), Round(seconds, on_time, late)


def available(fleet: Fleet, clients: Iterable[int], round: int, seed: int) -> set[int]:
    """Those of `clients` that can be reached in this round, each by its device's availability.

    The draw is named by (seed, round, client), so it does not depend on who else is asked about.
    """
    from ..seeds import seed_of  # seeds imports torch, which a reader of the config should not wait for

    def draw(client: int) -> float:
        return (seed_of(seed, "available", round, client) >> 10) / (1 << 53)  # in [0, 1), never rounded up to 1

    return {c for c in clients if draw(c) < fleet[c].profile.availability}
