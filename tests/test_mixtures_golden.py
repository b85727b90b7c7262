"""Mixtures and meta-learning worked out by hand: pFedMe, APFL, L2GD, Per-FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from fedtailor.config import Local
from fedtailor.errors import UserError
from fedtailor.method import Task
from fedtailor.methods.apfl import APFL
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.l2gd import L2GD
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.pfedme import PFedMe
from test_family_golden import SAME, SINGLE, slope, walk
from test_methods_golden import DATA, PLAIN, TWICE
from tools import by_hand, numbers, one_round, personal, three

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


@pytest.mark.parametrize(("optimizer", "eta"), [("sgd", 0.2 / (1 - 0.5)), ("adamw", 0.2)])
def test_l2gd_counts_momentum_where_the_optimiser_has_it(optimizer: Literal["sgd", "adamw"], eta: float) -> None:
    federation = by_hand(L2GD(lamda=0.5, p=0.5), DATA, replace(PLAIN, momentum=0.5, optimizer=optimizer))
    client = federation.client(federation.job.seats[0], {"x": three(1, 0.3, 0)}, 1)
    met = L2GD(lamda=0.5, p=0.5)._met(Task(three(3, 0.3, 0), facts={"p": 0.5}), client)
    assert numbers(met)[0] == pytest.approx(1 + eta * 0.5 * (3 - 1))


def test_l2gds_last_meeting_goes_as_far_as_the_last_rounds_rate_lets_it() -> None:
    federation = by_hand(L2GD(lamda=0.5, p=0.5), DATA, replace(PLAIN, schedule="cosine"), rounds=4)
    kept = {"x": three(1, 0.3, 0)}
    rate = 0.2 * 0.5 * (1 - 0.5**0.5)  # of round 4: cos(3 pi / 4) = -sqrt(1/2)
    for number in (4, 5):  # in the last round, and for keeps after it
        client = federation.client(federation.job.seats[0], dict(kept), number)
        met = L2GD(lamda=0.5, p=0.5)._met(Task(three(3, 0.3, 0), facts={"p": 0.5}), client)
        assert numbers(met)[0] == pytest.approx(1 + rate * 0.5 * (3 - 1))


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
