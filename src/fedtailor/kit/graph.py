"""Graphs over clients, from their models alone: who is near whom, and what neighbours hand each other.

Models are stacked: one tensor [clients, ...] for every name. No label and no image is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..parts import learnt
from ..spaces.base import Weights


def distances(models: Weights) -> Tensor:
    """Euclidean distances between the clients' models, [clients, clients], over what is trained."""
    flat = torch.cat([t.flatten(1) for n, t in models.items() if learnt(n)], 1)
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")


def similarities(apart: Tensor) -> Tensor:
    """1 for equal models, 0 for those farthest apart; 0 with oneself, whom `walk` adds."""
    s = 1 - apart / apart.max().clamp_min(torch.finfo(apart.dtype).tiny)
    return s.fill_diagonal_(0.0)


def strongest(adjacency: Tensor, neighbours: int) -> Tensor:
    """Of every row only its largest entries."""
    n = min(neighbours, len(adjacency))
    kept = adjacency.topk(n, dim=1)
    return torch.zeros_like(adjacency).scatter_(1, kept.indices, kept.values)


def walk(adjacency: Tensor, steps: int) -> Tensor:
    """(D^-1 (A + I))^steps: what each client receives of each other after some steps between neighbours."""
    own = adjacency + torch.eye(len(adjacency), dtype=adjacency.dtype, device=adjacency.device)
    return torch.linalg.matrix_power(own / own.sum(1, keepdim=True), steps)


def spread(shares: Tensor, models: Weights) -> Weights:
    """The mean over the clients' models by these shares, one of each client."""
    return {n: (shares @ t.flatten(1)).reshape(t.shape[1:]) for n, t in models.items()}


def learnt_graph(one: Tensor, two: Tensor, sharpness: float) -> Tensor:
    """A = relu(tanh(a (M1 M2^T - M2 M1^T))): of any two clients at most one hands to the other."""
    return torch.relu(torch.tanh(sharpness * (one @ two.T - two @ one.T)))


def fit_graph(
    one: Tensor, two: Tensor, wanted: Tensor, sharpness: float, steps: int, lr: float
) -> tuple[Tensor, Tensor]:
    """The embeddings after some steps of gradient descent on |A - wanted|^2 / clients^2."""
    with torch.enable_grad():
        for _ in range(steps):
            one, two = one.detach().requires_grad_(), two.detach().requires_grad_()
            loss = (learnt_graph(one, two, sharpness) - wanted).pow(2).mean()
            slopes = torch.autograd.grad(loss, (one, two))
            one, two = one - lr * slopes[0], two - lr * slopes[1]
    return one.detach(), two.detach()
