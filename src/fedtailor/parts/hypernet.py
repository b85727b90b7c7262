"""A hypernetwork at the server: from a client's embedding it makes the tensors of that client's network.

    h_0 = e_i,  h_l = relu(W_l h_{l-1} + b_l),  theta_i^t = V_t h_L + c_t     for every tensor t

The client trains theta_i to theta~_i. The server needs no data for its step: by the chain rule the gradient of the
client's objective is (d theta_i / d phi)^T (theta_i - theta~_i), up to the client's learning rate (pFedHN, eq. 3).

All state is a plain dictionary of tensors, phi. c_t starts at the network's ordinary first weights and V_t at their
scale, so that what is generated first is a network like that of any other method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..seeds import torch_seed
from ..spaces.base import Weights

EMBEDDINGS = "embeddings"
LARGEST = 2_000_000_000  # entries of a hypernetwork: 8 GB, and as much again for momenta


def new_hypernet(first: Weights, clients: int, embedding: int, hidden: int, layers: int, seed: int) -> Weights:
    """Embeddings of all clients, the hidden layers, and one linear layer for each tensor of `first`."""
    size = hidden * sum(t.numel() for t in first.values())
    if size > LARGEST:
        raise UserError(
            f"a hypernetwork for this network has {size:.1e} entries, {hidden} for every weight that it makes: more "
            "than a server holds. Choose a smaller net, or lower method.hidden."
        )
    with torch_seed("hypernetwork", seed):
        phi = {EMBEDDINGS: torch.randn(clients, embedding)}
        for i in range(layers):
            layer = nn.Linear(hidden if i else embedding, hidden)
            phi |= {f"hidden.{i}.weight": layer.weight.detach(), f"hidden.{i}.bias": layer.bias.detach()}
        for name, tensor in first.items():
            layer = nn.Linear(hidden, tensor.numel(), bias=False)
            spread = tensor.std() if tensor.numel() > 1 else torch.zeros(())
            phi |= {f"to.{name}.weight": layer.weight.detach() * spread, f"to.{name}.bias": tensor.flatten().clone()}
    return phi


def generate(phi: Weights, client: int, shapes: Mapping[str, Sequence[int]]) -> Weights:
    """The client's tensors of these shapes, as a differentiable function of phi."""
    h, i = phi[EMBEDDINGS][client], 0
    while f"hidden.{i}.weight" in phi:
        h, i = F.relu(F.linear(h, phi[f"hidden.{i}.weight"], phi[f"hidden.{i}.bias"])), i + 1
    return {n: F.linear(h, phi[f"to.{n}.weight"], phi[f"to.{n}.bias"]).reshape(s) for n, s in shapes.items()}


def gradient(phi: Weights, changes: Sequence[tuple[int, Weights, float]]) -> Weights:
    """Sum over clients of mass * (d theta_i / d phi)^T delta_i, from (client, delta_i = theta_i - theta~_i, mass)."""
    leaves = {n: t.detach().requires_grad_() for n, t in phi.items()}
    total = torch.zeros((), device=phi[EMBEDDINGS].device)
    with torch.enable_grad():
        for client, delta, mass in changes:
            made = generate(leaves, client, {n: d.shape for n, d in delta.items()})
            total = total + mass * sum((made[n] * d).sum() for n, d in delta.items())
        slopes = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True))


@torch.no_grad()
def descend(
    phi: Weights,
    momenta: Weights,
    slopes: Weights,
    *,
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    clip: float = 0.0,
) -> tuple[Weights, Weights]:
    """phi and its momenta after one step of SGD on the tensors that `slopes` has; the inputs are left as they are."""
    if clip:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in slopes.values()]))
        slopes = {n: g * (clip / (norm + 1e-6)).clamp(max=1.0) for n, g in slopes.items()}
    moved = {n: momentum * momenta[n] + g + decay * phi[n] for n, g in slopes.items()}
    return phi | {n: phi[n] - lr * m for n, m in moved.items()}, momenta | moved


def only_embeddings(slopes: Weights, clients: Sequence[int]) -> Weights:
    """The slopes of these clients' embeddings: how a client joins a hypernetwork that stays as it is."""
    rows = torch.zeros_like(slopes[EMBEDDINGS])
    rows[list(clients)] = slopes[EMBEDDINGS][list(clients)]
    return {EMBEDDINGS: rows}


zeros = partial(torch.utils._pytree.tree_map, torch.zeros_like)
