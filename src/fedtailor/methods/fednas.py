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

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..nets.darts import DartsCell, Mixture
from ..options import Count, Fraction, NonNegative, Positive
from ..registry import register
from ..search.milenas import PASSES, alpha_optimiser, cosine, milenas_step
from ..search.mixture import ALPHAS, averaged, begin, darts, mixture, reply_of, require_room, task_of
from ..spaces.base import Space, Weights, paste
from ..spaces.darts import Darts, Keep


@dataclass(frozen=True)
class LocalSearch(Method):
    """The client's half of the search, which the personalised variant shares."""

    paper: ClassVar[str] = "He et al., FedNAS, arXiv:2004.08546, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "alpha moves before w in every step, as in the authors' code; Algorithm 1 lists w first",
        "alpha is averaged over all clients and the gradient of w is clipped, as meant; their code does neither",
        "val is the partition's val split; their code halves what a client has",
        "the result is the last round's; the paper's is of the round that is best on its validation data",
    )
    needs = "space"

    lamda: NonNegative = 1.0  # lambda of eq. 4: weight of the gradient on val
    alpha_lr: Positive = 3e-4  # eta_alpha, of Adam
    alpha_decay: NonNegative = 1e-3
    lr_end: NonNegative = 0.0  # eta_w falls from local.lr to this in every round of search; 0: follow local.schedule

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Darts)

    def check(self, job: Job) -> None:
        require_room(job, self.name)

    def lr_of(self, client: Client, rounds: int) -> float:
        """eta_w at the start of a round of search, of which there are so many."""
        return client.local.lr if self.lr_end else client.local.lr_at(client.round, rounds)

    async def search(self, net: Mixture, client: Client, lr: float, epochs: float | None = None) -> float:
        """Lines 10-14: MiLeNAS over batches of train and val. The optimisers are new in every round."""
        alpha, weights, end = net.searched().alpha, list(net.parameters()), min(lr, self.lr_end)
        rate = torch.tensor(lr, device=alpha[0].device) if end else None
        step = milenas_step(
            lambda x, y: client.loss(net, x, y),
            weights,
            client.local.optimiser(weights, lr if rate is None else rate),
            alpha,
            alpha_optimiser(alpha, self.alpha_lr, self.alpha_decay),
            lamda=self.lamda,
            clip=client.local.clip,
            before=None if rate is None else cosine(rate, end, client.steps(epochs)),
        )
        over = ("train", "val" if client.size("val") else "train")
        loss = await client.loop(step, [net], epochs=epochs, over=over, passes=PASSES)
        net.searched(False)
        return loss


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
