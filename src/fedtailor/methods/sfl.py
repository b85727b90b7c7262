"""SFL: Chen et al., Personalized Federated Learning with a Graph, IJCAI 2022. Clients learn from their neighbours.

The server stacks the clients' models P and lets them walk over a graph of clients, row-normalised with self-loops:

    U = s * A^L P + (1 - s) * P        u_i is client i's personalised model, w_glob = mean_i u_i the readout

A client trains from u_i on F_i(w) + lambda/2 |w - u_i|^2 + mu/2 |w - w_glob|^2. The graph comes from the models
themselves, never from labels: near models are strong neighbours, or (SFL*) embeddings of the clients learn the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.jobs import Measured
from ..kit.graph import distances, fit_graph, learnt_graph, similarities, spread, strongest, walk
from ..method import Card, Job, Method, Reply, Seat, Server, Task, pack, unpack
from ..options import AtLeastOne, Fraction, NonNegative, Positive
from ..registry import register
from ..search.supernet import Deploy
from ..seeds import torch_seed
from ..spaces.base import Weights


@register("method", "sfl")
@dataclass(frozen=True)
class SFL(Method):
    paper: ClassVar[str] = "Chen et al., Personalized Federated Learning with a Graph, IJCAI 2022, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "the graph is never given: it follows from the models, since the server knows nothing else of the clients",
        "distances are squared and halved; the authors' code has plain norms, whose gradient does not vanish at u_i",
        "clients that were not called stay in the graph with their last model",
        "SFL* fits its graph to similarities; the authors' code to distances",
        "a client trains local.epochs before it keeps its network; the paper does not say so (deploy = 'as-is')",
    )
    card: ClassVar[Card] = Card(
        shared="all models, mixed over a graph of clients",
        personal="whole network",
        policy="neighbours in a graph that follows from the models",
        down=Message("network", {"global:*": "the readout w_glob"}),
        up=Message("network", facts=LOSS),
        holds={
            "models": "every client's last model",
            "shares": "of every model in every u_i",
            "weights": "the readout w_glob",
            "graph": "strengths between clients",
            "embeddings": "of the clients, where the graph is learnt",
        },
    )
    one_network: ClassVar[str] = "its server mixes models entry by entry, over all clients"

    graph: Literal["similarity", "learned"] = "similarity"  # "learned": SFL*
    steps: AtLeastOne = 3  # L, between neighbours
    share: Fraction = 1.0  # s, of the neighbourhood in u_i
    lamda: NonNegative = 0.3  # pull towards u_i
    mu: NonNegative = 0.3  # pull towards w_glob
    neighbours: AtLeastOne = 30  # strongest of a client's that count
    inertia: Fraction = 0.95  # SFL*: share of the old graph after a round
    dimensions: AtLeastOne = 40  # SFL*: of an embedding
    sharpness: Positive = 3.0  # SFL*: a of the graph's tanh
    graph_steps: AtLeastOne = 10  # SFL*: of gradient descent in a round
    graph_lr: Positive = 0.01
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    def start(self, job: Job) -> Server:
        first, n = job.space.new_weights(job.seed), job.clients
        models = {name: t.expand(n, *t.shape).clone() for name, t in first.items()}
        with torch_seed("graph", job.seed):
            embeddings = torch.randn(2, n, self.dimensions if self.graph == "learned" else 0)
        return Server(
            job, models=models, shares=torch.eye(n), weights=first, graph=torch.zeros(n, n), embeddings=embeddings
        )

    def ask(self, server: Server, client: Seat) -> Task:
        mine = client.id < server.job.clients  # one that joins later has no place in the graph yet
        u = spread(server.shares[client.id], server.models) if mine else server.weights
        return Task(u, extra=pack("global", server.weights))

    async def work(self, task: Task, client: Client) -> Reply:
        net, loss = await self._train(task, client)
        return Reply(client.take(net), facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        models = {n: t.clone() for n, t in server.models.items()}
        for reply in replies:
            for name, tensor in reply.weights.items():
                models[name][reply.client] = tensor
        graph, embeddings = self._graph(server, models)
        moved = walk(strongest(graph, self.neighbours), self.steps)
        shares = self.share * moved + (1 - self.share) * torch.eye(len(moved), device=moved.device)
        weights = spread(shares.mean(0), models)
        return server.replace(models=models, shares=shares, weights=weights, graph=graph, embeddings=embeddings)

    def _graph(self, server: Server, models: Weights) -> tuple[Tensor, Tensor]:
        near = similarities(distances(models))
        if self.graph == "similarity":
            return near, server.embeddings
        one, two = server.embeddings
        one, two = fit_graph(one, two, near, self.sharpness, self.graph_steps, self.graph_lr)
        found = learnt_graph(one, two, self.sharpness)
        return self.inertia * server.graph + (1 - self.inertia) * found, torch.stack([one, two])

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return (await self._train(task, client))[0] if self.deploy == "trained" else client.build(task)

    async def _train(self, task: Task, client: Client) -> tuple[nn.Module, Measured]:
        """Two pulls are one: lambda (w - u) + mu (w - g) = (lambda + mu) (w - (lambda u + mu g) / (lambda + mu))."""
        net, readout, both = client.build(task), unpack(task.extra, "global"), self.lamda + self.mu
        pull = None
        if both:
            anchor = {n: (self.lamda * u + self.mu * readout[n]) / both for n, u in task.weights.items()}
            pull = anchor, both
        return net, await client.fit(net, pull=pull)

    def shared(self, server: Server) -> Task:
        return Task(server.weights)
