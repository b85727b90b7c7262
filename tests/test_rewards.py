"""What PerFedRLNAS' policies are rewarded for: equation 9, and rewards of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.config import load
from fedtailor.engine.loop import Event
from fedtailor.errors import UserError
from fedtailor.fleet.budget import Limits
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.method import Reply
from fedtailor.methods.perfedrlnas import PerFedRLNAS
from fedtailor.search.ascent import ascend, no_moments
from fedtailor.search.rewards import Outcome, assemble, remember
from test_perfedrlnas import COSTS, TOY, begin, plain, reply, row, toy

# equation 9 -------------------------------------------------------------------------------------------------------


def soft(fraction: str = "60%") -> FleetConfig:
    return FleetConfig(hard=False, budget=Limits(memory=fraction))


def test_a_network_that_does_not_fit_has_accuracy_0_the_longest_time_and_all_the_memory() -> None:
    method = plain(rewards=("accuracy", "time", "memory"), weights={"time": 0.1})
    federation = toy(method, fleet=soft())
    server = federation.begin().server.replace(accuracy=torch.tensor([0.3, 0.5], dtype=torch.float64))
    use = [federation.job.seats[0].use(a)["memory"] for a in (TOY.smallest, TOY.largest)]
    assert use[0] < 1 < use[1]
    after = method.merge(server, [reply(0, TOY.largest, None, 0.5), reply(1, TOY.smallest, 0.7, 3.0)])
    # latest (0.3, 0.7): a refusal leaves the history alone. RT_0 = 3 = min RT.
    refused, fitted = 0 - 0.5 - 0 - 1, 0.7 - 0.5 - 0 - use[0]
    assert after.accuracy.tolist() == pytest.approx([0.3, 0.7])
    assert row(after, 0) == pytest.approx([refused * g for g in (-1 / 2, 1 / 2, -1 / 3, -1 / 3, 2 / 3)])
    assert row(after, 1) == pytest.approx([fitted * g for g in (1 / 2, -1 / 2, 2 / 3, -1 / 3, -1 / 3)])


def test_a_network_that_does_not_fit_is_slower_than_the_fastest() -> None:
    method = plain(rewards=("time",), weights={"time": 1.0})
    server = begin(method, fleet=soft())
    after = method.merge(server, [reply(0, TOY.largest, None, 0.5), reply(1, TOY.smallest, 0.7, 3.0)])
    assert not after.alpha.any()  # both have the longest time, which is then the shortest too
    replies = [reply(0, TOY.largest, None, 4.0), reply(1, TOY.smallest, 0.7, 3.0)]
    assert row(method.merge(server, replies), 0)[1] == pytest.approx(-0.5)  # RT_0 - min RT = 1


def test_a_round_of_refusals_has_a_mean_of_0() -> None:
    method = plain(rewards=("accuracy", "memory"))
    server = begin(method, fleet=soft())
    after = method.merge(server, [reply(0, TOY.largest, None, 0.5)])
    assert row(after, 0)[1] == pytest.approx(-0.5)
    assert all(torch.equal(after.weights[n], server.weights[n]) for n in server.weights)


def test_refused_networks_are_not_trained_not_averaged_and_not_kept() -> None:
    method = PerFedRLNAS(rewards=("accuracy", "time", "memory"))
    federation = toy(method, fleet=soft(), rounds=8)
    state = federation.begin()
    events: list[Event] = []
    for state in federation.rounds(state, events.append):  # noqa: B007, B020
        pass
    refusals = {(e.round, e.client) for e in events if e.metric == "refused"}
    losses = {(e.round, e.client) for e in events if e.metric == "loss"}
    assert refusals
    assert losses
    assert not refusals & losses
    sent = {(e.round, e.client): e.value for e in events if e.metric == "bytes_up"}
    assert all((sent[key] == 0) == (key in refusals) for key in sent)
    # even a policy that wants what does not fit ends with a network that does
    wish = torch.tensor([[-9.0, 9.0, -9.0, 0.0, 9.0]] * 2, dtype=torch.float64)
    seat = federation.job.seats[0]
    assert seat.use(method.offer(state.server.replace(alpha=wish), seat).arch)["memory"] <= 1


def test_soft_budgets_that_admit_nothing_are_an_error_before_the_run() -> None:
    with pytest.raises(UserError, match=r"client-0.*no arch of 'toy' fits.*memory"):
        toy(PerFedRLNAS(), fleet=soft("1%"))


# rewards ----------------------------------------------------------------------------------------------------------


def outcome(**changes: Any) -> Outcome:
    seat = toy(PerFedRLNAS()).job.seats[0]
    return dataclasses.replace(Outcome(seat, (1, 1), True, 0.8, 5.0, 0.6, 2.0), **changes)


def test_rewards_are_sums_of_named_pieces() -> None:
    assert assemble(("accuracy",), {})(outcome()) == pytest.approx(0.2)
    assert assemble(("accuracy", "time"), {})(outcome()) == pytest.approx(0.2 - 0.001 * 3)
    assert assemble(("accuracy", "time"), {"time": 0.5, "accuracy": 2.0})(outcome()) == pytest.approx(0.4 - 1.5)
    # width 2, one layer of depth: 2 + 4 + 4 weights of 14 in the largest, as many multiply-adds
    assert assemble(("energy",), {})(outcome()) == pytest.approx(-10 / 14)
    assert assemble(("bytes",), {"bytes": 3.0})(outcome()) == pytest.approx(-30 / 14)
    seat = outcome().seat
    mains = dataclasses.replace(seat, profile=dataclasses.replace(seat.profile, battery="none"))
    assert assemble(("energy",), {})(outcome(seat=mains)) == 0
    memory = COSTS[1, 1].training_memory(4) / seat.profile.memory
    assert assemble(("memory",), {})(outcome()) == pytest.approx(-memory)
    assert assemble(("memory",), {})(outcome(fits=False)) == -1


def test_a_reward_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def carbon(outcome):\n    return -float(outcome.arch[0])\ndef bad(outcome):\n    return float('nan')\n"
    )
    reward = assemble(("accuracy", f"{file}:carbon"), {"carbon": 0.25})
    assert reward(outcome()) == pytest.approx(0.2 - 0.25)
    with pytest.raises(UserError, match=r"reward '.*:bad' of client 'client-0' is nan"):
        assemble((f"{file}:bad",), {})(outcome())
    with pytest.raises(UserError, match=r"method\.rewards.*no file"):
        assemble(("nowhere.py:carbon",), {})
    with pytest.raises(UserError, match="no 'soot'"):
        assemble((f"{file}:soot",), {})


def test_misspelt_rewards_and_weights_are_named() -> None:
    with pytest.raises(UserError, match=r"unknown reward 'tiem'\. Did you mean 'time'"):
        toy(PerFedRLNAS(rewards=("accuracy", "tiem")))
    with pytest.raises(UserError, match=r"method\.weights\.memroy.*Did you mean 'memory'"):
        toy(PerFedRLNAS(rewards=("accuracy", "memory"), weights={"memroy": 2.0}))
    assert load("perfedrlnas", {"method.rewards": ["accuracy"]}).make_method()  # a weight without its piece is idle
    with pytest.raises(UserError, match=r"method\.weights"):
        load("perfedrlnas", {"method.weights.time": -1.0})


def test_what_a_server_holds_is_never_changed_in_place() -> None:
    alpha = torch.zeros(2, 3, dtype=torch.float64)
    moments = no_moments(alpha)
    moved, kept = ascend(alpha, moments, 1, torch.ones(3, dtype=torch.float64), 0.1, "adam")
    assert moved[1].any()
    assert all(t.any() for t in kept.values())
    assert not any(t.any() for t in (alpha, *moments.values()))
    latest = torch.zeros(2, dtype=torch.float64)
    assert remember(latest, [Reply(client=1, facts={"accuracy": 0.5})]).tolist() == [0, 0.5]
    assert not latest.any()
