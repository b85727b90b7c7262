"""Ditto: Li et al., ICML 2021, Algorithm 1. A shared model by FedAvg, and a personal model held near it.

v_k <- v_k - eta * (grad F_k(v_k) + lambda * (v_k - w_t)), with w_t as received at the start of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from ..engine.client import Client
from ..method import Card, Reply, Task
from ..options import NonNegative
from ..registry import register
from .fedavg import FedAvg


@register("method", "ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    paper: ClassVar[str] = "Li et al., ICML 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "v_k is trained after w_k, on batches of its own, instead of alternating with it step by step",
        "v_k starts at the first w that the client receives; a client never called trains v_k once at the end",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        personal="whole network",
        policy="pull of strength lambda towards the shared network",
        handles=("statistical",),
        keeps={"v": "the personal network v_k"},
    )

    lamda: NonNegative = 0.1  # lambda, strength of the pull towards w_t
    personal_epochs: NonNegative = 0.0  # for v_k each round; 0: local.epochs

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        loss = await client.fit(net)  # line 5: the solver for the shared model
        reply = Reply(client.take(net), task.arch, facts={"loss": loss})
        client.memory["v"] = client.copy(await self._train_personal(task, client))  # with statistics of its own
        return reply

    async def personal(self, task: Task, client: Client) -> nn.Module:
        if "v" in client.memory:
            return client.build(Task(client.memory["v"], task.arch))
        return await self._train_personal(task, client)

    async def _train_personal(self, task: Task, client: Client) -> nn.Module:
        """Line 6: v_k moves on its own objective, pulled towards the received w_t."""
        net = client.build(Task(client.memory.get("v", task.weights), task.arch))
        await client.fit(net, epochs=self.personal_epochs or None, pull=(task.weights, self.lamda))
        return net
