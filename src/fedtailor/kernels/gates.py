"""Channel gates (squeeze and excite) in half as many kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import Kernels, applies, compiled, gradients, launch
from .norm import lanes, values

THREADS = 512
NAMES = ("means", "scaled", "slopes", "images", "weights")


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kernels: Kernels) -> Tensor:
        mean, y = x.new_empty(x.shape[:2]), torch.empty_like(x)
        blocks, *sizes = ctx.planes = _planes(x)
        launch(kernels["means"], blocks, THREADS, x, mean, *sizes)
        hidden = torch._addmm_activation(b1, mean, w1.t())  # with a ReLU
        z = torch.addmm(b2, hidden, w2.t())
        launch(kernels["scaled"], blocks, THREADS, x, z, y, *sizes)
        ctx.save_for_backward(x, w1, b1, w2, b2, mean, hidden, z)
        ctx.kernels = kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, w1, b1, w2, b2, mean, hidden, z = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            inputs = (x, w1, b1, w2, b2)
            return *gradients(_by_torch(*inputs), inputs, ctx.needs_input_grad[:5], grads[0]), None
        dy, kernels, (blocks, *sizes) = grads[0].contiguous(), ctx.kernels, ctx.planes
        (many, few), dz, dx = w2.shape, torch.empty_like(z), torch.empty_like(x)
        launch(kernels["slopes"], blocks, THREADS, dy, x, z, dz, *sizes)
        dhidden = torch.ops.aten.threshold_backward(dz @ w2, hidden, 0)
        launch(kernels["images"], blocks, THREADS, dy, z, dhidden @ w1, dx, *sizes)
        out = x.new_empty(2 * many * few + few + many)
        everywhere = (-(-len(out) // THREADS), 1)
        launch(kernels["weights"], everywhere, THREADS, dz, hidden, dhidden, mean, out, len(x), many, few)
        dw1, dw2, db1, db2 = out.split([many * few, many * few, few, many])
        return dx, dw1.view_as(w1), db1, dw2.view_as(w2), db2, None


def _planes(x: Tensor) -> tuple[tuple[int, int], int, int, int]:
    """Blocks of a kernel over planes, how many planes there are, their size, and the threads that share one."""
    planes, size = len(x) * x.shape[1], math.prod(x.shape[2:])
    along = lanes(size)
    return (-(-planes * along // THREADS), 1), planes, size, along


def _by_torch(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    gates = F.hardsigmoid(F.linear(F.relu(F.linear(x.mean((2, 3)), w1, b1)), w2, b2))
    return x * gates[:, :, None, None]


def channel_gates(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """x * hard_sigmoid(w2 relu(w1 mean(x) + b1) + b2), the mean over positions."""
    if applies(x, w1, b1, w2, b2):
        kernels = compiled("gates", NAMES, x.device, V=values(math.prod(x.shape[2:])), T=THREADS)
        if kernels is not None:
            return _Gates.apply(x.contiguous(), w1, b1, w2, b2, kernels)  # type: ignore[return-value]
    return _by_torch(x, w1, b1, w2, b2)
