"""FedDyn: Acar et al., ICLR 2021, Algorithm 1. A regulariser that moves with the rounds makes local minima agree.

Client:  theta_k = argmin f_k(theta) - <g_k, theta> + alpha/2 |theta - theta_t|^2
         g_k <- g_k - alpha (theta_k - theta_t)
Server:  h <- h - alpha/N sum over P of (theta_k - theta_t),   theta <- mean over P of theta_k - h / alpha

The two terms of the client are one pull of strength alpha towards theta_t + g_k / alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..engine.client import Client
from ..method import Card, Job, Reply, Server, Task
from ..options import Positive
from ..owners import add_means, where_owned
from ..parts import choose, learnt
from ..registry import register
from .fedavg import FedAvg


@register("method", "feddyn")
@dataclass(frozen=True)
class FedDyn(FedAvg):
    paper: ClassVar[str] = "Acar et al., ICLR 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "local.epochs of training stand for the argmin",
        "normalisation statistics are averaged",
        "with archs given to clients, P and N count the owners of an entry",
        "a client whose reply comes too late keeps its own g_k all the same, which h then lacks",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        policy="a pull that adds up over the rounds",
        handles=("statistical",),
        keeps={"g": "g_k, the gradient of f_k at its last theta_k"},
        holds={"weights": "the network theta", "h": "what the clients' g_k sum up to"},
    )

    alpha: Positive = 0.1  # strength of the pull; the authors take 0.01 to 0.1, the smaller the longer clients train

    def start(self, job: Job) -> Server:
        server = super().start(job)
        return server.replace(h={n: torch.zeros_like(t) for n, t in choose(server.weights, learnt).items()})

    async def work(self, task: Task, client: Client) -> Reply:
        net, theta = client.build(task), choose(task.weights, learnt)
        g = client.memory.get("g") or {n: torch.zeros_like(t) for n, t in theta.items()}
        anchor = {n: theta[n] + g[n] / self.alpha for n in theta}
        loss = await client.fit(net, pull=(anchor, self.alpha))  # line 6
        found = client.take(net)
        client.memory["g"] = {n: g[n] - self.alpha * (found[n] - theta[n]) for n in theta}  # line 7
        return Reply(found, task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        space, theta = server.space, choose(server.weights, learnt)
        parts = []
        for r in replies:
            old = space.part(theta, r.arch)
            parts.append(({n: -self.alpha * (r.weights[n] - old[n]) for n in old}, r.arch))
        everyone = [seat.arch for seat in server.job.seats[: server.job.clients]]
        h, mean = add_means(space, server.h, parts, everyone), server.paste(replies, plain=True)  # lines 12-13
        moved = where_owned(space, theta, {n: mean[n] - h[n] / self.alpha for n in h}, [r.arch for r in replies])
        return server.replace(weights=mean | moved, h=h)
