"""SPIDER where steps are captured: the gated supernet is the cut network, and a decision captures nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import needs_gpu
from fedtailor.config import Local
from fedtailor.data.batches import Stream
from fedtailor.data.partition import TRAIN
from fedtailor.engine import replay, stack
from fedtailor.engine.jobs import Fit
from fedtailor.engine.loop import Federation
from fedtailor.engine.replay import FitSlot, Replay
from fedtailor.engine.stack import StackSlot
from fedtailor.engine.steps import fit_step
from fedtailor.methods.spider import Spider
from fedtailor.runs.execute import prepare
from fedtailor.search.gated import Gated, gateable, gated_of, held
from fedtailor.search.perturbation import Perturbed, Search
from fedtailor.seeds import rng_of
from fedtailor.spaces.darts import Darts, Keep
from fedtailor.spaces.measure import parameters_of, tensors_of
from pretend_cuda import pretend
from test_spider import SPACE, federation
from test_sweep import config_of

CPU = torch.device("cpu")


def some_of(space: Darts) -> Keep:
    """A sub-network in the middle of a search, with edges that have one operation, several or none."""
    rng = rng_of("some", space.variant)
    normal, reduce = (
        tuple(tuple(i for i in range(space.choices) if rng.random() < 0.5) for _ in range(14)) for _ in range(2)
    )
    return normal, reduce


def gated(space: Darts, weights: dict[str, Tensor], keep: Keep) -> Gated:
    net = gated_of(space).module()
    for name, tensor in tensors_of(net).items():
        tensor.data.copy_(held(space, weights, keep, CPU)[name])
    return net.at(keep)


def cut(space: Darts, weights: dict[str, Tensor], keep: Keep) -> Any:
    net = space.build_keep(keep)
    for name, tensor in tensors_of(net).items():
        tensor.data.copy_(weights[name])
    return net


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("look", ["gated", "perturbed"])
def test_the_next_candidate_does_not_wait_for_what_the_card_is_doing(look: str) -> None:
    net = gated_of(SPACE).module() if look == "gated" else Perturbed(SPACE.supernet(), SPACE)
    net.cuda().at(SPACE.full_keep)
    torch.cuda.set_sync_debug_mode("error")  # of a copy out of memory that is not pinned, say
    try:
        net.at(some_of(SPACE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gates = (net.gates_normal, net.gates_reduce) if isinstance(net, Gated) else net.gates
    for found, wanted in zip(gates, SPACE.gates_of(some_of(SPACE)), strict=True):
        assert torch.equal(found.cpu(), wanted)


# the same computation ---------------------------------------------------------------------------------------------

SGD = Local(batch=6, lr=0.1, momentum=0.9, weight_decay=1e-2, clip=0.5)
ADAM = replace(SGD, optimizer="adamw", lr=0.01, clip=0.0)


@pytest.mark.parametrize("local", [SGD, ADAM, replace(SGD, clip=0.0, momentum=0.0)])
@pytest.mark.parametrize("space", [SPACE, replace(SPACE, variant="s3"), replace(SPACE, variant="full", norm="group")])
def test_a_gated_step_is_that_of_the_cut_network(space: Darts, local: Local) -> None:
    """Several of them, so that what an optimiser keeps has to be the same too."""
    space, keep = replace(space, input=(1, 8, 8)), some_of(space)
    weights, shared = space.new_weights(1), space.new_weights(2)
    one, other = cut(space, weights, keep).train(), gated(space, weights, keep).train()
    stream: Any = Stream(federation(Spider()).store.split(0, TRAIN), 2, "none", 0)

    def steps(net: Any, anchor: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return fit_step(Fit(net, tuple(parameters_of(net)), stream, 4, local.lr, local, anchor=anchor, pull=0.3))

    first, second = steps(one, shared), steps(other, held(space, shared, keep, CPU))
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, y = torch.rand(6, 1, 8, 8, generator=generator), torch.randint(2, (6,), generator=generator)
        torch.testing.assert_close(second(x, y), first(x, y), rtol=1e-5, atol=0)
    found, own = tensors_of(other), tensors_of(one)
    for name, tensor in own.items():  # weights and statistics
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert len(own) < len(found) - 2
    assert all(bool((p == 0).all()) for name, p in parameters_of(other).items() if name not in own)


@pytest.mark.parametrize("images", [5, 1])
def test_a_gated_network_is_scored_like_a_perturbed_one(images: int) -> None:
    weights, keep, x = SPACE.new_weights(1), some_of(SPACE), torch.rand(images, 1, 4, 4)
    kind, e = next((kind, e) for kind in (0, 1) for e in range(14) if len(keep[kind][e]) == 2)
    without = tuple(
        tuple(places[:1] if (k, i) == (kind, e) else places for i, places in enumerate(edges))
        for k, edges in enumerate(keep)
    )
    net, there = gated(SPACE, weights, keep).eval(), cut(SPACE, weights, keep).eval()
    before = {n: t.clone() for n, t in tensors_of(net).items() if not n.startswith("gates")}
    for tried in (without, keep):
        perturbed = Perturbed(there, SPACE).at(tried).eval()  # type: ignore[arg-type]
        torch.testing.assert_close(net.at(tried)(x), perturbed(x))  # type: ignore[arg-type]
        assert net.cost == perturbed.cost
    assert all(torch.equal(tensors_of(net)[n], t) for n, t in before.items())
    assert not any(m.training for m in net.modules())


def test_noise_is_not_gated() -> None:
    """Its layers draw by their number in a network."""
    assert gateable(SPACE)
    assert not gateable(replace(SPACE, variant="s4"))


# whole runs on a card that is pretended ---------------------------------------------------------------------------


SMALL = {"space__channels": 2, "space__cells": 3, "space__variant": "s2", "precision": "fp32"}


def run_of(engine: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Federation, list[Any]]:
    """A run's federation, and what its clients keep after each round."""
    federation, _ = prepare(config_of("spider", "darts", **SMALL, **changes)).federation(
        pretend(monkeypatch), 1, engine, say=lambda _: None
    )
    state, found = federation.begin(), []
    for _ in federation.rounds(state, lambda event: None):
        found.append(dict(state.memories))
    return federation, found


@pytest.mark.parametrize(
    ("lamda", "changes"),
    [
        (0.1, {"participants": 2}),
        (0.1, {"clients": 4, "participants": 4}),  # which are stacked
        (0.1, {"participants": 2, "local__bn": "local"}),
        (0.1, {"participants": 2, "local__bn": "recalibrate"}),
        (0.0, {"participants": 2}),
        (math.inf, {"participants": 2}),
    ],
)
def test_a_search_with_gates_is_the_search_with_cuts(
    lamda: float, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "stacking_pays", lambda *_: True)
    changes |= {"rounds": 5, "local__lr": 0.003, "method__lamda": lamda}
    _, cuts = run_of("eager", monkeypatch, **changes)
    _, ours = run_of("auto", monkeypatch, **changes)
    for there, here in zip(cuts, ours, strict=True):
        for client, memory in there.items():
            assert here[client]["search"] == memory["search"]
            assert here[client].keys() == memory.keys()
            v = memory.get("v", {})
            apart = sum(float((here[client]["v"][n] - t).pow(2).sum()) for n, t in v.items())
            assert apart <= 1e-6 * sum(float(t.pow(2).sum()) for t in v.values())  # of rounding, which training spreads
            assert list(here[client].get("v", {})) == list(v)
    assert Search(**ours[-1][0]["search"]).over


def test_a_decision_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, many = Counter[str](), 4
    pretend(monkeypatch)
    capture, forward = Replay.capture, replay.Forward

    def captured(slot: Replay, step: Callable[[], Tensor]) -> None:
        counts["stack" if isinstance(slot, StackSlot) else "step" if isinstance(slot, FitSlot) else "own"] += 1
        capture(slot, step)

    class Pass(forward):  # type: ignore[misc, valid-type]
        def __init__(self, *how: Any) -> None:
            counts["pass"] += 1
            super().__init__(*how)

    uneven = {"partition__name": "dirichlet-class", "partition__samples": 0, "local__epochs": 0.05}
    changes = {"rounds": 8, "clients": many, "participants": many, **uneven}
    federation, _ = prepare(config_of("spider", "darts", **SMALL, **changes)).federation(CPU, 1, say=lambda _: None)
    monkeypatch.setattr(Replay, "capture", captured)
    monkeypatch.setattr(replay, "Forward", Pass)
    make, state, found = federation.engine.slots.make, federation.begin(), []  # type: ignore[attr-defined]

    def made(*what: Any) -> Any:
        counts["network"] += 1
        return make(*what)

    federation.engine.slots.make = made  # type: ignore[attr-defined]
    for _ in federation.rounds(state, lambda event: None):
        found.append((Search(**state.memories[0]["search"]), counts.copy()))
        counts.clear()
    first, second, *others = searching = [counts for search, counts in found if not search.over]
    assert (first["step"], first["network"]) == (2 * many, 2 * many)  # one for w and one for v
    assert (second["step"], second["network"]) == (0, 2 * many)  # the steps have kept theirs
    assert [(c["step"], c["network"]) for c in others] == [(0, 0)] * len(others)
    assert sum(c["stack"] + c["own"] for c in searching) == 0
    assert [c["pass"] for c in searching] == [0, many, *[0] * len(others)]  # for as many sizes of val
    last, after, *rest = [counts for search, counts in found if search.over]
    assert (last["step"], last["network"]) == (many, many)  # now the networks are cut
    assert (after["step"], after["network"]) == (0, many)
    assert not any(c.total() for c in rest)


def test_candidates_that_all_clients_score_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, many = Counter[str](), 3
    pretend(monkeypatch)
    forward = replay.Forward

    class Pass(forward):  # type: ignore[misc, valid-type]
        def __init__(self, *how: Any) -> None:
            passes["captured"] += 1
            super().__init__(*how)

    monkeypatch.setattr(replay, "Forward", Pass)
    changes = {"rounds": 40, "clients": many, "participants": many, "local__epochs": 0.05}
    setup = prepare(config_of("global-perturbation", "darts", **SMALL, **changes))
    federation, _ = setup.federation(CPU, 1, say=lambda _: None)
    state, deciding = federation.begin(), 0
    for _ in range(5):
        task = federation.method.ask(state.server, federation.job.seats[0])
        deciding += "candidates" in task.extra
        federation.round(state, lambda event: None)
    assert passes["captured"] == many * deciding > 0
