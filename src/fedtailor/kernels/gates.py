"""Channel gates (squeeze and excite) in three kernels, forth and back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import Kernels, compiled, gradients, half, launch, takes
from .layout import by_channel, laid_like
from .norm import lanes, values

THREADS = 1024
MOST = 2048  # channels of an image that shared memory has room for
ABREAST, FEWER = 4, 1024  # images that a block takes where weights are most of what it reads, and their channels
NAMES = ("gates", "images", "weights")


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kernels: Kernels) -> Tensor:
        many, few = w2.shape
        y, mean, hidden, z = torch.empty_like(x), *(w1.new_empty(len(x), n) for n in (many, few, many))
        size = math.prod(x.shape[2:])
        ctx.sizes = sizes = (len(x), many, few, size, lanes(size, half(x)))
        ctx.blocks = blocks = (-(-len(x) // room(many, few, size)[0]), 1)
        launch(kernels["gates"], blocks, THREADS, x, w1, b1, w2, b2, y, mean, hidden, z, *sizes, lanes(few))
        ctx.save_for_backward(x, w1, b1, w2, b2, mean, hidden, z)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, w1, b1, w2, b2, mean, hidden, z = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            inputs = (x, w1, b1, w2, b2)
            return *gradients(_by_torch(*inputs), inputs, ctx.needs_input_grad[:5], grads[0]), None
        dy, kernels, (many, few) = laid_like(grads[0].to(x.dtype), x), ctx.kernels, w2.shape
        dx, dz, dhidden = torch.empty_like(x), torch.empty_like(z), torch.empty_like(hidden)
        launch(kernels["images"], ctx.blocks, THREADS, dy, x, w1, w2, hidden, z, dx, dz, dhidden, *ctx.sizes)
        out = w1.new_empty(2 * many * few + few + many)
        everywhere = (-(-len(out) // THREADS), 1)
        launch(kernels["weights"], everywhere, THREADS, dz, hidden, dhidden, mean, out, len(x), many, few)
        dw1, dw2, db1, db2 = out.split([many * few, many * few, few, many])
        return dx, dw1.view_as(w1), db1, dw2.view_as(w2), db2, None


def _by_torch(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    mean = x.mean((2, 3)).to(w1.dtype)
    gates = F.hardsigmoid(F.linear(F.relu(F.linear(mean, w1, b1)), w2, b2))
    return x * gates[:, :, None, None].to(x.dtype)


def room(many: int, few: int, size: int) -> tuple[int, int]:
    """Images that a block takes, and the channels that it has shared memory for."""
    return (ABREAST, FEWER) if 2 * few > size and max(many, few) <= FEWER else (1, MOST)


def _at_once(*weights: Tensor) -> int:
    """How many weights a thread may read at a time."""
    return 4 if all(w.shape[1] % 4 == 0 and w.data_ptr() % 16 == 0 for w in weights) else 1


def channel_gates(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """x * hard_sigmoid(w2 relu(w1 mean(x) + b1) + b2), the mean over positions."""
    if takes(x, w1, b1, w2, b2) and max(w2.shape) <= MOST:
        size = math.prod(x.shape[2:])
        images, most = room(w2.shape[0], w2.shape[1], size)
        kinds = {"U": _at_once(w1, w2), "T": THREADS, "G": images, "MOST": most, "BY_CHANNEL": int(by_channel(x))}
        kinds |= {"V": values(size, half(x)), "HALF": half(x)}
        kernels = compiled("gates", NAMES, x.device, **kinds)
        if kernels is not None:
            return _Gates.apply(laid_like(x, x), w1, b1, w2, b2, kernels)  # type: ignore[return-value]
    return _by_torch(x, w1, b1, w2, b2)
