"""The interface of every search space, and what the library does for all of them.

A space says two things: its `dimensions`, and how to `build` the network of one arch. Sampling, cut and paste, costs,
checks and JSON follow from these. The one rule a space obeys is the *prefix rule*: a sub-network's tensor has the name
it has in the supernet and is found there in the leading entries of the channel axes and the centre of the kernel axes.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError
from ..kernels.blocks import Blocks
from ..seeds import Key, torch_seed
from .copying import never_copied, remembered
from .measure import Cost, Piece, count, tensors_of, total

Arch = tuple[int, ...]
Weights = dict[str, Tensor]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Dimension:
    """One choice of a space: a name and its options, smallest first."""

    name: str
    options: tuple[Hashable, ...]


class Block(ABC):
    """One counted piece of a network: a frozen, hashable description that can be built."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "build" in cls.__dict__:
            cls.build = remembered(cls.build)  # type: ignore[method-assign]

    @abstractmethod
    def build(self) -> nn.Module:
        """The module, with fresh weights."""


@lru_cache(maxsize=100_000)
def _counted(block: Block, inputs: tuple[tuple[int, ...], ...]) -> Piece:
    with never_copied():  # a block is counted on a device of its own
        return count(block.build, inputs)


@dataclass(frozen=True)
class Space(ABC):
    """A set of networks that share weights. `input` is (channels, height, width)."""

    name: ClassVar[str]
    fixed: ClassVar[bool] = False  # True for a network without choices
    called: ClassVar[str] = ""  # what a configuration calls it, where that is not its name

    input: tuple[int, int, int]
    classes: int

    # what a space says ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def dimensions(self) -> tuple[Dimension, ...]:
        """The choices, in the order in which an arch lists them."""

    @abstractmethod
    def build(self, arch: Arch) -> nn.Module:
        """The network of one arch: a plain module whose last layer is the linear layer `head`."""

    def supernet(self) -> nn.Module:
        """The network that holds every arch's tensors. Default: the arch with the last option everywhere."""
        return self.build(self.largest)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        """The counted pieces of an arch by the prefix of their names. Default: the whole network as one piece."""
        return {"": self._whole(arch)}

    @classmethod
    def ordered(cls) -> bool:
        """Whether its archs can be narrowed: its supernet is its largest arch, its options go from small to large.

        Not so in `darts`, whose options are operations and whose supernet holds all of them at once.
        """
        return not cls.fixed and cls.supernet is Space.supernet and cls.largest is Space.largest

    def describe(self, arch: Arch) -> str:
        """One readable line."""
        return ", ".join(f"{d.name} {d.options[i]}" for d, i in zip(self.dimensions, self.check(arch), strict=True))

    def word(self, arch: Arch) -> str:
        """The arch without spaces and commas, for a cell of a table: 1-0-2."""
        return "-".join(map(str, arch))

    def draw(self, arch: Arch) -> str:
        """A drawing of the arch as SVG: its pieces as blocks, or what the space says instead."""
        from .draw import chain_svg

        return chain_svg(self, self.check(arch))

    def __deepcopy__(self, memo: object) -> Space:
        """A space is a value: copies of a network share it, with what it has counted so far."""
        return self

    # archs ------------------------------------------------------------------------------------------------------

    @property
    def largest(self) -> Arch:
        return tuple(len(d.options) - 1 for d in self.dimensions)

    @property
    def smallest(self) -> Arch:
        return (0,) * len(self.dimensions)

    def require_choices(self) -> None:
        """Raises a UserError where a dimension has no options, or two have one name: `options` would hold one."""
        names = [d.name for d in self.dimensions]
        for d in self.dimensions:
            if not d.options:
                raise UserError(f"space '{self.name}': dimension '{d.name}' has no options. Give it one at least.")
            if names.count(d.name) > 1:
                raise UserError(f"space '{self.name}': two dimensions are called '{d.name}'. Every one needs its own.")

    @cached_property
    def size(self) -> int:
        """How many archs there are."""
        return math.prod(len(d.options) for d in self.dimensions)

    def check(self, arch: Sequence[int]) -> Arch:
        """The arch as a tuple, or an error that names the dimension it leaves."""
        arch = tuple(int(i) for i in arch)
        if len(arch) != len(self.dimensions):
            raise UserError(f"an arch of '{self.name}' has {len(self.dimensions)} numbers, not {len(arch)}: {arch}.")
        for d, i in zip(self.dimensions, arch, strict=True):
            if not 0 <= i < len(d.options):
                raise UserError(f"arch {arch} of '{self.name}': {d.name} = {i} is not in 0..{len(d.options) - 1}.")
        return arch

    def options(self, arch: Arch) -> dict[str, Hashable]:
        """The chosen option of every dimension, by name."""
        return {d.name: d.options[i] for d, i in zip(self.dimensions, arch, strict=True)}

    def archs(self) -> Iterator[Arch]:
        """Every arch, for spaces small enough to count."""
        if self.size > 1_000_000:
            raise UserError(f"'{self.name}' has {self.size:.2e} archs: too many to enumerate. Sample instead.")
        return itertools.product(*(range(len(d.options)) for d in self.dimensions))

    def sample(
        self,
        rng: np.random.Generator,
        probabilities: Sequence[np.ndarray] | None = None,
        fits: Callable[[Arch], bool] | None = None,
    ) -> Arch:
        """One arch, drawn per dimension (uniformly, or by `probabilities`), among those that fit.

        Rejection first, which is exact. Where fewer than one draw in a few hundred fits, Gibbs sweeps from the smallest
        arch: every step redraws one dimension among its fitting options, whose limit is the same distribution.
        """
        p = probabilities or [np.full(len(d.options), 1 / len(d.options)) for d in self.dimensions]
        wheels = [_wheel(weights) for weights in p]
        for _ in range(300):
            arch = tuple(map(_spin, wheels, rng.random(len(wheels)).tolist()))
            if fits is None or fits(arch):
                return arch
        assert fits is not None
        if not fits(self.smallest):
            raise UserError(f"no arch of '{self.name}' fits: the smallest, {self.smallest}, does not.")
        current = self.smallest
        for _ in range(30):
            for i in rng.permutation(len(current)):
                current = self._redraw(current, int(i), p[i], rng, fits)
        return current

    def _redraw(
        self, arch: Arch, i: int, p: np.ndarray, rng: np.random.Generator, fits: Callable[[Arch], bool]
    ) -> Arch:
        """The arch with dimension i drawn anew among its fitting options: by rejection, then from all of them."""
        wheel = _wheel(p)
        for _ in p:
            option = _spin(wheel, rng.random())
            other = (*arch[:i], option, *arch[i + 1 :])
            if option == arch[i] or fits(other):
                return other
        options = [(*arch[:i], k, *arch[i + 1 :]) for k in range(len(p))]
        fitting = [other for other in options if fits(other)]
        return fitting[_spin(_wheel(p[[other[i] for other in fitting]]), rng.random())]

    def to_json(self, arch: Arch) -> str:
        return json.dumps({"space": self.name, "arch": list(self.check(arch)), "options": self.options(arch)})

    def from_json(self, text: str) -> Arch:
        try:
            found = json.loads(text)
            arch, name = found["arch"], found["space"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"not an arch in JSON: {error}.") from error
        if name != self.name:
            raise UserError(f"this arch belongs to space '{name}', not to '{self.name}'.")
        return self.check(arch)

    # weights ----------------------------------------------------------------------------------------------------

    def new_weights(self, *key: Key) -> Weights:
        """A freshly initialised supernet; the same key gives the same weights."""
        with torch_seed("weights", *key):
            return {n: t.detach().clone() for n, t in tensors_of(self.supernet()).items()}

    @cached_property
    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the supernet and its shape."""
        with torch.device("meta"):
            return {n: tuple(t.shape) for n, t in tensors_of(self.supernet()).items()}

    @cached_property
    def _indices(self) -> dict[Arch, dict[str, Index]]:
        return {}

    @cached_property
    def _places(self) -> dict[tuple[str, int], tuple[Piece, dict[str, Index]]]:
        return {}

    def index(self, arch: Arch) -> Mapping[str, Index]:
        """Where each tensor of the arch lies in the supernet: leading channels, centred kernels.

        Slices of trailing axes that are taken whole are left out: a tensor taken whole has the empty tuple.
        """
        found = self._indices.get(arch)
        if found is None:
            found = {}
            for prefix, piece in self.pieces(self.check(arch)).items():
                found |= self._placed(prefix, piece)
            if len(self._indices) >= 256:
                self._indices.clear()
            self._indices[arch] = found
        return found

    def cut(self, weights: Weights, arch: Arch) -> Weights:
        """The arch's own copy of its entries of the supernet (differentiable)."""
        index, shapes = self.index(arch), self.full_shapes
        if weights.keys() >= index.keys() and (taken := self._taken(weights, arch, tuple(index))):
            return taken
        for name in index:
            tensor = weights.get(name)
            if tensor is None or tensor.shape != shapes[name]:
                has = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {shapes[name]}"
                raise UserError(f"these are not weights of '{self.name}': '{name}' {has}.")
        return {n: tensor_at(weights[n], at).clone() for n, at in index.items()}

    def part(self, weights: Weights, arch: Arch) -> Weights:
        """Like `cut`, of weights that need not hold every tensor. The empty arch takes them as they are."""
        if not arch:
            return weights
        index = self.index(arch)
        names = tuple(n for n in index if n in weights)
        return self._taken(weights, arch, names) or {n: tensor_at(weights[n], index[n]).clone() for n in names}

    def _taken(self, weights: Weights, arch: Arch, names: tuple[str, ...]) -> Weights | None:
        """These tensors of the arch, copied by a GPU in one go; None where it cannot, or the shapes are others."""
        large = [weights[n] for n in names]
        if not large or not large[0].is_cuda:
            return None
        found = self.layout(arch, names).take(large)
        return None if found is None else dict(zip(names, found, strict=True))

    def layout(self, arch: Arch, names: tuple[str, ...]) -> Blocks:
        """Some of the arch's tensors as blocks of the supernet's, for a GPU to copy or average in one go."""
        found = self._layouts.get((arch, names))
        if found is None:
            index, shapes = self.index(arch), self.full_shapes
            if len(self._layouts) >= 256:
                self._layouts.clear()
            found = self._layouts[arch, names] = Blocks([(shapes[n], index[n]) for n in names])
        return found

    @cached_property
    def _layouts(self) -> dict[tuple[Arch, tuple[str, ...]], Blocks]:
        return {}

    def cost(self, arch: Arch) -> Cost:
        """What the arch costs, from its counted pieces."""
        return total(p.cost for p in self.pieces(self.check(arch)).values())

    @cached_property
    def _wholes(self) -> dict[Arch, Piece]:
        return {}

    def _whole(self, arch: Arch) -> Piece:
        found = self._wholes.get(arch)
        if found is None:
            found = self._wholes[arch] = count(lambda: self.build(arch), [self.input])
        return found

    def _placed(self, prefix: str, piece: Piece) -> dict[str, Index]:
        """Where a piece's tensors lie. Archs share most of their pieces, so this is remembered by piece.

        A piece is known by its identity, which holds because the entry keeps it alive.
        """
        known = self._places.get((prefix, id(piece)))
        if known is not None:
            return known[1]
        found: dict[str, Index] = {}
        for name, shape in piece.shapes:
            full_name = f"{prefix}.{name}" if prefix else name
            whole = self.full_shapes.get(full_name)
            if whole is None or len(whole) != len(shape) or any(s > w for s, w in zip(shape, whole, strict=True)):
                there = "not in the supernet" if whole is None else f"not inside the supernet's {whole}"
                raise UserError(
                    f"space '{self.name}': tensor '{full_name}' {shape} is {there}. "
                    f"A sub-network keeps the supernet's names and takes leading entries of its tensors."
                )
            found[full_name] = _slices(whole, shape)
        if len(self._places) >= 4096:
            self._places.clear()
        if prefix:  # a network that is one piece is remembered by arch already
            self._places[prefix, id(piece)] = piece, found
        return found


def counted(block: Block, *inputs: tuple[int, ...]) -> Piece:
    """The piece for a block on inputs of these shapes, counted once per process."""
    return _counted(block, inputs)


@lru_cache(maxsize=10_000)
def _slices(whole: tuple[int, ...], shape: tuple[int, ...]) -> Index:
    """The part of this shape: the front of axes 0 and 1, the centre of a kernel's height and width after them."""
    found: list[slice] = []
    for axis, (full, part) in enumerate(zip(whole, shape, strict=True)):
        start = (full - part) // 2 if axis >= 2 else 0
        found.append(slice(start, start + part))
    while found and shape[len(found) - 1] == whole[len(found) - 1]:
        found.pop()
    return tuple(found)


def _wheel(weights: np.ndarray) -> tuple[list[float], float]:
    """Cumulated weights and their sum; all options weigh the same where none weighs anything."""
    total = weights.sum()
    if total <= 0:
        weights, total = np.ones_like(weights), len(weights)
    return np.cumsum(weights).tolist(), float(total)


def _spin(wheel: tuple[list[float], float], at: float) -> int:
    """The option at a point in [0, 1)."""
    ends, total = wheel
    return min(bisect_right(ends, at * total), len(ends) - 1)


def shape_at(whole: tuple[int, ...], at: Index) -> tuple[int, ...]:
    """The shape of a tensor's part."""
    return (*(place.stop - place.start for place in at), *whole[len(at) :])


def tensor_at(tensor: Tensor, at: Index) -> Tensor:
    return tensor[at] if at else tensor
