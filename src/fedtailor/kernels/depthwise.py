"""Depthwise convolutions on a GPU.

The libraries' kernels for these are made for large images: the gradients of the filters alone take as long as a seventh
of a small network's step. Ours keep whole planes in shared memory; they are compiled for the sizes of a layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiling import Kernels, compiled, gradients, half, launch, takes
from .layout import by_channel, empty_like_laid, laid_like

THREADS = 128
SHARED = 48 << 10  # bytes of shared memory that any card gives a block
BLOCKS = 512  # that keep a card busy
NAMES = ("forward", "images", "filters")


class Shape(NamedTuple):
    """All that the kernels are compiled for."""

    height: int
    width: int
    kernel: int
    stride: int
    dilation: int
    filters: int  # that read each channel
    relu: bool
    by_channel: bool = False  # how planes lie
    half: int = 0  # in bfloat16

    @property
    def out(self) -> tuple[int, int]:
        return (self.height - 1) // self.stride + 1, (self.width - 1) // self.stride + 1

    @property
    def border(self) -> int:
        return 2 * self.dilation * (self.kernel // 2)

    @property
    def patch(self) -> int:
        """How many rows and columns of the input a thread has."""
        return max(1, 4 // self.stride) * self.stride

    @property
    def planes(self) -> int:
        """That a block takes at a time: enough to keep its threads busy."""
        return max(1, THREADS // (math.ceil(self.height / self.patch) * math.ceil(self.width / self.patch)))

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block needs at most."""
        edge = self.border // 2
        row = self.width + edge + 3
        plane = (self.height + edge) * row + 2 * self.width
        tile = self.planes * plane + (self.patch + edge + 1) * row
        return 4 * (tile + THREADS // 32 * self.kernel**2)

    @property
    def small(self) -> bool:
        return self.kernel % 2 == 1 and self.kernel <= 7 and self.shared <= SHARED


def _kernels(shape: Shape, device: torch.device) -> Kernels | None:
    height, width = shape.out
    values = {"H": shape.height, "W": shape.width, "OH": height, "OW": width, "K": shape.kernel, "S": shape.stride}
    values |= {"D": shape.dilation, "M": shape.filters, "RELU": int(shape.relu), "P": shape.planes, "T": THREADS}
    values |= {"BY_CHANNEL": int(shape.by_channel), "HALF": shape.half}
    return compiled("depthwise", NAMES, device, **values)


class _Depthwise(torch.autograd.Function):
    """Filters m * C + c on channel c, with the kernels for a shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape, kernels: Kernels) -> Tensor:
        n, c = x.shape[:2]
        y = empty_like_laid(x, len(weight), *shape.out)
        arrived = weight.new_empty(len(weight), dtype=torch.int32) if ctx.needs_input_grad[1] else None
        launch(kernels["forward"], (math.ceil(n * c / shape.planes), 1), THREADS, x, weight, y, arrived, c, n)
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.kernels, ctx.arrived = shape, kernels, arrived
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        shape, kernels = ctx.shape, ctx.kernels
        (n, c), dy, dx, dw = x.shape[:2], laid_like(grads[0].to(x.dtype), x), None, None
        if torch.is_grad_enabled():  # somebody differentiates twice
            needed = ctx.needs_input_grad[:2]
            return *gradients(_by_torch(x, weight, shape), (x, weight), needed, dy), None, None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            launch(kernels["images"], (math.ceil(n * c / shape.planes), 1), THREADS, dy, weight, x, dx, c, n)
        if ctx.needs_input_grad[1]:
            groups = max(1, min(math.ceil(n / shape.planes), BLOCKS // len(weight)))
            parts = weight.new_empty((groups, *weight.shape))
            launch(kernels["filters"], (len(weight), groups), THREADS, dy, x, parts, ctx.arrived, c, n)
            dw = parts[0]
        return dx, dw, None, None


def _by_torch(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """The same by torch."""
    x = F.relu(x) if shape.relu else x
    x = x.repeat(1, shape.filters, 1, 1) if shape.filters > 1 else x
    return F.conv2d(x, weight.to(x.dtype), None, shape.stride, shape.border // 2, shape.dilation, len(weight))


def depthwise(x: Tensor, weight: Tensor, stride: int, dilation: int, relu: bool = False) -> Tensor:
    """Filters m * C + c on channel c of x, after a ReLU if asked for, with a border of zeros that keeps the size."""
    height, width = x.shape[2:]
    filters, how = len(weight) // x.shape[1], (by_channel(x), half(x))
    shape = Shape(height, width, weight.shape[-1], stride, dilation, filters, relu, *how)
    if takes(x, weight) and shape.small and x.numel() * shape.filters < 1 << 31:
        kernels = _kernels(shape, x.device)
        if kernels is not None:
            return _Depthwise.apply(laid_like(x, x), weight.contiguous(), shape, kernels)  # type: ignore[return-value]
    return _by_torch(x, weight, shape)


class Depthwise(nn.Conv2d):
    """A depthwise convolution without bias whose border of zeros keeps the size at stride 1."""

    def __init__(self, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel // 2)
        super().__init__(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return depthwise(input, self.weight, self.stride[0], self.dilation[0])
