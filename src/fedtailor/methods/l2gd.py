"""L2GD: Hanzely & Richtarik, arXiv:2002.05516, Algorithm 1. Local networks that meet by the toss of a coin.

min over x_1..x_n of 1/n sum f_i(x_i) + lambda/(2n) sum |x_i - xbar|^2; in every step all clients do the same:

    with probability 1 - p   x_i <- x_i - a/(n (1 - p)) grad f_i(x_i)       a local step
    with probability p       x_i <- x_i - a lambda/(n p) (x_i - xbar)       a meeting

A round here is the local steps up to a meeting, whose number is geometric, and then the meeting. With eta =
a/(n (1 - p)) the rate of local steps, a meeting goes the part eta lambda (1 - p)/p of the way to xbar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import nn

from ..card import LOSS, Message
from ..data.batches import steps_for
from ..engine.client import Client
from ..method import Card, Fact, Job, Reply, Seat, Server, Task
from ..options import NonNegative
from ..parts import learnt
from ..registry import register
from ..spaces.base import Weights
from .fedavg import FedAvg


@register("method", "l2gd")
@dataclass(frozen=True)
class L2GD(FedAvg):
    paper: ClassVar[str] = "Hanzely & Richtarik, arXiv:2002.05516, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "mini-batches, as in the authors' L2SGD, without its variance reduction",
        "xbar is the plain mean of a round's participants, and a client goes towards it when it is next called",
        "a client starts at the first xbar that it receives",
        "with SGD of local.momentum rho, eta is local.lr / (1 - rho); a meeting goes at most all the way to xbar",
        "a client that no round has called trains local.epochs from xbar at the end",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        shared="mean of the personal networks",
        personal="whole network",
        policy="a pull of strength lambda towards the mean, at random times",
        handles=("statistical",),
        down=Message("network", facts={"steps": "local steps before the next meeting", "p": "chance of a meeting"}),
        up=Message("network", facts=LOSS),
        keeps={"x": "the client's network x_i"},
        holds={"weights": "the mean xbar"},
    )

    lamda: NonNegative = 0.02  # lambda; 0 is local training, a large one FedAvg
    p: Annotated[float, Ge(0), Lt(1)] = 0.0  # chance of a meeting; 0: so that local.epochs lie between two on average

    def chance(self, job: Job) -> float:
        seats = job.seats[: job.clients]
        steps = [steps_for(seat.samples, job.local.batch, job.local.epochs) for seat in seats]
        return self.p or 1 / (1 + sum(steps) / len(steps))

    def ask(self, server: Server, client: Seat) -> Task:
        p = self.chance(server.job)
        steps = int(server.rng("coins").geometric(p)) - 1  # tails before the first head, the same for all clients
        return replace(server.task(client), facts={"steps": steps, "p": p})

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(Task(self._met(task, client), task.arch))
        steps = int(task.facts["steps"])
        facts: dict[str, Fact] = {"loss": await client.fit(net, steps=steps)} if steps else {}  # else two meetings
        client.memory["x"] = client.copy(net)
        return Reply(client.take(net), task.arch, facts=facts)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies, plain=True))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(Task(self._met(task, client), task.arch))
        if "x" not in client.memory:
            await client.fit(net)
        return net

    def _met(self, task: Task, client: Client) -> Weights:
        """x_i after the meeting: part of the way from where the client was to xbar."""
        kept, p = client.memory.get("x"), float(task.facts["p"])
        if kept is None:
            return task.weights
        rho = client.local.momentum if client.local.optimizer == "sgd" else 0.0
        lr = client.local.lr_at(min(client.round, client.rounds), client.rounds)  # of steps, also after the last round
        way = min(1.0, lr / max(1e-9, 1 - rho) * self.lamda * (1 - p) / p)
        return {n: torch.lerp(t, task.weights[n], way) if learnt(n) else t for n, t in kept.items()}
