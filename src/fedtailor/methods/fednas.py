"""FedNAS: He et al., arXiv:2004.08546, Algorithm 1. Clients search together; what they find is trained by FedAvg.

Phase 1, search: the server holds the DARTS supernet w and its architecture parameters alpha; clients move both by
MiLeNAS on their own images (eq. 4), the server averages both by samples (eq. 5). Phase 2, evaluation: the genotype of
alpha becomes a discrete network, which is trained from scratch by FedAvg.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Reply, Seat, Server, Task
from ..nets.darts import DartsCell, Mixture
from ..options import Count, Fraction
from ..registry import register
from ..search.local_search import LocalSearch
from ..search.mixture import ALPHAS, averaged, begin, darts, mixture, reply_of, task_of
from ..spaces.base import Space, Weights
from ..spaces.darts import Keep
from ..spaces.pasting import paste


@register("method", "fednas")
@dataclass(frozen=True)
class FedNAS(LocalSearch):
    card: ClassVar[Card] = Card(
        shared="supernet and alpha, then one network",
        policy="alpha averaged over the clients",
        search="clients",
        down=Message(("supernet", "network"), ALPHAS, {"genotype": "of the network of the second stage"}),
        up=Message(("supernet", "network"), ALPHAS, LOSS),
        holds={
            "weights": "the supernet, then the network",
            "alpha": "architecture parameters",
            "keep": "the genotype, once the search is over",
        },
    )

    search_share: Fraction = 0.5  # of the rounds; the rest is the evaluation stage
    search_rounds: Count = 0  # the same as a number; 0: by search_share
    stage: Literal["both", "search"] = "both"  # "search": the result is the supernet, weighed by alpha
    channels: Count = 0  # C of the evaluation stage's network; 0: as in the search
    cells: Count = 0  # its depth; 0: as in the search
    drop_path: Fraction = 0.0  # in the evaluation stage

    def check(self, job: Job) -> None:
        super().check(job)
        self.cell(job.space, darts(job.space).full_keep)  # an error now rather than after the search
        if self.stage == "both" and not 0 < self.searching(job.rounds) < job.rounds:
            raise UserError(
                f"{self.searching(job.rounds)} of {job.rounds} rounds would search: both stages need at least one. Set "
                "method.search_rounds, raise rounds, or do without the evaluation stage by method.stage = 'search'."
            )

    def searching(self, rounds: int) -> int:
        """How many of a run's rounds search."""
        return rounds if self.stage == "search" else self.search_rounds or round(self.search_share * rounds)

    def start(self, job: Job) -> Server:  # line 1
        return begin(job).replace(keep=())  # the genotype; empty while `weights` are the supernet's

    def ask(self, server: Server, client: Seat) -> Task:
        if server.round < self.searching(server.job.rounds):
            return task_of(server)
        cell, weights = self.derived(server)
        return Task(weights, facts={"genotype": json.dumps(cell.keep)})

    async def work(self, task: Task, client: Client) -> Reply:
        net, first = self.build(task, client), self.searching(client.rounds)
        if isinstance(net, Mixture):
            return reply_of(net, client, await self.search(net, client, self.lr_of(client, first)))
        loss = await client.fit(net, lr=client.local.lr_at(client.round - first, client.rounds - first))
        return Reply(client.take(net), facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        if server.round < self.searching(server.job.rounds):
            return averaged(server, replies)  # lines 6-7
        cell, weights = self.derived(server)
        merged = paste(cell, weights, [(r.weights, (), float(r.samples)) for r in replies])
        return server.replace(weights=merged, keep=cell.keep)

    def derived(self, server: Server) -> tuple[DartsCell, Weights]:
        """The evaluation stage's network, and its weights: new ones where its first round is yet to be merged."""
        cell = self.cell(server.space, server.keep or darts(server.space).genotype(*server.alpha.values()))
        if server.keep:
            return cell, server.weights
        device = server.weights["head.weight"].device
        return cell, {n: t.to(device) for n, t in cell.new_weights(server.job.seed, "evaluation").items()}

    def cell(self, space: Space, keep: Keep) -> DartsCell:
        s = darts(space)
        size = self.channels or s.channels, self.cells or s.cells
        return DartsCell(s.input, s.classes, *size, s.variant, s.norm, *keep, self.drop_path)

    def offer(self, server: Server, client: Seat) -> Task:
        return self.shared(server)

    def shared(self, server: Server) -> Task:
        if not server.keep:
            return task_of(server)
        return Task(server.weights, facts={"genotype": json.dumps(server.keep)})

    def build(self, task: Task, client: Client) -> nn.Module:
        if task.extra:
            return mixture(task, client)
        normal, reduce = (tuple(map(tuple, kept)) for kept in json.loads(str(task.facts["genotype"])))
        return client.build(task, self.cell(client.space, (normal, reduce)))
