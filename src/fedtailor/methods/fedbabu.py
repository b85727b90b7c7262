"""FedBABU: Oh, Kim & Yun, ICLR 2022, Algorithm 1. Only the body is trained and averaged; heads are tuned at the end.

During the federation the head keeps its random initial values, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..engine.client import Client
from ..method import Job, Method, Reply, Seat, Server, Task, body, head
from ..options import NonNegative
from ..registry import register


@register("method", "fedbabu")
@dataclass(frozen=True)
class FedBABU(Method):
    paper: ClassVar[str] = "Oh, Kim & Yun, ICLR 2022, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = ("bodies are averaged by samples; the authors' code averages plainly",)

    epochs: NonNegative = 5.0  # of fine-tuning at the end
    lr: NonNegative = 0.0  # of fine-tuning; 0: a tenth of local.lr
    part: Literal["all", "head"] = "all"  # what is fine-tuned

    def start(self, job: Job) -> Server:
        weights = job.space.new_weights(job.seed)
        return Server(job, weights={n: t for n, t in weights.items() if body(n)})

    def ask(self, server: Server, client: Seat) -> Task:
        return Task(server.weights)

    async def work(self, task: Task, client: Client) -> Reply:
        net = self._whole(task, client)
        loss = await client.fit(net, only=body)  # the head's learning rate is 0
        return Reply(client.take(net, only=body), facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = self._whole(task, client)
        if self.epochs:
            lr = self.lr or client.local.lr / 10
            await client.fit(net, epochs=self.epochs, lr=lr, only=head if self.part == "head" else None)
        return net

    def _whole(self, task: Task, client: Client) -> nn.Module:
        return client.build(Task(task.weights | {n: t for n, t in client.initial.items() if head(n)}))
