"""FedRep: Collins et al., ICML 2021, Algorithm 1. A shared body, a private head, trained one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative
from ..parts import choose, layers, require_layers, rest
from ..registry import register
from ..split import fit_head, start_shared, whole


@register("method", "fedrep")
@dataclass(frozen=True)
class FedRep(Method):
    paper: ClassVar[str] = "Collins et al., ICML 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "head and body share local.epochs half and half unless given, so that a round costs what other methods' cost",
        "every client starts from the same random head",
        "bodies are averaged by samples; the paper's clients are equally large",
        "a client tunes its head once more on the last body, as in the authors' code",
    )
    card: ClassVar[Card] = Card(
        shared="body",
        personal="head",
        policy="fixed split by layers",
        down=Message("body"),
        up=Message("body", facts=LOSS),
        keeps={"head": "the client's head h_i"},
        holds={"weights": "the body phi"},
    )
    one_network: ClassVar[str] = ""

    head: tuple[str, ...] = ("head",)  # h, the layers of the head; the body phi is the rest
    head_epochs: NonNegative = 0.0  # tau; 0: half of local.epochs
    body_epochs: NonNegative = 0.0  # 0: half of local.epochs
    final_epochs: NonNegative = 10.0  # of the head, once, after the last round

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
        net, half, body = whole(task, client, "head", head), client.local.epochs / 2, rest(head)
        await fit_head(net, client, head, self.head_epochs or half)  # lines 7-9: tau updates of the head
        loss = await client.fit(net, epochs=self.body_epochs or half, only=body)  # line 10: the representation
        client.memory["head"] = choose(client.copy(net), head)
        return Reply(client.take(net, only=body), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))  # line 14

    async def personal(self, task: Task, client: Client) -> nn.Module:
        head = layers(*self.head)
        net = whole(task, client, "head", head)
        if self.final_epochs:
            await fit_head(net, client, head, self.final_epochs)
        return net
