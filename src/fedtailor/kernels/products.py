"""Products of small matrices with long ones in bfloat16: what 1x1 convolutions of few channels are.

The library's kernels are made for matrices that are large both ways: large tiles, which leave little of a
multiprocessor to others, and few blocks where the result is small. Ours read and write everything once, in many small
blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .compiling import Kernels, compiled, gradients, launch, takes

THREADS = 128  # of a block, which has as many positions
LARGEST = 4096  # sums that a block's registers and shared memory have room for
SHARED = 48 << 10  # bytes of shared memory that any card gives a block
BLOCKS = 128  # the most that share the positions of a filter's gradient
GROUP = 8  # of these, whose sums are added up first
NAMES = ("forward", "images", "filters")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
        (many, out, into), long = weight.shape, x.shape[2]
        y = x.new_empty(many, out, long)
        blocks, _ = _sums(out, into, long)
        counters = many * (1 + max(1, blocks // GROUP))
        arrived = x.new_empty(counters, dtype=torch.int32) if ctx.needs_input_grad[0] else None
        launch(kernels["forward"], (long // THREADS, many), THREADS, weight, x, y, arrived, long)
        ctx.save_for_backward(weight, x)
        ctx.kernels, ctx.arrived = kernels, arrived
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            return *gradients(weight @ x, (weight, x), ctx.needs_input_grad[:2], grads[0]), None
        dy, dx, dw = grads[0].contiguous(), None, None
        (many, out, into), long = weight.shape, x.shape[2]
        if ctx.needs_input_grad[1]:
            dx = torch.empty_like(x)
            launch(ctx.kernels["images"], (long // THREADS, many), THREADS, weight, dy, dx, long)
        if ctx.needs_input_grad[0]:
            dw, (blocks, entries) = torch.empty_like(weight), _sums(out, into, long)
            parts = x.new_empty(many * blocks * entries, dtype=torch.float32)
            launch(ctx.kernels["filters"], (blocks, many), THREADS, dy, x, dw, parts, ctx.arrived, long)
        return dw, dx, None


def product(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x, for some [out, in] and [in, positions]."""
    kernels = _kernels(weight, x)
    if kernels is None:
        return weight @ x
    return _Product.apply(weight.contiguous(), x, kernels)  # type: ignore[return-value]


def _kernels(weight: Tensor, x: Tensor) -> Kernels | None:
    """None where the library's serve."""
    (_, out, into), long = weight.shape, x.shape[2]
    if weight.dtype != torch.bfloat16 or x.dtype != torch.bfloat16 or not takes(x):
        return None
    blocks, entries = _sums(out, into, long)
    shared = max(_shared(out, into), _shared(into, out))
    whole = out % 8 == into % 8 == long % THREADS == 0
    fits = whole and entries <= LARGEST and shared <= SHARED
    if not fits or not x.is_contiguous() or x.storage_offset() % 8:
        return None
    shares = {"BLOCKS": blocks, "IN_GROUP": GROUP, "TILES": long // THREADS // blocks}
    return compiled("products", NAMES, x.device, T=THREADS, CO=out, CI=into, **shares, HALF=1)


def _sums(out: int, into: int, long: int) -> tuple[int, int]:
    """Into how many blocks a gradient's positions are divided evenly, and how many sums each has."""
    entries = min(_whole(out) * into, out * _whole(into))
    some = max(1, min(BLOCKS, (out + into) * long // (GROUP * entries)))  # who sum up less than they have read
    most = 1 << (some.bit_length() - 1)
    return math.gcd(long // THREADS, most), entries


def _shared(out: int, into: int) -> int:
    """Bytes of shared memory that a block needs: for what it reads, the filters, and maybe for what it writes."""
    out, into = _whole(out), _whole(into)
    return 2 * ((into + (16 if out > 64 else 0)) * (THREADS + 8) + out * (into + 8))


def _whole(channels: int) -> int:
    """As many channels as the instruction takes."""
    return 16 * -(-channels // 16)
