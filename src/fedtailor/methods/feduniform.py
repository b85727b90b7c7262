"""FedUniform and FedAvg-x0.5, the baselines of Luo et al. (NFFL workshop at NeurIPS 2021, section 5.2).

FedUniform: every client takes the widest uniform network that meets its budget, trained with FedPA. FedAvg-x0.5: all
clients take the one width that everybody can afford, which makes partial aggregation plain FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Reply, Seat, Server, Task
from ..options import Fraction
from ..registry import register
from ..search.supernet import affords
from ..search.uniform import ordered, uniform, widest
from ..spaces.base import Arch, Space
from .fedpa import FedPA


@register("method", "feduniform")
@dataclass(frozen=True)
class FedUniform(FedPA):
    """FedUniform: Luo et al., NFFL workshop at NeurIPS 2021, section 5.2. The widest network a client affords."""

    paper: ClassVar[str] = "Luo et al., NFFL workshop at NeurIPS 2021, section 5.2 (FedUniform)"
    deviations: ClassVar[tuple[str, ...]] = (
        *FedPA.deviations,
        "widths are multiples of 0.05; in spaces without a width multiplier all dimensions narrow in step",
    )
    card: ClassVar[Card] = replace(FedPA.card, policy="the widest uniform network that fits the budget")

    needed: ClassVar[str] = (
        "its networks are narrowed, so options must go from small to large. Use mobilenetv2 (as Luo et al.), "
        "mobilenetv3, vit or tiny"
    )

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return ordered(space)

    def check(self, job: Job) -> None:
        if not self.runs_on(type(job.space)):
            raise UserError(f"method '{self.name}' cannot use space '{job.space.name}': {self.needed}.")
        super().check(job)

    def choose(self, job: Job, client: Seat) -> Arch:
        return widest(job.space, lambda arch: affords(client, arch))


@register("method", "fedavg-uniform")
@dataclass(frozen=True)
class FedAvgUniform(FedUniform):
    """FedAvg-x0.5: Luo et al., NFFL workshop at NeurIPS 2021, section 5.2. One width that all afford."""

    paper: ClassVar[str] = "Luo et al., NFFL workshop at NeurIPS 2021, section 5.2 (FedAvg with MobileNetV2 x0.5)"
    deviations: ClassVar[tuple[str, ...]] = ("in spaces without a width multiplier all dimensions narrow in step",)
    card: ClassVar[Card] = replace(
        FedPA.card,
        shared="one narrow network",
        personal="none",
        policy="one width for everybody",
        handles=("system",),
        down=Message("sub-network"),
        up=Message("sub-network", facts=LOSS),
        keeps={},
    )

    width: Fraction = 0.5  # of everybody's network

    def check(self, job: Job) -> None:
        super().check(job)
        arch = uniform(job.space, self.width)
        for seat in job.seats:
            if not affords(seat, arch):
                raise UserError(
                    f"method.width = {self.width:g} is for everybody, but client '{seat.name}' cannot afford it "
                    f"({seat.budget.why_not(job.space.cost(arch), seat.batch, seat.profile, seat.images)}). "
                    "Lower method.width, or let every client have its own with method.name = 'feduniform'."
                )

    def choose(self, job: Job, client: Seat) -> Arch:
        return uniform(job.space, self.width)

    def start(self, job: Job) -> Server:
        server = super().start(job)
        # FedAvg averages statistics with everything else, unless the run says otherwise
        return server.replace(weights=job.space.new_weights(job.seed)) if job.local.bn == "average" else server

    async def work(self, task: Task, client: Client) -> Reply:
        if client.local.bn != "average":
            return await super().work(task, client)
        net = client.build(task)
        loss = await client.fit(net)
        return Reply(client.take(net), task.arch, facts={"loss": loss})

    def shared(self, server: Server) -> Task:
        """The one network that everybody trains; the supernet around it is never used."""
        return self.ask(server, server.job.seats[0])
