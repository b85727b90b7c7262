"""The phases of SPIDER's clients: warm-up, search by one of two searchers, and training of what was found."""

from __future__ import annotations

from dataclasses import dataclass

from . import spider_milenas
from .perturbation import Schedule


@dataclass(frozen=True)
class Phases:
    """When a run of so many rounds does what; rounds t count from 0, as in the paper. Options as in the method."""

    searcher: str
    warm_up: int
    tau: int
    search_rounds: int
    merge_val: bool
    rounds: int

    @property
    def schedule(self) -> Schedule:
        """Of decisions by perturbation."""
        return Schedule.of(self.warm_up, self.tau, self.rounds)

    def over(self, t: int) -> bool:
        """Whether phase 3 has begun, in which nothing is decided on val any more."""
        if self.searcher == "milenas":
            return spider_milenas.over(self.search_rounds, t, self.rounds)
        return self.schedule.over(t)

    def split(self, t: int) -> str:
        """What is trained on."""
        return "train+val" if self.merge_val and self.over(t) else "train"
