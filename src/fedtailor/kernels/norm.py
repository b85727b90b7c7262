"""Batch normalisation in a training step with the activation that follows it, as one kernel each way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiling import Kernels, applies, compiled, launch

THREADS = 512
LARGEST = 1 << 17  # values of a channel that one block should read
ACTS = {"": 0, "relu": 1, "relu6": 2, "hswish": 3}
_BY_TORCH = {"": lambda x: x, "relu": F.relu, "relu6": F.relu6, "hswish": F.hardswish}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        act: str,
        kernels: Kernels,
    ) -> Tensor:
        y, seen = torch.empty_like(x), x.new_empty((2, x.shape[1]))
        size = math.prod(x.shape[2:])
        ctx.sizes = sizes = (x.shape[1], len(x), size, lanes(size))
        rates = float(momentum), float(eps)
        launch(kernels["forward"], (x.shape[1], 1), THREADS, x, weight, bias, y, seen, *running, *sizes, *rates)
        ctx.save_for_backward(x, weight, bias, seen)
        ctx.eps, ctx.act, ctx.kernels = eps, act, kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, seen = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            y = _BY_TORCH[ctx.act](F.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.eps))
            wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(y, wanted, grads[0], create_graph=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), *[None] * 5)
        dx, both = torch.empty_like(x), None if weight is None else torch.empty_like(seen)
        dweight, dbias = (None, None) if both is None else both.unbind()
        launch(
            ctx.kernels["backward"],
            (x.shape[1], 1),
            THREADS,
            *(grads[0].contiguous(), x, weight, bias, seen, dx, dweight, dbias, *ctx.sizes),
        )
        return dx, dweight, dbias, *[None] * 5


def lanes(size: int) -> int:
    """Threads that walk along a plane together: a power of two, at most a warp."""
    steps = -(-size // values(size))
    return min(32, 1 << (steps - 1).bit_length())


def values(size: int) -> int:
    """That a thread reads at a time."""
    return 4 if size % 4 == 0 else 1


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    act: str = "",
) -> Tensor:
    """A training step's normalisation of [images, channels, height, width] and one of the activations in ACTS."""
    size = math.prod(x.shape[2:])
    if applies(x, weight, bias, *running) and 1 < len(x) * size <= LARGEST:
        kinds = {"ACT": ACTS[act], "V": values(size), "T": THREADS}
        kernels = compiled("norm", ("forward", "backward"), x.device, **kinds)
        if kernels is not None and (weight is None) == (bias is None):
            norm: Callable[..., Tensor] = _Norm.apply  # type: ignore[assignment]
            return norm(x.contiguous(), weight, bias, running, momentum, eps, act, kernels)
    return _BY_TORCH[act](F.batch_norm(x, *running, weight, bias, True, momentum, eps))


class BatchNorm(nn.BatchNorm2d):
    """torch's layer, with the kernels in training. An activation that follows can be had with it."""

    def forward(self, input: Tensor, act: str = "") -> Tensor:
        if input.is_cuda and self.training and self.momentum is not None and self.num_batches_tracked is None:
            running = self.running_mean, self.running_var
            return batch_norm(input, self.weight, self.bias, running, self.momentum, self.eps, act)
        return _BY_TORCH[act](super().forward(input))
