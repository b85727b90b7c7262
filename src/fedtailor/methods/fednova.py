"""FedNova: Wang et al., NeurIPS 2020, eqs. 5-8. Clients that take more steps do not count for more.

With tau_i local steps of SGD, x - x_i = eta * G_i a_i, where a_i are the weights of the gradients: all 1 without
momentum. The server averages normalised directions and goes as far as the clients went on average:

    d_i = (x - x_i) / |a_i|_1,   x <- x - (sum p_i |a_i|_1) * (sum p_i d_i),   p_i = n_i / n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.steps import reach
from ..errors import UserError
from ..method import Card, Job, Reply, Server, Task
from ..parts import choose, learnt
from ..registry import register
from ..spaces.pasting import paste
from .fedavg import FedAvg


@register("method", "fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020, eqs. 5-8"
    deviations: ClassVar[tuple[str, ...]] = (
        "clients send x_i and |a_i|_1 instead of d_i, which is the same",
        "tau_eff is the sum of p_i |a_i|_1 as in the authors' code, the sum of p_i tau_i without momentum",
        "normalisation statistics are averaged",
        "with archs given to clients, sums are over the owners of an entry",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        policy="directions averaged per local step",
        handles=("statistical", "system"),
        up=Message("network", facts=LOSS | {"reach": "|a_i|_1, how many steps' worth the client went"}),
    )

    def check(self, job: Job) -> None:
        require_sgd(job, self.name, "it divides by the number of steps, each worth a gradient")

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net)
        went = reach(client.steps(), client.local.momentum)
        return Reply(client.take(net), task.arch, facts={"loss": loss, "reach": went})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        x, masses = choose(server.weights, learnt), [float(r.samples) for r in replies]
        directions, reaches = [], []
        for r, mass in zip(replies, masses, strict=True):
            a, own = float(r.facts["reach"]), choose(r.weights, learnt)
            old = server.space.part(x, r.arch)
            directions.append(({n: torch.lerp(old[n], t, 1 / a) for n, t in own.items()}, r.arch, mass))
            reaches.append(({n: torch.full_like(t, a) for n, t in own.items()}, r.arch, mass))
        step = paste(server.space, x, directions)  # x - sum p_i d_i
        tau = paste(server.space, {n: torch.ones_like(t) for n, t in x.items()}, reaches)  # tau_eff, entry by entry
        moved = {n: x[n] + tau[n] * (step[n] - x[n]) for n in x}
        return server.replace(weights=server.paste(replies) | moved)


def require_sgd(job: Job, method: str, why: str) -> None:
    """Raises `UserError` unless clients move by SGD."""
    if job.local.optimizer != "sgd":
        raise UserError(f"method.name = '{method}' needs local.optimizer = 'sgd', not '{job.local.optimizer}': {why}.")
