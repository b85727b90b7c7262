"""Control: every client keeps the largest architecture that fits its budget. Is a search more than a tape measure?"""

from __future__ import annotations

import math
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
                over = lambda arch, seat=seat: sum(max(0.0, u - 1) for u in seat.use(arch).values())  # noqa: E731
                known[key] = next(filter(fits, ranked)) if ranked else largest(job.space, size, over)
        return [known[seat.budget, seat.profile, seat.images] for seat in job.seats]


def largest(space: Space, size: Callable[[Arch], float], over: Callable[[Arch], float]) -> Arch:
    """A large arch of those that are `over` budget by 0: the larger of what climbing up and coming down find.

    Climbing alone is short-sighted where the budget is not of what makes an arch large. Under a limit on memory it
    takes early stages first, which add most FLOPs, and fill the memory before the cheap late ones have their turn.
    """
    if over(space.largest) == 0:
        return space.largest
    found = [climb(space, start, size, over) for start in (space.smallest, descend(space, size, over))]
    return max(found, key=size)


def climb(space: Space, arch: Arch, size: Callable[[Arch], float], over: Callable[[Arch], float]) -> Arch:
    """From an arch that fits, every step raises one dimension by one option: the one that adds most and still fits."""
    while True:
        ups = [(*arch[:d], i + 1, *arch[d + 1 :]) for d, i in enumerate(arch) if i < space.largest[d]]
        fitting = [up for up in ups if over(up) == 0]
        if not fitting:
            return arch
        arch = max(fitting, key=size)


def descend(space: Space, size: Callable[[Arch], float], over: Callable[[Arch], float]) -> Arch:
    """From the largest arch, every step lowers one dimension: the one that costs least size for what it saves."""
    arch = space.largest
    while arch != space.smallest and (excess := over(arch)) > 0:
        whole = size(arch)

        def price(down: Arch, whole: float = whole, excess: float = excess) -> float:
            saved = excess - over(down)
            return (whole - size(down)) / saved if saved > 0 else math.inf

        arch = min(((*arch[:d], i - 1, *arch[d + 1 :]) for d, i in enumerate(arch) if i), key=price)
    return arch
