"""FedRLNAS, and the controls of every search: random and largest archs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.engine.client import Client
from fedtailor.errors import UserError
from fedtailor.fleet.budget import budget_of
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.methods.fedrlnas import FedRLNAS
from fedtailor.methods.largest_fit import LargestFit, largest
from fedtailor.methods.perfedrlnas import PerFedRLNAS
from fedtailor.methods.random_arch import RandomArch
from fedtailor.spaces.mobilenetv3 import MobileNetV3
from fedtailor.spaces.tiny import Tiny
from test_perfedrlnas import DATA, PLAIN, TINY, TOY, begin, reply, row, toy
from tools import by_hand

# FedRLNAS ---------------------------------------------------------------------------------------------------------


def test_fedrlnas_moves_one_policy_by_the_mean_of_its_participants() -> None:
    method = FedRLNAS(warmup=0.0, search=1.0, policy_optimizer="ascent", policy_lr=1.0, baseline_decay=0.9)
    server = begin(method)
    assert server.alpha.shape == (1, 5)
    after = method.merge(server, [reply(0, (1, 0), 0.9, 1.0), reply(1, (0, 2), 0.6, 1.0)])
    # b = 1/2: r = 0.4 and 0.1
    first, second = (-1 / 2, 1 / 2, 2 / 3, -1 / 3, -1 / 3), (1 / 2, -1 / 2, -1 / 3, -1 / 3, 2 / 3)
    assert row(after, 0) == pytest.approx([(0.4 * a + 0.1 * b) / 2 for a, b in zip(first, second, strict=True)])
    assert after.baseline == pytest.approx(0.9 * 0.5 + 0.1 * 0.75)


def test_fedrlnas_warms_up_searches_and_trains() -> None:
    method = FedRLNAS(warmup=0.3, search=0.4)
    federation = toy(method, rounds=10)
    state = federation.begin()
    fresh, events, alphas = state.server.fresh, [], [state.server.alpha]
    for state in federation.rounds(state, events.append):  # noqa: B020
        alphas.append(state.server.alpha)
        if state.round == 7:
            supernet = state.server.weights
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(alphas)]
    assert moved == [False] * 3 + [True] * 4 + [False] * 3
    archs = {n: {str(e.value) for e in events if e.metric == "arch" and e.round == n} for n in range(1, 11)}
    assert len(set.union(*(archs[n] for n in (8, 9, 10)))) == 1
    assert len(set.union(*(archs[n] for n in (1, 2, 3)))) > 1
    # phase 3 knows nothing of the supernet: what its arch does not own is as it was drawn, and that is not the supernet
    index = TOY.cut({n: torch.ones_like(t) for n, t in fresh.items()}, state.server.arch)
    for name in fresh.keys() - index.keys():
        assert torch.equal(state.server.weights[name], fresh[name])
    assert not torch.equal(fresh["head.weight"], supernet["head.weight"])
    assert state.server.fresh is None
    assert method.shared(state.server).arch == state.server.arch


def test_fedrlnas_can_go_on_from_the_supernet() -> None:
    method = FedRLNAS(warmup=0.5, search=0.5, retrain="supernet")
    federation = toy(method, rounds=2)
    state = federation.begin()
    assert state.server.fresh is None
    for state in federation.rounds(state, lambda event: None):  # noqa: B007, B020
        pass
    arch = method.derived(state.server)
    offered = method.offer(state.server, federation.job.seats[0])
    expected = TOY.cut(state.server.weights, arch)
    assert offered.arch == arch
    assert all(torch.equal(offered.weights[n], expected[n]) for n in expected)


@pytest.mark.parametrize(("retrain", "last"), [("scratch", [0.2, 0.1]), ("supernet", [0.1, 0.1 * (1 - 0.5**0.5)])])
def test_a_network_from_scratch_has_the_schedule_from_its_beginning(retrain: Any, last: list[float]) -> None:
    method = FedRLNAS(warmup=0.25, search=0.25, retrain=retrain)
    federation = by_hand(method, DATA, dataclasses.replace(PLAIN, schedule="cosine"), TOY, rounds=4)
    original, rates = federation.client, dict[int, set[float]]()

    def client(*args: Any) -> Client:
        made = original(*args)
        fit = made.fit

        async def watched(net: nn.Module, **options: Any) -> Any:
            rates.setdefault(made.round, set()).add(options.get("lr") or made.lr)
            return await fit(net, **options)

        made.fit = watched  # type: ignore[method-assign]
        return made

    federation.client = client  # type: ignore[method-assign]
    list(federation.rounds(federation.begin(), lambda event: None))
    # the cosine over four rounds, half of it for the search; then over two, from the full rate again
    seen = [rate for n in (1, 2, 3, 4) for rate in rates[n]]
    assert seen == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), *last])


def test_fedrlnas_derives_an_arch_that_fits_every_client() -> None:
    method = FedRLNAS()
    fleet = FleetConfig(name="capacity-high", fractions=(1.0, 0.6, 0.5))
    federation = by_hand(method, DATA * 5, PLAIN, TINY, fleet=fleet)
    wish = torch.tensor([[0.0, 3.0] * 6], dtype=torch.float64)
    arch = method.derived(federation.begin().server.replace(alpha=wish))
    assert all(seat.fits(arch) for seat in federation.job.seats)
    assert arch != TINY.largest


def test_fedrlnas_phases_are_shares() -> None:
    with pytest.raises(UserError, match=r"method\.warmup = 0\.7.*at most 1"):
        toy(FedRLNAS(warmup=0.7, search=0.4))


# controls ---------------------------------------------------------------------------------------------------------

TIERS = FleetConfig(name="capacity-low", fractions=(1.0, 0.5, 0.2))


def test_random_archs_are_fixed_differ_and_fit() -> None:
    federation = by_hand(RandomArch(), DATA * 10, PLAIN, TINY, fleet=TIERS)
    state = federation.begin()
    archs = [federation.method.ask(state.server, seat).arch for seat in federation.job.seats]
    state.server.round = 5
    assert archs == [federation.method.ask(state.server, seat).arch for seat in federation.job.seats]
    assert len(set(archs)) > 8
    assert all(seat.fits(arch) for seat, arch in zip(federation.job.seats, archs, strict=True))


def test_random_archs_are_uniform_where_there_is_no_budget() -> None:
    job = dataclasses.replace(toy(RandomArch()).job, seats=toy(RandomArch()).job.seats[:1])
    draws = [RandomArch().choose(dataclasses.replace(job, seed=s))[0] for s in range(1200)]
    assert all(abs(n - 200) < 60 for n in Counter(draws).values())
    assert len(set(draws)) == 6


@pytest.mark.parametrize("measure", ["flops", "parameters"])
def test_the_largest_arch_that_fits_is_exact_on_a_small_space(measure: str) -> None:
    method = LargestFit(measure=measure)  # type: ignore[arg-type]
    federation = by_hand(method, DATA * 5, PLAIN, TINY, fleet=TIERS)
    for seat, arch in zip(federation.job.seats, method.choose(federation.job), strict=True):
        best = max(getattr(TINY.cost(a), measure) for a in TINY.archs() if seat.fits(a))
        assert seat.fits(arch)
        assert getattr(TINY.cost(arch), measure) == best


def test_the_rule_for_large_spaces_ends_where_no_step_up_fits() -> None:
    size = lambda arch: float(TINY.cost(arch).flops)  # noqa: E731
    for share in (0.15, 0.4, 0.7, 1.0):
        limit = share * size(TINY.largest)
        arch = largest(TINY, size, lambda a: max(0.0, size(a) - limit))  # noqa: B023
        best = max(size(a) for a in TINY.archs() if size(a) <= limit)
        assert 0.8 * best <= size(arch) <= limit
        ups = [(*arch[:d], i + 1, *arch[d + 1 :]) for d, i in enumerate(arch) if not i]
        assert all(size(up) > limit for up in ups)


def test_where_climbing_finds_more_than_coming_down_its_arch_is_kept() -> None:
    space = Tiny((1, 8, 8), 3)
    size = lambda a: float(space.cost(a).flops)  # noqa: E731
    limit = 0.5 * size(space.largest)
    arch = largest(space, size, lambda a: max(0.0, size(a) - limit))
    assert round(100 * size(arch) / size(space.largest), 1) == 49.0  # 48.1 from above


@pytest.mark.parametrize(("quantity", "share"), [("flops", 70.0), ("parameters", 84.5), ("memory", 78.0)])
def test_no_arch_drawn_within_a_budget_is_larger_than_the_largest_that_fits(quantity: str, share: float) -> None:
    # a climb that sees only what adds most reached 0.65 of the largest network's FLOPs within 0.7 of its parameters,
    # where one draw in a few had more
    space = MobileNetV3((3, 32, 32), 10)
    job = toy(LargestFit()).job
    budget = budget_of({}, budget_of({quantity: 0.7})).absolute(space.cost(space.largest), 32, job.seats[0].profile)
    seat = dataclasses.replace(job.seats[0], space=space, budget=budget, batch=32, images=500)
    (arch,) = LargestFit().choose(dataclasses.replace(job, space=space, seats=(seat,)))
    rng = np.random.default_rng(0)
    drawn = [space.cost(space.sample(rng, fits=seat.fits)).flops for _ in range(100)]
    assert seat.fits(arch)
    assert space.cost(arch).flops >= max(drawn)
    assert round(100 * space.cost(arch).flops / space.cost(space.largest).flops, 1) == share  # as the page says


def test_controls_average_like_the_search() -> None:
    # with one arch for everybody a control is FedAvg on it, and so is a policy that has settled on it
    settled = torch.tensor([[-60.0, 60.0, -60.0, -60.0, 60.0]] * 2, dtype=torch.float64)
    found = []
    for method, values in ((LargestFit(), {}), (PerFedRLNAS(), {"alpha": settled})):
        federation = toy(method)
        state = federation.begin()
        state.server = state.server.replace(**values)
        found.append(next(federation.rounds(state, lambda event: None)).server.weights)
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
