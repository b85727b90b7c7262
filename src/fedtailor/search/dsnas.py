"""DSNAS (Hu et al., CVPR 2020): searching on one sampled path at a time; the local search of Direct FedNAS.

A path Z, one operation per edge, is drawn from p = softmax(alpha). One backward pass through it gives the gradient of
its weights and, since every operation is multiplied by its entry of Z (which is 1), the reward of each edge,
R = dL/dZ. With it

    grad alpha = R * grad log p(Z) = R * (Z - p)      per edge, minimised by Adam
    w          <- w - eta_w * grad_w L                of the path's weights alone
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..spaces.base import Arch
from ..spaces.darts import Darts, Gates, Network
from ..spaces.darts_ops import Cell, Edge

M = TypeVar("M", bound=nn.Module)


def path_of(net: Network, space: Darts, arch: Arch) -> Network:
    """The supernet as seen along one path. It shares the supernet's modules, so training it trains the supernet."""
    view, keep = _shallow(net), space.keep_of(arch)
    cells: list[nn.Module] = []
    for cell in net.cells:
        assert isinstance(cell, Cell)
        one = _shallow(cell)
        one.edges = nn.ModuleList(
            Edge(names, kept, edge.__getitem__)  # type: ignore[arg-type]
            for names, kept, edge in zip(space.operations[cell.kind], keep[cell.kind], cell.edges, strict=True)
        )
        cells.append(one)
    view.cells = nn.ModuleList(cells)
    view.space, view.arch = space, arch  # type: ignore[assignment]
    return view


def _shallow(module: M) -> M:
    """A module of its own with the same children, some of which may then be exchanged."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    return found


def chances(alpha: Tensor, freeze: float) -> Tensor:
    """p of every edge. One whose two best are `freeze` or more apart is decided: all its chance is on the best."""
    p = alpha.softmax(-1)
    best = p.topk(2, dim=-1)
    decided = best.values[..., :1] - best.values[..., 1:] >= freeze
    return torch.where(decided, torch.zeros_like(p).scatter_(-1, best.indices[..., :1], 1.0), p)


def dsnas_step(
    loss: Callable[[Tensor, Tensor, Gates], Tensor],
    path: Gates,
    weights: Sequence[nn.Parameter],
    weights_optimiser: torch.optim.Optimizer,
    alpha: Gates,
    alpha_optimiser: torch.optim.Optimizer,
    *,
    clip: float = 0.0,
    freeze: float = 1.0,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The step on one path, given as the one-hot gates Z of both cells. `loss(x, y, Z)` multiplies operations by Z."""
    z = [gates.clone().requires_grad_() for gates in path]
    weights = list(weights)

    def step(x: Tensor, y: Tensor) -> Tensor:
        weights_optimiser.zero_grad()
        for gates in z:
            gates.grad = None
        value = loss(x, y, (z[0], z[1]))
        value.backward(inputs=[*weights, *z])
        for gates, a in zip(z, alpha, strict=True):
            chosen = gates.detach()
            slope = torch.zeros_like(chosen) if gates.grad is None else gates.grad  # None: `none` on every edge
            a.grad = (slope * chosen).sum(-1, keepdim=True) * (chosen - chances(a.detach(), freeze))
        alpha_optimiser.step()
        if clip:
            nn.utils.clip_grad_norm_(weights, clip)
        weights_optimiser.step()
        return value.detach()

    return step
