"""SFL against numbers worked out by hand: graphs of two and three clients, three weights."""

from __future__ import annotations

import math

import pytest
import torch

from fedtailor.config import Local
from fedtailor.kit.graph import distances, fit_graph, learnt_graph, similarities, strongest, walk
from fedtailor.methods.sfl import SFL
from tools import by_hand, numbers, one_round, personal, three

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
TWICE = Local(epochs=2.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]
Q = 1 - 1 / (1 + math.exp(-0.2))  # see test_methods_golden: the gradient of the second step


def stacked(*models: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.stack([m[n] for m in models]) for n in models[0]}


def test_near_models_are_strong_neighbours() -> None:
    models = stacked(three(0, 0, 0), three(0, 0, 3), three(0, 4, 0))
    apart = distances(models)
    assert apart.tolist() == [[0, 3, 4], [3, 0, 5], [4, 5, 0]]
    near = similarities(apart)  # 1 - d / 5
    assert near[0].tolist() == pytest.approx([0, 0.4, 0.2])
    assert near[1].tolist() == pytest.approx([0.4, 0, 0])
    assert strongest(near, 1)[0].tolist() == pytest.approx([0, 0.4, 0])
    # the same models, statistics apart: those are no part of the distance
    assert torch.equal(distances(models | {"n.running_mean": torch.rand(3, 2)}), apart)


def test_a_walk_has_self_loops_and_keeps_the_mass() -> None:
    shares = walk(torch.tensor([[0.0, 1.0], [0.5, 0.0]]), 1)
    assert shares.tolist() == [pytest.approx([0.5, 0.5]), pytest.approx([1 / 3, 2 / 3])]
    assert walk(torch.rand(4, 4), 3).sum(1).tolist() == pytest.approx([1, 1, 1, 1])


def test_the_server_mixes_models_over_the_graph() -> None:
    # three clients: 0 and 1 hold label 0 and end at head (0.1, -0.1), 2 holds label 1 and ends at (-0.1, 0.1)
    federation = by_hand(SFL(steps=1, lamda=0.0, mu=0.0), [DATA[0], DATA[0], DATA[1]], PLAIN)
    first = stacked(*[three(1, 0, 0)] * 3)
    state = one_round(federation, models=first, weights=three(1, 0, 0))
    # similarity 1 between 0 and 1, 0 with 2: u_0 = u_1 = (0.1, -0.1), u_2 stays alone
    assert state.server.graph.tolist() == [pytest.approx(row) for row in ([0, 1, 0], [1, 0, 0], [0, 0, 0])]
    asked = [federation.method.ask(state.server, seat).weights for seat in federation.job.seats]
    assert [numbers(u)[1] for u in asked] == pytest.approx([0.1, 0.1, -0.1])
    assert numbers(state.server.weights) == pytest.approx([1, 0.1 / 3, -0.1 / 3])  # the readout
    half = by_hand(SFL(steps=1, lamda=0.0, mu=0.0, share=0.0), [DATA[0], DATA[0], DATA[1]], PLAIN)
    assert torch.equal(one_round(half).server.shares, torch.eye(3))  # everybody keeps what it sent


def test_the_regularisers_act_on_the_second_step() -> None:
    federation = by_hand(SFL(lamda=0.75, mu=0.25, deploy="trained"), [DATA[0], DATA[0]], TWICE)
    u, w = three(1, 0, 0), three(1, 0.4, -0.4)
    state = federation.begin()
    state.server = state.server.replace(models=stacked(u, u), weights=w)
    kept = numbers(personal(federation, state, 0))
    # step 1 at u: gradient (-1/2, 1/2) plus mu * (0 - 0.4); step 2 pulls towards u and towards the readout
    one = 0.2 * (0.5 + 0.25 * 0.4)
    q = 1 - 1 / (1 + math.exp(-2 * one))
    two = one + 0.2 * (q - 0.75 * one - 0.25 * (one - 0.4))
    assert kept == pytest.approx([1 + 0.2 * q * 2 * one, two, -two], abs=1e-6)
    free = by_hand(SFL(lamda=0.0, mu=0.0), [DATA[0], DATA[0]], TWICE)
    plain = numbers(personal(free, state, 0))
    assert plain == pytest.approx([1 + 0.2 * 0.2 * Q, 0.1 + 0.2 * Q, -0.1 - 0.2 * Q])


def test_no_label_reaches_the_server() -> None:
    federation = by_hand(SFL(), DATA, PLAIN)
    seat = federation.job.seats[0]
    state = federation.begin()
    work = federation.method.work(federation.method.ask(state.server, seat), federation.client(seat, {}, 1))
    reply = federation.engine.run([("", work)])[0]
    assert set(reply.weights) == {"body.weight", "head.weight"}
    assert not reply.extra
    assert set(reply.facts) == {"loss"}


def test_a_learned_graph_approaches_similarities_and_moves_slowly() -> None:
    wanted = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    one, two = torch.tensor([[1.0], [0.2], [0.0]]), torch.tensor([[0.0], [0.3], [0.0]])
    assert learnt_graph(one, two, 2.0)[0, 1] == pytest.approx(math.tanh(2 * 0.3))
    assert learnt_graph(one, two, 2.0)[1, 0] == 0
    fitted = fit_graph(one, two, wanted, 2.0, 200, 0.5)
    assert learnt_graph(fitted[0], fitted[1], 2.0)[0, 1] > 0.9  # near becomes strong, not weak
    federation = by_hand(SFL(graph="learned", dimensions=2), [DATA[0], DATA[0], DATA[1]], PLAIN)
    state = one_round(federation)
    found = learnt_graph(state.server.embeddings[0], state.server.embeddings[1], 3.0)
    assert torch.allclose(state.server.graph, 0.05 * found)


def test_an_absent_client_keeps_its_model() -> None:
    federation = by_hand(SFL(), [DATA[0], DATA[0], DATA[1]], PLAIN, participants=1, rounds=2)
    state = one_round(federation)
    first = federation.begin().server.models["head.weight"]
    changed = [not torch.equal(a, b) for a, b in zip(state.server.models["head.weight"], first, strict=True)]
    assert sum(changed) == 1
