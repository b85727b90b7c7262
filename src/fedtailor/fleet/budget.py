"""What a device can afford: limits on the network of one client, absolute or as fractions of the largest network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ..errors import UserError
from .clock import round_seconds
from .profile import Profile

if TYPE_CHECKING:
    from ..spaces.base import Arch, Space
    from ..spaces.measure import Cost

QUANTITIES = ("flops", "parameters", "memory", "seconds", "bytes")
_UNITS = {"flops": "FLOP", "parameters": "", "memory": "B", "bytes": "B"}


@dataclass(frozen=True)
class Budget:
    """Limits on a network; None is no limit. `a & b` is the budget that keeps both.

    Fractions are of what the largest arch of the space needs, and become absolute once the space is known: `absolute`.
    """

    flops: float | None = None  # forward pass of one image, two per multiply-add
    parameters: float | None = None
    memory: float | None = None  # bytes to train at the local batch: weights, gradients, momenta, kept activations
    seconds: float | None = None  # simulated time of a round: receive, train on the round's images, send
    bytes: float | None = None  # to send the network once
    of_largest: Budget | None = None  # the same limits as fractions

    def __post_init__(self) -> None:
        for quantity, limit in self.limits.items():
            if not 0 < limit < math.inf:
                raise UserError(f"budget: the limit on {quantity} is {limit:g}; it must be a number above 0.")

    def __and__(self, other: Budget) -> Budget:
        parts = [b.of_largest for b in (self, other) if b.of_largest is not None]
        fractions = None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]
        both = other.limits | self.limits
        return budget_of({q: min(limit, other.limits.get(q, limit)) for q, limit in both.items()}, fractions)

    def __str__(self) -> str:
        parts = [f"{q} ≤ {readable(q, limit)}" for q, limit in self.limits.items()]
        if self.of_largest:
            parts += [f"{q} ≤ {100 * f:g} % of largest" for q, f in self.of_largest.limits.items()]
        return ", ".join(parts) or "no limits"

    @cached_property  # searches ask for it at every arch
    def limits(self) -> dict[str, float]:
        """The limits that are set, by quantity."""
        return {q: limit for q in QUANTITIES if (limit := getattr(self, q)) is not None}

    def absolute(self, largest: Cost, batch: int, profile: Profile, images: int | None = None) -> Budget:
        """The budget with its fractions taken of `largest`, the cost of the largest arch."""
        if self.of_largest is None:
            return self
        scaled = {q: f * need(q, largest, batch, profile, images) for q, f in self.of_largest.limits.items()}
        return replace(self, of_largest=None) & budget_of(scaled)

    def use(self, cost: Cost, batch: int, profile: Profile, images: int | None = None) -> dict[str, float]:
        """How much of each limit the network takes, 1 being all of it (`memory` is phi of PerFedRLNAS, eq. 9)."""
        return {q: need(q, cost, batch, profile, images) / limit for q, limit in self._known().items()}

    def excess(self, cost: Cost, batch: int, profile: Profile, images: int | None = None) -> dict[str, float]:
        """What the network needs of every quantity in which it goes beyond the limit; empty if it fits."""
        needs = {q: need(q, cost, batch, profile, images) for q in self._known()}
        return {q: n for q, n in needs.items() if n > self.limits[q]}

    def fits(self, cost: Cost, batch: int, profile: Profile, images: int | None = None) -> bool:
        """Whether the network stays within every limit. A limit on seconds needs `images`, trained on in a round."""
        return not self.excess(cost, batch, profile, images)

    def why_not(self, cost: Cost, batch: int, profile: Profile, images: int | None = None) -> str:
        """'memory 1.2 GB (limit 1 GB), ...', or an empty text if the network fits."""
        over = self.excess(cost, batch, profile, images)
        return ", ".join(f"{q} {readable(q, n)} (limit {readable(q, self.limits[q])})" for q, n in over.items())

    def within(
        self, space: Space, batch: int, profile: Profile, images: int | None = None, largest: Cost | None = None
    ) -> Callable[[Arch], bool]:
        """The test for `Space.sample(..., fits=...)`. Fractions are of `largest`, else of the space's largest."""
        budget = self.absolute(largest or space.cost(space.largest), batch, profile, images)
        # sampling asks about the same archs again and again, and adding up a cost is slower than remembering an answer
        return lru_cache(maxsize=100_000)(lambda arch: budget.fits(space.cost(arch), batch, profile, images))

    def _known(self) -> dict[str, float]:
        if self.of_largest is not None:
            raise ValueError("this budget has fractions: call `absolute` with the largest arch's cost first")
        return self.limits


def budget_of(limits: Mapping[str, float], of_largest: Budget | None = None) -> Budget:
    """The budget with these limits, by quantity."""
    return replace(Budget(of_largest=of_largest), **limits)


def need(quantity: str, cost: Cost, batch: int, profile: Profile, images: int | None = None) -> float:
    """What a network needs of a quantity on this device."""
    if quantity == "memory":
        return cost.training_memory(batch)
    if quantity != "seconds":
        return getattr(cost, quantity)
    if images is None:
        raise ValueError("a limit on seconds needs the number of images a client trains on in a round")
    return round_seconds(profile, cost.bytes, cost.bytes, cost.train_flops * images)


def require_feasible(
    space: Space,
    budget: Budget,
    client_name: str,
    batch: int,
    profile: Profile,
    images: int | None = None,
    largest: Cost | None = None,
) -> None:
    """Raises the error a user can act on if not even the smallest arch fits this client."""
    limits = budget.absolute(largest or space.cost(space.largest), batch, profile, images)
    why = limits.why_not(space.cost(space.smallest), batch, profile, images)
    if why:
        raise UserError(
            f"client '{client_name}' ({profile.name}): no arch of '{space.name}' fits its budget. The smallest, "
            f"{space.smallest}, needs {why} at batch {batch}. Raise the limit (fleet.budget), give the client a larger "
            "device, lower the batch, or choose a smaller space."
        )


def readable(quantity: str, value: float) -> str:
    """'1.234 MFLOP', '4 GB', '12.5 s', '3,600 s'."""
    if quantity == "seconds":
        return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
    prefix = 0
    while value >= 999.95 and prefix < 4:  # what would be written as 1000
        value, prefix = value / 1000, prefix + 1
    return f"{value:.4g} {('', 'k', 'M', 'G', 'T')[prefix]}{_UNITS[quantity]}".rstrip()


@dataclass(frozen=True)
class Limits:
    """The table [fleet.budget]: limits for every client, beside those its device brings. 0 is no limit.

    A limit is a number, a number with k, M, G or T ("4 GB", "600M"), or "50%" of what the largest arch needs.
    """

    flops: float | str = 0.0  # forward pass of one image, two per multiply-add
    parameters: float | str = 0.0  # weights of the network
    memory: float | str = 0.0  # bytes to train at the local batch
    seconds: float | str = 0.0  # simulated time of one round, transfers included
    bytes: float | str = 0.0  # to send the network once

    def __post_init__(self) -> None:
        self.budget()  # a bad limit is an error where it is written

    def budget(self) -> Budget:
        absolute: dict[str, float] = {}
        fractions: dict[str, float] = {}
        for quantity in QUANTITIES:
            limit, relative = _read_limit(quantity, getattr(self, quantity))
            if limit:
                (fractions if relative else absolute)[quantity] = limit
        return budget_of(absolute, budget_of(fractions) if fractions else None)


_LIMIT = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*(%|[kMGT]?B?)", re.ASCII)


def _read_limit(quantity: str, value: float | str) -> tuple[float, bool]:
    """The limit as a number, and whether it is a fraction of the largest arch."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value), False
    match = _LIMIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise UserError(
            f"fleet.budget.{quantity} = {value!r} is no limit: write a number of at least 0 (0 = no limit), one with "
            "k, M, G or T such as '4 GB', or a part of what the largest arch needs such as '50%'."
        )
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return number / 100, True
    return number * {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(unit[:1], 1.0), False
