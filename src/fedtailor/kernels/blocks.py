"""The tensors of a part as blocks of larger ones, all of them in one kernel.

A sub-network has hundreds of tensors; copying each one out of the supernet, or averaging it back in, costs more to ask
for than to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .compiling import Kernels, applies, compiled, launch

THREADS = 256
CHUNK = 4096  # entries that a block of threads takes
ALIGNED = 64  # entries at whose multiples tensors begin
NAMES = ("take", "add", "average")
Shape = tuple[int, ...]
Tables = tuple[Tensor, Tensor]  # rows and pieces, as blocks.cu describes them


class Blocks:
    """Where the tensors of a part lie in larger ones: the large one's shape and the slices of its first axes."""

    def __init__(self, places: Sequence[tuple[Shape, tuple[slice, ...]]]) -> None:
        self.shapes = [large for large, _ in places]
        boxes = [_box(*place) for place in places]
        rows = np.array([_row(*box) for box in boxes], dtype=np.int64).reshape(-1, 9)
        counts = rows[:, 8]
        starts = np.concatenate([[0], np.cumsum(-(-counts // ALIGNED) * ALIGNED)])
        self.total, self.rows = int(starts[-1]), np.column_stack([rows, starts[:-1]])
        pieces = -(-counts // CHUNK)
        which = np.repeat(np.arange(len(rows)), pieces)
        begins = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * CHUNK
        self.pieces = np.column_stack([which, begins]).astype(np.int32)
        self.views = [(own, _strides(own), int(at)) for (_, _, own), at in zip(boxes, starts, strict=False)]
        self._tables: dict[torch.device, Tables] = {}

    def take(self, large: Sequence[Tensor]) -> list[Tensor] | None:
        """Copies of the blocks; None where no kernel of ours can make them."""
        if not self._describes(large) or (kernels := _kernels(large)) is None:
            return None
        out = torch.empty(self.total, device=large[0].device)
        self._launch(kernels["take"], _numbers([large], out.device), out)
        return [out.as_strided(*view) for view in self.views]

    def add(self, tensors: Sequence[Sequence[Tensor]], mass: float) -> bool:
        """Of (part, old, change, masses), adds mass * (part - old) to the third and mass to the fourth.

        Says no where no kernel of ours can.
        """
        if not self._describes(tensors[1]) or (kernels := _kernels([t for some in tensors for t in some])) is None:
            return False
        part = tensors[0]
        self._launch(kernels["add"], _numbers(tensors, part[0].device), len(part), mass)
        return True

    def average(
        self, parts: Sequence[Sequence[Tensor]], old: Sequence[Tensor], masses: Sequence[float]
    ) -> list[Tensor] | None:
        """old + sum(mass * (part - old)) / sum(mass), of parts that own all; None where no kernel of ours can."""
        everything = [*old, *(t for part in parts for t in part)]
        if not self._describes(old) or (kernels := _kernels(everything)) is None:
            return None
        device, total = old[0].device, sum(masses)
        shares = torch.tensor([mass / total for mass in masses]).to(device, non_blocking=True)
        out = torch.empty(self.total, device=device)
        pointers = _numbers([old, *parts], device)
        self._launch(kernels["average"], pointers, shares, out, len(parts), len(old))
        return [out.as_strided(*view) for view in self.views]

    def _describes(self, large: Sequence[Tensor]) -> bool:
        """Whether these are tensors of the shapes that the tables were made for."""
        return [tensor.shape for tensor in large] == self.shapes

    def _launch(self, kernel: object, pointers: Tensor, *more: Tensor | int | float) -> None:
        launch(kernel, (len(self.pieces), 1), THREADS, pointers, *self._on(pointers.device), *more)

    def _on(self, device: torch.device) -> Tables:
        if device not in self._tables:
            rows, pieces = (torch.from_numpy(t).to(device, non_blocking=True) for t in (self.rows, self.pieces))
            self._tables[device] = rows, pieces
        return self._tables[device]


def _kernels(tensors: Sequence[Tensor]) -> Kernels | None:
    learning = torch.is_grad_enabled()
    kinds = {(t.is_contiguous(), learning and t.requires_grad, t.is_cuda, t.dtype) for t in tensors}
    if len(kinds) != 1 or kinds.pop()[:2] != (True, False) or not applies(tensors[0]):
        return None
    return compiled("blocks", NAMES, tensors[0].device, T=THREADS, CHUNK=CHUNK)


def _numbers(tensors: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Where tensors lie."""
    return torch.tensor([t.data_ptr() for some in tensors for t in some]).to(device, non_blocking=True)


def _box(large: Shape, at: tuple[slice, ...]) -> tuple[Shape, Shape, Shape]:
    """The large tensor's shape, the part's first entry in it, and the part's shape."""
    rest = len(large) - len(at)
    first = (*(place.start for place in at), *[0] * rest)
    return large, first, (*(place.stop - place.start for place in at), *large[len(at) :])


@lru_cache(maxsize=100_000)
def _row(large: Shape, first: Shape, own: Shape) -> tuple[int, ...]:
    """Sizes of the three inner axes, strides of all four, the first entry's place, entries; of at most four axes."""
    axes: list[tuple[int, int]] = []  # size and stride, those that lie in one piece joined
    for size, stride in zip(own, _strides(large), strict=True):
        if axes and axes[-1][1] == size * stride:
            size *= axes.pop()[0]
        axes.append((size, stride))
    axes = [(1, 0)] * (4 - len(axes)) + axes
    at = sum(a * b for a, b in zip(first, _strides(large), strict=True))
    return *(size for size, _ in axes[1:]), *(stride for _, stride in axes), at, math.prod(own)


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
