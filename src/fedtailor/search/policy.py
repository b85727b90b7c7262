"""A categorical policy over the dimensions of any space, and its REINFORCE gradient.

A policy is one flat vector of logits, the options of all dimensions side by side. p^d = softmax(alpha^d), one
independent draw per dimension (PerFedRLNAS, eq. 4).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..spaces.base import Arch, Space

LEAST = math.log(1e-300)  # as the logarithm of a probability


def sizes(space: Space) -> list[int]:
    """How many options each dimension has."""
    return [len(d.options) for d in space.dimensions]


def uniform_logits(space: Space, clients: int) -> Tensor:
    """Logits of policies that know nothing, one row per client."""
    return torch.zeros(clients, sum(sizes(space)), dtype=torch.float64)


def probabilities(space: Space, alpha: Tensor) -> list[np.ndarray]:
    """The probabilities of every dimension's options."""
    return [torch.softmax(part, 0).numpy() for part in alpha.double().cpu().split(sizes(space))]


def log_probabilities(space: Space, alpha: Tensor) -> list[list[float]]:
    """Their logarithms, in plain numbers: dimensions are too small to be worth arrays."""
    logits, found = iter(alpha.tolist()), []
    for size in sizes(space):
        part = list(islice(logits, size))
        top = max(part)
        total = top + math.log(sum(math.exp(logit - top) for logit in part))
        found.append([max(logit - total, LEAST) for logit in part])
    return found


def log_gradient(space: Space, alpha: Tensor, arch: Arch) -> Tensor:
    """d log p(arch) / d alpha = onehot(arch) - p, per dimension (eq. 6 and 7)."""
    parts = []
    for part, chosen in zip(alpha.double().split(sizes(space)), arch, strict=True):
        gradient = -torch.softmax(part, 0)
        gradient[chosen] += 1
        parts.append(gradient)
    return torch.cat(parts)


def most_likely(space: Space, alpha: Tensor, fits: Callable[[Arch], bool], patience: int = 20_000) -> Arch:
    """The arch of highest probability among those that fit.

    Archs are visited from the most likely downwards (best first over each dimension's sorted options), which is exact;
    after `patience` archs that do not fit, options move greedily to smaller ones, cheapest loss of probability first.
    """
    logs = log_probabilities(space, alpha)
    ranked = [sorted(range(len(log)), key=log.__getitem__, reverse=True) for log in logs]

    def arch_at(ranks: tuple[int, ...]) -> Arch:
        return tuple(ranked[d][r] for d, r in enumerate(ranks))

    def loss(ranks: tuple[int, ...]) -> float:
        return -sum(logs[d][ranked[d][r]] for d, r in enumerate(ranks))

    start: tuple[int, ...] = tuple(0 for _ in logs)
    queue, seen = [(loss(start), start)], {start}
    for _ in range(patience):
        if not queue:
            break
        _, ranks = heapq.heappop(queue)
        if fits(arch_at(ranks)):
            return arch_at(ranks)
        for d, r in enumerate(ranks):
            step = (*ranks[:d], r + 1, *ranks[d + 1 :])
            if r + 1 < len(ranked[d]) and step not in seen:
                seen.add(step)
                heapq.heappush(queue, (loss(step), step))
    return _shrunk(space, arch_at(start), logs, fits)


def _shrunk(space: Space, arch: Arch, logs: list[list[float]], fits: Callable[[Arch], bool]) -> Arch:
    while not fits(arch):
        downs = [(logs[d][i] - logs[d][i - 1], d) for d, i in enumerate(arch) if i > 0]
        if not downs:
            raise UserError(f"no arch of '{space.name}' fits: the smallest, {space.smallest}, does not.")
        _, d = min(downs)
        arch = (*arch[:d], arch[d] - 1, *arch[d + 1 :])
    return arch
