"""The DARTS cell (Liu, Simonyan and Yang, ICLR 2019): its graph, its candidate operations, its blocks.

A cell has two inputs (the outputs of the two cells before it), four nodes and 14 edges; a node is the sum of its
incoming edges, the cell's output the four nodes side by side. States 0 and 1 are the inputs, 2 to 5 the nodes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.compiling import is_plain
from ..kernels.depthwise import Depthwise
from ..kernels.halving import halves, shifted
from ..kernels.layout import AvgPool, MaxPool, Pointwise, by_channel, laid_like
from ..kernels.mixing import Term, fanned, mixed
from ..kernels.products import product
from ..kernels.random import uniform
from .abreast import SideBySide, abreast, joined, lay, norm_apart, norm_once
from .base import Block
from .layers import Counted, Dropout, Norm, norm_layer

NODES = 4
EDGES: tuple[tuple[int, int], ...] = tuple((source, node) for node in range(2, 2 + NODES) for source in range(node))
"""The state an edge leaves and the node it enters, in the order of the papers' edge numbers 0..13."""
EDGES_INTO: dict[int, tuple[int, ...]] = {
    node: tuple(e for e, (_, target) in enumerate(EDGES) if target == node) for node in range(2, 2 + NODES)
}
"""The edges that enter each node: {2: (0, 1), 3: (2, 3, 4), 4: (5, 6, 7, 8), 5: (9, 10, 11, 12, 13)}."""

FULL = (  # the order FedNAS and FedRLNAS number them in; `none` first
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)

# The pairs of s1 are this library's own, as no table of them is in the papers we work from: a cheap operation and a
# convolution, out of lists of 3 and 4, so neighbouring edges never agree. Numbers do not compare with published ones.
_CHEAP = ("skip_connect", "max_pool_3x3", "avg_pool_3x3")
_CONVS = ("sep_conv_3x3", "dil_conv_5x5", "sep_conv_5x5", "dil_conv_3x3")
_S1 = tuple(tuple((_CHEAP[(e + kind) % 3], _CONVS[(e + 2 * kind) % 4]) for e in range(len(EDGES))) for kind in range(2))

LAID = (nn.Conv2d, nn.BatchNorm2d)  # layers whose tensors lie next to those of their like
CHAINS = ("conv_3x3", "conv_5x5")  # how the names of operations end that are chains of convolutions

Operations = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]


def _alike(*names: str) -> Operations:
    edges = (names,) * len(EDGES)
    return edges, edges


VARIANTS: dict[str, Operations] = {
    "full": _alike(*FULL),
    "s1": (_S1[0], _S1[1]),
    "s2": _alike("skip_connect", "sep_conv_3x3"),
    "s3": _alike("none", "skip_connect", "sep_conv_3x3"),
    "s4": _alike("noise", "sep_conv_3x3"),
    "s5": _alike(*FULL[1:]),
}
"""Names of the operations by variant, cell type (normal, reduction) and edge. s2 to s5 are those of DARTS-PT."""


# operations -------------------------------------------------------------------------------------------------------


class Halve(nn.Module):
    """DARTS' factorised reduction: two 1x1 convolutions of stride 2, one pixel apart, side by side.

    Of an odd side the second convolution sees one row of zeros beyond the edge, so both halves agree in size.
    """

    def __init__(self, cin: int, cout: int, norm: Norm, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(cin, cout // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(cin, cout // 2, 1, stride=2, bias=False)
        self.norm = norm_layer(norm, cout, affine)

    def forward(self, x: Tensor) -> Tensor:
        if by_channel(x):
            return Halve.abreast([self], x)[0]
        x = self.relu(x)
        return self.norm(torch.cat((self.even(x), self.odd(shifted(x))), dim=1))

    @staticmethod
    def abreast(layers: Sequence[Halve], x: Tensor) -> list[Tensor]:
        """The outputs of several of them on one input, computed as one."""
        even, odd = ([getattr(layer, name).weight for layer in layers] for name in ("even", "odd"))
        if by_channel(x):
            planes = halves(x.transpose(0, 1))
            each = product(joined([*even, *odd]).view(2, -1, x.shape[1]), planes.flatten(2))
            both = each.unflatten(1, (len(layers), -1)).transpose(0, 1).reshape(-1, *planes.shape[2:]).transpose(0, 1)
        else:
            x = F.relu(x)
            found = (F.conv2d(x, joined(even), stride=2), F.conv2d(shifted(x), joined(odd), stride=2))
            both = torch.cat([half.unflatten(1, (len(layers), -1)) for half in found], dim=2).flatten(1, 2)
        return norm_apart([layer.norm for layer in layers], both)


class Noise(Counted):
    """Standard normal noise in the shape of the (strided) input: the operation of s4 that can carry nothing.

    The noise is a function of a counter and of the layer's own `salt`, which its network derives from its name: the
    supernet and a sub-network draw the same. Evaluation always draws the same numbers, so a stored network scores the
    same whenever it is loaded.
    """

    salt = 0

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :: self.stride, :: self.stride]
        if self.training:
            self.counter.add_(1)
        at = self.counter if self.training else torch.zeros_like(self.counter)
        radius, turn = uniform(at + self.salt, 2, *x.shape).unbind(0)  # Box and Muller's two uniforms
        return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * turn)).to(x.dtype)


class DropPath(Dropout):
    """Drops an edge for a whole image at a time (Larsson et al. 2017), with masks from a counter."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.counter.add_(1)
        keep = uniform(self.counter, x.shape[0], 1, 1, 1) >= self.p
        return x * keep / (1 - self.p)


class NormedPool(nn.Sequential):
    """A pool and a norm without weights, as a search network has them."""

    @staticmethod
    def abreast(layers: Sequence[NormedPool], x: Tensor) -> list[Tensor]:
        """The outputs of several of them on one input; nothing where they cannot be had from one.

        In training they are all the same: a norm without weights goes by its input alone.
        """
        if not (x.is_cuda or by_channel(x)):
            return []
        y = norm_once([layer[1] for layer in layers], layers[0][0](x)) if layers[0].training else None
        return [] if y is None else list(fanned(y, len(layers)))


class Convolutions(nn.Sequential):
    """ReLU, depthwise, pointwise, norm, once per stride. The first ReLU leaves its input alone: other edges read it."""

    def __init__(self, c: int, kernel: int, strides: Sequence[int], dilation: int, norm: Norm, affine: bool) -> None:
        layers: list[tuple[str, nn.Module]] = []
        for i, stride in enumerate(strides):
            layers += [
                (f"relu{i}", nn.ReLU(inplace=i > 0)),
                (f"depthwise{i}", Depthwise(c, kernel, stride, dilation)),
                (f"pointwise{i}", Pointwise(c, c)),
                (f"norm{i}", norm_layer(norm, c, affine)),
            ]
        super().__init__(OrderedDict(layers))

    def forward(self, input: Tensor) -> Tensor:
        return abreast([self], input)[0] if by_channel(input) else super().forward(input)  # ReLUs on the way


@dataclass(frozen=True)
class Operation(Block):
    """A candidate operation by description; `none` has no module and therefore no block.

    `affine` tells a derived network from a search network. The latter has no affine parameters in its cells and a norm
    after each pool; the former has them, and bare pools, as in DARTS' evaluation network.
    """

    name: str
    channels: int
    stride: int
    norm: Norm
    affine: bool

    def build(self) -> nn.Module:
        c, stride = self.channels, self.stride
        if self.name == "noise":
            return Noise(stride)
        if self.name == "skip_connect":
            return nn.Identity() if stride == 1 else Halve(c, c, self.norm, self.affine)
        kind, kernel = self.name[: -len("_3x3")], int(self.name[-1])
        if kind == "sep_conv":
            return Convolutions(c, kernel, (stride, 1), 1, self.norm, self.affine)
        if kind == "dil_conv":
            return Convolutions(c, kernel, (stride,), 2, self.norm, self.affine)
        pool = (
            MaxPool(kernel, stride, kernel // 2)
            if kind == "max_pool"
            else AvgPool(kernel, stride, kernel // 2, count_include_pad=False)
        )
        if self.affine:
            return pool
        return NormedPool(OrderedDict(pool=pool, norm=norm_layer(self.norm, c, affine=False)))


@dataclass(frozen=True)
class Preprocess(Block):
    """What an input passes before the cell: ReLU, 1x1 convolution, norm; `Halve` where it is twice the size."""

    cin: int
    cout: int
    halve: bool
    norm: Norm
    affine: bool

    def build(self) -> nn.Module:
        if self.halve:
            return Halve(self.cin, self.cout, self.norm, self.affine)
        conv = Pointwise(self.cin, self.cout)
        return nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=conv, norm=norm_layer(self.norm, self.cout, self.affine)))


# cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellPlan:
    """Where one cell stands in the network."""

    kind: int  # 0: normal, 1: reduction
    cin: tuple[int, int]  # channels of the outputs of the cells k-2 and k-1
    sizes: tuple[tuple[int, int], tuple[int, int]]  # their heights and widths
    channels: int

    @property
    def halve(self) -> bool:
        """Whether cell k-1 was a reduction, so that the output of cell k-2 is twice the size."""
        return self.sizes[0] != self.sizes[1]

    def stride(self, edge: int) -> int:
        return 2 if self.kind and EDGES[edge][0] < 2 else 1

    def size(self, state: int) -> tuple[int, int]:
        """Height and width of a state: the inputs' after their preprocessing, or a node's."""
        height, width = self.sizes[1]
        return ((height + 1) // 2, (width + 1) // 2) if self.kind and state >= 2 else (height, width)


def plan(channels: int, cells: int, size: tuple[int, int]) -> tuple[CellPlan, ...]:
    """All cells: reductions at a third and two thirds of the depth, where the channels double."""
    found: list[CellPlan] = []
    outputs = [(3 * channels, size)] * 2  # both inputs of the first cell are the stem's output
    for k in range(cells):
        kind = int(k in (cells // 3, 2 * cells // 3))
        channels *= 1 + kind
        (c0, size0), (c1, size1) = outputs[-2:]
        found.append(CellPlan(kind, (c0, c1), (size0, size1), channels))
        outputs.append((NODES * channels, found[-1].size(2)))
    return tuple(found)


class Edge(nn.ModuleDict):
    """The operations of one edge."""

    def __init__(self, names: Sequence[str], kept: Sequence[int], build: Callable[[str], nn.Module]) -> None:
        self.places = tuple(i for i in kept if names[i] != "none")
        super().__init__({names[i]: build(names[i]) for i in self.places})

    def forward(
        self, read: Iterator[Tensor], drop: DropPath | None, made: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """The operations' places and outputs, each of its own copy of the state that the edge leaves.

        `made` holds those that were computed together with other edges' ones.
        """
        for place, (name, op) in zip(self.places, self.items(), strict=True):
            y = made[name] if name in made else op(next(read))
            if drop is not None and not isinstance(op, nn.Identity):  # DARTS never drops an identity
                y = drop(y)
            yield place, y


class Cell(SideBySide):
    def __init__(
        self,
        plan: CellPlan,
        names: Sequence[Sequence[str]],
        kept: Sequence[Sequence[int]],
        norm: Norm,
        affine: bool,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.kind = plan.kind
        self.held = False  # whether operations whose gates are 0 have weights that are 0 too, while this trains
        self.pre0 = Preprocess(plan.cin[0], plan.channels, plan.halve, norm, affine).build()
        self.pre1 = Preprocess(plan.cin[1], plan.channels, False, norm, affine).build()
        self.edges = nn.ModuleList()
        for e in range(len(EDGES)):
            stride = plan.stride(e)
            self.edges.append(
                Edge(names[e], kept[e], lambda op, s=stride: Operation(op, plan.channels, s, norm, affine).build())
            )
        self.drop = DropPath(drop_path) if drop_path else None
        self.readers = [self._readers(state) for state in range(2 + NODES)]

    def _readers(self, state: int) -> int:
        """How many read a state at most: operations, groups of them, the output; the second input's shape is asked."""
        edges = [cast(Edge, self.edges[e]) for e, (source, _) in enumerate(EDGES) if source == state]
        return sum(map(len, edges)) + sum(1 for _ in self._alike(state)) + 1

    def forward(self, before: Tensor, last: Tensor, gates: Tensor | None) -> Tensor:
        states, out = [self._read(0, self.pre0(before)), self._read(1, self.pre1(last))], list[Tensor]()
        made, like = self._leaving(0, states[0]) | self._leaving(1, states[1]), next(states[1])
        for node, room in zip(range(2, 2 + NODES), self._rooms(like), strict=True):
            if node > 2:
                made |= self._leaving(node - 1, states[-1])
            into = [e for e in EDGES_INTO[node] if len(cast(Edge, self.edges[e]))]
            terms = (self._terms(e, states, made) for e in into)
            states.append(self._read(node, mixed(terms, gates, like, room) if into else self._zero(like)))
            out.append(next(states[-1]))
        if by_channel(like):
            return joined([x.transpose(0, 1) for x in out]).transpose(0, 1)
        return torch.cat(out, dim=1)

    def _rooms(self, like: Tensor) -> Sequence[Tensor | None]:
        """Where the nodes may lie, side by side as they are put out; None where they have to be put together."""
        if not by_channel(like):
            return [None] * NODES
        images, channels, *size = self._shape(like)
        return [room.transpose(0, 1) for room in like.new_empty((NODES * channels, images, *size)).chunk(NODES)]

    def _terms(
        self, e: int, states: Sequence[Iterator[Tensor]], made: Mapping[int, Mapping[str, Tensor]]
    ) -> Iterator[Term]:
        """What an edge brings, and where its gates are."""
        edge, gateless = cast(Edge, self.edges[e]), CHAINS if self.held and self.training else ()
        for name, (place, y) in zip(edge, edge(states[EDGES[e][0]], self.drop, made.get(e, {})), strict=True):
            yield None if name.endswith(gateless) else (e, place), y

    def _read(self, state: int, x: Tensor) -> Iterator[Tensor]:
        """A state for everybody who reads it."""
        return iter(fanned(x, self.readers[state]))

    def _leaving(self, state: int, read: Iterator[Tensor]) -> dict[int, dict[str, Tensor]]:
        """Outputs of the operations that leave a state, by edge and name, as far as several of them are alike."""
        made: dict[int, dict[str, Tensor]] = {}
        if torch.compiler.is_compiling() or is_plain():  # one layer for every layer
            return made
        for name, alike in self._alike(state):
            operations, x = list(alike.values()), next(read)
            if isinstance(operations[0], Halve):
                outputs = Halve.abreast(cast(list[Halve], operations), x)
            elif name.endswith(CHAINS):
                outputs = abreast(cast(list[nn.Sequential], operations), x)
            else:
                outputs = NormedPool.abreast(cast(list[NormedPool], operations), x)
            for e, y in zip(alike, outputs, strict=False):
                made.setdefault(e, {})[name] = y
        return made

    def _alike(self, state: int) -> Iterator[tuple[str, dict[int, nn.Module]]]:
        """The operations that leave a state on several edges, by edge."""
        leaving = [(e, cast(Edge, self.edges[e])) for e, (source, _) in enumerate(EDGES) if source == state]
        for name in dict.fromkeys(name for _, edge in leaving for name in edge):
            alike = {e: edge[name] for e, edge in leaving if name in edge}
            same = name.endswith(CHAINS) or all(isinstance(op, (Halve, NormedPool)) for op in alike.values())
            if len(alike) > 1 and same:
                yield name, alike

    def lay(self) -> None:
        for halve in [m for m in self.modules() if isinstance(m, Halve)]:
            lay([halve.even, halve.odd])
        for state in range(2 + NODES):
            for _, alike in self._alike(state):
                held = ([m for m in op.modules() if isinstance(m, LAID)] for op in alike.values())
                rows = list(zip(*held, strict=True))
                if isinstance(next(iter(alike.values())), Halve):  # all that are even, then all that are odd
                    rows = [rows[0] + rows[1], *rows[2:]]
                for layers in rows:
                    lay(layers)

    def _shape(self, like: Tensor) -> tuple[int, int, int, int]:
        """A node's, by that of an input."""
        n, c, height, width = like.shape
        return n, c, (height + self.kind) // (1 + self.kind), (width + self.kind) // (1 + self.kind)

    def _zero(self, like: Tensor) -> Tensor:
        return laid_like(like.new_zeros(self._shape(like)), like)
