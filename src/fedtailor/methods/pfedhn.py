"""pFedHN: Shamsian et al., ICML 2021, Algorithm 1. A hypernetwork at the server makes every client's network.

The server sends theta_i = h(e_i; phi). The client trains it to theta~_i and returns Delta = theta_i - theta~_i. The
server moves phi and the embedding e_i along (d theta_i / d phi)^T Delta. Only networks cross the wire; the hypernetwork
may be as large as the server likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..kit.hypernet import HOLDS, Generated
from ..method import Card, Job, Reply, Seat, Server, Task, head
from ..options import NonNegative
from ..parts import learnt
from ..registry import register


@register("method", "pfedhn")
@dataclass(frozen=True)
class PFedHN(Generated):
    paper: ClassVar[str] = (
        "Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021, Algorithm 1"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "with several participants the server takes one step along the mean of their gradients; the paper asks one",
        "generated networks start near the ordinary first weights, in place of a hypernetwork drawn at random",
        "normalisation statistics are not generated: clients estimate their own",
    )

    card: ClassVar[Card] = Card(
        shared="a hypernetwork at the server",
        personal="whole network, generated",
        policy="an embedding per client, learnt",
        down=Message("network"),
        up=Message(extra={"*": "theta_i - theta~_i, how far training moved each tensor"}, facts=LOSS),
        keeps={"head": "the client's head, where method.head is private"},
        holds=HOLDS,
    )

    clip: NonNegative = 50.0  # largest norm of the server's gradient; local.clip is the clients'
    head: Literal["generated", "private"] = "generated"  # "private" is pFedHN-PC: the last layer stays at the client

    def makes(self, name: str) -> bool:
        return learnt(name) and not (self.head == "private" and head(name))

    def start(self, job: Job) -> Server:
        return self.hypernet(job)

    def ask(self, server: Server, client: Seat) -> Task:  # line 3
        return Task(self.made(server, client))

    async def work(self, task: Task, client: Client) -> Reply:
        net = self._whole(task, client)
        loss = await client.fit(net)  # lines 4-6
        if self.head == "private":
            client.memory["head"] = client.take(net, only=head)
        return Reply(extra=self.change(task, net), facts={"loss": loss})  # line 7

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return self.learn(server, replies)  # lines 8-9

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = self._whole(task, client)
        if self.head == "private" and "head" not in client.memory:
            await client.fit(net, only=head)
        return net

    def _whole(self, task: Task, client: Client) -> nn.Module:
        if self.head == "generated":
            return client.build(task)
        first = {n: t for n, t in client.initial.items() if head(n)}
        return client.build(Task(task.weights | client.memory.get("head", first)))
