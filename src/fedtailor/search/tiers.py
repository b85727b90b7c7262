"""Tiers of devices (FedorAS): brackets of FLOPs, archs within a bracket, and their evolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import UserError
from ..method import Job
from ..seeds import rng_of
from ..spaces.base import Arch, Space
from .paths import Options, every_option

MASS = 0.95  # of the sampled FLOPs that lies below the last bracket
TRIES = 200
STARTS = 20
STEPS = 200  # changes of one choice until another start is tried

Pool = list[dict[str, Any]]  # scored archs: arch, accuracy, images


@dataclass(frozen=True)
class Bracket:
    """The archs of a tier: low < FLOPs <= high, and small enough for whoever has to hold them."""

    space: Space
    low: float
    high: float
    fits: Callable[[Arch], bool]

    def holds(self, arch: Arch) -> bool:
        return self.low < self.space.cost(arch).flops <= self.high and self.fits(arch)

    def sample(self, rng: np.random.Generator, options: Options | None = None) -> Arch:
        """A random arch of these options; while it is outside, random changes towards the bracket are made."""
        options = options or every_option(self.space)
        for _ in range(STARTS):
            arch = tuple(o[int(rng.integers(len(o)))] for o in options)
            flops = self.space.cost(arch).flops
            for _ in range(STEPS):
                large = flops > self.high or not self.fits(arch)
                if not large and flops > self.low:
                    return arch
                d = int(rng.integers(len(arch)))
                other = (*arch[:d], options[d][int(rng.integers(len(options[d])))], *arch[d + 1 :])
                cost = self.space.cost(other).flops
                if cost < flops if large else flops <= cost <= self.high:
                    arch, flops = other, cost
        raise UserError(
            f"no arch of '{self.space.name}' was found with {self.low:.4g} < FLOPs <= {self.high:.4g} that its clients "
            "can hold. Lower method.tiers, set method.assign = 'device', or raise fleet.budget."
        )


@lru_cache(maxsize=16)
def edges(space: Space, tiers: int, probes: int, seed: int) -> tuple[float, ...]:
    """The ends of the brackets: equal steps up to where 95 % of the sampled FLOPs lie, then the rest.

    The smallest arch is in the first bracket, the largest in the last.
    """
    rng = rng_of(seed, "edges")
    flops = np.sort([space.cost(space.sample(rng)).flops for _ in range(probes)])
    least, most = space.cost(space.smallest).flops, max(space.cost(space.largest).flops, int(flops[-1]))
    common = flops[np.searchsorted(np.cumsum(flops), MASS * flops.sum())]
    if common == most:  # few archs: the last bracket is that of the largest
        common = max(flops[flops < most], default=least)
    return (least - 1.0, *np.linspace(least, common, tiers).tolist()[1:], float(most))


def assigned(job: Job, tiers: int, by: str) -> list[int]:
    """Every client's tier, in equal shares: at random, or by the speed of its device."""
    n = len(job.seats)
    order = rng_of(job.seed, "tiers").permutation(n)
    if by == "device":
        order = np.argsort([seat.profile.flops_per_second for seat in job.seats], kind="stable")
    found = [0] * n
    for rank, i in enumerate(order):
        found[int(i)] = rank * tiers // n
    return found


def offspring(bracket: Bracket, parents: Sequence[Arch], mutation: float, rng: np.random.Generator) -> Arch:
    """A child of two parents: every choice from either, some drawn anew; within the bracket."""
    for _ in range(TRIES if parents else 0):
        a, b = (parents[int(i)] for i in rng.integers(len(parents), size=2))
        child = [x if take else y for x, y, take in zip(a, b, rng.random(len(a)) < 0.5, strict=True)]
        for d in np.flatnonzero(rng.random(len(child)) < mutation):
            child[d] = int(rng.integers(len(bracket.space.dimensions[d].options)))
        if bracket.holds(tuple(child)):
            return tuple(child)
    return bracket.sample(rng)


def ranked(pool: Pool) -> list[Arch]:
    """Scored archs, the most accurate first; of equals the one known for longer."""
    return [tuple(entry["arch"]) for entry in sorted(pool, key=lambda entry: -entry["accuracy"])]


def noted(pool: Pool, arch: Arch, accuracy: float, images: float) -> Pool:
    """The pool with one more score: an arch's accuracy is over all images that it was ever scored on."""
    for i, entry in enumerate(pool):
        if tuple(entry["arch"]) == arch:
            total = entry["images"] + images
            mean = entry["accuracy"] + (accuracy - entry["accuracy"]) * images / total
            return [*pool[:i], entry | {"accuracy": mean, "images": total}, *pool[i + 1 :]]
    return [*pool, {"arch": list(arch), "accuracy": accuracy, "images": images}]
