"""Control: every client keeps the largest architecture that fits its budget. Is a search more than a tape measure?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..method import Card, Job
from ..registry import register
from ..search.supernet import affords
from ..spaces.base import Arch, Space
from .random_arch import RandomArch

ENUMERABLE = 20_000  # archs that are compared one by one; above that the greedy rule decides


@register("method", "largest-fit")
@dataclass(frozen=True)
class LargestFit(RandomArch):
    paper: ClassVar[str] = "control for the searches: the largest arch that fits"
    card: ClassVar[Card] = replace(RandomArch.card, policy="the largest that fits the budget")

    measure: Literal["flops", "parameters"] = "flops"  # what makes an arch large

    def choose(self, job: Job) -> list[Arch]:
        size = lambda arch: float(getattr(job.space.cost(arch), self.measure))  # noqa: E731
        ranked = sorted(job.space.archs(), key=size, reverse=True) if job.space.size <= ENUMERABLE else None
        known: dict[object, Arch] = {}
        for seat in job.seats:
            key = (seat.budget, seat.profile, seat.images)  # clients with equal devices and data get equal archs
            if key not in known:
                fits = lambda arch, seat=seat: affords(seat, arch)  # noqa: E731
                known[key] = next(filter(fits, ranked)) if ranked else climb(job.space, size, fits)
        return [known[seat.budget, seat.profile, seat.images] for seat in job.seats]


def climb(space: Space, size: Callable[[Arch], float], fits: Callable[[Arch], bool]) -> Arch:
    """An arch that fits and that no step up in one dimension leaves fitting, found greedily.

    From the smallest arch, every step raises one dimension by one option: the one that adds most and still fits.
    """
    if fits(space.largest):
        return space.largest
    arch = space.smallest
    while True:
        ups = [(*arch[:d], i + 1, *arch[d + 1 :]) for d, i in enumerate(arch) if i < space.largest[d]]
        fitting = [up for up in ups if fits(up)]
        if not fitting:
            return arch
        arch = max(fitting, key=size)
