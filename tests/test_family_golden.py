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
from fedtailor.data.federation import Store
from fedtailor.data.partition import TEST, TRAIN
from fedtailor.engine.loop import Federation
from fedtailor.engine.steps import reach
from fedtailor.errors import UserError
from fedtailor.evaluate import evaluate
from fedtailor.method import Method
from fedtailor.methods.apfl import APFL
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.feddyn import FedDyn
from fedtailor.methods.fednova import FedNova
from fedtailor.methods.fedopt import FedOpt
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.l2gd import L2GD
from fedtailor.methods.lg_fedavg import LGFedAvg
from fedtailor.methods.local import Local as LocalTraining
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.pfedme import PFedMe
from fedtailor.methods.random_arch import RandomArch
from fedtailor.methods.scaffold import Scaffold
from fedtailor.nets.base import FixedNet
from fedtailor.owners import add_means, owners
from fedtailor.parts import body, choose, head, layers, norms
from fedtailor.runs.execute import prepare
from fedtailor.runs.given import give
from fedtailor.spaces.base import Weights
from fedtailor.spaces.tiny import Tiny
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


# pFedMe -----------------------------------------------------------------------------------------------------------


def inner(w: Sequence[float], theta: Sequence[float], label: int, steps: int, p: float, lamda: float) -> list[float]:
    for _ in range(steps):
        theta = [t - p * (g + lamda * (t - a)) for t, g, a in zip(theta, slope(theta, label), w, strict=True)]
    return list(theta)


def test_pfedme_solves_the_inner_problem_and_moves_w_towards_it() -> None:
    # momentum and decay of the run have no part, nor is there a hidden decay
    local = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.9, weight_decay=0.1)
    method = PFedMe(lamda=2.0, inner_steps=3, personal_lr=0.1, lr=0.2, beta=2.0)
    federation = by_hand(method, DATA, local)
    w = [1, 0.3, 0.0]
    state = one_round(federation, weights=three(*w))
    moved = []
    for label in (0, 1):
        theta = inner(w, w, label, 3, 0.1, 2.0)
        moved.append([a - 0.2 * 2.0 * (a - t) for a, t in zip(w, theta, strict=True)])
    mean = [0.25 * a + 0.75 * b for a, b in zip(*moved, strict=True)]
    merged = [(1 - 2.0) * a + 2.0 * m for a, m in zip(w, mean, strict=True)]
    assert numbers(state.server.weights) == pytest.approx(merged)
    assert numbers(personal(federation, state, 0)) == pytest.approx(inner(merged, merged, 0, 3, 0.1, 2.0))
    assert state.memories == {}


def test_pfedme_carries_theta_from_batch_to_batch_within_a_round() -> None:
    state = one_round(by_hand(PFedMe(lamda=2.0, inner_steps=1, lr=0.2), SAME, TWICE), weights=three(1, 0.3, 0))
    w = theta = [1, 0.3, 0.0]
    for _ in range(2):
        theta = inner(w, theta, 0, 1, 0.2, 2.0)
        w = [a - 0.4 * (a - t) for a, t in zip(w, theta, strict=True)]
    assert numbers(state.server.weights) == pytest.approx(w)


def test_pfedme_trains_the_participants_alone() -> None:
    federation, seen = by_hand(PFedMe(lamda=1.0), DATA, PLAIN, participants=1), []
    next(federation.rounds(federation.begin(), seen.append))
    assert len([e for e in seen if e.metric == "flops"]) == 1


def test_pfedme_refuses_rates_that_overshoot() -> None:
    with pytest.raises(UserError, match="overshoot from 10 on"):
        by_hand(PFedMe(lamda=15.0, personal_lr=0.05), DATA, PLAIN)


# APFL -------------------------------------------------------------------------------------------------------------


def mixed(alpha: float, v: Sequence[float], w: Sequence[float]) -> list[float]:
    return [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]


def test_apfl_mixes_weights_and_learns_the_share_in_every_step() -> None:
    federation = by_hand(APFL(alpha=0.4), DATA, TWICE)
    state = one_round(federation, weights=three(1, 0.3, 0))
    kept = []
    for label in (0, 1):
        w = v = [1, 0.3, 0.0]
        alpha = 0.4
        for _ in range(2):
            at_w, at_mix = slope(w, label), slope(mixed(alpha, v, w), label)
            step = sum((a - b) * g for a, b, g in zip(v, w, at_mix, strict=True))
            w, v = (
                [a - 0.2 * g for a, g in zip(w, at_w, strict=True)],
                [a - 0.2 * alpha * g for a, g in zip(v, at_mix, strict=True)],
            )
            alpha -= 0.2 * step
        kept.append((w, v, alpha))
    shared = [0.25 * a + 0.75 * b for a, b in zip(kept[0][0], kept[1][0], strict=True)]
    assert numbers(state.server.weights) == pytest.approx(shared)
    assert numbers(state.memories[0]["v"]) == pytest.approx(kept[0][1])
    assert float(state.memories[0]["alpha"]) == pytest.approx(kept[0][2])
    assert kept[0][2] != 0.4
    # what is used, and tested, is the mixture with the server's w: not w_i, and not a mixture of outputs
    assert numbers(personal(federation, state, 0)) == pytest.approx(mixed(kept[0][2], kept[0][1], shared))


def test_apfl_holds_the_share_between_0_and_1() -> None:
    state = one_round(by_hand(APFL(alpha=0.4, alpha_lr=1e6), DATA, TWICE), weights=three(1, 0.3, 0))
    assert {float(memory["alpha"]) for memory in state.memories.values()} <= {0.0, 1.0}
    fixed = one_round(by_hand(APFL(alpha=0.4, adapt=False), DATA, TWICE), weights=three(1, 0.3, 0))
    assert float(fixed.memories[0]["alpha"]) == pytest.approx(0.4)


# L2GD -------------------------------------------------------------------------------------------------------------


def test_l2gd_meets_part_of_the_way_at_the_plain_mean() -> None:
    federation = by_hand(L2GD(lamda=0.5, p=0.25), DATA, PLAIN, rounds=2)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0.3, 0))
    steps, run = [], federation.rounds(state, lambda event: None)
    for _ in range(2):
        asked = [federation.method.ask(state.server, seat).facts["steps"] for seat in federation.job.seats]
        assert asked[0] == asked[1]  # one coin for all clients
        steps.append(int(asked[0]))
        next(run)
    a, b = (walk([1, 0.3, 0], label, steps[0]) for label in (0, 1))
    mean = [(x + y) / 2 for x, y in zip(a, b, strict=True)]  # every client once, whatever its samples
    way = 0.2 * 0.5 * (1 - 0.25) / 0.25  # eta lambda (1 - p) / p, that is (a lambda) / (n p)
    met = [[x + way * (m - x) for x, m in zip(own, mean, strict=True)] for own in (a, b)]
    assert numbers(state.memories[0]["x"]) == pytest.approx(walk(met[0], 0, steps[1]))
    ends = [walk(met[0], 0, steps[1]), walk(met[1], 1, steps[1])]
    assert numbers(state.server.weights) == pytest.approx([(x + y) / 2 for x, y in zip(*ends, strict=True)])


def test_l2gd_tosses_the_coin_it_says() -> None:
    federation = by_hand(L2GD(p=0.25), DATA, PLAIN)
    server, steps = federation.begin().server, []
    for server.round in range(2000):
        steps.append(int(federation.method.ask(server, federation.job.seats[0]).facts["steps"]))
    assert sum(steps) / len(steps) == pytest.approx((1 - 0.25) / 0.25, rel=0.1)
    by_epochs = by_hand(L2GD(), DATA, SINGLE)  # clients take 1 and 3 steps, 2 on average
    assert L2GD().chance(by_epochs.job) == pytest.approx(1 / 3)


def test_l2gd_with_a_strong_pull_is_fedavg_of_equals() -> None:
    ends = []
    for method in (L2GD(lamda=1e6, p=0.25), FedAvg()):
        federation = by_hand(method, SAME, PLAIN)
        state = one_round(federation, weights=three(1, 0, 0))
        client = federation.client(federation.job.seats[0], state.memories.get(0, {}), 1)
        task = federation.method.ask(state.server, federation.job.seats[0])
        ends.append(method._met(task, client) if isinstance(method, L2GD) else task.weights)
        assert numbers(ends[-1]) == pytest.approx(numbers(state.server.weights))


# Per-FedAvg -------------------------------------------------------------------------------------------------------


def test_per_fedavg_first_order_steps_along_the_gradient_after_the_step() -> None:
    federation = by_hand(PerFedAvg(variant="fo", alpha=0.5), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0.3, 0))
    w = [1, 0.3, 0.0]
    ends = [[a - 0.2 * g for a, g in zip(w, slope(walk(w, label, 1, 0.5), label), strict=True)] for label in (0, 1)]
    merged = [0.25 * a + 0.75 * b for a, b in zip(*ends, strict=True)]
    assert numbers(state.server.weights) == pytest.approx(merged)
    assert numbers(personal(federation, state, 0)) == pytest.approx(walk(merged, 0, 1, 0.5))


def test_per_fedavg_hessian_free_has_the_second_derivative() -> None:
    state = one_round(by_hand(PerFedAvg(variant="hf", alpha=0.5), SAME, PLAIN), weights=three(1, 0.3, 0))
    w = torch.tensor([1, 0.3, 0.0], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return -torch.log_softmax(w[0] * w[1:], 0)[0]

    g = torch.tensor(slope(walk(w.tolist(), 0, 1, 0.5), 0), dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(loss, w)
    exact = w - 0.2 * (g - 0.5 * hessian @ g)
    assert numbers(state.server.weights) == pytest.approx(exact.tolist(), abs=2e-5)
    first_order = (w - 0.2 * g).tolist()
    assert max(abs(a - b) for a, b in zip(numbers(state.server.weights), first_order, strict=True)) > 1e-3


def test_per_fedavg_keeps_the_inner_step_out_of_the_momentum() -> None:
    local = Local(epochs=2.0, batch=4, lr=0.2, momentum=0.9, weight_decay=0.0)
    state = one_round(by_hand(PerFedAvg(variant="fo", alpha=0.5), SAME, local), weights=three(1, 0.3, 0))
    w, speed = [1, 0.3, 0.0], [0.0, 0.0, 0.0]
    for _ in range(2):
        meta = slope(walk(w, 0, 1, 0.5), 0)
        speed = [0.9 * s + g for s, g in zip(speed, meta, strict=True)]
        w = [a - 0.2 * s for a, s in zip(w, speed, strict=True)]
    assert numbers(state.server.weights) == pytest.approx(w)


def test_per_fedavg_takes_tau_steps_whatever_a_client_holds() -> None:
    state = one_round(by_hand(PerFedAvg(alpha=0.5, tau=3), [DATA[0], DATA[0] * 9], PLAIN), weights=three(1, 0.3, 0))
    w = [1, 0.3, 0.0]
    for _ in range(3):
        w = [a - 0.2 * g for a, g in zip(w, slope(walk(w, 0, 1, 0.5), 0), strict=True)]
    assert numbers(state.server.weights) == pytest.approx(w)


def test_per_fedavg_draws_every_batch_on_its_own() -> None:
    """Inner and outer gradients see different batches: with labels that differ, one batch twice is one of two ends."""
    data = [[(255, 0), (255, 1)]] * 2
    local = Local(epochs=0.5, batch=1, lr=0.2, momentum=0.0, weight_decay=0.0)
    w, ends = [1, 0.3, 0.0], set()
    for seed in range(8):
        federation = by_hand(PerFedAvg(variant="fo", alpha=0.5), data, local)
        federation.job = replace(federation.job, seed=seed, participants=1)
        ends.add(tuple(round(x, 4) for x in numbers(one_round(federation, weights=three(*w)).server.weights)))
    pairs = {
        tuple(round(a - 0.2 * g, 4) for a, g in zip(w, slope(walk(w, one, 1, 0.5), other), strict=True))
        for one in (0, 1)
        for other in (0, 1)
    }
    assert ends <= pairs
    assert len(ends) > 2


# faults of public code that this library is free of ---------------------------------------------------------------


def test_heads_are_found_by_layer_and_never_by_a_part_of_a_name() -> None:
    assert head("head.weight")
    assert not any(map(head, ("overhead.weight", "head2.weight", "body.head.weight", "header")))
    assert body("body.head.weight")
    assert layers("body.0")("body.0.conv.weight")
    assert not layers("body.0")("body.01.weight")
    space = Tiny((1, 8, 8), 10)
    assert {n.split(".")[-2] for n in choose(dict.fromkeys(space.full_shapes), norms(space))} == {"norm"}
    assert any(n.endswith("norm.running_var") and norms(space)(n) for n in space.full_shapes)


@pytest.mark.parametrize("method", [FedRep(), FedBABU(epochs=0.0)])
def test_a_frozen_head_stays_bit_for_bit_under_decay_and_momentum(method: FedRep | FedBABU) -> None:
    local = Local(epochs=2.0, batch=2, lr=0.2, momentum=0.9, weight_decay=0.1)
    federation, frozen = by_hand(method, DATA, local), []
    federation.engine.initial = lambda space, seed: three(1, 0.1, -0.1)  # type: ignore[method-assign]
    fit = federation.engine._fit

    def spy(job):
        before = choose({n: t.detach().clone() for n, t in job.net.named_parameters()}, head)
        loss = fit(job)
        if not any(map(head, job.train)):
            frozen.append(all(torch.equal(t, dict(job.net.named_parameters())[n]) for n, t in before.items()))
        return loss

    federation.engine._fit = spy  # type: ignore[method-assign]
    one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    assert frozen == [True, True]


def test_fedrep_trains_the_head_without_moving_the_statistics_of_the_body() -> None:
    data = [[(255, 0), (0, 1)], [(200, 1), (100, 0)]]
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0)
    federation = by_hand(FedRep(head_epochs=5.0, body_epochs=1.0), data, local, Normed((1, 1, 1), 2))
    state = one_round(federation)
    # one batch of each client has moved the running mean from 0 by a tenth: that of the body phase alone
    means = [0.1 * (255 + 0) / 2 / 255, 0.1 * (200 + 100) / 2 / 255]
    assert float(state.server.weights["norm.running_mean"]) == pytest.approx(sum(means) / 2)
    kept = personal(federation, state, 0)["norm.running_mean"]
    assert torch.equal(kept, state.server.weights["norm.running_mean"])


def test_statistics_that_stay_at_the_client_are_its_own_from_round_to_round() -> None:
    """Under the policy `local` the server's statistics, 0 and 1 for ever, must not overwrite a client's own."""
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0, bn="local")
    federation = by_hand(FedAvg(), [[(255, 0), (0, 1)]] * 2, local, Normed((1, 1, 1), 2), rounds=2)
    state = federation.begin()
    for _ in federation.rounds(state, lambda event: None):
        pass
    mean = 0.1 * 0.5 + 0.9 * 0.1 * 0.5  # the batch's mean is 0.5; the running mean goes a tenth of the way, twice
    assert float(state.memories[0]["statistics"]["norm.running_mean"]) == pytest.approx(mean)
    test = Store({(i, TEST): federation.store.split(i, TRAIN) for i in range(2)})
    found = evaluate(federation, state, test)[1]
    assert float(found[0].weights["norm.running_mean"]) == pytest.approx(mean)


def test_a_head_is_trained_on_statistics_that_were_estimated_where_there_were_none() -> None:
    """A client that no round has called has no statistics under the policy `local`: 0 and 1 must not be held."""
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0, bn="local")
    federation = by_hand(FedRep(), [[(255, 0), (0, 1)]] * 2, local, Normed((1, 1, 1), 2), participants=1)
    state = one_round(federation)
    (absent,) = {0, 1} - state.memories.keys()
    who = federation.client(federation.job.seats[absent], {}, 1)
    task = federation.sent(federation.method.offer(state.server, federation.job.seats[absent]))
    net = federation.engine.run([("", federation.method.personal(task, who))])[0]
    assert float(net.norm.running_mean) == pytest.approx(0.5)  # type: ignore[union-attr]


def test_ditto_starts_the_personal_network_at_the_received_one() -> None:
    federation = by_hand(Ditto(lamda=0.0, personal_epochs=1.0), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0, 0))
    assert numbers(state.memories[0]["v"]) == pytest.approx([1, 0.1, -0.1])  # a random start would end elsewhere
    assert Ditto().lamda > 0  # 0 would be local training


# archs given to clients -------------------------------------------------------------------------------------------


def given(method: Method, source: str) -> Federation:
    setup = prepare(small_config("fedavg", clients=3, participants=3, space__name="tiny", archs="random", rounds=1))
    seats = (
        give(source, setup.job.seats, 0)
        if source
        else [replace(seat, arch=setup.job.space.smallest) for seat in setup.job.seats]
    )
    job = replace(setup.job, seats=tuple(seats))
    federation, _ = replace(setup, job=job, method=method).federation(torch.device("cpu"), 1)
    return federation


def test_fedavg_on_random_archs_is_the_control_that_draws_them() -> None:
    a, b = one_round(given(FedAvg(), "random")), one_round(given(RandomArch(), "random"))
    assert all(torch.equal(t, b.server.weights[n]) for n, t in a.server.weights.items())


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), FedDyn(), FedOpt(), FedNova(), PFedMe(), L2GD(p=0.3)])
def test_entries_that_nobody_owns_rest(method: Method) -> None:
    federation = given(method, "")
    state = federation.begin()
    before, space = state.server.weights, federation.job.space
    next(federation.rounds(state, lambda event: None))
    owned = owners(space, before, [space.smallest])
    assert any((owned[n] == 0).any() for n in before)
    for name, old in before.items():
        assert torch.equal(state.server.weights[name][owned[name] == 0], old[owned[name] == 0]), name
    assert any(not torch.equal(state.server.weights[n], old) for n, old in before.items())


def test_means_count_the_owners_of_each_entry() -> None:
    space = Tiny((1, 8, 8), 10)
    zeros = {n: torch.zeros(shape) for n, shape in space.full_shapes.items()}
    ones = {n: torch.ones(shape) for n, shape in space.full_shapes.items()}
    parts = [(ones, space.largest), (space.cut(ones, space.smallest), space.smallest)]
    found = add_means(space, zeros, parts, [space.largest, space.smallest, space.smallest])
    weight = found["head.weight"]  # 16 of 32 inputs are in the smallest arch
    assert weight[:, :16].unique().tolist() == pytest.approx([2 / 3])  # two parts, three owners
    assert weight[:, 16:].unique().tolist() == [1.0]  # one part, one owner
