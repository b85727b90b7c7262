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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError
from ..seeds import Key, torch_seed
from .measure import Cost, Piece, count, tensors_of

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

    @abstractmethod
    def build(self) -> nn.Module:
        """The module, with fresh weights."""


@lru_cache(maxsize=100_000)
def _counted(block: Block, inputs: tuple[tuple[int, ...], ...]) -> Piece:
    return count(block.build, inputs)


@dataclass(frozen=True)
class Space(ABC):
    """A set of networks that share weights. `input` is (channels, height, width)."""

    name: ClassVar[str]
    fixed: ClassVar[bool] = False  # True for a network without choices

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

    def describe(self, arch: Arch) -> str:
        """One readable line."""
        return ", ".join(f"{d.name} {d.options[i]}" for d, i in zip(self.dimensions, self.check(arch), strict=True))

    def draw(self, arch: Arch) -> str:
        """A drawing of the arch as SVG: its pieces as blocks, or what the space says instead."""
        from .draw import chain_svg

        return chain_svg(self, self.check(arch))

    # archs ------------------------------------------------------------------------------------------------------

    @property
    def largest(self) -> Arch:
        return tuple(len(d.options) - 1 for d in self.dimensions)

    @property
    def smallest(self) -> Arch:
        return (0,) * len(self.dimensions)

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

        def draw(i: int, among: Sequence[int] | None = None) -> int:
            weights = p[i] if among is None else p[i][list(among)]
            total = weights.sum()
            if total <= 0:
                weights, total = np.ones_like(weights), len(weights)
            at = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
            at = min(at, len(weights) - 1)
            return at if among is None else among[at]

        for _ in range(300):
            arch = tuple(draw(i) for i in range(len(self.dimensions)))
            if fits is None or fits(arch):
                return arch
        if not fits(self.smallest):
            raise UserError(f"no arch of '{self.name}' fits: the smallest, {self.smallest}, does not.")
        current = list(self.smallest)
        for _ in range(30):
            for i in rng.permutation(len(current)):
                rest = [tuple(current[:i] + [k] + current[i + 1 :]) for k in range(len(self.dimensions[i].options))]
                current[i] = draw(int(i), [k for k, arch in enumerate(rest) if fits(arch)])
        return tuple(current)

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

    def index(self, arch: Arch) -> Mapping[str, Index]:
        """Where each tensor of the arch lies in the supernet: leading channels, centred kernels."""
        cache: dict[Arch, dict[str, Index]] = self.__dict__.setdefault("_indices", {})
        if arch not in cache:
            if len(cache) >= 4096:
                cache.clear()
            cache[arch] = {
                name: tuple(_axis(axis, full, part) for axis, (full, part) in enumerate(zip(whole, shape, strict=True)))
                for name, shape, whole in self._placed(arch)
            }
        return cache[arch]

    def cut(self, weights: Weights, arch: Arch) -> Weights:
        """The arch's own copy of its entries of the supernet (differentiable)."""
        missing = self.index(arch).keys() - weights.keys()
        if missing:
            raise UserError(f"these are not weights of '{self.name}': '{sorted(missing)[0]}' is missing.")
        return {name: weights[name][at].clone() for name, at in self.index(arch).items()}

    def cost(self, arch: Arch) -> Cost:
        """What the arch costs, from its counted pieces."""
        return sum((p.cost for p in self.pieces(arch).values()), Cost())

    def _whole(self, arch: Arch) -> Piece:
        cache: dict[Arch, Piece] = self.__dict__.setdefault("_pieces", {})
        if arch not in cache:
            cache[arch] = count(lambda: self.build(arch), [self.input])
        return cache[arch]

    def _placed(self, arch: Arch) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        for prefix, piece in self.pieces(self.check(arch)).items():
            for name, shape in piece.shapes:
                full_name = f"{prefix}.{name}" if prefix else name
                whole = self.full_shapes.get(full_name)
                if whole is None or len(whole) != len(shape) or any(s > w for s, w in zip(shape, whole, strict=True)):
                    raise UserError(
                        f"space '{self.name}', arch {arch}: tensor '{full_name}' {shape} is not inside the supernet's "
                        f"{whole}. A sub-network keeps the supernet's names and takes leading entries of its tensors."
                    )
                yield full_name, shape, whole


def counted(block: Block, *inputs: tuple[int, ...]) -> Piece:
    """The piece for a block on inputs of these shapes, counted once per process."""
    return _counted(block, inputs)


def _axis(axis: int, full: int, part: int) -> slice:
    if part == full:
        return slice(None)
    start = (full - part) // 2 if axis >= 2 else 0  # axes 2 and 3 are a kernel's height and width
    return slice(start, start + part)


def paste(
    space: Space, weights: Weights, parts: Sequence[tuple[Weights, Arch, float]], keys: Sequence[str] | None = None
) -> Weights:
    """Averages parts into the supernet, entry by entry, over the parts that own the entry.

    `parts` are (weights, arch, mass) with the mass usually the client's number of samples. An entry that nobody owns
    keeps its value bit for bit, and parts that return what they received change nothing: the average is taken over
    differences, new = old + sum(mass * (part - old)) / sum(mass). A part may leave out tensors (`keys` limits them
    too), and then does not own them.
    """
    change: dict[str, Tensor] = {}
    mass: dict[str, Tensor | float] = {}
    wanted = None if keys is None else set(keys)
    for part, arch, weight in parts:
        index = space.index(arch)
        for name, value in part.items():
            if wanted is not None and name not in wanted:
                continue
            old, at = weights[name], index[name]
            whole = all(s == slice(None) for s in at)
            if name not in change:
                change[name] = torch.zeros_like(old)
                mass[name] = 0.0
            if whole:
                change[name].add_(value - old, alpha=weight)
                mass[name] = mass[name] + weight
            else:
                seen = mass[name]
                if isinstance(seen, float):
                    seen = mass[name] = torch.full_like(old, seen)
                change[name][at].add_(value - old[at], alpha=weight)
                seen[at] += weight
    merged = dict(weights)
    for name, total in change.items():
        seen = mass[name]
        if isinstance(seen, float):
            merged[name] = weights[name] + total / seen if seen else weights[name]
        else:
            merged[name] = weights[name] + total / torch.where(seen > 0, seen, torch.ones_like(seen))
    return merged
