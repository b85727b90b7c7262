"""What a run had sent by the time it first reached an accuracy (Luo et al., Figure 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtailor.errors import UserError
from fedtailor.runs.results import KINDS, Results


class Milestone(NamedTuple):
    """The first evaluation at which the mean accuracy over clients was as high as asked for."""

    round: int
    accuracy: float
    bytes_down: float  # to all clients, from the first round to this one
    bytes_up: float
    seconds: float  # simulated

    @property
    def bytes(self) -> float:
        return self.bytes_down + self.bytes_up


def bytes_to_reach(run: Results, accuracy: float, kind: str = "personal") -> Milestone | None:
    """The milestone of an accuracy between 0 and 1 on val, or None where the run never reached it.

    Runs are evaluated every `evaluate_every` rounds, so the true crossing may lie up to that many rounds earlier.
    """
    if kind not in KINDS:
        raise UserError(f"there is no {kind} accuracy; there are {', '.join(KINDS)}.")
    rounds, mean, _, _ = run.series(KINDS[kind], "val")
    reached = np.flatnonzero(mean >= accuracy)
    if not len(reached):
        return None
    at = int(reached[0])
    so_far = run.events.round <= rounds[at]
    down, up, seconds = (
        float(run.events.value[run.events.where(metric) & so_far].sum())
        for metric in ("bytes_down", "bytes_up", "round_seconds")
    )
    return Milestone(int(rounds[at]), float(mean[at]), down, up, seconds)
