"""FedPer: Arivazhagan et al., arXiv:1912.00818, Algorithms 1 and 2. A shared body, private last layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative
from ..parts import choose, layers, require_layers, rest
from ..registry import register
from ..split import fit_head, start_shared, whole
from .fedrep import FedRep


@register("method", "fedper")
@dataclass(frozen=True)
class FedPer(Method):
    paper: ClassVar[str] = "Arivazhagan et al., arXiv:1912.00818, Algorithms 1 and 2"
    deviations: ClassVar[tuple[str, ...]] = (
        "every client starts from the same random personalisation layers",
        "a client that no round has called trains its personalisation layers once, at the end",
    )
    card: ClassVar[Card] = replace(FedRep.card, keeps={"head": "the client's personalisation layers W_P"})
    one_network: ClassVar[str] = ""

    head: tuple[str, ...] = ("head",)  # W_P, the personalisation layers; the authors try the last K_P = 1 to 4 blocks
    final_epochs: NonNegative = 0.0  # of W_P, once, after the last round; none in the paper

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
        net = whole(task, client, "head", head)
        loss = await client.fit(net)  # W_B and W_P together
        client.memory["head"] = choose(client.copy(net), head)
        return Reply(client.take(net, only=rest(head)), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        head = layers(*self.head)
        net = whole(task, client, "head", head)
        epochs = self.final_epochs or (0 if "head" in client.memory else client.local.epochs)
        if epochs:
            await fit_head(net, client, head, epochs)
        return net
