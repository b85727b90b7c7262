"""Arithmetic over clients that own different entries of one set of weights. With a fixed network all own all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .spaces.base import Arch, Space, Weights, tensor_at


def owners(space: Space, like: Weights, archs: Sequence[Arch]) -> Weights:
    """How many of the archs own each entry."""
    found = {n: torch.zeros_like(t) for n, t in like.items()}
    for arch in archs:
        for name, at in space.index(arch).items():
            if name in found:
                tensor_at(found[name], at).add_(1)
    return found


def add_means(
    space: Space, weights: Weights, parts: Sequence[tuple[Weights, Arch]], everyone: Sequence[Arch]
) -> Weights:
    """Weights + 1/N * sum of the parts, entry by entry, where N counts the owners among everyone, present or not."""
    counts = owners(space, weights, everyone)
    new = {n: t.clone() for n, t in weights.items()}
    for part, arch in parts:
        index = space.index(arch)
        for name, tensor in part.items():
            at = index[name]
            tensor_at(new[name], at).add_(tensor / tensor_at(counts[name], at))
    return new


def where_owned(space: Space, old: Weights, new: Weights, archs: Sequence[Arch]) -> Weights:
    """`old`, with `new` in the entries that any of the archs owns."""
    counts = owners(space, new, archs)
    return old | {n: torch.where(counts[n] > 0, t, old[n]) for n, t in new.items()}
