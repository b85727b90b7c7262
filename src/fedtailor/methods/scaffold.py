"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1. Control variates take the drift out of local steps.

Client, K steps:  y <- y - eta_l (g(y) - c_i + c),   then   c_i+ = c_i - c + (x - y) / (K eta_l)      (option II)
Server:           x <- x + eta_g mean over S of (y_i - x),   c <- c + (|S| / N) mean over S of (c_i+ - c_i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Reply, Seat, Server, Task, pack, unpack
from ..options import Positive
from ..owners import add_means
from ..parts import choose, learnt
from ..registry import register
from .fedavg import FedAvg
from .fednova import require_sgd


@register("method", "scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020, Algorithm 1 with option II"
    deviations: ClassVar[tuple[str, ...]] = (
        "steps are plain, as in the paper: local.momentum has no part, since it multiplies corrections that are stale",
        "normalisation statistics have no control variate: they are averaged",
        "with archs given to clients, S and N count the owners of an entry",
        "a client whose reply comes too late keeps its own c_i all the same, which c then lacks",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        policy="local gradients corrected by control variates",
        handles=("statistical",),
        down=Message("network", {"c:*": "the server's control variate c"}),
        up=Message("network", {"dc:*": "the change of the client's control variate"}, LOSS),
        keeps={"c": "the client's control variate c_i"},
        holds={"weights": "the network x", "c": "the control variate c, the mean of all c_i"},
    )

    server_lr: Positive = 1.0  # eta_g

    def check(self, job: Job) -> None:
        require_sgd(job, self.name, "it reads gradients off the way a client went")

    def start(self, job: Job) -> Server:
        server = super().start(job)
        return server.replace(c={n: torch.zeros_like(t) for n, t in choose(server.weights, learnt).items()})

    def ask(self, server: Server, client: Seat) -> Task:  # line 4
        return server.task(client, c=server.c)

    async def work(self, task: Task, client: Client) -> Reply:
        net, c = client.build(task), unpack(task.extra, "c")
        own = client.memory.get("c") or {n: torch.zeros_like(t) for n, t in c.items()}
        loss = await client.fit(net, push={n: c[n] - own[n] for n in c}, momentum=False)  # line 10
        y, way = client.take(net), client.steps() * client.lr  # K eta_l
        new = {n: own[n] - c[n] + (task.weights[n] - y[n]) / way for n in c}  # line 12
        client.memory["c"] = new
        return Reply(y, task.arch, pack("dc", {n: new[n] - own[n] for n in c}), {"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:  # lines 16-17
        mean, x = server.paste(replies, plain=True), server.weights
        moved = {n: torch.lerp(x[n], mean[n], self.server_lr) for n in server.c}
        parts = [(unpack(r.extra, "dc"), r.arch) for r in replies]
        everyone = [seat.arch for seat in server.job.seats[: server.job.clients]]
        return server.replace(weights=mean | moved, c=add_means(server.space, server.c, parts, everyone))
