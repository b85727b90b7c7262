"""FedorAS: op-aware averaging and single paths by hand, tiers and their brackets, evolution, the three stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine.client import Client
from fedtailor.engine.loop import Event
from fedtailor.errors import UserError
from fedtailor.fleet.budget import budget_of
from fedtailor.method import Server
from fedtailor.methods.fedoras import FedorAS
from fedtailor.registry import lookup
from fedtailor.runs.execute import prepare
from fedtailor.search.evolution import arch_of, noted, offspring, ranked
from fedtailor.search.paths import entries, every_option, op_aware, some_options, tensors_for
from fedtailor.search.tiers import Bracket, assigned, bracket_of, edges, serves
from fedtailor.spaces.base import Arch, Dimension, Space, Weights
from fedtailor.spaces.tiny import Tiny
from tools import by_hand, one_round, small_config

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]


class _Switch(nn.Module):
    """logits = head * op(x), with op one weight (a) or two in a row (b); the supernet holds both."""

    def __init__(self, ops: Sequence[str]) -> None:
        super().__init__()
        made = {"a": lambda: _one(1), "b": lambda: _one(2)}
        self.ops = nn.ModuleDict({name: made[name]() for name in ops})
        self.head = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(op(x.flatten(1)) for op in self.ops.values()))


def _one(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))


@dataclass(frozen=True)
class Switch(Space):
    name = "switch"

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return (Dimension("op", ("a", "b")),)

    def build(self, arch: Arch) -> nn.Module:
        return _Switch(("ab"[arch[0]],))

    def supernet(self) -> nn.Module:
        return _Switch("ab")


SPACE = Switch((1, 1, 1), 2)
A, B = (0,), (1,)


def switch(a: float, b: float, c: float, *head: float) -> Weights:
    found = {"ops.a.0.weight": a, "ops.b.0.weight": b, "ops.b.1.weight": c}
    return {n: torch.tensor([[float(v)]]) for n, v in found.items()} | {
        "head.weight": torch.tensor([[float(h)] for h in head])
    }


def test_an_operation_counts_by_the_examples_it_saw() -> None:
    old = switch(1, 1, 1, 0, 0)
    one, two = switch(2, 9, 9, 1, 0), switch(4, 5, 7, 3, 0)
    new = op_aware(SPACE, old, [(one, [(A, 3.0)]), (two, [(A, 1.0), (B, 4.0)])])
    assert new["ops.a.0.weight"].item() == pytest.approx((3 * 2 + 1 * 4) / 4)
    assert new["ops.b.0.weight"].item() == pytest.approx(5)  # client 0 never ran b: it does not dilute it
    assert new["head.weight"][0].item() == pytest.approx((3 * 1 + 5 * 3) / 8)  # in all paths: by all examples
    kept = op_aware(SPACE, old, [(one, [(A, 3.0)])])
    assert torch.equal(kept["ops.b.1.weight"], old["ops.b.1.weight"])


def test_entries_of_a_prefix_count_on_their_own() -> None:
    space = Tiny((1, 8, 8), 10)
    old = space.new_weights(0)
    narrow, wide = (0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0)
    parts = [({n: t + 1 for n, t in old.items()}, [(narrow, 3.0)]), ({n: t + 5 for n, t in old.items()}, [(wide, 1.0)])]
    moved = op_aware(space, old, parts)["body.0.0.conv.weight"] - old["body.0.0.conv.weight"]
    assert moved[:8, :, 1:-1, 1:-1].flatten().tolist() == pytest.approx([2.0] * 8 * 9, abs=1e-5)
    assert moved[8:, :, 1:-1, 1:-1].flatten().tolist() == pytest.approx([5.0] * 8 * 9, abs=1e-5)
    assert not moved[:, :, 0].any()  # the rim of the 5 x 5 kernel: nobody's


def test_a_round_of_paths_by_hand() -> None:
    federation = by_hand(FedorAS(tiers=1), [DATA[0]], PLAIN, SPACE, rounds=4)
    state = one_round(federation, weights=switch(1, 1, 1, 0, 0))
    assert state.server.weights["head.weight"].flatten().tolist() == pytest.approx([0.1, -0.1])
    assert state.server.weights["ops.a.0.weight"].item() == 1  # at head (0, 0) nothing else has a gradient
    seat = federation.job.seats[0]
    client = federation.client(seat, {}, 1)
    reply = federation.engine.run([("", federation.method.work(federation.method.ask(state.server, seat), client))])[0]
    assert reply.extra["examples"].tolist() == [1]
    ran = {0: {"ops.a.0.weight"}, 1: {"ops.b.0.weight", "ops.b.1.weight"}}[int(reply.extra["paths"][0])]
    assert set(reply.weights) == ran | {"head.weight"}


def test_brackets_cover_the_space_and_samples_stay_inside() -> None:
    space = Tiny((1, 8, 8), 10)
    ends = edges(space, 4, 200, 0)
    assert len(ends) == 5
    assert list(ends) == sorted(ends)
    flops = [space.cost(arch).flops for arch in space.archs()]
    assert ends[0] < min(flops)
    assert ends[-1] == max(flops)
    assert np.diff(ends[:4]) == pytest.approx([(ends[3] - min(flops)) / 3] * 3, abs=2)
    rng = np.random.default_rng(0)
    for low, high in itertools.pairwise(ends):
        bracket = Bracket(space, low, high, lambda arch: True)
        parents = [bracket.sample(rng) for _ in range(4)]
        children = [offspring(bracket, parents, 0.5, rng) for _ in range(10)]
        assert all(low < space.cost(arch).flops <= high for arch in parents + children)
    with pytest.raises(UserError, match=r"Lower method\.tiers"):
        Bracket(space, ends[-1], ends[-1] + 1, lambda arch: True).sample(rng)


def test_tiers_are_equal_shares_at_random_or_by_device() -> None:
    job = by_hand(FedorAS(tiers=1), DATA * 4, PLAIN, SPACE, rounds=2).job
    assert sorted(assigned(job, 4, "random")) == [0, 0, 1, 1, 2, 2, 3, 3]
    seats = [
        replace(seat, profile=replace(seat.profile, flops_per_second=float(speed)))
        for seat, speed in zip(job.seats, (8, 1, 7, 2, 6, 3, 5, 4), strict=True)
    ]
    assert assigned(replace(job, seats=tuple(seats)), 4, "device") == [3, 0, 3, 0, 2, 1, 2, 1]


def test_a_tiers_network_fits_its_own_clients_and_those_above() -> None:
    space = Tiny((1, 8, 8), 10)
    job = by_hand(FedorAS(tiers=1), DATA, PLAIN, space, rounds=2).job
    tight = budget_of({"flops": 0.5 * space.cost(space.largest).flops})
    ends = (-1.0, float(space.cost(space.largest).flops), float(space.cost(space.largest).flops))
    for limited, fitting in ((0, [False, True]), (1, [False, False])):  # the client of tier 0, that of tier 1
        seats = [replace(s, hard=True, budget=tight) if s.id == limited else s for s in job.seats]
        server = Server(replace(job, seats=tuple(seats)), tiers=[0, 1], edges=ends)
        assert [bracket_of(server, tier).fits(space.largest) for tier in (0, 1)] == fitting


@pytest.mark.parametrize(("tune_lr", "last"), [(0.0, {4: 0.2, 5: 0.1}), (0.04, {4: 0.04, 5: 0.02})])
def test_a_schedule_begins_anew_with_each_stage_that_trains(
    tune_lr: float, last: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, fit, rates = FedorAS(tiers=1, search=0.2, tune=0.4, tune_lr=tune_lr), Client.fit, dict[int, float]()

    async def watched(self: Client, net: nn.Module, **options: Any) -> Any:
        rates[self.round] = options["lr"]
        return await fit(self, net, **options)

    monkeypatch.setattr(Client, "fit", watched)
    federation = by_hand(method, DATA, replace(PLAIN, schedule="cosine"), SPACE, rounds=5)
    assert method.stages(5) == (2, 3)
    list(federation.rounds(federation.begin(), lambda event: None))
    assert rates == pytest.approx({1: 0.2, 2: 0.1} | last)


def test_scores_are_means_over_all_images() -> None:
    pool: list[dict[str, Any]] = noted(noted([], A, 0.5, 10.0), B, 0.6, 10.0)
    assert ranked(pool) == [B, A]
    pool = noted(pool, A, 1.0, 10.0)
    assert pool[0]["accuracy"] == pytest.approx(0.75)
    assert ranked(pool) == [A, B]


@pytest.mark.parametrize("space", [Tiny((1, 8, 8), 10), lookup("space", "darts")((1, 8, 8), 10, 4, 3, "s2")])
def test_a_part_of_the_supernet_holds_all_its_paths(space: Space) -> None:
    assert set(tensors_for(space, every_option(space))) == set(space.full_shapes)
    rng = np.random.default_rng(0)
    least, most = entries(space, list(space.index(space.smallest))), entries(space, list(space.full_shapes))
    limit = (least + most) // 2
    options = some_options(space, limit, rng)
    sent = set(tensors_for(space, options))
    assert least <= entries(space, list(sent)) <= limit < most
    for _ in range(20):
        arch = tuple(int(rng.choice(o)) for o in options)
        assert set(space.index(arch)) <= sent
    assert all(o[0] == 0 for o in options)


def test_three_stages_end_in_one_network_per_tier() -> None:
    setup = prepare(small_config("fedoras", rounds=4, participants=4, method__tiers=2, local__epochs=0.3))
    method = setup.method
    assert isinstance(method, FedorAS)
    assert method.stages(4) == (2, 3)
    federation, _ = setup.federation(torch.device("cpu"), 1)
    state, events, stages = federation.begin(), list[Event](), []
    for _ in federation.rounds(state, events.append):
        stages.append(method.stage(state.server))
        if state.round < 4:
            for seat in setup.job.seats:
                assert serves(state.server, seat) <= state.server.tiers[seat.id]  # never beyond its device
    assert stages[:3] == ["supernet", "search", "tune"]
    server = state.server
    for tier in range(2):
        arch = arch_of(server, tier)
        assert bracket_of(server, tier).holds(arch)
        assert arch in ranked(server.pools[tier])[:1]
    tuned = server.tuned["0"]["head.weight"]
    assert not torch.equal(tuned, server.space.cut(server.weights, arch_of(server, 0))["head.weight"])
    offers = [method.offer(server, seat) for seat in setup.job.seats]
    assert [o.arch for o in offers] == [arch_of(server, t) for t in server.tiers]


def test_paths_stay_within_the_tier() -> None:
    setup = prepare(small_config("fedoras", participants=4))
    method, federation = setup.method, setup.federation(torch.device("cpu"), 1)[0]
    server = federation.begin().server
    for seat in setup.job.seats:
        work = method.work(method.ask(server, seat), federation.client(seat, {}, 1))
        reply = federation.engine.run([("", work)])[0]
        for arch in reply.extra["paths"].tolist():
            assert setup.job.space.cost(tuple(arch)).flops <= server.edges[server.tiers[seat.id] + 1]


def test_only_part_of_the_supernet_is_sent_where_a_limit_is_given() -> None:
    space = {"space__name": "darts", "space__variant": "s2", "space__channels": 4, "space__cells": 3}
    setup = prepare(small_config("fedoras", **space, method__max_parameters=9000, rounds=2))
    federation, _ = setup.federation(torch.device("cpu"), 1)
    server = federation.begin().server
    tasks = [setup.method.ask(server, seat) for seat in setup.job.seats]
    assert all(entries(setup.job.space, list(t.weights)) <= 9000 for t in tasks)
    assert len({tuple(t.extra["options"].tolist()) for t in tasks}) == 1  # one part for all clients of a round
    with pytest.raises(UserError, match="smallest arch's tensors have"):
        prepare(small_config("fedoras", **space, method__max_parameters=10))


def test_too_few_rounds() -> None:
    with pytest.raises(UserError, match="one to train and one to search"):
        prepare(small_config("fedoras", rounds=1))
