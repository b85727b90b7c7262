"""Control: every client keeps one architecture, drawn at random among those that fit it. What does the search add?

Supernet, aggregation, local training and deployment are PerFedRLNAS's; only the choice is not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..registry import register
from ..search.supernet import Deploy, affords, keep, require_room, sub_network, train
from ..seeds import rng_of
from ..spaces.base import Arch


@register("method", "random-arch")
@dataclass(frozen=True)
class RandomArch(Method):
    paper: ClassVar[str] = "control for the searches: fixed archs, drawn uniformly"
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet",
        personal="architecture, and the weights cut for it",
        policy="drawn at random before the first round",
        handles=("statistical", "system", "model"),
        down=Message("sub-network"),
        up=Message("sub-network", facts=LOSS | {"accuracy": "on val"}),
        holds={"weights": "the supernet", "archs": "every client's arch"},
    )

    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    def check(self, job: Job) -> None:
        require_room(job)

    def choose(self, job: Job) -> list[Arch]:
        """The archs of all clients, for the whole run."""
        return [
            job.space.sample(rng_of(job.seed, "random-arch", seat.id), fits=lambda arch, seat=seat: affords(seat, arch))
            for seat in job.seats
        ]

    def start(self, job: Job) -> Server:
        return Server(job, weights=job.space.new_weights(job.seed), archs=self.choose(job))

    def ask(self, server: Server, client: Seat) -> Task:
        return sub_network(server, server.archs[client.id])

    async def work(self, task: Task, client: Client) -> Reply:
        return await train(task, client)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await keep(task, client, self.deploy)
