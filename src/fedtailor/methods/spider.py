"""SPIDER: Mushtaq et al., TMLR 2023, Algorithms 1 and 2. A shared supernet, and each client's own network out of it.

Server and clients train one supernet w by FedAvg. Each client also has a network of its own, v_k on architecture A_k:
first the whole supernet, then ever fewer operations, as the searcher decides on the client's validation data. It learns
from the others only by the pull towards the received weights of the operations it still has (eq. 4):

    v_k <- v_k - eta * (grad F_k(v_k, A_k) + lambda * (v_k - w_share)),   w_share: the entries of w^t that v_k has

A_k, v_k and its normalisation statistics never leave the client's memory: the server sees the supernet alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.jobs import Measured
from ..method import Card, Job, Reply, Seat, Server, Task
from ..options import Count, NonNegative, Positive
from ..registry import register
from ..search import perturbation
from ..search.perturbation import Search, accuracy, candidates, cells_of, decide, network, own, searching, share
from ..search.phases import Phases
from ..search.spider_milenas import discrete, is_relaxed, mixture, relaxed, require_relaxable, train_relaxed
from ..spaces.base import Space, Weights
from ..spaces.darts import Darts
from .fedavg import FedAvg


@register("method", "spider")
@dataclass(frozen=True)
class Spider(FedAvg):
    paper: ClassVar[str] = "Mushtaq et al., Distributed Architecture Search Over Heterogeneous Distributions, TMLR 2023"
    deviations: ClassVar[tuple[str, ...]] = (
        "an edge keeps the operation whose removal lowers accuracy most, as the text says; Algorithm 2, line 8 has it "
        "the other way round",
        "after the edges every node keeps its two best inputs, as in the authors' code; the paper does not say so. "
        "Deleted edges stay off, and val joins train only when this is done",
        "candidates are scored on the statistics of the val images, as in the authors' code, without updating v_k's",
        "v_k starts at the first w it meets, with lambda = 0 at the initial weights; the authors draw others",
        "with lambda = 0 nobody reads w, so it is neither trained nor sent; v_k is the same",
        "local.clip bounds v_k's gradient with its pull, as w's; the paper clips nothing, the authors' code w alone",
        "optimisers start anew every round, and clients are averaged by their training images",
        "neither the arch nor the weights of v_k are sent; the authors' code sends both for its log",
        "a client that misses rounds catches up on the search when it is back; one never called trains v_k at the end",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet",
        personal="architecture and all of its weights",
        policy="operations pruned by accuracy on val; pull of strength lambda towards the supernet",
        search="clients",
        handles=("statistical", "model"),
        down=Message("supernet"),
        up=Message("supernet", facts=LOSS),
        keeps={"v": "the personal network v_k", "search": "its architecture A_k and what is still undecided"},
        holds={"weights": "the supernet w"},
    )

    lamda: NonNegative = 0.01  # lambda of eq. 4: 0 is local search, nothing is sent; inf is v_k = w_share
    searcher: Literal["perturbation", "milenas"] = "perturbation"
    warm_up: Count = 0  # t_s, rounds before the search; 0: 30 in 1000
    tau: Count = 0  # recovery period, rounds between two decisions; 0: 20 in 1000
    search_rounds: Count = 0  # of milenas; 0: 400 in 1000
    alpha_lr: Positive = 0.01  # eta_alpha of milenas, appendix C
    alpha_val: NonNegative = 1.0  # lambda_alpha of milenas: weight of the gradient on val
    merge_val: bool = True  # train on val too when the search is over

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Darts)

    def check(self, job: Job) -> None:
        perturbation.require_supernet(job, self.name)
        self._phases(job.rounds).schedule.check(job.rounds)
        perturbation.require_gentle(job, self.lamda)
        if self.searcher == "milenas":
            require_relaxable(job, self.lamda, self.search_rounds)

    def ask(self, server: Server, client: Seat) -> Task:
        return super().ask(server, client) if self.lamda else Task()  # without a pull nobody reads w

    async def work(self, task: Task, client: Client) -> Reply:  # Algorithm 1, ClientLocalSearch
        perturbation.require_val(client)
        if not self.lamda:
            return Reply(facts={"loss": await self._train_own(task, client)})
        # Line 17 comes before line 10, and line 18 sees the same batches after both. No update reads the other's, so
        # this is the paper's alternation; and what is sent is there before anything private is touched.
        net = network(client, task.weights, cells_of(client.space).full_keep)
        loss = await client.fit(net, on=self._phases(client.rounds).split(client.round - 1))
        reply = Reply(client.take(net), facts={"loss": loss})
        await self._train_own(task, client)
        return reply

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:  # line 6
        if not self.lamda:
            return server
        whole = cells_of(server.space).full_keep
        return server.replace(weights=server.paste([replace(r, arch=whole) for r in replies]))  # type: ignore[arg-type]

    async def personal(self, task: Task, client: Client) -> nn.Module:
        v, search = self._own(task, client)
        if is_relaxed(v):
            return mixture(v, client)
        net = network(client, v, search.keep, stale=self.lamda == math.inf)  # statistics are the whole supernet's
        if "search" not in client.memory:  # no round has called this client
            await self._fit(net, task, client, "train")
        return net

    def shared(self, server: Server) -> Task | None:
        return Task(server.weights, cells_of(server.space).full_keep) if self.lamda else None  # type: ignore[arg-type]

    async def _train_own(self, task: Task, client: Client) -> Measured:
        (v, search), t = self._own(task, client), client.round - 1  # the paper counts from 0
        phases = self._phases(client.rounds)
        if self.searcher == "milenas" and not phases.over(t):
            net = mixture(relaxed(v, client), client)
            loss = await train_relaxed(net, client, task.weights, self.lamda, self.alpha_lr, self.alpha_val)
        else:
            search = search.ended(discrete(v)) if is_relaxed(v) else search
            net, before = searching(client, v, search), search
            if self.searcher == "perturbation":  # line 10: Algorithm 2
                score = partial(accuracy, client, candidates(client, net))
                search = await decide(search, phases.schedule.due(t), score, client.rng("ties"))
            if search != before:
                net = searching(client, v, search, net)
            loss = await self._fit(net, task, client, phases.split(t))
        client.memory |= {"search": asdict(search)} | ({} if self.lamda == math.inf else {"v": own(client, net)})
        return loss

    async def _fit(self, net: nn.Module, task: Task, client: Client, on: str) -> Measured:
        """Lines 11 to 14 and 18, on w's batches. Of w^t the pull reads the entries that the network has: w_share."""
        if self.lamda == math.inf:
            return math.nan  # v_k is w_share: there is nothing to train
        return await client.fit(net, pull=(share(client, task.weights, net), self.lamda), on=on, again=True)

    def _own(self, task: Task, client: Client) -> tuple[Weights, Search]:
        """v_k and how far its search is."""
        kept = client.memory.get("search")
        search = Search(**kept) if kept else Search.begin(cells_of(client.space), client.rng("search"))
        first = task.weights if self.lamda else client.initial
        return first if self.lamda == math.inf else client.memory.get("v", first), search

    def _phases(self, rounds: int) -> Phases:
        return Phases(self.searcher, self.warm_up, self.tau, self.search_rounds, self.merge_val, rounds)
