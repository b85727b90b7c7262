"""Products of small matrices with long ones in bfloat16: what 1x1 convolutions of few channels are.

The library's kernels are made for matrices that are large both ways. For one of 16 x 16 they take most of a
multiprocessor's shared memory, so that nothing else runs beside them, and sum up the filters' gradient over all
positions in a block or two. Ours read and write everything once, in many small blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compiling import Kernels, compiled, gradients, launch, takes

THREADS = 128  # of a block, which has as many positions
LARGEST = 4096  # entries of a filter that a block's registers have room for
SHARED = 48 << 10  # bytes of shared memory that any card gives a block
SUMS = 16384  # entries of partial sums that the last block of a gradient adds up
NAMES = ("forward", "images", "filters")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
        (many, out, _), long = weight.shape, x.shape[2]
        y = x.new_empty(many, out, long)
        arrived = x.new_empty(many, dtype=torch.int32) if ctx.needs_input_grad[0] else None
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
        many, long = len(weight), x.shape[2]
        if ctx.needs_input_grad[1]:
            dx = torch.empty_like(x)
            launch(ctx.kernels["images"], (long // THREADS, many), THREADS, weight, dy, dx, long)
        if ctx.needs_input_grad[0]:
            dw, blocks = torch.empty_like(weight), min(long // THREADS, max(1, SUMS // weight[0].numel()))
            parts = x.new_empty(blocks, *weight.shape, dtype=torch.float32)
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
    _, out, into = weight.shape
    if weight.dtype != torch.bfloat16 or x.dtype != torch.bfloat16 or not takes(x):
        return None
    fits = out % 8 == into % 8 == x.shape[2] % THREADS == 0 and out * into <= LARGEST and _shared(out, into) <= SHARED
    if not fits or not x.is_contiguous() or x.storage_offset() % 8:
        return None
    return compiled("products", NAMES, x.device, T=THREADS, CO=out, CI=into, HALF=1)


def _shared(out: int, into: int) -> int:
    """Bytes of shared memory that a block needs."""
    out, into = 16 * -(-out // 16), 16 * -(-into // 16)
    return 2 * (max(out, into) * (THREADS + 8) + max(out * (into + 8), into * (out + 8)))
