"""Random numbers that are a function of a counter: the same on every device and inside a captured graph.

Written with torch's integers they take forty operations, as many as a block of a network; on a GPU here they take one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .compiling import compiled, launch

THREADS = 256
BLOCKS = 8192  # at most; each goes on to the next piece
MIX1, MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd 64-bit constants, as signed integers


def hash_bits(counter: Tensor) -> Tensor:
    """Mixes int64 counters into 62 well-spread bits (an xor-shift-multiply finaliser), by integer arithmetic alone."""
    x = counter * MIX1
    x = (x ^ (x >> 32)) * MIX2
    x = (x ^ (x >> 29)) * MIX1
    return (x ^ (x >> 32)) & ((1 << 62) - 1)


def uniform(counter: Tensor, *shape: int) -> Tensor:
    """Uniform numbers in [0, 1) of the shape for every counter of an int64 tensor (one counter: just that shape)."""
    if applies(counter) and _kernels(counter.device) is not None:
        return _Uniform.apply(counter, shape)  # type: ignore[return-value]
    index = torch.arange(math.prod(shape), device=counter.device, dtype=torch.int64)
    bits = hash_bits(hash_bits(hash_bits(counter))[..., None] + index)
    return ((bits >> 38).to(torch.float32) / (1 << 24)).reshape(*counter.shape, *shape)


class _Uniform(torch.autograd.Function):
    """Vectorised over clients, these are more counters."""

    @staticmethod
    def forward(counter: Tensor, shape: tuple[int, ...]) -> Tensor:
        found, kernels = torch.empty(*counter.shape, *shape, device=counter.device), _kernels(counter.device)
        assert kernels is not None
        blocks = max(1, min(BLOCKS, -(-found.numel() // THREADS)))
        sizes = (counter.numel(), math.prod(shape))
        launch(kernels["uniforms"], (blocks, 1), THREADS, counter.contiguous(), found, *sizes)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int | None]:  # noqa: ARG004
        counter, shape = args
        if in_dims[0] is None:
            return _Uniform.apply(counter, shape), None
        return _Uniform.apply(counter.movedim(in_dims[0], 0), shape), 0


def applies(counter: Tensor) -> bool:
    return counter.is_cuda and not torch.compiler.is_compiling()


def _kernels(device: torch.device) -> Any:
    return compiled("random", ("uniforms",), device, T=THREADS, MIX1=MIX1, MIX2=MIX2)
