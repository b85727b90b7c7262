"""Batch-norm statistics under each policy, by hand: one normalisation, a black and a white pixel in every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

from fedtailor.config import Local
from fedtailor.engine.client import Client
from fedtailor.engine.local import LocalEngine
from fedtailor.method import Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.parts import choose, head, learnt
from fedtailor.split import fit_head
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
