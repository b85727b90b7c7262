"""Tiers of devices (FedorAS): brackets of FLOPs, archs within a bracket, and paths that stay within it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..engine.client import Client
from ..errors import UserError
from ..method import Job, Reply, Seat, Server, Task
from ..seeds import rng_of
from ..spaces.base import Arch, Space
from .paths import Options, every_option, pack_paths, train_paths, unpack_options

MASS = 0.95  # of the sampled FLOPs that lies below the last bracket
STARTS = 20
STEPS = 200  # changes of one choice until another start is tried


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


def layout(job: Job, tiers: int, assign: str, probes: int) -> dict[str, Any]:
    """What the server knows of tiers: every client's, and the ends of their brackets."""
    return {"tiers": assigned(job, tiers, assign), "edges": edges(job.space, tiers, probes, job.seed)}


def require_archs(server: Server) -> None:
    """Raises `UserError` where a tier has no arch that its clients can hold."""
    for tier in range(len(server.edges) - 1):
        bracket_of(server, tier).sample(rng_of(server.job.seed, "check", tier))


def bracket_of(server: Server, tier: int) -> Bracket:
    """What a tier's network may cost, for all clients that work on it: those of the tier and of higher ones."""
    seats = {(s.budget, s.profile): s for s, t in zip(server.job.seats, server.tiers, strict=True) if t >= tier}
    fits = lambda arch: all(seat.fits(arch) for seat in seats.values())  # noqa: E731
    return Bracket(server.space, server.edges[tier], server.edges[tier + 1], fits)


def serves(server: Server, client: Seat) -> int:
    """The tier whose network a client trains in this round: its own, or a lower one."""
    return int(server.rng("serves", client.id).integers(server.tiers[client.id] + 1))


async def train_within(task: Task, client: Client, draw_every: int, lr: float) -> Reply:
    """A client's round of single paths, drawn among the task's options within its FLOPs."""
    options = unpack_options(client.space, task.extra["options"])
    bracket = Bracket(client.space, -1.0, float(task.facts["flops"]), client.fits)
    draw = lambda first: bracket.sample(client.rng(f"path {first}"), options)  # noqa: E731
    weights, paths, loss = await train_paths(task.weights, client, draw, draw_every, lr)
    return Reply(weights, extra=pack_paths(paths), facts={"loss": loss})
