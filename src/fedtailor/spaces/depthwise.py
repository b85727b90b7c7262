"""Depthwise convolutions on a GPU.

The libraries' kernels for these are made for large images: the gradient of the filters alone takes as long as a third
of a small network's step. Ours keep whole planes in shared memory. They are compiled when a network that needs them is
first seen, for its sizes. Where they do not apply, torch's own convolution runs.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

THREADS = 128
SHARED = 48 << 10  # bytes of shared memory that any card gives a block
BLOCKS = 1024  # that keep a card busy
_here = threading.local()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, networks compute layer after layer as they are written, with torch's own kernels."""
    before, _here.plain = is_plain(), True
    try:
        yield
    finally:
        _here.plain = before


def is_plain() -> bool:
    return getattr(_here, "plain", False)


class Shape(NamedTuple):
    """All that the kernels are compiled for."""

    height: int
    width: int
    kernel: int
    stride: int
    dilation: int
    filters: int  # that read each channel
    relu: bool

    @property
    def out(self) -> tuple[int, int]:
        return (self.height - 1) // self.stride + 1, (self.width - 1) // self.stride + 1

    @property
    def border(self) -> int:
        return 2 * self.dilation * (self.kernel // 2)

    @property
    def planes(self) -> int:
        """That a block takes at a time: enough to keep its threads busy."""
        return max(1, THREADS // (math.ceil(self.height / 4) * self.width))

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        width = self.width + self.border
        tile = self.planes * (self.height + self.border) * width + 4 * self.stride * width
        return 4 * (tile + THREADS // 32 * self.kernel**2)

    @property
    def small(self) -> bool:
        return self.kernel % 2 == 1 and self.kernel <= 7 and self.shared <= SHARED


class Kernels(NamedTuple):
    forward: Callable[..., None]
    images: Callable[..., None]
    filters: Callable[..., None]


@lru_cache(maxsize=256)
def _kernels(shape: Shape, device: torch.device) -> Kernels | None:
    """The kernels for a shape; None where this torch cannot compile them.

    They are made in a thread of their own: one that captures a graph is not allowed to load code.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_compile, shape, device).result()


def _compile(shape: Shape, device: torch.device) -> Kernels | None:
    height, width = shape.out
    values = {"H": shape.height, "W": shape.width, "OH": height, "OW": width, "K": shape.kernel, "S": shape.stride}
    values |= {"D": shape.dilation, "M": shape.filters, "RELU": int(shape.relu), "P": shape.planes, "T": THREADS}
    source = "".join(f"#define {name} {value}\n" for name, value in values.items())
    source += Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    try:
        from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

        torch.cuda.set_device(device.index or 0)
        made: Any = _cuda_load_module(_nvrtc_compile(source, "forward")[0], list(Kernels._fields))
        return Kernels(**made)
    except (ImportError, OSError, RuntimeError):  # another torch, or no compiler library beside it
        return None


class _Depthwise(torch.autograd.Function):
    """Filters m * C + c on channel c, with the kernels for a shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape, kernels: Kernels) -> Tensor:
        n, c = x.shape[:2]
        y = x.new_empty((n, len(weight), *shape.out))
        _launch(kernels.forward, math.ceil(n * c / shape.planes), 1, x, weight, y, c, n * c)
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.kernels = shape, kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        shape, kernels = ctx.shape, ctx.kernels
        (n, c), dy, dx, dw = x.shape[:2], grads[0].contiguous(), None, None
        if torch.is_grad_enabled():  # somebody differentiates twice
            with torch.enable_grad():
                y = _torch(x, weight, shape)
            dx, dw = torch.autograd.grad(y, (x, weight), dy, create_graph=True)
            return dx, dw, None, None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            _launch(kernels.images, math.ceil(n * c / shape.planes), 1, dy, weight, x, dx, c, n * c)
        if ctx.needs_input_grad[1]:
            groups = min(math.ceil(n / shape.planes), math.ceil(BLOCKS / len(weight)))
            parts = weight.new_empty((groups, *weight.shape))
            _launch(kernels.filters, len(weight), groups, dy, x, parts, c, n)
            dw = parts.sum(0) if groups > 1 else parts[0]
        return dx, dw, None, None


def _launch(kernel: Callable[..., None], width: int, height: int, *args: Tensor | int) -> None:
    if not getattr(_here, "launched", False):  # a thread that launches nothing through torch first has no context
        torch.zeros(1, device="cuda")
        _here.launched = True
    kernel((width, height, 1), (THREADS, 1, 1), args)


def _torch(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """The same by torch."""
    x = F.relu(x) if shape.relu else x
    x = x.repeat(1, shape.filters, 1, 1) if shape.filters > 1 else x
    return F.conv2d(x, weight, None, shape.stride, shape.border // 2, shape.dilation, len(weight))


def depthwise(x: Tensor, weight: Tensor, stride: int, dilation: int, relu: bool = False) -> Tensor:
    """Filters m * C + c on channel c of x, after a ReLU if asked for, with a border of zeros that keeps the size."""
    height, width = x.shape[2:]
    shape = Shape(height, width, weight.shape[-1], stride, dilation, len(weight) // x.shape[1], relu)
    if _applies(x, weight, shape):
        kernels = _kernels(shape, x.device)
        if kernels is not None:
            return _Depthwise.apply(x.contiguous(), weight.contiguous(), shape, kernels)  # type: ignore[return-value]
    return _torch(x, weight, shape)


def _applies(x: Tensor, weight: Tensor, shape: Shape) -> bool:
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.float32
        and shape.small
        and not is_plain()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and x.numel() * shape.filters < 1 << 31
    )


class Depthwise(nn.Conv2d):
    """A depthwise convolution without bias whose border of zeros keeps the size at stride 1."""

    def __init__(self, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel // 2)
        super().__init__(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return depthwise(input, self.weight, self.stride[0], self.dilation[0])
