"""FedBABU: Oh, Kim & Yun, ICLR 2022, Algorithm 1. Only the body is trained and averaged; heads are tuned at the end.

During the federation the head keeps its random initial values, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative
from ..parts import layers, require_layers, rest
from ..registry import register
from ..split import fine_tune, start_shared, whole


@register("method", "fedbabu")
@dataclass(frozen=True)
class FedBABU(Method):
    paper: ClassVar[str] = "Oh, Kim & Yun, ICLR 2022, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = ("bodies are averaged by samples; the authors' code averages plainly",)
    card: ClassVar[Card] = Card(
        shared="body",
        personal="whole network, tuned",
        policy="fixed split by layers; fine-tuning after the last round",
        down=Message("body"),
        up=Message("body", facts=LOSS),
        holds={"weights": "the body"},
    )
    one_network: ClassVar[str] = ""

    head: tuple[str, ...] = ("head",)  # the layers of the head; the body is the rest
    epochs: NonNegative = 5.0  # of fine-tuning at the end
    lr: NonNegative = 0.0  # of fine-tuning; 0: a tenth of local.lr
    part: Literal["all", "head"] = "all"  # what is fine-tuned

    @property
    def declared(self) -> Card:
        return self.card.split_at(self.head)

    def check(self, job: Job) -> None:
        require_layers(job.space, self.head, f"method.head = {list(self.head)}")

    def start(self, job: Job) -> Server:
        return start_shared(job, rest(layers(*self.head)))

    def ask(self, server: Server, client: Seat) -> Task:
        return server.task(client)

    async def work(self, task: Task, client: Client) -> Reply:
        head = layers(*self.head)
        net, body = whole(task, client, "", head), rest(head)
        loss = await client.fit(net, only=body)  # the head's learning rate is 0
        return Reply(client.take(net, only=body), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        head = layers(*self.head)
        net = whole(task, client, "", head)
        await fine_tune(net, client, head if self.part == "head" else None, self.epochs, self.lr)
        return net
