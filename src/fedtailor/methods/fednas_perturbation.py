"""One architecture for all, found by perturbation: the "FedNAS" that SPIDER is compared with (its appendix D.1).

FedAvg on the supernet; then, event by event as in SPIDER's Algorithm 2, edges and nodes of the one shared network are
decided by its validation accuracy without each operation, averaged over the clients; then FedAvg of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Reply, Seat, Server, Task
from ..options import Count
from ..registry import register
from ..search.perturbation import (
    Question,
    Schedule,
    Search,
    accuracy,
    answered,
    candidates,
    cells_of,
    questions,
    require_supernet,
    require_val,
)
from ..seeds import rng_of
from ..spaces.base import Space
from ..spaces.darts import Darts, Keep
from ..spaces.darts_ops import EDGES_INTO
from .fedavg import FedAvg

LAST_NODE = max(map(len, EDGES_INTO.values())) - 3  # rounds that a node takes after its first, for an edge each


@register("method", "global-perturbation")
@dataclass(frozen=True)
class GlobalPerturbation(FedAvg):
    paper: ClassVar[str] = (
        "Mushtaq et al., Distributed Architecture Search Over Heterogeneous Distributions, TMLR 2023, appendix D.1"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "candidates are scored by the clients on val and the accuracies averaged; the paper scores them at the server, "
        "on its test or validation data",
        "edges are decided as in this library's SPIDER; a node with several edges to lose takes a round for each",
        "weights of the operations that are left are kept, as in SPIDER, not trained from scratch",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet, pruned to one network",
        policy="operations pruned by accuracy on val, averaged over the clients",
        search="server and clients",
        down=Message("sub-network", {"candidates": "sub-networks to score"}, {"over": "whether the search is over"}),
        up=Message("sub-network", {"accuracies": "of the candidates"}, LOSS),
        holds={"weights": "the supernet", "search": "what is left and what is undecided"},
    )

    warm_up: Count = 0  # t_s, rounds before the search; 0: 30 in 1000
    tau: Count = 0  # recovery period, rounds between two decisions; 0: 20 in 1000
    merge_val: bool = True  # train on val too when the search is over

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Darts)

    def check(self, job: Job) -> None:
        require_supernet(job, self.name)
        more = LAST_NODE if self.warm_up or self.tau else 0  # a schedule scaled to a run of few rounds may not end
        Schedule.of(self.warm_up, self.tau, job.rounds).check(job.rounds, more)

    def start(self, job: Job) -> Server:
        search = Search.begin(cells_of(job.space), rng_of(job.seed, "search"))
        return Server(job, weights=job.space.new_weights(job.seed), search=asdict(search))

    def ask(self, server: Server, client: Seat) -> Task:
        task, search = self.shared(server), Search(**server.search)
        keeps = [keep for question in self._questions(server) for keep in question.candidates]
        extra = {"candidates": _masks(cells_of(server.space), keeps)} if keeps else {}
        return Task(task.weights, task.arch, extra, {"over": search.over})

    async def work(self, task: Task, client: Client) -> Reply:
        require_val(client)
        net = client.build(task)
        look, keeps = candidates(client, net), _keeps(task.extra["candidates"]) if task.extra else []
        found = [await accuracy(client, look, keep) for keep in keeps]  # of the shared weights, as they came
        loss = await client.fit(net, on="train+val" if task.facts["over"] and self.merge_val else "train")
        extra = {"accuracies": torch.tensor(found, dtype=torch.float64)} if found else {}
        return Reply(client.take(net), task.arch, extra, {"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        search, rng = Search(**server.search), server.rng("ties")
        if asked := self._questions(server):
            count = sum(len(question.candidates) for question in asked)
            mean = torch.stack([r.extra["accuracies"].reshape(count) for r in replies]).mean(0).tolist()
            for question in asked:
                n = len(question.candidates)
                search, mean = answered(search, question, mean[:n], rng), mean[n:]
        return server.replace(weights=server.paste(replies), search=asdict(search))

    def shared(self, server: Server) -> Task:
        keep: Keep = server.search["keep"]
        return Task(cells_of(server.space).cut_keep(server.weights, keep), keep)  # type: ignore[arg-type]

    def offer(self, server: Server, client: Seat) -> Task:
        return self.shared(server)

    def _questions(self, server: Server) -> list[Question]:
        """What is scored in this round; the same for every client."""
        due = Schedule.of(self.warm_up, self.tau, server.job.rounds).due(server.round)
        return questions(Search(**server.search), due)


def _masks(space: Darts, keeps: Sequence[Keep]) -> Tensor:
    """Sub-networks as one tensor: [which, cell type, edge, operation]."""
    return torch.stack([torch.stack(space.gates_of(keep)) for keep in keeps]).to(torch.uint8)


def _keeps(masks: Tensor) -> list[Keep]:
    """The sub-networks again."""
    found: list[Keep] = []
    for pair in masks.tolist():
        normal, reduce = (tuple(tuple(i for i, on in enumerate(edge) if on) for edge in kind) for kind in pair)
        found.append((normal, reduce))
    return found
