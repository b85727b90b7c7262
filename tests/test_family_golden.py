"""Update rules of the methods that make weights personal, against numbers worked out by hand.

The setting is that of test_methods_golden: three weights (body, two in the head), every image a pixel of value 1. From
body 1 and head (0, 0) a step of 0.2 on label 0 moves the head by (0.1, -0.1) and leaves the body. `walk` repeats the
textbook step in plain Python for as many steps as a rule needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine.loop import Federation
from fedtailor.engine.steps import reach
from fedtailor.errors import UserError
from fedtailor.method import Method
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.feddyn import FedDyn
from fedtailor.methods.fednova import FedNova
from fedtailor.methods.fedopt import FedOpt
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.lg_fedavg import LGFedAvg
from fedtailor.methods.local import Local as LocalTraining
from fedtailor.methods.scaffold import Scaffold
from fedtailor.nets.base import FixedNet
from fedtailor.spaces.base import Weights
from test_methods_golden import DATA, PLAIN, TWICE, Q
from tools import by_hand, numbers, one_round, personal, small_config, three

SAME = [DATA[0], DATA[0]]
SINGLE = Local(epochs=1.0, batch=1, lr=0.2, momentum=0.0, weight_decay=0.0)  # client 0 takes 1 step, client 1 takes 3


def slope(w: Sequence[float], label: int) -> list[float]:
    """The gradient of the cross-entropy: logits are body * head."""
    body, head = w[0], list(w[1:])
    top = [math.exp(body * h) for h in head]
    error = [t / sum(top) - (i == label) for i, t in enumerate(top)]
    return [sum(e * h for e, h in zip(error, head, strict=True)), *(e * body for e in error)]


def walk(w: Sequence[float], label: int, steps: int = 1, lr: float = 0.2) -> list[float]:
    w = list(w)
    for _ in range(steps):
        w = [a - lr * g for a, g in zip(w, slope(w, label), strict=True)]
    return w


def test_walk_is_the_step_that_clients_take() -> None:
    assert walk([1, 0, 0], 0) == pytest.approx([1, 0.1, -0.1])
    assert walk([1, 0, 0], 0, 2) == pytest.approx([1 + 0.04 * Q, 0.1 + 0.2 * Q, -0.1 - 0.2 * Q])


# SCAFFOLD ---------------------------------------------------------------------------------------------------------


def test_scaffold_learns_the_clients_gradients_and_then_stands_still() -> None:
    federation = by_hand(Scaffold(), DATA, PLAIN, rounds=2)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    seen = []
    for found in federation.rounds(state, lambda event: None):
        seen.append([numbers(found.server.weights), numbers(found.server.c), numbers(found.memories[0]["c"])])
    # round 1: heads (0.1, -0.1) and (-0.1, 0.1), averaged plainly; c_0 = (x - y) / (1 * 0.2), the gradient at x
    assert seen[0][0] == pytest.approx([1, 0, 0])
    assert seen[0][2] == pytest.approx([0, -0.5, 0.5])
    # round 2: the gradient of client 0 is c_0 again, and g - c_0 + c = 0: nobody drifts
    assert seen[1][0] == pytest.approx([1, 0, 0])
    assert seen[1][1] == pytest.approx([0, 0, 0])


def test_scaffold_counts_all_clients_in_c_and_those_present_in_x() -> None:
    federation = by_hand(Scaffold(server_lr=0.5), SAME, PLAIN, participants=1)
    state = one_round(federation, weights=three(1, 0, 0))
    assert numbers(state.server.weights) == pytest.approx([1, 0.05, -0.05])
    assert numbers(state.server.c) == pytest.approx([0, -0.25, 0.25])


def test_scaffold_corrects_every_step() -> None:
    control = three(0, 0.3, 0.1)
    state = one_round(by_hand(Scaffold(), SAME, TWICE), weights=three(1, 0, 0), c=control)
    w = [1.0, 0.0, 0.0]
    for _ in range(2):
        w = [a - 0.2 * (g + c) for a, g, c in zip(w, slope(w, 0), (0, 0.3, 0.1), strict=True)]
    assert numbers(state.server.weights) == pytest.approx(w)
    # c_i = 0 - c + (x - y) / (2 * 0.2)
    own = [-c + (a - b) / 0.4 for a, b, c in zip((1, 0, 0), w, (0, 0.3, 0.1), strict=True)]
    assert numbers(state.memories[0]["c"]) == pytest.approx(own, abs=1e-6)


def test_scaffold_takes_plain_steps_whatever_the_momentum() -> None:
    plain, heavy = (
        one_round(by_hand(Scaffold(), SAME, replace(TWICE, momentum=m)), weights=three(1, 0, 0)) for m in (0.0, 0.9)
    )
    assert numbers(plain.server.weights) == numbers(heavy.server.weights)


def test_scaffold_holds_the_mean_of_the_clients_last_gradients_at_every_rate() -> None:
    """After one step from x, c_i is the gradient at x, and c the mean of them, in every round."""
    federation = by_hand(Scaffold(), SAME, replace(PLAIN, schedule="cosine"), rounds=3)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    before = [1.0, 0.0, 0.0]
    for found in federation.rounds(state, lambda event: None):
        assert numbers(found.memories[1]["c"]) == pytest.approx(slope(before, 0), abs=1e-6)
        assert numbers(found.server.c) == pytest.approx(slope(before, 0), abs=1e-6)
        before = numbers(found.server.weights)


@pytest.mark.parametrize(("method", "name", "value"), [(Scaffold(), "c", 0.5), (FedDyn(alpha=0.5), "h", 0.05)])
def test_sums_over_all_clients_leave_out_those_that_never_train(method: Method, name: str, value: float) -> None:
    federation = by_hand(method, SAME, PLAIN, participants=1)
    federation.job = replace(federation.job, clients=1)  # the other one is held out
    state = one_round(federation, weights=three(1, 0, 0))
    assert numbers(state.server.values[name]) == pytest.approx([0, -value, value])


# FedNova ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_reach_is_how_far_a_constant_gradient_of_one_takes_sgd(momentum: float) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for steps in range(1, 5):
        weight.grad = torch.ones(1)
        optimiser.step()
        assert reach(steps, momentum) == pytest.approx(-float(weight.detach()), rel=1e-6)


def test_fednova_divides_by_each_clients_own_steps() -> None:
    state = one_round(by_hand(FedNova(), DATA, SINGLE), weights=three(1, 0, 0))
    one, three_steps = walk([1, 0, 0], 0, 1), walk([1, 0, 0], 1, 3)
    tau = 0.25 * 1 + 0.75 * 3
    expected = [
        x - tau * (0.25 * (x - a) / 1 + 0.75 * (x - b) / 3) for x, a, b in zip((1, 0, 0), one, three_steps, strict=True)
    ]
    assert numbers(state.server.weights) == pytest.approx(expected)


def test_fednova_divides_by_what_momentum_adds_to_the_steps() -> None:
    state = one_round(by_hand(FedNova(), DATA, replace(SINGLE, momentum=0.5)), weights=three(1, 0, 0))
    ends = []
    for label, steps in ((0, 1), (1, 3)):
        w, speed = [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for _ in range(steps):
            speed = [0.5 * v + g for v, g in zip(speed, slope(w, label), strict=True)]
            w = [a - 0.2 * v for a, v in zip(w, speed, strict=True)]
        ends.append(w)
    a, b = 1.0, 1 + 1.5 + 1.75
    tau = 0.25 * a + 0.75 * b
    moved = [x - tau * (0.25 * (x - p) / a + 0.75 * (x - q) / b) for x, p, q in zip((1, 0, 0), *ends, strict=True)]
    assert numbers(state.server.weights) == pytest.approx(moved)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    state = one_round(by_hand(FedNova(), DATA, PLAIN), weights=three(1, 0, 0))
    assert numbers(state.server.weights) == pytest.approx([1, -0.05, 0.05])


@pytest.mark.parametrize("method", [FedNova(), Scaffold()])
def test_rules_that_count_steps_refuse_other_optimisers(method: FedNova | Scaffold) -> None:
    with pytest.raises(UserError, match=r"needs local\.optimizer = 'sgd'"):
        by_hand(method, DATA, Local(optimizer="adamw"))


# FedDyn -----------------------------------------------------------------------------------------------------------


def test_feddyn_goes_further_by_what_clients_have_gathered() -> None:
    federation = by_hand(FedDyn(alpha=0.5), SAME, PLAIN, rounds=2)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    run = federation.rounds(state, lambda event: None)
    next(run)
    # theta_k = (0.1, -0.1); h = -0.5 * (0.1, -0.1); theta = mean - h / 0.5
    assert numbers(state.server.h) == pytest.approx([0, -0.05, 0.05])
    assert numbers(state.server.weights) == pytest.approx([1, 0.2, -0.2])
    assert numbers(state.memories[0]["g"]) == pytest.approx([0, -0.05, 0.05])
    next(run)
    # the client's gradient is that of f_k minus g_k
    moved = [
        a - 0.2 * (s - g) for a, s, g in zip((1, 0.2, -0.2), slope((1, 0.2, -0.2), 0), (0, -0.05, 0.05), strict=True)
    ]
    change = [m - a for m, a in zip(moved, (1, 0.2, -0.2), strict=True)]
    h = [old - 0.5 * c for old, c in zip((0, -0.05, 0.05), change, strict=True)]
    assert numbers(state.server.h) == pytest.approx(h, abs=1e-6)
    assert numbers(state.server.weights) == pytest.approx(
        [m - v / 0.5 for m, v in zip(moved, h, strict=True)], abs=1e-6
    )


def test_feddyn_averages_clients_alike_whatever_they_hold() -> None:
    state = one_round(by_hand(FedDyn(alpha=0.5), DATA, PLAIN), weights=three(1, 0, 0))
    assert numbers(state.server.weights) == pytest.approx([1, 0, 0])  # one moved as far as the other, the other way


def test_feddyn_counts_absent_clients_in_h() -> None:
    state = one_round(by_hand(FedDyn(alpha=0.5), SAME, PLAIN, participants=1), weights=three(1, 0, 0))
    assert numbers(state.server.weights) == pytest.approx([1, 0.1 + 0.05, -0.1 - 0.05])


def test_feddyn_pulls_by_the_square_of_the_distance() -> None:
    """The second step is pulled by alpha * 0.1, as far as the first one went; an unsquared norm would pull by alpha."""
    state = one_round(by_hand(FedDyn(alpha=1.0), SAME, TWICE), weights=three(1, 0, 0))
    head = 0.1 - 0.2 * (-Q + 0.1)
    assert numbers(state.memories[0]["g"])[1] == pytest.approx(-head)


# FedOpt -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "second"),
    [
        ("adam", lambda v, d: 0.9 * v + 0.1 * d * d),
        ("yogi", lambda v, d: v - 0.1 * d * d * math.copysign(1, v - d * d)),
        ("adagrad", lambda v, d: v + d * d),
    ],
)
def test_fedopt_steps_along_the_mean_change(optimizer, second) -> None:
    method = FedOpt(optimizer=optimizer, server_lr=0.1, beta1=0.5, beta2=0.9, tau=0.01)
    federation = by_hand(method, DATA, PLAIN, rounds=2)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    run = federation.rounds(state, lambda event: None)
    next(run)
    delta = -0.05  # FedAvg's change of the first weight of the head
    m, v = 0.5 * delta, second(1e-4, delta)
    first = 0.1 * m / (math.sqrt(v) + 0.01)
    assert numbers(state.server.weights) == pytest.approx([1, first, -first])
    next(run)
    start = (1, first, -first)
    mean = [0.25 * a + 0.75 * b for a, b in zip(walk(start, 0), walk(start, 1), strict=True)]
    delta = mean[1] - first
    m, v = 0.5 * m + 0.5 * delta, second(v, delta)
    assert numbers(state.server.weights)[1] == pytest.approx(first + 0.1 * m / (math.sqrt(v) + 0.01), rel=1e-5)


# split models -----------------------------------------------------------------------------------------------------


def started(method: Method, weights: Weights, data: Sequence[Sequence[tuple[int, int]]] = DATA) -> Federation:
    """A federation whose clients' own initial weights are given by hand."""
    federation = by_hand(method, data, PLAIN, rounds=2)
    federation.engine.initial = lambda space, seed: weights  # type: ignore[method-assign]
    return federation


def test_fedper_trains_both_parts_at_once_and_sends_the_body() -> None:
    federation = started(FedPer(), three(1, 0.1, -0.1))
    state = one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    a, b = walk([1, 0.1, -0.1], 0), walk([1, 0.1, -0.1], 1)
    assert list(state.server.weights) == ["body.weight"]
    assert numbers(state.server.weights) == pytest.approx([0.25 * a[0] + 0.75 * b[0]])
    assert numbers(state.memories[0]["head"]) == pytest.approx(a[1:])
    assert numbers(personal(federation, state, 1)) == pytest.approx([0.25 * a[0] + 0.75 * b[0], *b[1:]])


def test_lg_fedavg_sends_the_head_and_keeps_the_body() -> None:
    federation = started(LGFedAvg(), three(1, 0.1, -0.1))
    state = one_round(federation, weights={"head.weight": torch.tensor([[0.1], [-0.1]])})
    a, b = walk([1, 0.1, -0.1], 0), walk([1, 0.1, -0.1], 1)
    shared = [0.25 * x + 0.75 * y for x, y in zip(a[1:], b[1:], strict=True)]
    assert numbers(state.server.weights) == pytest.approx(shared)
    assert numbers(state.memories[0]["body"]) == pytest.approx(a[:1])
    assert numbers(personal(federation, state, 1)) == pytest.approx([b[0], *shared])


class _Normed(nn.Module):
    """A normalisation of the pixel, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


@dataclass(frozen=True)
class Normed(FixedNet):
    name = "normed"

    def module(self) -> nn.Module:
        return _Normed()


def test_fedbn_averages_all_but_normalisation() -> None:
    """In round 1 a client does what it would do alone; the heads are averaged, the norms stay as they came out."""
    data = [[(255, 0), (0, 1)], [(200, 1), (100, 1), (0, 0), (30, 0), (90, 1), (10, 0)]]
    local = Local(epochs=2.0, batch=6, lr=0.2, momentum=0.0, weight_decay=0.0)  # all images in every batch
    space = Normed((1, 1, 1), 2)
    state = one_round(by_hand(FedBN(), data, local, space))
    alone = one_round(by_hand(LocalTraining(), data, local, space)).memories
    heads = [alone[i]["weights"]["head.weight"] for i in range(2)]
    assert list(state.server.weights) == ["head.weight"]
    assert torch.allclose(state.server.weights["head.weight"], 0.25 * heads[0] + 0.75 * heads[1])
    for i in range(2):
        kept = state.memories[i]["norms"]
        assert set(kept) == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
        assert torch.allclose(kept["norm.weight"], alone[i]["weights"]["norm.weight"])
    assert not torch.allclose(state.memories[0]["norms"]["norm.bias"], state.memories[1]["norms"]["norm.bias"])


def test_fedbn_refuses_a_network_without_normalisation() -> None:
    with pytest.raises(UserError, match="normalisation layers, is nothing of 'three'"):
        by_hand(FedBN(), DATA, PLAIN)
    assert small_config("fedbn").net["norm"] == "batch"  # so the demo's network gets some
    assert "norm" not in small_config("fedavg").net
