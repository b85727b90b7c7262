"""FML against numbers worked out by hand. Both networks are the three weights; the pixel is 1: logits = body * head."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedtailor.config import Local
from fedtailor.errors import UserError
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.kit.distil import divergence
from fedtailor.methods.fml import FML
from fedtailor.runs.execute import open_space, read_networks, start
from tools import Three, by_hand, kept, numbers, one_round, personal, small_config, three

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_proxy_and_private_network_teach_each_other() -> None:
    federation = by_hand(FML(alpha=0.75, beta=0.25), DATA, PLAIN)
    federation.engine.initial = lambda space, seed: three(1, 1, 0)  # type: ignore[method-assign]
    state = one_round(federation, weights=three(1, 0, 0))
    p, q = sigmoid(1), 0.5  # probability of label 0 by the private network and by the proxy
    # cross-entropy: p - 1[y = 0] for the first logit; KL(g || v): p_v - p_g, and the other way round
    own = {0: 0.75 * (p - 1) + 0.25 * (p - q), 1: 0.75 * p + 0.25 * (p - q)}
    for client, slope in own.items():
        # head moves by -lr * slope * body, the body by -lr * slope * (head_0 - head_1)
        expected = [1 - 0.2 * slope * 1, 1 - 0.2 * slope, 0.2 * slope]
        assert numbers(personal(federation, state, client)) == pytest.approx(expected)
    proxy = {0: 0.25 * (q - 1) + 0.75 * (q - p), 1: 0.25 * q + 0.75 * (q - p)}
    mean = 0.25 * proxy[0] + 0.75 * proxy[1]  # by samples
    assert numbers(state.server.weights) == pytest.approx([1, -0.2 * mean, 0.2 * mean])


def test_the_private_network_stays_at_home_and_the_proxy_travels() -> None:
    federation = by_hand(FML(), DATA, PLAIN)
    state = one_round(federation)
    assert set(state.memories[0]) == {"v"}
    assert set(state.server.values) == {"weights"}


def test_divergence_is_a_sum_over_classes_and_leaves_the_teacher_alone() -> None:
    teacher, student = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True), torch.zeros(1, 3, requires_grad=True)
    value = divergence(teacher, student)
    t = teacher.detach().softmax(1)
    assert value.detach().tolist() == pytest.approx(float((t * (t.log() - math.log(1 / 3))).sum()))  # not over 3
    value.backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_shares_of_one_are_two_ordinary_trainings() -> None:
    federation = by_hand(FML(alpha=1.0, beta=1.0), DATA, PLAIN)
    federation.engine.initial = lambda space, seed: three(1, 0, 0)  # type: ignore[method-assign]
    state = one_round(federation, weights=three(1, 0, 0))
    assert numbers(state.server.weights) == pytest.approx([1, -0.05, 0.05])  # FedAvg's
    assert numbers(personal(federation, state, 0)) == pytest.approx([1, 0.1, -0.1])


def test_private_networks_may_differ(tmp_path: Path) -> None:
    private = [{"name": "cnn", "width": 4, "hidden": 8}, {"name": "resnet18"}]
    federation = by_hand(FML(private=tuple({"name": n} for n in ("three", "biased"))), DATA, PLAIN)
    state = one_round(federation)
    assert [kept(federation, state, i).space.name for i in (0, 1)] == ["three", "biased"]  # type: ignore[union-attr]
    private[1] = {"name": "cnn", "width": 6, "hidden": 8}
    folder = start(small_config("fml", rounds=1, method__private=private), tmp_path / "run", "cpu", workers=1)
    found = read_networks(folder, open_space(folder))
    assert [found[i][0].width for i in range(4)] == [4, 6, 4, 6]  # type: ignore[attr-defined]


def test_a_private_network_that_nobody_can_hold_is_an_error() -> None:
    federation = by_hand(FML(), DATA, PLAIN)
    tight = replace(federation.job.seats[0].budget, parameters=2)
    job = replace(federation.job, seats=(replace(federation.job.seats[0], budget=tight, hard=True),))
    with pytest.raises(UserError, match="none of its possible networks fits"):
        FML(private=({"name": "three"},)).check(job)
    with pytest.raises(UserError, match="unknown net"):
        by_hand(FML(private=({"name": "nonesuch"},)), DATA, PLAIN, Three((1, 1, 1), 2), fleet=FleetConfig())
