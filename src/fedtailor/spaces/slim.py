"""Narrow networks as their supernet with channels held at zero: one structure for all widths.

A channel is zero behind a norm whose scale and shift are, and behind an activation that keeps zero; what reads it adds
nothing, and no gradient passes. So the supernet with such norms computes what the narrow network computes, for the
supernet's arithmetic. Which channels these are is a matter of tensors, not of structure: what a GPU has captured once
serves every width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .base import Arch, Space, shape_at
from .mobilenetv2 import MobileNetV2

STEP = 8  # channels between an option and the next


def slimmable(space: Space) -> bool:
    """Whether archs differ in numbers of channels alone, and a norm and such an activation follow each of them."""
    return isinstance(space, MobileNetV2)


class Slim:
    """The archs of a slimmable space as scales and shifts of the supernet's norms."""

    def __init__(self, space: Space, device: torch.device) -> None:
        norms = choosers(space)
        sizes = [space.full_shapes[f"{norm}.weight"][0] for norm in norms]
        self.norms, self.sizes = list(norms), sizes
        self.names = [f"{norm}.{kind}" for kind in ("weight", "bias") for norm in norms]
        whose = [torch.full((size,), d) for size, d in zip(sizes, norms.values(), strict=True)]
        self.whose = torch.cat(whose).to(device)  # of each channel: the dimension that chooses how many there are
        self.place = torch.cat([torch.arange(size) for size in sizes]).to(device)
        self.least = torch.tensor([d.options[0] for d in space.dimensions], dtype=torch.float32, device=device)

    def lend(self, weights: Mapping[str, Tensor], arch: Tensor) -> dict[str, Tensor]:
        """The norms' scales and shifts for an arch, a tensor of its choices: zero for the channels that it lacks."""
        many = (self.least + STEP * arch).index_select(0, self.whose)
        there = (self.place < many).to(self.least).split(self.sizes)
        lent = _Lent.apply(there, *(weights[name] for name in self.names))
        return dict(zip(self.names, lent, strict=True))  # type: ignore[arg-type]


class _Lent(torch.autograd.Function):
    """Each tensor times its channels' zeros and ones, and the gradients too: all of them at once, both ways."""

    @staticmethod
    def forward(ctx: Any, there: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.there = [*there, *there]  # of the scales, then of the shifts
        return tuple(torch._foreach_mul(weights, ctx.there))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        return None, *torch._foreach_mul(slopes, ctx.there)


@lru_cache(maxsize=16)
def choosers(space: Space) -> dict[str, int]:
    """The norms whose channels are a choice, and the dimension that makes it: the one that, one lower, narrows them."""
    found: dict[str, int] = {}
    for d, top in enumerate(space.largest):
        lower: Arch = (*space.largest[:d], top - 1, *space.largest[d + 1 :])
        for name, at in space.index(lower).items():
            whole = space.full_shapes[name]
            if name.endswith("norm.weight") and shape_at(whole, at) != whole:
                found[name.removesuffix(".weight")] = d
    return found
