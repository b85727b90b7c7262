"""Faults of public code that this library is free of, and methods on archs given to clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from fedtailor.config import Local
from fedtailor.data.federation import Store
from fedtailor.data.partition import TEST, TRAIN
from fedtailor.engine.loop import Federation
from fedtailor.evaluate import evaluate
from fedtailor.method import Method
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg, FedAvgFineTune
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.feddyn import FedDyn
from fedtailor.methods.fednova import FedNova
from fedtailor.methods.fedopt import FedOpt
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.l2gd import L2GD
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.pfedhn import PFedHN
from fedtailor.methods.pfedme import PFedMe
from fedtailor.methods.random_arch import RandomArch
from fedtailor.methods.scaffold import Scaffold
from fedtailor.owners import add_means, owners
from fedtailor.parts import body, choose, head, layers, norms
from fedtailor.runs.execute import prepare
from fedtailor.runs.given import give
from fedtailor.spaces.tiny import Tiny
from test_family_golden import Normed
from test_methods_golden import DATA, PLAIN
from tools import by_hand, numbers, one_round, personal, small_config, three

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


@pytest.mark.parametrize("method", [FedAvgFineTune(part="head"), FedBABU(part="head")])
def test_tuning_the_head_alone_leaves_the_statistics_of_the_body(method: Method) -> None:
    data = [[(255, 0), (0, 1)], [(200, 1), (100, 0)]]
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0)
    federation = by_hand(method, data, local, Normed((1, 1, 1), 2))
    state = one_round(federation)
    kept = personal(federation, state, 0)
    assert torch.equal(kept["norm.running_mean"], state.server.weights["norm.running_mean"])
    assert torch.equal(kept["norm.weight"], state.server.weights["norm.weight"])


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


@pytest.mark.parametrize(
    ("method", "bn"), [(PerFedAvg(), "local"), (Ditto(), "local"), (PFedHN(head="private"), "average")]
)
def test_a_network_is_trained_for_keeps_from_statistics_that_were_estimated(
    method: Method, bn: Literal["average", "local"]
) -> None:
    """A client that no round has called takes a step or two: from 0 the mean would be a tenth of what it should be."""
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0, bn=bn)
    federation = by_hand(method, [[(255, 0), (0, 1)]] * 2, local, Normed((1, 1, 1), 2), participants=1)
    state = one_round(federation)
    (absent,) = set(range(2)) - state.memories.keys()
    test = Store({(i, TEST): federation.store.split(i, TRAIN) for i in range(2)})
    assert float(evaluate(federation, state, test)[1][absent].weights["norm.running_mean"]) == pytest.approx(0.5)


def test_ditto_starts_the_personal_network_at_the_received_one() -> None:
    federation = by_hand(Ditto(lamda=0.0, personal_epochs=1.0), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0, 0))
    assert numbers(state.memories[0]["v"]) == pytest.approx([1, 0.1, -0.1])  # a random start would end elsewhere
    assert Ditto().lamda > 0  # 0 would be local training


def test_the_two_networks_of_ditto_have_statistics_of_their_own() -> None:
    """Where statistics stay at the client, those of the shared network are FedAvg's, whatever the personal one saw."""
    local = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0, bn="local")
    federation = by_hand(Ditto(personal_epochs=5.0), [[(255, 0), (0, 1)]] * 2, local, Normed((1, 1, 1), 2))
    state = one_round(federation)
    shared, own = (state.memories[0][key]["norm.running_mean"] for key in ("statistics", "v"))
    assert float(shared) == pytest.approx(0.1 * 0.5)  # one batch of mean 0.5 moves it a tenth of the way
    assert float(own) == pytest.approx(0.5 - 0.9**5 * (0.5 - 0.1 * 0.5))  # five more batches, from there
    test = Store({(i, TEST): federation.store.split(i, TRAIN) for i in range(2)})
    assert torch.equal(evaluate(federation, state, test)[1][0].weights["norm.running_mean"], own)


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
