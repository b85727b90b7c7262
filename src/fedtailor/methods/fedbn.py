"""FedBN: Li et al., ICLR 2021, Algorithm 1. FedAvg of everything but the normalisation layers, which stay private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..parts import choose, norms, require_part, rest
from ..registry import register
from ..split import settle, start_shared, whole


@register("method", "fedbn")
@dataclass(frozen=True)
class FedBN(Method):
    paper: ClassVar[str] = "Li et al., ICLR 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "clients are averaged by samples; the paper's are equally large",
        "group and layer normalisation stay private too, where a network has them instead",
        "a client without statistics of its own estimates them on its training images before it trains or is tested",
        "a client that no round has called trains its normalisation layers once, at the end",
    )
    card: ClassVar[Card] = Card(
        shared="all but normalisation layers",
        personal="normalisation layers",
        policy="fixed split by layers",
        down=Message("all but norms"),
        up=Message("all but norms", facts=LOSS),
        keeps={"norms": "the client's normalisation layers, statistics too"},
        holds={"weights": "everything else"},
    )
    net_options: ClassVar[dict[str, Any]] = {"norm": "batch"}  # where a network can be without
    one_network: ClassVar[str] = ""

    def check(self, job: Job) -> None:
        require_part(job.space, norms(job.space), f"method.name = '{self.name}': what it keeps, normalisation layers,")

    def start(self, job: Job) -> Server:
        return start_shared(job, rest(norms(job.space)))

    def ask(self, server: Server, client: Seat) -> Task:
        return server.task(client)

    async def work(self, task: Task, client: Client) -> Reply:
        own = norms(client.space)
        net = await settle(whole(task, client, "norms", own), client)
        loss = await client.fit(net)
        client.memory["norms"] = choose(client.copy(net), own)
        return Reply(client.take(net, only=rest(own)), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        own = norms(client.space)
        net = await settle(whole(task, client, "norms", own), client)
        if "norms" not in client.memory:
            await client.fit(net, only=own)
        return net
