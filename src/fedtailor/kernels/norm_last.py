"""Batch normalisation in a training step of tensors whose channels lie last, as tensor cores want them.

Each way is two kernels, which also add a shortcut and apply the activation that follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import Kernels, compiled, gradients, half, launch, takes
from .norm import ACTS, ACTS_OF_TORCH, Rule

THREADS = 512
SLAB = 64  # channels of a block
BLOCKS = 128  # one for each of a large card's processors: every one of them adds up what all have found
MOST = 1 << 30  # values of a tensor, so that a place and what is added to it is an int
LEAST = 2  # rows that a thread should have
NAMES = ("gather", "apply", "gather_back", "apply_back")


class _NormLast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plus: Tensor | None,
        rule: Rule,
        kernels: Kernels,
    ) -> Tensor:
        channels = x.shape[1]
        sizes, blocks = (channels, x.numel() // channels), _blocks(x)
        y, parts, seen = torch.empty_like(x), _parts(x), x.new_empty((4, channels), dtype=torch.float32)
        how = rule.layers(channels), float(rule.momentum), float(rule.eps)
        launch(kernels["gather"], blocks, THREADS, x, parts, *sizes)
        tensors = (x, plus, weight, bias, parts, y, seen, *rule.running)
        launch(kernels["apply"], blocks, THREADS, *tensors, *sizes, *how)
        ctx.masked = plus is not None and rule.act != ""
        ctx.save_for_backward(x, weight, bias, seen, y if ctx.masked else None)
        ctx.rule, ctx.kernels, ctx.sizes, ctx.added = rule, kernels, sizes, plus is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, seen, y = ctx.saved_tensors
        dy = _laid(grads[0].to(x.dtype))
        if torch.is_grad_enabled():  # somebody differentiates twice
            d = dy * (y > 0) if ctx.masked else dy
            like = F.batch_norm(x, None, None, weight, bias, True, ctx.rule.momentum, ctx.rule.eps)
            like = like if ctx.added else ACTS_OF_TORCH[ctx.rule.act](like)
            found = gradients(like, (x, weight, bias), ctx.needs_input_grad[:3], d)
            return *found, d if ctx.added else None, None, None
        blocks, parts, d = _blocks(x), _parts(x), torch.empty_like(x) if ctx.masked else dy
        launch(ctx.kernels["gather_back"], blocks, THREADS, x, dy, y, seen, parts, d, *ctx.sizes)
        dx, both = torch.empty_like(x), None if weight is None else torch.empty_like(seen[:2])
        dweight, dbias = (None, None) if both is None else both.unbind()
        tensors = (x, d, seen, parts, dx, dweight, dbias)
        launch(ctx.kernels["apply_back"], blocks, THREADS, *tensors, *ctx.sizes)
        return dx, dweight, dbias, d if ctx.added else None, None, None


def _blocks(x: Tensor) -> tuple[int, int]:
    """One for each slab of the channels and each share of the rows."""
    channels, across = x.shape[1], SLAB * x.element_size() // 16  # threads that read a row of a slab
    slabs, rows = channels // SLAB, x.numel() // channels
    return slabs, max(1, min(BLOCKS // slabs, rows // (LEAST * THREADS // across)))


def _parts(x: Tensor) -> Tensor:
    """Room for two sums of each channel in each share of the rows."""
    return x.new_empty((2 * x.shape[1] * _blocks(x)[1],), dtype=torch.float32)


def _laid(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def fits(x: Tensor) -> bool:
    """Whether channels lie last, and not image by image as well, and fill slabs, and there are not too many values."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return last and x.shape[1] % SLAB == 0 and x.numel() <= MOST


def batch_norm_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule, plus: Tensor | None = None
) -> Tensor | None:
    """Normalises, adds, and does what follows; None where the kernels do not apply."""
    if not fits(x) or not takes(x, weight, bias, *rule.running) or (weight is None) != (bias is None):
        return None
    if plus is not None and not (rule.act in ("", "relu") and plus.shape == x.shape and plus.dtype == x.dtype):
        return None
    kinds = {"ACT": ACTS[rule.act], "PLUS": int(plus is not None), "T": THREADS, "HALF": half(x)}
    kernels = compiled("norm_last", NAMES, x.device, **kinds)
    if kernels is None:
        return None
    plus = None if plus is None else _laid(plus)
    return _NormLast.apply(x, weight, bias, plus, rule, kernels)  # type: ignore[return-value]
