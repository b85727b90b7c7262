"""Personalised FedNAS: He et al., arXiv:2004.08546, section 2.5. Every client ends with a w and an alpha of its own.

The federation searches as in FedNAS, for all rounds. Then each client adapts the received w and alpha on its own train
and val images by the same alternating rule (eq. 4), and keeps the supernet weighed by its own alpha; or, cut down to
the strongest operation of each edge and trained on, a discrete network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Reply, Seat, Server, Task
from ..options import NonNegative
from ..registry import register
from ..search.local_search import LocalSearch
from ..search.mixture import ALPHAS, averaged, begin, darts, mixture, reply_of, task_of
from ..search.policy import most_likely
from ..spaces.base import Arch
from ..spaces.darts import Gates


@register("method", "fednas-personal")
@dataclass(frozen=True)
class FedNASPersonal(LocalSearch):
    paper: ClassVar[str] = "He et al., FedNAS, arXiv:2004.08546, section 2.5"
    deviations: ClassVar[tuple[str, ...]] = (
        *LocalSearch.deviations,
        "the paper does not say how long clients adapt: local.epochs, unless method.epochs is given",
    )
    card: ClassVar[Card] = Card(
        shared="supernet and alpha",
        personal="both, adapted",
        policy="alpha averaged over the clients, then adapted by each",
        search="clients",
        handles=("statistical", "model"),
        down=Message("supernet", ALPHAS),
        up=Message("supernet", ALPHAS, LOSS),
        holds={"weights": "the supernet", "alpha": "architecture parameters"},
    )

    epochs: NonNegative = 0.0  # of adaptation; 0: local.epochs
    lr: NonNegative = 0.0  # eta_w of adaptation; 0: local.lr
    keep: Literal["mixture", "path"] = "mixture"  # "path": one operation per edge
    path_epochs: NonNegative = 10.0  # a path trains on for these, since its operations are no longer scaled by gates

    def start(self, job: Job) -> Server:
        return begin(job)

    def ask(self, server: Server, client: Seat) -> Task:
        return task_of(server)

    async def work(self, task: Task, client: Client) -> Reply:
        net = mixture(task, client)
        return reply_of(net, client, await self.search(net, client, self.lr_of(client, client.rounds)))

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return averaged(server, replies)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net, lr = mixture(task, client), self.lr or client.local.lr
        await self.search(net, client, lr, self.epochs or None)
        if self.keep == "mixture":
            return net
        arch = strongest(net.alpha, client)
        path = client.build(Task(client.space.cut(client.copy(net), arch), arch))
        await client.fit(path, lr=lr, epochs=self.path_epochs)
        return path

    def shared(self, server: Server) -> Task:
        return task_of(server)

    def build(self, task: Task, client: Client) -> nn.Module:
        return mixture(task, client)


def strongest(alpha: Gates, client: Client) -> Arch:
    """The operation of largest alpha on every edge, `none` left out, within the client's budget."""
    rows = torch.cat(alpha).clone()
    for row, dimension in zip(rows, darts(client.space).dimensions, strict=True):
        if "none" in dimension.options:
            row[dimension.options.index("none")] = -torch.inf
    return most_likely(client.space, rows.flatten(), client.fits)
