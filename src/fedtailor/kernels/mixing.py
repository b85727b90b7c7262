"""Sums of many tensors in one kernel.

A node of a cell is the sum of what its edges bring, each operation times its gate; and where many read one tensor, its
gradient is the sum of theirs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from .compiling import Kernels, compiled, gradients, half, launch, takes
from .layout import by_channel
from .norm import values

THREADS = 256
MOST = 64  # tensors that a kernel's arguments have room for
FEWEST = 3  # that are worth a kernel
NO_GATE = -1  # in place of a gate's number
NAMES = ("forward", "backward", "gather")
Place = tuple[int, int]  # of a gate: row and column
Term = tuple[Place | None, Tensor]  # None: it has no gate


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor | None,
        places: tuple[Place | None, ...],
        kernels: Kernels,
        out: Tensor | None,
        *xs: Tensor,
    ) -> Tensor:
        ctx.kernels, ctx.places = kernels, places
        weighed = gates is not None and ctx.needs_input_grad[0]
        ctx.save_for_backward(gates, *(xs if weighed else ()))
        xs = tuple(map(_in_pieces, xs))
        y = xs[0].new_empty(xs[0].shape) if out is None else out.detach()
        size = math.prod(y.shape[1:])
        launch(kernels["forward"], _blocks(y), THREADS, y, gates, _terms(xs, gates, places), size)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gates, *xs = ctx.saved_tensors
        gated = [i for i, place in enumerate(ctx.places) if place is not None]
        slopes = [grads[0]] * len(ctx.places)  # of what has no gate
        if gates is None or not gated:
            return None, None, None, None, *slopes
        if torch.is_grad_enabled():  # somebody differentiates twice
            return _twice(ctx, gates, xs, grads[0])
        dy, xs, weighed = _in_pieces(grads[0]), [_in_pieces(xs[i]) for i in gated if xs], bool(xs)
        kernels = ctx.kernels if len(gated) == len(slopes) else _kernels(dy, len(gated))
        assert kernels is not None
        many, blocks, size = len(gated), _blocks(dy), math.prod(dy.shape[1:])
        shares = gates.new_empty(many, math.prod(blocks)) if weighed else None
        dx = dy.new_empty(many, *dy.shape)
        terms = _terms(xs or [dy] * many, gates, [ctx.places[i] for i in gated])
        launch(kernels["backward"], blocks, THREADS, dy, gates, terms, dx, shares, size, dy.stride(0))
        dgates = None
        if shares is not None:
            dgates = torch.empty_like(gates)
            launch(kernels["gather"], (gates.numel(), 1), THREADS, shares, terms, dgates, math.prod(blocks))
        for i, slope in zip(gated, dx.unbind(), strict=True):
            slopes[i] = slope
        return dgates, None, None, None, *slopes


def _twice(ctx: Any, gates: Tensor, xs: Sequence[Tensor], dy: Tensor) -> tuple[Any, ...]:
    """Gradients that can be differentiated again."""
    dx = [dy if place is None else gates[place] * dy for place in ctx.places]
    if not xs:
        return None, None, None, None, *dx
    y = _by_torch([[(place, x)] for place, x in zip(ctx.places, xs, strict=True)], gates)
    return *gradients(y, [gates], [True], dy), None, None, None, *dx


class _Fanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, many: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for _ in range(many))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ARG004
        found = [g for g in grads if g is not None]
        return (_total(found) if found else None), None


def fanned(x: Tensor, many: int) -> Sequence[Tensor]:
    """The tensor for each of up to so many readers, whose gradients are added up in one go."""
    if many < FEWEST or not (x.requires_grad and torch.is_grad_enabled() and takes(x)):
        return [x] * many
    return _Fanned.apply(x, many)  # type: ignore[return-value]


def _total(tensors: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled():  # somebody differentiates twice
        return _sum(tensors)
    return mixed([[((0, 0), x) for x in tensors]], None, tensors[0])


def mixed(edges: Iterable[Iterable[Term]], gates: Tensor | None, like: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over edges of the sum over an edge's tensors, each times its gate where there are gates.

    They may be made as they are asked for, of something that lies where `like` lies. A kernel of ours puts the sum into
    `out`, whose planes lie channel by channel.
    """
    if not takes(like, gates) or not (gates is None or gates.is_contiguous()):
        return _by_torch(edges, gates)
    edges = [list(edge) for edge in edges]
    places, xs = zip(*(term for edge in edges for term in edge), strict=True)
    if (FEWEST if out is None else 1) <= len(xs) <= MOST and all(map(takes, xs)) and len({x.dtype for x in xs}) == 1:
        images, *sizes = xs[0].shape
        turned = out is not None or any(map(by_channel, xs))
        if turned:
            xs = tuple(map(_in_one_piece, xs))
        kernels = _kernels(xs[0], len(xs))
        if kernels is not None:
            y: Any = _Mixed.apply(gates, places, kernels, None if out is None else _in_one_piece(out), *xs)
            return y.view(sizes[0], images, *sizes[1:]).transpose(0, 1) if turned else y
    return _by_torch(edges, gates)


def _kernels(like: Tensor, many: int) -> Kernels | None:
    """For so many tensors of a shape."""
    kinds = {"V": values(math.prod(like.shape[1:]), half(like)), "T": THREADS, "HALF": half(like)}
    return compiled("mixing", NAMES, like.device, N=many, **kinds)


def _by_torch(edges: Iterable[Iterable[Term]], gates: Tensor | None) -> Tensor:
    return _sum(_sum(x if gates is None or place is None else gates[place] * x for place, x in edge) for edge in edges)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(add, tensors)


def _in_one_piece(x: Tensor) -> Tensor:
    """All planes channel by channel, as if they were one image."""
    return x.transpose(0, 1).reshape(1, -1)


def _in_pieces(x: Tensor) -> Tensor:
    """The tensor with every image in one piece, wherever the next one lies, at a place that suits wide reads."""
    _, *inner = x.stride()
    whole = inner == [math.prod(x.shape[i:]) for i in range(2, x.dim() + 1)]
    return x if whole and x.storage_offset() % 8 == 0 and x.stride(0) % 8 == 0 else x.contiguous()


def _blocks(y: Tensor) -> tuple[int, int]:
    size = math.prod(y.shape[1:])
    return -(-size // (THREADS * values(size, half(y)))), len(y)


@lru_cache(maxsize=MOST)
def _table(many: int) -> type[ctypes.Structure]:
    kinds = ("at", ctypes.c_void_p), ("stride", ctypes.c_long), ("gate", ctypes.c_int)
    return type("Terms", (ctypes.Structure,), {"_fields_": [(name, kind * many) for name, kind in kinds]})


def _terms(xs: Sequence[Tensor], gates: Tensor | None, places: Sequence[Place | None]) -> ctypes.Structure:
    many, width = len(xs), 0 if gates is None else gates.shape[1]
    where = [NO_GATE if place is None else width * place[0] + place[1] for place in places]
    at = [[x.data_ptr() for x in xs], [x.stride(0) for x in xs], where]
    return _table(many)(*[kind(*row) for (_, kind), row in zip(_table(many)._fields_, at, strict=True)])  # type: ignore
