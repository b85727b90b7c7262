"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1; and FedAvg followed by fine-tuning on each client.

Server: w <- sum_k (n_k / n) w_k over the round's clients. Client: E epochs of SGD from w.
Fine-tuning: the client trains the last server weights on its own data and keeps
(1 - interpolate) * fine-tuned + interpolate * server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import Fraction, NonNegative
from ..parts import head
from ..registry import register
from ..split import fine_tune


@register("method", "fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg: McMahan et al., AISTATS 2017, Algorithm 1. One network, averaged by samples."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = ("batches are always full (shuffles joined end to end)",)
    card: ClassVar[Card] = Card(
        shared="whole network",
        policy="average by samples",
        handles=(),
        down=Message("network"),
        up=Message("network", facts=LOSS),
        holds={"weights": "the network w"},
    )
    one_network: ClassVar[str] = ""

    def start(self, job: Job) -> Server:
        return Server(job, weights=job.space.new_weights(job.seed))

    def ask(self, server: Server, client: Seat) -> Task:
        return server.task(client)

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net)
        return Reply(client.take(net), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))

    def shared(self, server: Server) -> Task | None:
        return server.whole()


@register("method", "fedavg-ft")
@dataclass(frozen=True)
class FedAvgFineTune(FedAvg):
    """FedAvg, then every client fine-tunes the result on its own data: the baseline to beat."""

    card: ClassVar[Card] = replace(
        FedAvg.card,
        personal="whole network, tuned",
        policy="fine-tuning after the last round",
        handles=("statistical",),
    )

    epochs: NonNegative = 10.0  # of fine-tuning
    lr: NonNegative = 0.0  # 0: a tenth of local.lr
    part: Literal["all", "head"] = "all"
    interpolate: Fraction = 0.0  # way back towards the server's weights

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)
        await fine_tune(net, client, head if self.part == "head" else None, self.epochs, self.lr)
        if self.interpolate:
            tuned, t = client.take(net), self.interpolate
            client.load(net, {n: w + t * (task.weights[n] - w) if n in task.weights else w for n, w in tuned.items()})
        return net
