"""Batch-norm statistics under each policy, by hand: one normalisation, a black and a white pixel in every batch. And
how a GPU's engine estimates them, in pretence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine.client import Client
from fedtailor.engine.local import Cannot, LocalEngine
from fedtailor.engine.loops import LoopReplay
from fedtailor.engine.replay import Replay
from fedtailor.engine.steps import Estimate
from fedtailor.method import Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.parts import choose, head, learnt
from fedtailor.split import fit_head
from party import Party
from test_family_golden import Normed
from tools import by_hand

PLAIN = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0)
OWN = [0.5, 0.5]  # mean and variance of 0 and 1, as batch normalisation estimates it: (0.25 + 0.25) / (2 - 1)


def client_of(
    bn: Literal["average", "local", "recalibrate"], memory: dict[str, Any] | None = None, keeping: bool = False
) -> tuple[Client, Task, LocalEngine]:
    federation = by_hand(FedAvg(), [[(255, 0), (0, 1)]], replace(PLAIN, bn=bn), Normed((1, 1, 1), 2))
    seat, server = federation.job.seats[0], federation.begin().server
    return federation.client(seat, memory or {}, 1, keeping), federation.method.ask(server, seat), federation.engine


def statistics(net: nn.Module) -> list[float]:
    norm = cast(nn.BatchNorm2d, net.norm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return [float(norm.running_mean), float(norm.running_var)]


def test_recalibrated_statistics_are_the_clients_own_whenever_its_network_is_used() -> None:
    client, task, engine = client_of("recalibrate")
    net = client.build(task)
    assert statistics(net) == [0, 1]  # as they came
    engine.run([("", client.score(net))])
    assert statistics(net) == pytest.approx(OWN)
    engine.run([("", client.fit(net))])
    net.norm.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]
    engine.run([("", client.score(net))])
    assert statistics(net) == pytest.approx(OWN)


@pytest.mark.parametrize(("keeping", "expected"), [(False, [0.05, 0.95]), (True, OWN)])
def test_a_network_that_is_trained_for_keeps_begins_with_statistics_of_its_own(
    keeping: bool, expected: list[float]
) -> None:
    """One step moves them by a tenth: from 0 and 1, or from where they are right already."""
    client, task, engine = client_of("local", keeping=keeping)
    net = client.build(task)
    net.norm.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]
    client.load(net, choose(task.weights, learnt))  # the network's last client leaves nothing
    assert statistics(net) == [0, 1]
    engine.run([("", client.fit(net, steps=1))])
    assert statistics(net) == pytest.approx(expected)


def test_statistics_that_stay_are_kept_part_by_part_and_found_again() -> None:
    other = {"other.running_mean": torch.ones(1)}
    memory: dict[str, Any] = {"statistics": other}
    client, task, _ = client_of("local", memory)
    net = client.build(Task(choose(task.weights, learnt)))
    net.norm.running_mean.fill_(3.0)  # type: ignore[union-attr, operator]
    sent = client.take(net)
    assert all(learnt(name) for name in sent)
    assert set(client.memory["statistics"]) == {"other.running_mean", "norm.running_mean", "norm.running_var"}
    assert memory == {"statistics": other}  # the round is not over: what lies at the client is as it was
    assert statistics(client.build(Task(sent))) == [3, 1]


def test_statistics_of_a_part_that_is_not_trained_stay_as_they_are() -> None:
    known = {"norm.running_mean": torch.tensor([3.0]), "norm.running_var": torch.tensor([2.0])}
    client, task, engine = client_of("local", {"statistics": known})
    net = client.build(Task(choose(task.weights, learnt)))
    engine.run([("", fit_head(net, client, head, 1.0))])
    assert statistics(net) == [3, 2]


# estimated by a GPU's engine, in pretence ----------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False])
def test_statistics_whose_first_pass_was_broken_off_are_estimated_anew(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it while it is recorded, or while it runs because it cannot be."""
    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    party = Party(monkeypatch, clients=2, participants=2, net__norm="batch", local__bn="recalibrate")
    real, capture, calls = Estimate.step, Replay.capture, iter(range(99))
    closed, means, broken = Estimate.close, list[Tensor](), set[int]()

    def break_off() -> None:
        if next(calls) in broken:
            raise torch.OutOfMemoryError

    def step(self: Estimate, images: Tensor, labels: Tensor) -> Tensor:
        found = real(self, images, labels)
        if not captured:
            break_off()
        return found

    def record(slot: Replay, step: Callable[[], Tensor]) -> None:
        if isinstance(slot, LoopReplay):
            if not captured:
                raise Cannot("it reads a value")
            break_off()
        capture(slot, step)

    def close(self: Estimate) -> None:
        closed(self)
        means.append(torch.cat(self.running))

    monkeypatch.setattr(Estimate, "step", step)
    monkeypatch.setattr(Estimate, "close", close)
    monkeypatch.setattr(Replay, "capture", record)
    party.train(2)
    calls, broken = iter(range(99)), {0}
    party.train(2)
    assert next(calls) >= 3
    assert len(means) == 4
    assert torch.equal(means[0], means[2])
    assert torch.equal(means[1], means[3])


def test_statistics_are_estimated_by_replays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party(monkeypatch, clients=2, participants=2, net__norm="batch", local__bn="recalibrate")
    real, run, launched = Estimate.step, [0], [0]

    def step(self: Estimate, images: Tensor, labels: Tensor) -> Tensor:
        run[0] += 1
        return real(self, images, labels)

    def launch(slot: Replay) -> None:
        launched[0] += isinstance(slot, LoopReplay)
        replayed(slot)

    replayed = Replay.launch
    monkeypatch.setattr(Estimate, "step", step)
    monkeypatch.setattr(Replay, "launch", launch)
    party.train(2)
    assert run == launched == [20]  # what a card would record is run by nobody
