"""LG-FedAvg: Liang et al., arXiv:2001.01523, Algorithm 1. Local representations, one global head on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..parts import choose, layers, require_layers, rest
from ..registry import register
from ..split import settle, start_shared, whole


@register("method", "lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(Method):
    paper: ClassVar[str] = "Liang et al., arXiv:2001.01523, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "clients start from the same random body; the authors' runs start from a network that FedAvg has trained",
        "no adversarial loss and no self-supervised one: the representation learns from the labels",
        "a client keeps one network, its body under the global head; the authors ensemble bodies for new devices",
        "a client that no round has called trains its body once, at the end",
    )
    card: ClassVar[Card] = Card(
        shared="head",
        personal="body",
        policy="fixed split by layers",
        down=Message("head"),
        up=Message("head", facts=LOSS),
        keeps={"body": "the client's representation l_m"},
        holds={"weights": "the head g"},
    )
    one_network: ClassVar[str] = ""

    head: tuple[str, ...] = ("head",)  # theta_g, the global layers; the rest is theta_l, the client's own

    @property
    def declared(self) -> Card:
        return self.card.split_at(self.head)

    def check(self, job: Job) -> None:
        require_layers(job.space, self.head, f"method.head = {list(self.head)}")

    def start(self, job: Job) -> Server:
        return start_shared(job, layers(*self.head))

    def ask(self, server: Server, client: Seat) -> Task:
        return server.task(client)

    async def work(self, task: Task, client: Client) -> Reply:
        head = layers(*self.head)
        net = await settle(whole(task, client, "body", rest(head)), client)
        loss = await client.fit(net)  # lines 8-12: both parts at once
        client.memory["body"] = choose(client.copy(net), rest(head))
        return Reply(client.take(net, only=head), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))  # line 5

    async def personal(self, task: Task, client: Client) -> nn.Module:
        own = rest(layers(*self.head))
        net = await settle(whole(task, client, "body", own), client)
        if "body" not in client.memory:
            await client.fit(net, only=own)
        return net
