"""PerFedRLNAS, FedRLNAS and the controls: equations against numbers worked out by hand, and two whole rounds against a
slow reference that shares no code with the library.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine.loop import Event, Federation
from fedtailor.evaluate import evaluate, onboard
from fedtailor.fleet.budget import Limits, budget_of
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.method import Method, Reply, Server
from fedtailor.methods.perfedrlnas import PerFedRLNAS
from fedtailor.runs.execute import prepare
from fedtailor.search.policy import log_probabilities, most_likely, probabilities
from fedtailor.spaces.base import Arch, Dimension, Space, Weights
from fedtailor.spaces.tiny import Tiny
from tools import by_hand, personal, small_config

# a space of six networks: logits = head * body.1 * ... * body.0 * x, without biases -------------------------------


class _Toy(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(1, width, bias=False), *(nn.Linear(width, width, bias=False) for _ in range(depth))
        )
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


@dataclass(frozen=True)
class Toy(Space):
    name = "toy"

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return Dimension("width", (1, 2)), Dimension("depth", (0, 1, 2))

    def build(self, arch: Arch) -> nn.Module:
        return _Toy(1 + arch[0], arch[1], self.classes)


TOY = Toy((1, 1, 1), 2)
COSTS = {arch: TOY.cost(arch) for arch in TOY.archs()}  # counted here, since `merge` runs without gradients
TINY = Tiny((1, 8, 8), 10)
DATA = [[(255, 0), (102, 1)], [(204, 1), (51, 0), (255, 1)]]
PLAIN = Local(epochs=2.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)


def toy(method: Method, **options: Any) -> Federation:
    return by_hand(method, DATA, PLAIN, TOY, **options)


def begin(method: Method, **options: Any) -> Server:
    return toy(method, **options).begin().server


def reply(client: int, arch: Arch, accuracy: float | None, seconds: float, weights: Weights | None = None) -> Reply:
    facts = {"refused": 1} if accuracy is None else {"accuracy": accuracy}
    return Reply(weights or {}, arch, {}, facts, client, samples=1 + client, seconds=seconds)


def plain(**options: Any) -> PerFedRLNAS:
    return PerFedRLNAS(policy_optimizer="ascent", policy_lr=1.0, **options)


def row(server: Server, client: int) -> list[float]:
    return server.alpha[client].tolist()


# equations 4 to 8 -------------------------------------------------------------------------------------------------


def test_policies_start_uniform_and_follow_equations_5_to_8() -> None:
    method = plain(weights={"time": 0.1})
    server = begin(method)
    assert not server.alpha.any()
    server = method.merge(server, [reply(0, (1, 0), 0.8, 2.0), reply(1, (0, 2), 0.4, 1.0)])
    # mean Acc 0.6, min RT 1: r_0 = 0.2 - 0.1 * 1 = 0.1 and r_1 = -0.2; p = 1/2 and 1/3
    assert row(server, 0) == pytest.approx([0.1 * g for g in (-1 / 2, 1 / 2, 2 / 3, -1 / 3, -1 / 3)])
    assert row(server, 1) == pytest.approx([-0.2 * g for g in (1 / 2, -1 / 2, -1 / 3, -1 / 3, 2 / 3)])


def test_second_step_uses_softmax_and_everybodys_latest_accuracy() -> None:
    method = plain(rewards=("accuracy",))
    server = begin(method).replace(
        alpha=torch.tensor([[math.log(3), 0.0, 0.0, 0.0, math.log(2)], [0.0] * 5], dtype=torch.float64),
        accuracy=torch.tensor([0.1, 0.5], dtype=torch.float64),
    )
    after = method.merge(server, [reply(0, (0, 1), 0.7, 1.0)])
    # participants are updated first: mean of (0.7, 0.5) = 0.6, r = 0.1; p = (3/4, 1/4) and (1/4, 1/4, 1/2)
    moved = [0.1 * g for g in (1 / 4, -1 / 4, -1 / 4, 3 / 4, -1 / 2)]
    assert row(after, 0) == pytest.approx([a + m for a, m in zip(row(server, 0), moved, strict=True)])
    assert row(after, 1) == row(server, 1)
    assert after.accuracy.tolist() == [0.7, 0.5]


def test_clients_never_seen_are_not_in_the_mean() -> None:
    method = plain(rewards=("accuracy",))
    server = method.merge(begin(method), [reply(1, (0, 0), 0.9, 1.0)])
    assert row(server, 1) == [0.0] * 5  # alone it is its own mean
    assert math.isnan(server.accuracy[0])


def test_adam_takes_a_step_of_its_own_size() -> None:
    method = PerFedRLNAS(policy_lr=0.5, rewards=("accuracy",))
    server = method.merge(begin(method), [reply(0, (1, 0), 0.8, 2.0), reply(1, (0, 2), 0.4, 1.0)])
    # the first step of Adam is lr * sign(gradient), whatever the reward
    assert row(server, 0) == pytest.approx([-0.5, 0.5, 0.5, -0.5, -0.5])
    assert row(server, 1) == pytest.approx([-0.5, 0.5, 0.5, 0.5, -0.5])
    after = method.merge(server, [reply(0, (1, 0), 0.6, 1.0)])
    # mean of (0.6, 0.4): r = 0.1. First logit: g_1 = 0.2 * -1/2, g_2 = 0.1 * -p with p = 1 / (1 + e)
    g1, g2 = -0.1, -0.1 / (1 + math.e)
    first = (0.5 * 0.5 * g1 + 0.5 * g2) / (1 - 0.5**2)
    second = (0.999 * 0.001 * g1**2 + 0.001 * g2**2) / (1 - 0.999**2)
    assert row(after, 0)[0] == pytest.approx(-0.5 + 0.5 * first / (math.sqrt(second) + 1e-8))
    assert row(after, 1) == row(server, 1)  # Adam does not move who is not there
    assert after.moments["steps"].tolist() == [2, 1]


def test_archs_are_drawn_from_the_clients_own_softmax() -> None:
    method = PerFedRLNAS()
    federation = toy(method)
    server = federation.begin().server.replace(
        alpha=torch.tensor([[math.log(4), 0.0, 0.0, 0.0, math.log(3)], [0.0] * 5], dtype=torch.float64)
    )
    draws = []
    for server.round in range(4000):
        draws.append(method.ask(server, federation.job.seats[0]).arch)
    share = Counter(draws)
    for arch in TOY.archs():  # dimensions are independent: 4/5, 1/5 and 1/5, 1/5, 3/5
        expected = (0.8, 0.2)[arch[0]] * (0.2, 0.2, 0.6)[arch[1]]
        assert share[arch] / 4000 == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))


# aggregation and budgets ------------------------------------------------------------------------------------------


def test_entries_are_averaged_over_their_owners_and_others_keep_every_bit() -> None:
    method = PerFedRLNAS()
    server = by_hand(method, DATA, PLAIN, TINY).begin().server
    archs = [(0, 1, 0, 1, 0, 0), (1, 0, 0, 0, 0, 0)]
    rng = torch.Generator().manual_seed(0)
    parts = [{n: torch.randn(t.shape, generator=rng) for n, t in TINY.cut(server.weights, a).items()} for a in archs]
    merged = method.merge(
        server, [reply(i, a, 0.5, 1.0, p) for i, (a, p) in enumerate(zip(archs, parts, strict=True))]
    ).weights
    # where each part lies, found without the library's index: a supernet whose entries are their own positions
    numbered = {n: torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape) for n, t in server.weights.items()}
    sums: dict[tuple[str, int], list[float]] = {}
    for i, (arch, part) in enumerate(zip(archs, parts, strict=True)):
        places = TINY.cut(numbered, arch)
        for name, values in part.items():
            for place, value in zip(places[name].flatten().tolist(), values.flatten().tolist(), strict=True):
                entry = sums.setdefault((name, int(place)), [0.0, 0.0])
                entry[0] += (1 + i) * value
                entry[1] += 1 + i
    untouched = 0
    for name, old in server.weights.items():
        for place, (before, after) in enumerate(zip(old.flatten(), merged[name].flatten(), strict=True)):
            if (name, place) in sums:
                total, mass = sums[name, place]
                assert float(after) == pytest.approx(total / mass, abs=1e-6)
            else:
                untouched += 1
                assert before.view(torch.int32) == after.view(torch.int32)
    assert untouched > 1000


def test_ten_thousand_draws_stay_within_hard_budgets() -> None:
    method = PerFedRLNAS()
    fleet = FleetConfig(name="capacity-low", fractions=(0.9, 0.4, 0.1), budget=Limits(memory="80%"))
    federation = by_hand(method, DATA * 5, PLAIN, TINY, fleet=fleet)
    server = federation.begin().server
    # policies that long for the largest arch, some of them strongly
    up = torch.arange(10, dtype=torch.float64)[:, None].expand(10, 12) * torch.tensor([0.0, 0.15]).repeat(6)
    server = server.replace(alpha=up)
    archs = set()
    for seat in federation.job.seats:
        chances, fits = _softmax(up[seat.id]), functools.cache(seat.fits)
        for server.round in range(1000):
            arch = server.space.sample(server.rng("arch", seat.id), chances, fits)
            archs.add((seat.id, arch))
            if server.round < 20:
                assert method.ask(server, seat).arch == arch
    for client, arch in archs:
        assert max(federation.job.seats[client].use(arch).values()) <= 1
    assert len(archs) > 100


def _softmax(alpha: Tensor) -> list[np.ndarray]:
    return [np.exp(a) / np.exp(a).sum() for a in alpha.reshape(6, 2).numpy()]


def test_log_probabilities_are_those_of_the_probabilities() -> None:
    alpha = torch.from_numpy(np.random.default_rng(0).normal(size=12) * 5)
    alpha[3] = -2000.0  # as good as impossible, but a number
    for logs, chances in zip(log_probabilities(TINY, alpha), probabilities(TINY, alpha), strict=True):
        assert logs == pytest.approx(np.log(np.maximum(chances, 1e-300)).tolist())


def test_the_kept_arch_is_the_most_likely_that_fits() -> None:
    rng = np.random.default_rng(0)
    costs = {arch: TINY.cost(arch) for arch in TINY.archs()}
    largest = costs[TINY.largest]
    for _ in range(30):
        alpha = torch.from_numpy(rng.normal(size=12) * rng.choice([0.1, 3.0]))
        limits = budget_of({"flops": largest.flops * rng.uniform(0.1, 1), "memory": 1e9 * rng.uniform(0.001, 1)})
        fits = {a: c.flops <= limits.flops and c.training_memory(32) <= limits.memory for a, c in costs.items()}
        if not fits[TINY.smallest]:
            continue
        chance = {a: math.prod(float(p[i]) for p, i in zip(_softmax(alpha), a, strict=True)) for a in costs}
        best = max(p for a, p in chance.items() if fits[a])
        found = most_likely(TINY, alpha, fits.__getitem__)
        assert fits[found]
        assert chance[found] == pytest.approx(best)


def test_patience_ends_in_a_smaller_arch_that_gives_up_what_mattered_least() -> None:
    alpha = torch.tensor([logit for wish in (1.0, 2.0, 6.0, 3.0, 5.0, 4.0) for logit in (0.0, wish)])
    assert most_likely(TINY, alpha, lambda arch: sum(arch) <= 1, patience=2) == (0, 0, 1, 0, 0, 0)


# two rounds, written again ----------------------------------------------------------------------------------------


def reference(
    archs: dict[tuple[int, int], Arch], weights: dict[str, Any], lamda: float
) -> tuple[Any, list[list[float]]]:
    """Two rounds of PerFedRLNAS on the toy space in plain loops: the supernet and alpha after them."""
    weights = {n: t.double().tolist() for n, t in weights.items()}
    alpha, latest = [[0.0] * 5 for _ in DATA], {}
    for round in (1, 2):
        got, accuracy, time = [], [], []
        for client, data in enumerate(DATA):
            width, depth = archs[round, client][0] + 1, archs[round, client][1]
            names = [f"body.{i}.weight" for i in range(depth + 1)] + ["head.weight"]
            shapes = [(width, 1)] + [(width, width)] * depth + [(2, width)]
            mine = [
                torch.tensor([[weights[n][i][j] for j in range(s[1])] for i in range(s[0])], dtype=torch.float64)
                for n, s in zip(names, shapes, strict=True)
            ]
            x = torch.tensor([[p / 255] for p, _ in data], dtype=torch.float64)

            def logits(layers: list[Tensor], x: Tensor = x) -> Tensor:
                out = x
                for layer in layers:
                    out = out @ layer.T
                return out

            for _ in range(2):  # epochs of one batch each
                mine = [m.detach().requires_grad_() for m in mine]
                out = logits(mine)
                loss = sum(torch.logsumexp(out[k], 0) - out[k, y] for k, (_, y) in enumerate(data)) / len(data)
                loss.backward()  # type: ignore[union-attr]
                mine = [m - 0.2 * m.grad for m in mine]  # type: ignore[operator]
            scores = logits([m.detach() for m in mine]).tolist()
            guesses = [row.index(max(row)) for row in scores]
            accuracy.append(sum(g == y for g, (_, y) in zip(guesses, data, strict=True)) / len(data))
            entries = sum(a * b for a, b in shapes)
            flops = 2 * entries * len(data) * (3 * 2 + 1)  # two epochs forward and back, one pass over val
            time.append(2 * 4 * entries * 8 / 100e6 + flops / 3e10)
            got.append(dict(zip(names, [m.detach().tolist() for m in mine], strict=True)))
        for n, matrix in weights.items():
            for i, j in itertools.product(range(len(matrix)), range(len(matrix[0]))):
                owners = [c for c, g in enumerate(got) if n in g and i < len(g[n]) and j < len(g[n][0])]
                if owners:
                    mass = sum(len(DATA[c]) for c in owners)
                    matrix[i][j] = sum(len(DATA[c]) * got[c][n][i][j] for c in owners) / mass
        latest |= dict(enumerate(accuracy))
        for client in range(len(DATA)):
            reward = accuracy[client] - sum(latest.values()) / len(latest) - lamda * (time[client] - min(time))
            for at, size, chosen in ((0, 2, archs[round, client][0]), (2, 3, archs[round, client][1])):
                part = alpha[client][at : at + size]
                total = sum(math.exp(a) for a in part)
                for j in range(size):
                    alpha[client][at + j] += 0.7 * reward * ((j == chosen) - math.exp(part[j]) / total)
    return weights, alpha


def test_two_rounds_equal_a_slow_plain_reference() -> None:
    method = PerFedRLNAS(policy_optimizer="ascent", policy_lr=0.7, weights={"time": 1e4})
    federation = toy(method, rounds=2)
    state = federation.begin()
    start = {n: t.clone() for n, t in state.server.weights.items()}
    events: list[Event] = []
    for state in federation.rounds(state, events.append):  # noqa: B007, B020
        pass
    archs = {
        (e.round, e.client): tuple(int(i) for i in str(e.value).split("-"))
        for e in events
        if e.metric == "arch" and e.client is not None
    }
    assert len(archs) == 4
    weights, alpha = reference(archs, start, 1e4)
    for name, matrix in weights.items():
        np.testing.assert_allclose(state.server.weights[name].numpy(), matrix, atol=1e-6)
    np.testing.assert_allclose(state.server.alpha.numpy(), alpha, atol=1e-9)
    assert np.abs(alpha).max() > 0.05


# deployment and onboarding ----------------------------------------------------------------------------------------


def test_a_network_is_kept_as_it_is_or_after_local_epochs() -> None:
    for deploy in ("as-is", "trained"):
        federation = toy(PerFedRLNAS(deploy=deploy))  # type: ignore[arg-type]
        state = federation.begin()
        offered = federation.method.offer(state.server, federation.job.seats[0]).weights
        kept = personal(federation, state, 0)
        assert all(torch.equal(kept[n], offered[n]) for n in kept) == (deploy == "as-is")


def test_onboarding_moves_only_the_new_clients_policies() -> None:
    config = small_config("perfedrlnas", partition__new_clients=3, method__onboard_rounds=4)
    setup = prepare(config)
    federation, test = setup.federation(torch.device("cpu"), 1)
    state = federation.begin()
    for state in federation.rounds(state, lambda event: None):  # noqa: B007, B020
        pass
    before = state.server
    server, memories = onboard(federation, state, federation.job.seats[4:])
    assert all(torch.equal(server.weights[n], before.weights[n]) for n in before.weights)
    assert torch.equal(server.alpha[:4], before.alpha[:4])
    assert (server.moments["steps"][4:] == 4).all()
    assert server.alpha[4:].any(dim=1).any()
    assert not before.alpha[4:].any()  # the run's own state is left as it is
    assert not memories
    # newcomers are judged against newcomers
    events, kept = evaluate(federation, state, test)
    assert len([e for e in events if e.metric == "new_accuracy" and e.split == "test"]) == 3
    assert {k.client for k in kept} == set(range(7))
    federation.engine.close()


def test_newcomers_only_test_and_are_compared_with_each_other() -> None:
    method, rounds = plain(rewards=("accuracy",), onboard_rounds=7).onboarding()
    assert rounds == 7
    federation = toy(method)
    server = federation.begin().server.replace(accuracy=torch.tensor([0.9, math.nan], dtype=torch.float64))
    client = federation.client(federation.job.seats[1], {}, 1)
    answer = federation.engine.run([("", method.work(method.ask(server, federation.job.seats[1]), client))])[0]
    assert not answer.weights
    assert set(answer.facts) == {"accuracy"}
    server.job = dataclasses.replace(server.job, clients=1)  # client 1 is new
    after = method.merge(server, [reply(1, (0, 0), 0.2, 1.0)])
    assert not after.alpha.any()  # 0.2 is the newcomers' mean; next to the 0.9 of client 0 it would be a failure
