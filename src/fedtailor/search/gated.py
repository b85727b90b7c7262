"""Sub-networks of cells as their supernet with operations held at zero: one structure for the whole of a search.

An operation whose gate is 0 adds nothing to its node, and no gradient passes. Its weights are zeros, and so is what
they are pulled towards: decay, momentum and pull leave them there, and they add nothing to the norm that gradients are
clipped by. So the supernet with such gates computes and learns what the cut network does, for the supernet's
arithmetic. Which operations these are is a matter of tensors, not of structure: what a GPU has captured once serves
every sub-network.

A chain of layers that are all zero adds nothing and passes nothing by itself, so in training it needs no gate, for
whose sake every operation of a node would get a gradient of its own. One layer alone does: what it reads is not zero.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nets.base import FixedNet
from ..spaces.base import Weights
from ..spaces.darts import TYPES, Darts, Gates, Keep, Network
from ..spaces.darts_ops import EDGES, Cell
from ..values import sent

GATES = tuple(f"gates_{kind}" for kind in TYPES)


def gateable(space: Darts) -> bool:
    """Whether gates change nothing else: noise is drawn by its layer's place among those that a network has."""
    return not any("noise" in names for edges in space.operations for names in edges)


class Gated(Network):
    """The supernet with the gates of a sub-network inside, for a search.

    In evaluation mode it is a candidate: its norms go by the images, as those of `Perturbed`.
    """

    gates_normal: Tensor
    gates_reduce: Tensor

    def __init__(self, space: Darts) -> None:
        super().__init__(space, space.full_keep, affine=False)
        self.cells_of = space
        for name in GATES:
            self.register_buffer(name, torch.zeros(len(EDGES), space.choices))
        for cell in self.cells:
            cast(Cell, cell).held = True

    @cached_property
    def norms(self) -> list[_BatchNorm]:
        return norms_of(self)

    def at(self, keep: Keep) -> Gated:
        """The same network with other operations, whose weights it has."""
        self.keep, self.cost = keep, self.cells_of.cost_keep(keep)
        for own, rows in zip((self.gates_normal, self.gates_reduce), self.cells_of.gates_of(keep), strict=True):
            own.copy_(sent(rows, own.device))
        return self

    def forward(self, x: Tensor, gates: Gates | None = None) -> Tensor:
        gates = (self.gates_normal, self.gates_reduce) if gates is None else gates
        if self.training:
            return super().forward(x, gates)
        with by_images(self.norms, len(x)):
            return super().forward(x, gates)


@dataclass(frozen=True)
class GatedNet(FixedNet):
    """Its place among the networks that engines make. It lives for a search only: nobody keeps or sends it."""

    name: ClassVar[str] = "darts-gated"

    cells: Darts

    def module(self) -> Gated:
        return Gated(self.cells)


@lru_cache(maxsize=16)
def gated_of(space: Darts) -> GatedNet:
    """The gated supernet of a space as a network of its own."""
    return GatedNet(space.input, space.classes, space)


def held(space: Darts, weights: Weights, keep: Keep, device: torch.device) -> Weights:
    """The supernet's tensors as a sub-network has them: zeros where it lacks something. Gates are still closed."""
    own = set(space.names_of(keep))
    lacks = {name: shape for name, shape in gated_of(space).full_shapes.items() if name not in own}
    sizes = [math.prod(shape) for shape in lacks.values()]
    zeros = torch.zeros(sum(sizes), device=device).split(sizes)
    found = {name: zero.view(shape) for (name, shape), zero in zip(lacks.items(), zeros, strict=True)}
    return found | {name: tensor for name, tensor in weights.items() if name in own}


def norms_of(net: nn.Module) -> list[_BatchNorm]:
    return [m for m in net.modules() if isinstance(m, _BatchNorm)]


@contextlib.contextmanager
def by_images(norms: Sequence[_BatchNorm], images: int) -> Iterator[None]:
    """Inside, norms use the statistics of the images before them. Their running ones stay as they are, and serve only
    where there is a single image."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        vars(norm).update(training=images > 1, momentum=0.0)  # a module's own setattr costs more than its norm
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            vars(norm).update(training=False, momentum=momentum)
