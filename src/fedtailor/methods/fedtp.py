"""FedTP: Li et al., IEEE TNNLS 2023, Algorithm 1. Personal self-attention, the rest of the transformer shared.

A hypernetwork at the server makes the projections W_i = (Q, K, V of every block) from client i's embedding; the other
parameters xi are one for all. A client trains both. The server averages xi by samples and moves the hypernetwork along
sum_i (n_i / n) (d W_i / d phi)^T (W_i - W~_i).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..kit.hypernet import HOLDS, Generated
from ..method import Card, Job, Reply, Seat, Server, Task
from ..nets.vit import ViT
from ..options import AtLeastOne, Count
from ..registry import register
from ..spaces.base import Space

PROJECTIONS = re.compile(r"(^|\.)attention\.[qkv]\.")


@register("method", "fedtp")
@dataclass(frozen=True)
class FedTP(Generated):
    paper: ClassVar[str] = (
        "Li et al., FedTP: Federated Learning by Transformer Personalization, TNNLS 2023, Algorithm 1"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "generated projections start near the ordinary first weights, in place of a hypernetwork drawn at random",
        "clients that join learn an embedding, the shared parameters stay as they are",
    )

    card: ClassVar[Card] = Card(
        shared="all but the attention's projections; a hypernetwork at the server",
        personal="projections to queries, keys and values, generated",
        policy="an embedding per client, learnt",
        down=Message("network"),
        up=Message("network", {"*.attention.*": "how far training moved each projection"}, LOSS),
        holds={"weights": "the shared parameters xi"} | HOLDS,
    )

    embedding: Count = 128  # length of e_i
    hidden: AtLeastOne = 150  # units of a hidden layer

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, ViT)

    def check(self, job: Job) -> None:
        if not any(map(self.makes, job.space.full_shapes)):
            raise UserError(
                f"method.name = 'fedtp' makes the projections attention.q, .k and .v of a transformer, and net "
                f"'{job.space.name}' has none of that name. Use net.name = 'vit'."
            )

    def makes(self, name: str) -> bool:
        return PROJECTIONS.search(name) is not None

    def masses(self, replies: Sequence[Reply]) -> list[float]:
        total = sum(r.samples for r in replies)
        return [r.samples / total for r in replies]

    def start(self, job: Job) -> Server:
        shared = {n: t for n, t in job.space.new_weights(job.seed).items() if not self.makes(n)}
        return self.hypernet(job).replace(weights=shared)

    def ask(self, server: Server, client: Seat) -> Task:  # lines 5-6
        return Task(server.weights | self.made(server, client))

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net)  # lines 12-17
        shared = client.take(net, only=lambda name: not self.makes(name))
        return Reply(shared, extra=self.change(task, net), facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:  # lines 8-10
        return self.learn(server.replace(weights=server.paste(replies)), replies)
