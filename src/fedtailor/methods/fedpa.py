"""FedPA, federated partial aggregation: Luo et al., NFFL workshop at NeurIPS 2021, section 4.2.

Every client keeps one sub-network theta_k of one supernet. The server sends the entries of theta_k, the client trains
them and sends them back, and every entry of the supernet becomes the mean over the round's clients that own it. Running
statistics of batch normalisation never leave a client. Alone, FedPA serves any archs "sampled from the same search
space": here one per client, drawn at random among those that fit its budget. FedCS and FedUniform choose them better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative
from ..registry import register
from ..search.partial import build_own, part_of, take_learnt, without_statistics
from ..search.supernet import affords, require_room
from ..search.uniform import ordered
from ..seeds import rng_of
from ..spaces.base import Arch


@register("method", "fedpa")
@dataclass(frozen=True)
class FedPA(Method):
    paper: ClassVar[str] = "Luo et al., NFFL workshop at NeurIPS 2021, section 4.2 (FedPA)"
    deviations: ClassVar[tuple[str, ...]] = (
        "the listing is in an appendix that is not published: owners are averaged by samples, entries nobody owns stay",
        "statistics stay at the client under every local.bn; before its first round it estimates them on its images",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet without statistics",
        personal="architecture, the weights cut for it, statistics",
        policy="drawn at random before the first round",
        handles=("statistical", "system", "model"),
        down=Message("learnt sub-network"),
        up=Message("learnt sub-network", facts=LOSS),
        keeps={"statistics": "of the client's normalisation layers"},
        holds={"weights": "the supernet", "archs": "every client's arch"},
    )

    final_epochs: NonNegative = 0.0  # on its own data before a client keeps its network; none in the paper

    def check(self, job: Job) -> None:
        require_room(job)

    def choose(self, job: Job, client: Seat) -> Arch:
        """theta_k: the arch a client keeps for the whole run."""
        rng = rng_of(job.seed, "fedpa", client.id)
        return job.space.sample(rng, fits=lambda arch: affords(client, arch))

    def start(self, job: Job) -> Server:
        weights = without_statistics(job.space.new_weights(job.seed))
        return Server(job, weights=weights, archs=[self.choose(job, seat) for seat in job.seats])

    def ask(self, server: Server, client: Seat) -> Task:
        arch = server.archs[client.id]
        return Task(part_of(server.space, server.weights, arch), arch)

    async def work(self, task: Task, client: Client) -> Reply:
        net = build_own(task, client)
        if client.local.bn != "recalibrate":
            await client.refresh(net)  # a first time: from 0 and 1 they would need dozens of batches to come right
        loss = await client.fit(net, lr=self.lr_of(client))
        return Reply(take_learnt(net, client), task.arch, facts={"loss": loss})

    def lr_of(self, client: Client) -> float:
        """The learning rate of the round."""
        return client.lr

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        """'Loc.': its own sub-network with its own statistics."""
        net = build_own(task, client)
        if self.final_epochs:
            await client.fit(net, epochs=self.final_epochs)
        return net

    def shared(self, server: Server) -> Task | None:
        """'Glo.': the whole supernet, with statistics of the client that it is tested on."""
        return Task(server.weights, server.space.largest) if ordered(type(server.space)) else None
