"""Networks of the DARTS space that are no single path, each as the space with one point.

`darts-cell` is a discrete cell stacked into a network: what FedNAS trains from scratch after its search. Without
options its cells are those that FedNAS's authors published. `darts-mixture` is the supernet with its architecture
parameters α inside: what FedNAS searches with, and what its personalised variant keeps. A run folder records both as
the [net] table that builds them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..registry import register
from ..spaces.base import Arch
from ..spaces.darts import TYPES, Darts, Gates, Keep, Kept, Network, Variant
from ..spaces.darts_ops import EDGES
from ..spaces.layers import Norm
from ..spaces.measure import FLOAT_BYTES, Cost, Piece
from .base import FixedNet
from .blocks import rate

ALPHA = tuple(f"alpha_{kind}" for kind in TYPES)
"""The names of α among the tensors of a mixture: normal cell, reduction cell."""

MAX, SKIP, SEP3, SEP5, DIL5 = (1,), (3,), (4,), (5,), (7,)  # places in `darts_ops.FULL`
FEDNAS_NORMAL: Kept = (SEP3, SEP3, SEP5, (), SEP3, (), SEP3, (), SEP5, (), (), (), DIL5, SEP3)
FEDNAS_REDUCE: Kept = (MAX, SKIP, MAX, (), MAX, MAX, DIL5, (), (), MAX, (), DIL5, (), ())


@dataclass(frozen=True)
class _DartsNet(FixedNet):
    channels: int = 16
    cells: int = 8
    variant: Variant = "full"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        assert self.space  # checks the options

    @cached_property
    def space(self) -> Darts:
        """The space that the network is taken from."""
        return Darts(self.input, self.classes, self.channels, self.cells, self.variant, self.norm)


@register("net", "darts-cell")
@dataclass(frozen=True)
class DartsCell(_DartsNet):
    """A discrete DARTS cell, by default the one FedNAS published, stacked into a network."""

    normal: Kept = FEDNAS_NORMAL  # places of the operations kept on each of the 14 edges
    reduce: Kept = FEDNAS_REDUCE
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        self.space.check_keep(self.keep)
        rate(self.name, drop_path=self.drop_path)

    @property
    def keep(self) -> Keep:
        return self.normal, self.reduce

    def module(self) -> nn.Module:
        return self.space.derived(self.keep, self.drop_path)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        return self.space.pieces_keep(self.keep, affine=True)

    def word(self, arch: Arch) -> str:
        return self.space.word(self.keep)  # type: ignore[arg-type]

    def describe(self, arch: Arch) -> str:
        edges = self.space.edges_of(self.keep).items()
        return "; ".join(f"{kind}: {', '.join(f'{a}>{b} {op}' for a, b, op in found)}" for kind, found in edges)

    def draw(self, arch: Arch) -> str:
        return self.space.draw_keep(self.keep)


class Mixture(Network):
    """The supernet with α inside: on each edge the operations are weighed by the softmax of the edge's α."""

    alpha_normal: Tensor
    alpha_reduce: Tensor

    def __init__(self, space: Darts) -> None:
        super().__init__(space, space.full_keep, affine=False)
        for name in ALPHA:  # not parameters: whoever trains weights leaves them alone
            self.register_buffer(name, torch.zeros(len(EDGES), space.choices))

    @property
    def alpha(self) -> Gates:
        return self.alpha_normal, self.alpha_reduce

    def searched(self, yes: bool = True) -> Mixture:
        """The same network, with α open to gradients or closed."""
        for alpha in self.alpha:
            alpha.requires_grad_(yes).grad = None
        return self

    def forward(self, x: Tensor, gates: Gates | None = None) -> Tensor:
        return super().forward(x, Darts.relaxed(self.alpha) if gates is None else gates)


@register("net", "darts-mixture")
@dataclass(frozen=True)
class DartsMixture(_DartsNet):
    """The DARTS supernet: every operation of every edge, weighed by the softmax of α."""

    def module(self) -> Mixture:
        return Mixture(self.space)

    def word(self, arch: Arch) -> str:
        return "mixture"

    def describe(self, arch: Arch) -> str:
        return "every operation of every edge, weighed by the softmax of alpha"

    def draw(self, arch: Arch) -> str:
        return self.space.draw_keep(self.space.full_keep)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        return self._pieces

    @cached_property
    def _pieces(self) -> dict[str, Piece]:
        """Those of the supernet, and α, for whose gradient a search keeps the output of every operation."""
        found = self.space.pieces_keep(self.space.full_keep)
        outputs = [p.outputs[0] for name, p in found.items() if ".edges." in name]
        shape = (len(EDGES), self.space.choices)
        kept = FLOAT_BYTES * sum(map(math.prod, outputs))
        alpha = Cost(buffers=len(ALPHA) * math.prod(shape), activations=kept)
        return {"": Piece(alpha, tuple((name, shape) for name in ALPHA), ()), **found}


def mixture_of(space: Darts) -> DartsMixture:
    """The mixture of a space as a network of its own."""
    return DartsMixture(space.input, space.classes, space.channels, space.cells, space.variant, space.norm)
