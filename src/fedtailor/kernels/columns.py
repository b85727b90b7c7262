"""Patches of images as the rows of a matrix, which makes a convolution a product of matrices.

For many clients at once that is the fastest way. Torch gathers patches well enough for a few images, but not for the
hundreds that a stack of clients has; the kernels here read and write everything once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .compiling import Kernels, compiled, launch

THREADS = 256
BLOCKS = 8192  # at most; each goes on to the next piece
NAMES = ("patches", "collect")
Pair = tuple[int, int]


class Window(NamedTuple):
    """What a convolution looks at."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def out(self, x: Tensor) -> Pair:
        """Rows and columns of the output."""
        rows, columns = (
            (size + 2 * pad - kernel) // stride + 1
            for size, kernel, stride, pad in zip(x.shape[-2:], self.kernel, self.stride, self.padding, strict=True)
        )
        return rows, columns


POINTS = Window((1, 1), (1, 1), (0, 0))  # single points: there is nothing to gather


class _Patches(torch.autograd.Function):
    """Vectorised over clients, these are more images."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> Tensor:
        found = x.new_empty(len(x), *window.out(x), *window.kernel, x.shape[1])
        _launch("patches", found.numel(), x, window, x, found, *x.stride())
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: Tensor) -> None:  # noqa: ARG004
        ctx.shape, ctx.window = inputs[0].shape, inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        images, channels, height, width = ctx.shape
        dx = grads[0].new_empty(images, height, width, channels).permute(0, 3, 1, 2)
        _launch("collect", dx.numel(), dx, ctx.window, grads[0].contiguous(), dx)
        return dx, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int | None]:  # noqa: ARG004
        x, window = args
        if in_dims[0] is None:
            return _Patches.apply(x, window), None
        x = x.movedim(in_dims[0], 0)
        found: Any = _Patches.apply(x.flatten(0, 1), window)
        return found.unflatten(0, x.shape[:2]), 0


def applies(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def patches(x: Tensor, window: Window) -> Tensor:
    """[images, rows, columns, height and width of the filter, channels]."""
    if window == POINTS:
        return x.permute(0, 2, 3, 1)[:, :, :, None, None]
    if applies(x) and _kernels(x, window, _together(x)) is not None:
        return _Patches.apply(x, window)  # type: ignore[return-value]
    (high, wide), (down, along), (top, left) = window
    padded = F.pad(x, (left, left, top, top))
    return padded.unfold(2, high, down).unfold(3, wide, along).permute(0, 2, 3, 4, 5, 1)


def _together(x: Tensor) -> int:
    """How many channels a thread can read at once."""
    whole = x.stride(1) == 1 and all(size % 4 == 0 for size in (x.shape[1], x.stride(0), x.stride(2), x.stride(3)))
    return 4 if whole else 1


def _kernels(x: Tensor, window: Window, values: int) -> Kernels | None:
    sizes = dict(zip("CHWRQ", (*x.shape[1:], *window.out(x)), strict=True))
    for name, (first, second) in zip("KSP", window, strict=True):
        sizes |= {f"{name}1": first, f"{name}2": second}
    return compiled("columns", NAMES, x.device, T=THREADS, V=values, **sizes)


def _launch(name: str, entries: int, like: Tensor, window: Window, *args: Tensor | int) -> None:
    """A kernel over so many entries, for images that lie like these."""
    values = _together(like)
    kernels, threads = _kernels(like, window, values), entries // values
    assert kernels is not None
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    launch(kernels[name], (min(BLOCKS, -(-threads // THREADS)), 1), THREADS, *tensors, threads, *args[len(tensors) :])
