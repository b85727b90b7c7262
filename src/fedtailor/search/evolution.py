"""Evolution of archs that clients score on val (FedorAS): pools of scored archs, their children, a client's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..engine.client import Client
from ..method import Reply, Server, Task
from ..seeds import rng_of
from ..spaces.base import Arch
from .paths import score_paths
from .tiers import Bracket, bracket_of

TRIES = 200
IMAGES = 10**8  # that a client may say it scored on: they are masses of a mean, and no server knows how large a val is

Pool = list[dict[str, Any]]  # scored archs: arch, accuracy, images


def generation(
    bracket: Bracket, pool: Pool, size: int, parents: int, mutation: float, rng: np.random.Generator
) -> list[Arch]:
    """The best archs so far, which are scored again, and children of theirs."""
    best = ranked(pool)[:parents]
    again = best[: size - 1]
    return again + [offspring(bracket, best, mutation, rng) for _ in range(size - len(again))]


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


def arch_of(server: Server, tier: int) -> Arch:
    """The tier's arch: the best that was found so far; any of its bracket where nothing was scored."""
    known = [tuple(server.archs[tier])] if server.archs else ranked(server.pools[tier])
    return known[0] if known else bracket_of(server, tier).sample(rng_of(server.job.seed, "unscored", tier))


def absorbed(pools: Sequence[Pool], replies: Sequence[Reply]) -> list[Pool]:
    """The tiers' pools with what clients reported; an arch that a client scored twice counts once."""
    found = list(pools)
    for r in replies:
        tier, images = int(r.facts["tier"]), float(r.facts["images"])
        archs, accuracies = r.extra["candidates"].tolist(), r.extra["accuracies"].tolist()
        if not 0 < images <= IMAGES or not all(0 <= accuracy <= 1 for accuracy in accuracies):
            raise ValueError(f"it says it scored on {images:g} images, with accuracies {str(accuracies)[:200]}")
        for arch, accuracy in {tuple(a): x for a, x in zip(archs, accuracies, strict=True)}.items():
            found[tier] = noted(found[tier], arch, accuracy, images)
    return found


async def score_candidates(task: Task, client: Client) -> Reply:
    """A client's scores of the task's candidates, on its own val."""
    archs = task.extra["candidates"]
    accuracies = await score_paths(task.weights, client, [tuple(arch) for arch in archs.tolist()])
    facts = {"tier": task.facts["tier"], "images": client.size("val")}
    return Reply(extra={"candidates": archs, "accuracies": torch.tensor(accuracies)}, facts=facts)
