"""Batch normalisation in a training step with the activation that follows it, as one kernel each way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import Kernels, addresses, compiled, gradients, half, launch, takes
from .layout import apart, by_channel, laid_like

THREADS = 512  # of a block, at most
EACH = 16  # values that a thread should have at least: idle ones keep other networks' blocks waiting
KEEP = 16  # steps of a thread whose values may stay in registers: four of these for each step
LARGEST = 1 << 17  # values of a channel that one block should read
ACTS = {"": 0, "relu": 1, "relu6": 2, "hswish": 3}
ACTS_OF_TORCH = {"": lambda x: x, "relu": F.relu, "relu6": F.relu6, "hswish": F.hardswish}


class Rule(NamedTuple):
    """How to normalise: running statistics to move on, how far, what to add to variances, what follows.

    Several layers that see the same images may have their statistics here, one after another.
    """

    running: tuple[Tensor | None, Tensor | None]
    momentum: float
    eps: float
    act: str = ""  # one of ACTS

    def layers(self, channels: int) -> int:
        """How many layers' statistics there are."""
        mean, _ = self.running
        return 0 if mean is None else len(mean) // channels


class _Norm(torch.autograd.Function):
    """The output is handed out in parts, whose gradients come from different places and need not be put together."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule, parts: int, kernels: Kernels
    ) -> tuple[Tensor, ...]:
        y, seen = torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)
        ctx.sizes = sizes = stretches(x)
        how = rule.layers(x.shape[1]), float(rule.momentum), float(rule.eps)
        shape = (x.shape[1], 1), threads(x.numel() // x.shape[1])
        launch(kernels["forward"], *shape, x, weight, bias, y, seen, *rule.running, *sizes, *how)
        ctx.save_for_backward(x, weight, bias, seen)
        ctx.rule, ctx.kernels = rule, kernels
        return apart(y, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, seen = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            y = _by_torch(x, weight, bias, ctx.rule._replace(running=(None, None)))
            return *gradients(y, (x, weight, bias), ctx.needs_input_grad[:3], torch.cat(grads, 1)), None, None, None
        dx, both = torch.empty_like(x), None if weight is None else torch.empty_like(seen)
        dweight, dbias = (None, None) if both is None else both.unbind()
        tensors, dy = (x, weight, bias, seen, dx, dweight, dbias), [laid_like(g.to(x.dtype), x) for g in grads]
        channels, batch, size, _ = ctx.sizes
        launch(ctx.kernels["backward"], (channels, 1), threads(batch * size), *tensors, addresses(dy), *ctx.sizes)
        return dx, dweight, dbias, None, None, None


def stretches(x: Tensor) -> tuple[int, int, int, int]:
    """Channels, how many stretches of memory each has, how long these are, and how many threads walk along one."""
    channels, size = x.shape[1], math.prod(x.shape[2:])
    if by_channel(x):
        return channels, 1, len(x) * size, threads(len(x) * size)
    return channels, len(x), size, lanes(size, half(x))


def lanes(size: int, half: int = 0) -> int:
    """Threads that walk along a plane together: a power of two, at most a warp."""
    steps = -(-size // values(size, half))
    return min(32, 1 << (steps - 1).bit_length())


def threads(count: int) -> int:
    """Of a block that has so many values: a power of two, at least a warp."""
    return min(THREADS, max(32, 1 << (count // EACH - 1).bit_length()))


def values(size: int, half: int = 0) -> int:
    """That a thread reads at a time: sixteen bytes, where that goes."""
    return next(many for many in ((8, 4, 1) if half else (4, 1)) if size % many == 0)


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule) -> Tensor:
    """A training step's normalisation of [images, channels, height, width], and what follows it."""
    return batch_norm_apart(x, weight, bias, rule, 1)[0]


def batch_norm_apart(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule, parts: int) -> Sequence[Tensor]:
    """The same in so many tensors, each with an equal share of the channels."""
    fits = small(x) and (weight is None) == (bias is None)
    if fits and takes(x, weight, bias, *rule.running) and not _channels_last(x):
        count, long = x.numel() // x.shape[1], stretches(x)[2]
        kinds = {"ACT": ACTS[rule.act], "V": values(long, half(x)), "T": threads(count), "PARTS": parts}
        steps = -(-count // (kinds["T"] * kinds["V"]))
        keep = min(steps, KEEP) if by_channel(x) else 0
        kinds |= {"KEEP": keep, "REST": int(steps > keep), "HALF": half(x)}
        kernels = compiled("norm", ("forward", "backward"), x.device, **kinds)
        if kernels is not None:
            return _Norm.apply(laid_like(x, x), weight, bias, rule, parts, kernels)  # type: ignore[return-value]
    return apart(_by_torch(x, weight, bias, rule), parts)


def small(x: Tensor) -> bool:
    """Whether the kernels take images of this size."""
    return 1 < x.numel() // x.shape[1] <= LARGEST and takes(x)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _by_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule) -> Tensor:
    mean, variance = rule.running
    if mean is not None and variance is not None and len(mean) > x.shape[1]:
        *others, (mean, variance) = zip(mean.split(x.shape[1]), variance.split(x.shape[1]), strict=True)
        for statistics in others:
            F.batch_norm(x.detach(), *statistics, None, None, True, rule.momentum, rule.eps)
    return ACTS_OF_TORCH[rule.act](F.batch_norm(x, mean, variance, weight, bias, True, rule.momentum, rule.eps))
