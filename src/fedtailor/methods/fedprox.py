"""FedProx: Li et al., MLSys 2020, Algorithm 2. FedAvg with mu/2 |w - w_t|^2 added to the local objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..engine.client import Client
from ..method import Card, Reply, Task
from ..options import NonNegative
from ..registry import register
from .fedavg import FedAvg


@register("method", "fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    paper: ClassVar[str] = "Li et al., MLSys 2020, Algorithm 2"
    deviations: ClassVar[tuple[str, ...]] = (
        "a fixed number of local epochs stands for the inexactness gamma",
        "sampled clients are averaged by samples, as in FedAvg",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card, policy="average; clients are pulled towards it", handles=("statistical",)
    )

    mu: NonNegative = 0.01  # strength of the proximal term

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net, pull=(task.weights, self.mu))  # line 3: argmin f_k(w) + mu/2 |w - w_t|^2
        return Reply(client.take(net), task.arch, facts={"loss": loss})
