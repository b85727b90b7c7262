"""A hypernetwork at the server: from a client's embedding it makes the tensors of that client's network.

    h_0 = e_i,  h_l = relu(W_l h_{l-1} + b_l),  theta_i^t = V_t h_L + c_t     for every tensor t

The client trains theta_i to theta~_i. The server needs no data for its step: by the chain rule the gradient of the
client's objective is (d theta_i / d phi)^T (theta_i - theta~_i), up to the client's learning rate (pFedHN, eq. 3).

All state is a plain dictionary of tensors, phi. c_t starts at the network's ordinary first weights and V_t at their
scale, so that what is generated first is a network like that of any other method.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.client import Client
from ..errors import UserError
from ..method import Job, Method, Reply, Seat, Server, Task
from ..options import AtLeastOne, Count, Fraction, NonNegative, Positive
from ..seeds import torch_seed
from ..spaces.base import Weights
from ..spaces.measure import tensors_of

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


HOLDS = {"phi": "the hypernetwork and the clients' embeddings", "momenta": "of the server's SGD"}


@dataclass(frozen=True)
class Generated(Method):
    """The server's half of a method whose clients' tensors, or some of them, come from a hypernetwork."""

    one_network: ClassVar[str] = "its hypernetwork makes tensors of one shape"

    embedding: Count = 0  # length of e_i; 0: 1 + a quarter of the clients
    hidden: AtLeastOne = 100  # units of a hidden layer
    layers: AtLeastOne = 3  # hidden layers
    lr: Positive = 0.01  # of the server's SGD
    momentum: Fraction = 0.9
    decay: NonNegative = 1e-3
    clip: NonNegative = 0.0  # largest norm of the server's gradient; 0: no limit
    onboard_rounds: Count = 20  # in which clients that join later learn an embedding

    @abstractmethod
    def makes(self, name: str) -> bool:
        """Whether the hypernetwork makes the tensor."""

    def hypernet(self, job: Job) -> Server:
        """A server with phi and its momenta, before round 1."""
        first = {n: t for n, t in job.space.new_weights(job.seed).items() if self.makes(n)}
        width = self.embedding or 1 + job.clients // 4
        phi = new_hypernet(first, len(job.seats), width, self.hidden, self.layers, job.seed)
        return Server(job, phi=phi, momenta={n: torch.zeros_like(t) for n, t in phi.items()})

    @torch.no_grad()
    def made(self, server: Server, client: Seat) -> Weights:
        """theta_i."""
        shapes = {n: s for n, s in server.space.full_shapes.items() if self.makes(n)}
        return generate(server.phi, client.id, shapes)

    def change(self, task: Task, net: nn.Module) -> Weights:
        """theta_i - theta~_i, what a client sends of the tensors that were made for it."""
        trained = tensors_of(net)
        return {n: t - trained[n].detach() for n, t in task.weights.items() if self.makes(n)}

    def masses(self, replies: Sequence[Reply]) -> list[float]:
        """What each reply counts; together 1."""
        return [1 / len(replies)] * len(replies)

    def learn(self, server: Server, replies: Sequence[Reply], joining: bool = False) -> Server:
        """One step of the hypernetwork and the embeddings, or of the embeddings of clients that join.

        Clients that join share nothing that learns, so each counts whole, however many come at once.
        """
        masses = [1.0] * len(replies) if joining else self.masses(replies)
        changes = [(r.client, r.extra, m) for r, m in zip(replies, masses, strict=True)]
        slopes = gradient(server.phi, changes)
        if joining:
            slopes = only_embeddings(slopes, [r.client for r in replies])
        phi, momenta = descend(
            server.phi,
            server.momenta,
            slopes,
            lr=self.lr,
            momentum=self.momentum,
            decay=self.decay,
            clip=self.clip,
        )
        return server.replace(phi=phi, momenta=momenta)

    def onboarding(self) -> tuple[Method, int]:
        return Joining(self), self.onboard_rounds


@dataclass(frozen=True)
class Joining(Method):
    """How clients join a hypernetwork: it stays as it is, and only their embeddings learn."""

    method: Generated

    def start(self, job: Job) -> Server:
        return self.method.start(job)

    def ask(self, server: Server, client: Seat) -> Task:
        return self.method.ask(server, client)

    async def work(self, task: Task, client: Client) -> Reply:
        return await self.method.work(task, client)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return self.method.learn(server, replies, joining=True)
