"""One round by hand: what is counted, how long it takes, who is merged, what clients keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedtailor.config import Local
from fedtailor.engine.client import Client
from fedtailor.engine.loop import Event, Federation, State
from fedtailor.evaluate import evaluate
from fedtailor.fleet import FleetConfig, shipped
from fedtailor.method import Method, Reply, Seat, Server, Task
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.pfedme import PFedMe
from tools import by_hand, numbers, three

PLAIN = Local(lr=0.5, batch=2, epochs=1.0, momentum=0.0, weight_decay=0.0)
TWO = [[(255, 0)], [(255, 1)] * 4]  # one step on the only image, two steps on two images each


def played(federation: Federation) -> tuple[State, list[Event]]:
    """One round from weights that are known, and what it reported."""
    state, events = federation.begin(), list[Event]()
    state.server = state.server.replace(weights=three(1, 0, 0))
    federation.round(state, events.append)
    return state, events


def told(events: list[Event], metric: str) -> list[float]:
    """A metric's values in the order of the clients."""
    return [float(e.value) for e in events if e.metric == metric]


@dataclass(frozen=True)
class Uneven(FedAvg):
    """Receives 3 + 5 floats and sends 1 + 2."""

    def ask(self, server: Server, client: Seat) -> Task:
        return replace(super().ask(server, client), extra={"more": torch.zeros(5)})

    async def work(self, task: Task, client: Client) -> Reply:
        reply = await super().work(task, client)
        weights, facts = {"body.weight": reply.weights["body.weight"]}, reply.facts | {"accuracy": 0.5}
        return Reply(weights, extra={"more": torch.zeros(2)}, facts=facts)


def test_a_round_counts_all_tensors_each_way_and_takes_the_time_of_both() -> None:
    federation = by_hand(Uneven(), TWO, PLAIN, fleet=FleetConfig(up_mbit=1.0, down_mbit=4.0))
    _, events = played(federation)
    flops = [federation.job.space.cost(()).train_flops * images for images in (1, 4)]
    seconds = [8e-6 * (32 / 4 + 12 / 1) + f / shipped().get("phone-high").flops_per_second for f in flops]
    assert told(events, "bytes_down") == [32, 32]
    assert told(events, "bytes_up") == [12, 12]
    assert told(events, "flops") == flops
    assert told(events, "seconds") == pytest.approx(seconds, rel=1e-12)
    assert told(events, "round_seconds") == pytest.approx([seconds[1]], rel=1e-12)
    assert {(e.metric, e.split) for e in events if e.split} == {("loss", "train"), ("accuracy", "val")}


def test_a_step_of_several_passes_costs_as_much_as_so_many_steps() -> None:
    federation = by_hand(PFedMe(lamda=1.0, inner_steps=3), TWO, PLAIN)
    _, events = played(federation)
    assert told(events, "flops") == [3 * federation.job.space.cost(()).train_flops * images for images in (1, 4)]


def late(method: Method, share: float) -> tuple[State, list[Event], float]:
    """A round whose deadline lies at this share of the way from the faster client's time to the slower one's."""
    first, second = told(played(by_hand(method, TWO, PLAIN))[1], "seconds")
    deadline = first + share * (second - first)
    return *played(by_hand(method, TWO, PLAIN, fleet=FleetConfig(deadline=deadline))), deadline


def test_a_reply_after_the_deadline_is_not_merged_and_its_client_keeps_its_memory() -> None:
    state, events, deadline = late(Ditto(), 0.5)
    alone, _ = played(by_hand(Ditto(), TWO[:1], PLAIN))
    assert numbers(state.server.weights) == numbers(alone.server.weights)
    assert told(events, "late") == [1]
    assert told(events, "round_seconds") == [deadline]
    assert [sorted(state.memories[i]) for i in (0, 1)] == [["v"], ["v"]]
    assert state.touched == {0, 1}


class Busy(FedAvg):
    """Has no answer to an empty round, as a mean has none."""

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        assert replies
        return super().merge(server, replies)


def test_a_round_in_which_all_are_late_leaves_the_server_as_it_was() -> None:
    state, events, _ = late(Busy(), -0.5)
    assert numbers(state.server.weights) == [1, 0, 0]
    assert told(events, "late") == [2]
    assert (state.round, state.server.round) == (1, 1)


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Keeps a note in odd rounds and clears it in even ones."""

    async def work(self, task: Task, client: Client) -> Reply:
        client.memory = {"note": client.round} if client.round % 2 else {}
        return Reply(task.weights)


def test_a_client_can_forget() -> None:
    federation = by_hand(Forgetful(), TWO, PLAIN, rounds=2)
    state = federation.begin()
    assert [dict(s.memories) for s in federation.rounds(state, lambda _: None)][-1] == {0: {}, 1: {}}


def test_a_network_for_keeps_is_made_by_a_client_that_knows_it() -> None:
    seen: list[bool] = []

    class Noted(FedAvg):
        async def personal(self, task: Task, client: Client) -> nn.Module:
            seen.append(client.keeping)
            return await super().personal(task, client)

    federation = by_hand(Noted(), TWO, PLAIN)
    evaluate(federation, federation.begin(), None)
    assert seen == [True, True]
