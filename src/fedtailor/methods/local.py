"""Local training: every client alone, from the same initial weights. Nothing is exchanged.

The reference every personalised method has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative
from ..registry import register
from ..spaces.base import Weights


@register("method", "local")
@dataclass(frozen=True)
class Local(Method):
    paper: ClassVar[str] = "no paper: the baseline without a federation"
    card: ClassVar[Card] = Card(
        shared="none", personal="whole network", handles=(), keeps={"weights": "the client's network"}
    )
    one_network: ClassVar[str] = ""

    extra_epochs: NonNegative = 0.0  # trained by every client at the end, also by those that never took part

    def start(self, job: Job) -> Server:
        return Server(job)

    def ask(self, server: Server, client: Seat) -> Task:
        return Task(arch=client.arch)

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(Task(self._own(client), task.arch))
        loss = await client.fit(net)
        client.memory["weights"] = client.take(net)
        return Reply(facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(Task(self._own(client), task.arch))
        epochs = self.extra_epochs or (0 if "weights" in client.memory else client.local.epochs)
        if epochs:  # a client that no round has called yet trains now: its first weights know nothing
            await client.fit(net, epochs=epochs)
        return net

    def _own(self, client: Client) -> Weights:
        return client.memory.get("weights") or client.initial
