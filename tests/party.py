"""Clients on a card that is pretended, to be trained and scored as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.data.partition import VAL
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.jobs import Made, Recipe, Score
from fedtailor.engine.replay import Replay
from fedtailor.runs.execute import prepare
from pretend_cuda import pretend
from test_sweep import config_of


class Party:
    """A federation of equal clients on a card that is pretended, and what its engine says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str = "fedavg", **changes: Any) -> None:
        self.said: list[str] = []
        self.captured: list[Replay] = []
        small = {"local__epochs": 0.3, "local__lr": 0.003, "precision": "fp32"}
        device, setup = pretend(monkeypatch), prepare(config_of(method, "", **(small | changes)))
        self.federation, _ = setup.federation(device, 1, say=self.said.append)
        found = self.federation.engine
        assert isinstance(found, CudaEngine)
        self.engine, self.task = found, self.federation.method.ask(self.federation.begin().server, setup.job.seats[0])
        real = Replay.capture

        def capture(slot: Replay, step: Callable[[], Tensor]) -> None:
            self.captured.append(slot)
            slot.lane.held += 1
            real(slot, step)

        monkeypatch.setattr(Replay, "capture", capture)

    def client(self, i: int) -> Any:
        return self.federation.client(self.federation.job.seats[i], {}, 1)

    async def trained(self, i: int) -> float:
        client = self.client(i)
        net = client.build(self.task)
        await client.fit(net)
        return await client.score(net)

    async def score(self, i: int) -> float:
        net = self.engine.network(self.federation.job.space, ())
        return await Score(net, self.federation.store.split(i, VAL))

    def train(self, clients: int) -> list[float]:
        return self.engine.run((f"client {i}", self.trained(i)) for i in range(clients))


@dataclass(frozen=True)
class Shrinking(Recipe):
    """Halves all weights."""

    def make(self, nets: Any, values: Any) -> Made:
        weights = list(nets[0].parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                torch._foreach_mul_(weights, 0.5)
            return x.mean()

        return Made(step, list)
