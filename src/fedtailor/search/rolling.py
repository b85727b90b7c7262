"""Sub-networks at other places than the front: cut and average at any indices of a supernet's tensors.

FedRolex takes window t of every channel axis, indices (t .. t + k - 1) mod K, instead of the first k of K. Two axes
that carry the same channels have the same K and the same k, so one t keeps them in step. HeteroFL is window 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spaces.base import Arch, Space, Weights

Places = dict[str, tuple[Tensor, ...]]  # by tensor, the indices along each axis
CHANNEL_AXES = 2  # of a tensor, the first two; a kernel's height and width stay centred


def window(space: Space, arch: Arch, shift: int = 0) -> Places:
    """Where the arch's tensors lie when every channel axis that is not taken whole starts `shift` entries later.

    An axis that is taken whole stays in its order: pixels' channels and classes have a meaning.
    """
    found: Places = {}
    for name, at in space.index(arch).items():
        whole, axes = space.full_shapes[name], []
        for axis, full in enumerate(whole):
            taken = torch.arange(*(at[axis].indices(full) if axis < len(at) else (0, full)))
            rolls = axis < CHANNEL_AXES and len(taken) < full
            axes.append((taken + shift) % full if rolls else taken)
        found[name] = tuple(axes)
    return found


def cut_at(weights: Weights, places: Places) -> Weights:
    """The entries at these places, of the tensors that the weights have."""
    return {n: weights[n][grid(axes)] for n, axes in places.items() if n in weights}


@torch.no_grad()
def average_at(weights: Weights, parts: Sequence[tuple[Weights, Places, float]]) -> Weights:
    """The weights with parts averaged in, entry by entry, over those that own the entry, by their mass.

    An entry that nobody owns keeps its value bit for bit.
    """
    merged = dict(weights)
    for name in dict.fromkeys(n for part, _, _ in parts for n in part):
        old = weights[name]
        change, mass = torch.zeros_like(old), torch.zeros_like(old)
        for part, places, weight in parts:
            if name in part:
                at = grid(places[name])
                change[at] += weight * (part[name] - old[at])
                mass[at] += weight
        merged[name] = torch.where(mass > 0, old + change / mass.clamp_min(torch.finfo(old.dtype).tiny), old)
    return merged


def grid(axes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Indices along each axis as one index of all their combinations."""
    n = len(axes)
    return tuple(a.reshape([-1 if i == k else 1 for k in range(n)]) for i, a in enumerate(axes))
