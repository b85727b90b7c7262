"""Clusters of clients by what they predict."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def means(points: Tensor, clusters: int, rng: np.random.Generator, rounds: int = 50) -> Tensor:
    """k-means: the cluster of each row. Starts from far rows (the first at random), stops when nothing changes.

    With fewer rows than clusters every row is a cluster of its own.
    """
    flat = points.flatten(1)
    chosen = [int(rng.integers(len(flat)))]
    while len(chosen) < min(clusters, len(flat)):
        apart = torch.stack([(flat - flat[i]).pow(2).sum(1) for i in chosen]).amin(0)
        chosen.append(int(apart.argmax()))
    centres = flat[chosen]
    member = torch.full((len(flat),), -1, device=flat.device)
    for _ in range(rounds):
        apart = torch.stack([(flat - c).pow(2).sum(1) for c in centres], 1)
        nearest = apart.argmin(1)
        if torch.equal(nearest, member):
            break
        member = nearest
        centres = torch.stack(
            [flat[member == c].mean(0) if (member == c).any() else old for c, old in enumerate(centres)]
        )
    return member
