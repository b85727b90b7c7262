"""Half-way: a complete method in one file. Server momentum for the shared network, and a private one that meets it.

Server: u <- beta * u + (mean of the replies - w),  w <- w + u.
Client: trains w and sends it; then trains a network of its own, started at (1 - keep) * w + keep * v, where v is what
it kept last time. v never leaves the client.

Run it:  fedtailor run demo --set method.name=examples/own_method.py
With options:  fedtailor run demo --set method.name=examples/own_method.py --set method.keep=0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedtailor.card import Card, Message
from fedtailor.engine.client import STATISTICS, Client
from fedtailor.method import Job, Method, Reply, Seat, Server, Task
from fedtailor.options import Fraction
from fedtailor.registry import register


@register("method", "half-way")
@dataclass(frozen=True)
class HalfWay(Method):
    paper: ClassVar[str] = "no paper: the example of the documentation"
    deviations: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = Card(
        shared="whole network",
        personal="whole network",
        policy="a fixed share of the client's own weights",
        down=Message("network"),
        up=Message("network", facts={"loss": "mean training loss"}),
        keeps={"v": "the client's own network"},
        holds={"weights": "the shared network w", "velocity": "u"},
    )

    beta: Fraction = 0.5  # momentum of the server
    keep: Fraction = 0.5  # how much of its own network a client keeps when a new shared one arrives

    def start(self, job: Job) -> Server:
        weights = job.space.new_weights(job.seed)
        # normalisation statistics are averaged as they are: with momentum a variance could turn negative
        velocity = {n: torch.zeros_like(t) for n, t in weights.items() if not n.endswith(STATISTICS)}
        return Server(job, weights=weights, velocity=velocity)

    def ask(self, server: Server, client: Seat) -> Task:
        return Task(server.weights)

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net)
        reply = Reply(client.take(net), facts={"loss": loss})
        client.memory["v"] = client.take(await self._own(task, client))
        return reply

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        mean = server.paste(replies)
        velocity = {n: self.beta * u + mean[n] - server.weights[n] for n, u in server.velocity.items()}
        moved = {n: server.weights[n] + u for n, u in velocity.items()}
        return server.replace(weights=mean | moved, velocity=velocity)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await self._own(task, client)

    def shared(self, server: Server) -> Task:
        return Task(server.weights)

    async def _own(self, task: Task, client: Client) -> nn.Module:
        """The client's own network, half-way between what it kept and what has just arrived, then trained."""
        w, v = task.weights, client.memory.get("v", {})
        net = client.build(Task({n: t + self.keep * (v.get(n, t) - t) for n, t in w.items()}))
        await client.fit(net)
        return net
