"""What a factorised reduction reads, in one kernel each way: planes of half the size, twice, one pixel apart."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import Kernels, compiled, gradients, half, launch, takes

THREADS = 256


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        *planes, height, width = x.shape
        y = x.new_empty((2, *planes, (height + 1) // 2, (width + 1) // 2))
        launch(kernels["forward"], _blocks(y[0]), THREADS, x, y, math.prod(planes))
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            return *gradients(_by_torch(x), (x,), (True,), grads[0]), None
        dy, dx = grads[0].to(x.dtype).contiguous(), torch.empty_like(x)
        launch(ctx.kernels["backward"], _blocks(x), THREADS, dy, x, dx, math.prod(x.shape[:-2]))
        return dx, None


def halves(x: Tensor) -> Tensor:
    """Of planes [..., height, width] after a ReLU every second pixel of every second row, from the first and from the
    second on: [2, ..., height / 2, width / 2]."""
    if takes(x) and x.numel() < 1 << 31:
        *_, height, width = x.shape
        kinds = {"H": height, "W": width, "T": THREADS, "HALF": half(x)}
        kernels = compiled("halving", ("forward", "backward"), x.device, **kinds)
        if kernels is not None:
            return _Halves.apply(x.contiguous(), kernels)  # type: ignore[return-value]
    return _by_torch(x)


def shifted(x: Tensor) -> Tensor:
    """The image from its second row and column on; of an odd side with a row of zeros beyond the edge."""
    height, width = x.shape[-2:]
    x = x[..., 1:, 1:]
    return F.pad(x, (0, width % 2, 0, height % 2)) if height % 2 or width % 2 else x


def _by_torch(x: Tensor) -> Tensor:
    return F.relu(torch.stack([half[..., ::2, ::2] for half in (x, shifted(x))]))


def _blocks(x: Tensor) -> tuple[int, int]:
    """Enough for a thread each."""
    return -(-x.numel() // THREADS), 1
