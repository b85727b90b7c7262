"""FedRep: Collins et al., ICML 2021, Algorithm 1. A shared body, a private head, trained one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..engine.client import Client
from ..method import Job, Method, Reply, Seat, Server, Task, body, head
from ..options import NonNegative
from ..registry import register


@register("method", "fedrep")
@dataclass(frozen=True)
class FedRep(Method):
    paper: ClassVar[str] = "Collins et al., ICML 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "head and body share local.epochs half and half unless given, so that a round costs what other methods' cost",
        "every client starts from the same random head",
    )

    head_epochs: NonNegative = 0.0  # tau; 0: half of local.epochs
    body_epochs: NonNegative = 0.0  # 0: half of local.epochs
    final_epochs: NonNegative = 10.0  # of the head, once, after the last round

    def start(self, job: Job) -> Server:
        weights = job.space.new_weights(job.seed)
        return Server(job, weights={n: t for n, t in weights.items() if body(n)})

    def ask(self, server: Server, client: Seat) -> Task:
        return Task(server.weights)

    async def work(self, task: Task, client: Client) -> Reply:
        net = self._whole(task, client)
        half = client.local.epochs / 2
        await client.fit(net, epochs=self.head_epochs or half, only=head)  # lines 7-9: tau updates of the head
        loss = await client.fit(net, epochs=self.body_epochs or half, only=body)  # line 10: the representation
        client.memory["head"] = client.take(net, only=head)
        return Reply(client.take(net, only=body), facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))  # line 14

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = self._whole(task, client)
        if self.final_epochs:
            await client.fit(net, epochs=self.final_epochs, only=head)
        return net

    def _whole(self, task: Task, client: Client) -> nn.Module:
        first = {n: t for n, t in client.initial.items() if head(n)}
        return client.build(Task(task.weights | client.memory.get("head", first)))
