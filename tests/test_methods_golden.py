"""Update rules against numbers worked out by hand: two clients, three weights (one in the body, two in the head).

Every image is a pixel of value 1, so logits = body * head. From body 1 and head (0, 0) both classes have probability
1/2, and the gradient of the cross-entropy for label 0 is (-1/2, 1/2) for the head and 0 for the body: a step of 0.2
moves the head by (0.1, -0.1). Client 0 holds one image of label 0, client 1 three images of label 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedtailor.config import Local
from fedtailor.data.partition import TRAIN
from fedtailor.evaluate import fold_prior
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg, FedAvgFineTune
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedprox import FedProx
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.local import Local as LocalTraining
from tools import Biased, by_hand, numbers, one_round, personal, three

DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]
PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
TWICE = Local(epochs=2.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
# the second step of client 0, from head (0.1, -0.1): its own class has probability 1 / (1 + exp(-0.2))
Q = 1 - 1 / (1 + math.exp(-0.2))


def test_fedavg_weights_by_samples() -> None:
    state = one_round(by_hand(FedAvg(), DATA, PLAIN), weights=three(1, 0, 0))
    # heads (0.1, -0.1) and (-0.1, 0.1) with masses 1 and 3
    assert numbers(state.server.weights) == pytest.approx([1, -0.05, 0.05])


def test_fine_tuning_starts_at_the_server_and_can_go_half_way_back() -> None:
    tuned = by_hand(FedAvgFineTune(epochs=1.0, lr=0.2), DATA, PLAIN)
    state = one_round(tuned, weights=three(1, 0, 0))
    own = 1 - 1 / (1 + math.exp(0.1))  # from head (-0.05, 0.05), client 0's label has logit difference -0.1
    moved = [1 + 0.2 * 0.1 * -own, -0.05 + 0.2 * own, 0.05 - 0.2 * own]
    assert numbers(personal(tuned, state, 0)) == pytest.approx(moved, abs=1e-6)
    half = by_hand(FedAvgFineTune(epochs=1.0, lr=0.2, interpolate=0.5), DATA, PLAIN)
    middle = [(a + b) / 2 for a, b in zip(moved, [1, -0.05, 0.05], strict=True)]
    assert numbers(personal(half, state, 0)) == pytest.approx(middle, abs=1e-6)


def test_weights_decay_at_the_rate_that_is_given() -> None:
    state = one_round(by_hand(FedAvg(), DATA[:1], replace(PLAIN, weight_decay=0.5)), weights=three(1, 0.1, -0.1))
    plain = one_round(by_hand(FedAvg(), DATA[:1], PLAIN), weights=three(1, 0.1, -0.1))
    shrunk = [w - 0.2 * 0.5 * old for w, old in zip(numbers(plain.server.weights), (1, 0.1, -0.1), strict=True)]
    assert numbers(state.server.weights) == pytest.approx(shrunk)


def test_fine_tuning_takes_a_tenth_of_the_rate_unless_one_is_given() -> None:
    federation = by_hand(FedAvgFineTune(epochs=1.0), [DATA[0]], PLAIN)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    assert numbers(personal(federation, state, 0)) == pytest.approx([1, 0.01, -0.01])


def test_fine_tuning_the_head_leaves_the_body() -> None:
    federation = by_hand(FedAvgFineTune(epochs=1.0, lr=0.2, part="head"), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0.3, 0))
    kept = numbers(personal(federation, state, 0))
    assert kept[0] == numbers(state.server.weights)[0]
    assert kept[1:] != numbers(state.server.weights)[1:]


def test_fedprox_pulls_the_second_step_back() -> None:
    state = one_round(by_hand(FedProx(mu=1.0), [DATA[0], DATA[0]], TWICE), weights=three(1, 0, 0))
    # step 2 from head (0.1, -0.1), body 1: gradient (-Q, Q) for the head plus mu * (0.1, -0.1); -0.2 Q for the body
    head = 0.1 - 0.2 * (-Q + 0.1)
    assert numbers(state.server.weights) == pytest.approx([1 + 0.2 * 0.2 * Q, head, -head])


def test_fedprox_without_pull_is_fedavg() -> None:
    a = one_round(by_hand(FedProx(mu=0.0), DATA, TWICE), weights=three(1, 0.2, 0))
    b = one_round(by_hand(FedAvg(), DATA, TWICE), weights=three(1, 0.2, 0))
    assert numbers(a.server.weights) == numbers(b.server.weights)


def test_ditto_trains_the_personal_model_near_the_received_one() -> None:
    federation = by_hand(Ditto(lamda=1.0), DATA, TWICE)
    state = one_round(federation, weights=three(1, 0, 0))
    head = 0.1 - 0.2 * (-Q + 0.1)  # two steps of v from w_t, anchored at w_t
    assert numbers(personal(federation, state, 0)) == pytest.approx([1 + 0.04 * Q, head, -head])
    shared = 0.25 * (0.1 + 0.2 * Q) - 0.75 * (0.1 + 0.2 * Q)  # the shared model is FedAvg's, without the pull
    assert numbers(state.server.weights)[1] == pytest.approx(shared)


def test_ditto_keeps_the_personal_model_at_the_client() -> None:
    federation = by_hand(Ditto(), DATA, PLAIN)
    state = one_round(federation)
    assert set(state.memories[0]) == {"v"}
    assert set(state.server.values) == {"weights"}


def test_ditto_goes_on_from_the_personal_model_of_the_round_before() -> None:
    federation = by_hand(Ditto(lamda=0.0, personal_epochs=2.0), DATA, PLAIN, rounds=2)
    state = federation.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    assert len(list(federation.rounds(state, lambda event: None))) == 2
    alone = by_hand(LocalTraining(), DATA, PLAIN, rounds=4)  # without a pull it is training alone, two steps a round
    alone.engine.initial = lambda space, seed: three(1, 0, 0)  # type: ignore[method-assign]
    other = alone.begin()
    assert len(list(alone.rounds(other, lambda event: None))) == 4
    assert numbers(state.memories[0]["v"]) == pytest.approx(numbers(other.memories[0]["weights"]))


@pytest.mark.parametrize(("epochs", "given"), [(1.0, 1.0), (4.0, 1.0), (2.0, 0.0)], ids=["as is", "given", "halves"])
def test_fedrep_trains_head_then_body_and_keeps_the_head(epochs: float, given: float) -> None:
    method = FedRep(head_epochs=given, body_epochs=given, final_epochs=1.0)
    federation = by_hand(method, DATA, replace(PLAIN, epochs=epochs))
    federation.engine.initial = lambda space, seed: three(1, 0, 0)  # type: ignore[method-assign]
    state = one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    # head first: (0.1, -0.1); then the body sees gradient -0.2 Q for client 0, the same for client 1 by symmetry
    assert numbers(state.server.weights) == pytest.approx([1 + 0.2 * 0.2 * Q])
    assert numbers(state.memories[0]["head"]) == pytest.approx([0.1, -0.1])
    assert numbers(state.memories[1]["head"]) == pytest.approx([-0.1, 0.1])
    assert list(state.server.weights) == ["body.weight"]
    body = 1 + 0.2 * 0.2 * Q  # on which the head is tuned once more
    head = 0.1 + 0.2 * body * (1 - 1 / (1 + math.exp(-2 * body * 0.1)))
    assert numbers(personal(federation, state, 0)) == pytest.approx([body, head, -head])


def test_fedbabu_never_moves_the_head_before_fine_tuning() -> None:
    federation = by_hand(FedBABU(epochs=0.0), [DATA[0], DATA[0]], PLAIN)
    federation.engine.initial = lambda space, seed: three(1, 0.1, -0.1)  # type: ignore[method-assign]
    state = one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    assert numbers(state.server.weights) == pytest.approx([1 + 0.2 * 0.2 * Q])
    assert numbers(personal(federation, state, 0))[1:] == pytest.approx([0.1, -0.1])


def test_local_training_shares_nothing() -> None:
    federation = by_hand(LocalTraining(), DATA, PLAIN)
    federation.engine.initial = lambda space, seed: three(1, 0, 0)  # type: ignore[method-assign]
    state = one_round(federation)
    assert numbers(personal(federation, state, 0)) == pytest.approx([1, 0.1, -0.1])
    assert numbers(personal(federation, state, 1)) == pytest.approx([1, -0.1, 0.1])
    assert state.server.values == {}


def test_label_prior_enters_the_loss_and_the_last_bias() -> None:
    # one image of label 0 and three of label 1, no smoothing to speak of: log prior = (log 1/4, log 3/4)
    local = Local(
        epochs=1.0, batch=4, lr=1.0, momentum=0.0, weight_decay=0.0, prior=True, prior_smoothing=1e-9, prior_tau=0.5
    )
    data = [[(0, 0), (0, 1), (0, 1), (0, 1)]]
    federation = by_hand(FedAvg(), data, local, Biased((1, 1, 1), 2))
    zero = {"head.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2)}
    state = one_round(federation, weights=zero)
    # with the prior added, the predicted frequencies are right already: no gradient at all
    assert state.server.weights["head.bias"].tolist() == pytest.approx([0, 0], abs=1e-6)
    client = federation.client(federation.job.seats[0], {}, 1)
    net = client.build(federation.method.ask(state.server, federation.job.seats[0]))
    # the network says nothing, the prior of the client says label 1: three of four are right
    assert federation.engine.run([("", client.score(net))]) == [0.75]
    fold_prior(net, client)
    assert net.head.bias.tolist() == pytest.approx([0.5 * math.log(0.25), 0.5 * math.log(0.75)], abs=1e-6)  # type: ignore


def test_label_prior_counts_what_a_client_has_never_seen() -> None:
    local = Local(prior=True, prior_smoothing=2.0)
    federation = by_hand(FedAvg(), [[(0, 1)] * 3], local, Biased((1, 1, 1), 2))
    prior = federation.client(federation.job.seats[0], {}, 1).log_prior
    assert prior is not None
    assert prior.exp().tolist() == pytest.approx([2 / 7, 5 / 7])  # 0 + 2 and 3 + 2


def test_weights_nobody_sends_stay_as_they_were() -> None:
    federation = by_hand(FedRep(final_epochs=0.0), DATA, PLAIN)
    assert federation.store.split(0, TRAIN).size == 1
    state = federation.begin()
    before = state.server.weights
    assert federation.method.merge(state.server, []).weights == before
