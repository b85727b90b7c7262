"""SPIDER: updates by hand, the search step by step, what is sent, a slow plain reference, and the gain matrix."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedtailor.config import Local
from fedtailor.data.partition import TRAIN, VAL
from fedtailor.engine.jobs import Fit, Score
from fedtailor.engine.loop import Event
from fedtailor.errors import UserError
from fedtailor.methods.spider import Spider
from fedtailor.search.perturbation import Perturbed, Schedule, Search, answered, decide, questions
from fedtailor.seeds import rng_of, torch_seed
from fedtailor.spaces.darts import Darts, Keep
from fedtailor.spaces.darts_ops import EDGES_INTO
from fedtailor.spaces.measure import tensors_of
from tools import Three, by_hand, numbers, one_round, personal, three

SPACE = Darts((1, 4, 4), 2, channels=2, cells=3, variant="s2")
PIXELS = [[(250, 0), (40, 1), (120, 0), (30, 1)], [(90, 1), (160, 0), (20, 1), (220, 1), (70, 0)]]  # (pixel, label)
LOCAL = Local(epochs=2.0, batch=8, lr=0.1, momentum=0.9, weight_decay=1e-3, clip=0.5)


def federation(method, rounds: int = 20, local: Local = LOCAL, space=SPACE, pixels=PIXELS, trained: int = 2, **options):
    """Clients whose first `trained` images are train and the rest val, side by side as in a real store.

    Images are noise instead of one colour each, on which normalisation would amplify rounding.
    """
    found = by_hand(method, pixels, local, space, rounds, **options)
    images = found.store.ranges[0, TRAIN].images
    images.copy_(torch.from_numpy(rng_of("images").integers(0, 256, images.shape, dtype=np.uint8)))
    for i in range(len(pixels)):
        whole = found.store.ranges[i, TRAIN]
        found.store.ranges[i, TRAIN] = replace(whole, size=trained)
        found.store.ranges[i, VAL] = replace(whole, start=whole.start + trained, size=whole.size - trained)
    return found


def after(found, rounds: int, **values):
    """The state after some rounds."""
    state = found.begin()
    state.server = state.server.replace(**values)
    for _ in zip(range(rounds), found.rounds(state, lambda event: None), strict=False):
        pass
    return state


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that awaits no engine."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


# the update, by hand ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThreeCells(Three):
    """Three weights that pass for a space of cells with nothing to search."""

    full_keep = ()


class Hand(Spider):
    def check(self, job) -> None:
        """Three weights are no cells; one round has no search."""


HAND = ThreeCells((1, 1, 1), 2)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]  # as in test_methods_golden: pixel 1, logits = body * head
PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)


def test_local_weights_are_pulled_towards_the_received_ones() -> None:
    found = by_hand(Hand(lamda=0.5), DATA, PLAIN, HAND)
    state = found.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    kept = asdict(Search.begin(HAND, rng_of()))  # type: ignore[arg-type]
    state.memories = {i: {"v": three(1, 0.5, -0.5), "search": kept} for i in range(2)}
    state = next(found.rounds(state, lambda event: None))
    # line 18 from v = (1; 0.5, -0.5) with w = (1; 0, 0): label 0 has probability 1 / (1 + exp(-1)) there
    q = 1 - 1 / (1 + math.exp(-1))
    head = 0.5 - 0.2 * (-q + 0.5 * 0.5)
    assert numbers(personal(found, state, 0)) == pytest.approx([1 - 0.2 * -q, head, -head])
    head = 0.5 - 0.2 * ((1 - q) + 0.5 * 0.5)  # client 1 has the other label
    assert numbers(personal(found, state, 1)) == pytest.approx([1 - 0.2 * (1 - q), head, -head])
    # lines 17 and 6: w is FedAvg's, as if there were no v; heads (0.1, -0.1) and (-0.1, 0.1) with masses 1 and 3
    assert numbers(state.server.weights) == pytest.approx([1, -0.05, 0.05])


def test_both_models_see_the_same_batches() -> None:
    pixels = [[(10 * i, i % 2) for i in range(12)]]
    found = by_hand(Hand(lamda=1e-9), pixels, replace(PLAIN, batch=3, momentum=0.9), HAND)
    state = one_round(found, weights=three(1, 0.3, 0))
    # nearly without a pull these are the same steps from the same start, so equal batches lead to equal weights
    assert numbers(personal(found, state, 0)) == pytest.approx(numbers(state.server.weights), abs=1e-6)


@pytest.mark.parametrize("lamda", [5.0, 50.0, 500.0])
def test_with_growing_lambda_the_local_weights_become_the_shared_ones(lamda: float) -> None:
    found = by_hand(Hand(lamda=lamda), DATA, replace(PLAIN, lr=1 / lamda), HAND)
    state = found.begin()
    state.server = state.server.replace(weights=three(1, 0, 0))
    kept = asdict(Search.begin(HAND, rng_of()))  # type: ignore[arg-type]
    state.memories = {0: {"v": three(1, 0.5, -0.5), "search": kept}}
    state = next(found.rounds(state, lambda event: None))
    # one step of eta = 1 / lambda has the closed form v = w - grad F(v) / lambda: it forgets v and tends to w
    q = 1 - 1 / (1 + math.exp(-1))
    expected = [1 + q / lamda, q / lamda, -q / lamda]
    assert numbers(personal(found, state, 0)) == pytest.approx(expected, abs=1e-6)


def test_infinite_lambda_is_the_shared_weights() -> None:
    found = federation(Spider(lamda=math.inf))
    state = after(found, 2)
    kept, w = personal(found, state, 0), state.server.weights
    assert all(torch.equal(t, w[n]) for n, t in kept.items() if "running" not in n)
    assert "v" not in state.memories[0]
    with pytest.raises(UserError, match="overshoot"):
        federation(Spider(lamda=2 * 1.9 / LOCAL.lr))


def test_without_lambda_a_client_knows_nothing_of_the_others() -> None:
    def local_weights(seed: int):
        return after(federation(Spider(lamda=0.0)), 2, weights=SPACE.new_weights(seed)).memories[0]["v"]

    a, b = local_weights(1), local_weights(2)
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("searcher", ["perturbation", "milenas"])
def test_without_lambda_nothing_is_sent_and_clients_learn(searcher: str) -> None:
    found = federation(Spider(lamda=0.0, searcher=searcher))  # type: ignore[arg-type]
    state = found.begin()
    before = {n: t.clone() for n, t in state.server.weights.items()}
    seat = found.job.seats[0]
    assert not found.method.ask(state.server, seat).weights
    events: list[Event] = []
    for _ in zip(range(2), found.rounds(state, events.append), strict=False):
        pass
    assert {e.value for e in events if e.metric in ("bytes_up", "bytes_down")} == {0}
    assert all(torch.equal(t, before[n]) for n, t in state.server.weights.items())
    first = found.engine.initial(found.job.space, found.job.seed)
    assert not torch.equal(state.memories[0]["v"]["head.weight"], first["head.weight"])
    assert found.method.shared(state.server) is None


# the search -------------------------------------------------------------------------------------------------------


def test_an_edge_keeps_the_operation_whose_removal_hurts_most() -> None:
    search, rng = Search.begin(SPACE, rng_of("order")), rng_of("ties")
    for question in questions(search, (1, 0)):
        edge = question.edge
        assert edge == search.edges[question.kind][0]
        assert question.removed == (0, 1)
        assert [keep[question.kind][edge] for keep in question.candidates] == [(1,), (0,)]
        for accuracies, kept in (((0.3, 0.9), 0), ((0.9, 0.3), 1)):
            found = answered(search, question, accuracies, rng)
            assert found.keep[question.kind][edge] == (kept,)
            assert edge not in found.edges[question.kind]
            assert found.edges[1 - question.kind] == search.edges[1 - question.kind]
    question = questions(search, (1, 0))[0]
    equal = {answered(search, question, (0.5, 0.5), rng).keep[question.kind][question.edge] for _ in range(40)}
    assert equal == {(0,), (1,)}  # chance decides, not the order of the list


def test_nodes_keep_their_two_best_edges_and_deleted_ones_stay_off() -> None:
    worth = rng_of("worth").permutation(28).reshape(2, 14) / 100
    asked: list[Keep] = []

    async def score(keep: Keep) -> float:
        asked.append(keep)
        return sum(worth[kind][e] for kind in (0, 1) for e in range(14) if keep[kind][e])

    singles = tuple((e % 2,) for e in range(14))
    search = replace(Search.begin(SPACE, rng_of("order")), keep=(singles, singles), edges=((), ()))
    done = finish(decide(search, (14, 3), score, rng_of("ties")))
    for kind in (0, 1):
        for node, edges in EDGES_INTO.items():
            left = {e for e in edges if done.keep[kind][e]}
            assert left == (set(sorted(edges, key=lambda e: worth[kind][e])[-2:]) if node > 2 else {0, 1})
        assert sum(map(bool, done.keep[kind])) == 8
    assert done.nodes == ((), ())
    # once an edge is deleted no later candidate has it again: the number of live edges never grows
    alive = [sum(bool(e) for kind in keep for e in kind) for keep in asked]
    assert alive == sorted(alive, reverse=True)
    assert len(asked) == 2 * (3 + 4 + 3 + 5 + 4 + 3)


def test_the_schedule_is_that_of_the_paper() -> None:
    schedule = Schedule.of(30, 20, 1000)
    due = [schedule.due(t) for t in range(1000)]
    steps = [t for t in range(1, 1000) if due[t] != due[t - 1]]
    assert steps == list(range(40, 341, 20))
    assert [due[t][0] for t in steps] == [*range(1, 15), 14, 14]
    assert [t for t in range(1, 1000) if due[t][1] > due[t - 1][1]] == [300, 320, 340]
    assert not schedule.over(339)
    assert schedule.over(340)
    assert due == [Schedule.of(0, 0, 1000).due(t) for t in range(1000)]
    short = Schedule.of(0, 0, 100)
    assert [t for t in range(1, 100) if short.due(t) != short.due(t - 1)] == list(range(4, 35, 2))
    assert Schedule.of(0, 0, 3).due(2) == (14, 3)  # several decisions in a round, but all of them
    with pytest.raises(UserError, match="last decision"):
        federation(Spider(tau=2), rounds=32)
    federation(Spider(tau=2, warm_up=1), rounds=33)


def test_phases_of_a_client_and_when_val_joins_train() -> None:
    found = federation(Spider(warm_up=30, tau=20), rounds=1000, pixels=PIXELS[:1])
    nets: dict[Any, Any] = {}
    make = found.engine.network
    found.engine.network = lambda space, arch: nets.setdefault(arch, make(space, arch))  # type: ignore[method-assign]
    server, memory, log = found.begin().server, {}, {}
    for t in sorted({0, 39, 41, 299, 301, 339, 341, *range(40, 341, 20)}):
        client = found.client(found.job.seats[0], memory, t + 1)
        work, jobs, answer = found.method.work(found.method.ask(server, found.job.seats[0]), client), [], None
        try:
            while True:
                job = work.send(answer)
                jobs.append(job)
                answer = 0.5
        except StopIteration:
            memory = client.memory
        fits = [job.stream.split.size for job in jobs if isinstance(job, Fit)]
        assert fits == [2, 2] if t < 340 else fits == [4, 4]  # train, then train and val; both models alike
        log[t] = sum(isinstance(job, Score) for job in jobs)
        assert all(job.split.size == 2 for job in jobs if isinstance(job, Score))  # val is what decides
    deletions = [2 * sum(range(3, n + 1)) for n in (3, 4, 5)]
    assert [t for t, scores in log.items() if scores] == list(range(40, 341, 20))
    assert all(log[t] == 4 for t in range(40, 300, 20))  # one edge of each cell type, two operations each
    assert log[300] - 4 + log[320] + log[340] == sum(deletions)
    assert memory["search"]["edges"] == memory["search"]["nodes"] == ((), ())
    assert [sum(map(bool, kind)) for kind in memory["search"]["keep"]] == [8, 8]


def test_a_client_that_was_away_catches_up() -> None:
    found = federation(Spider(warm_up=1, tau=1), rounds=20)
    server, seat = found.begin().server, found.job.seats[0]

    def search_at(memory, number: int):
        client = found.client(seat, memory, number)
        found.engine.run([("", found.method.work(found.method.ask(server, seat), client))])
        return client.memory

    first = search_at({}, 1)
    assert first["search"]["keep"] == SPACE.full_keep
    second = search_at(first, 6)  # rounds 1 to 5 are due, in the order drawn in round 0
    for kind in (0, 1):
        done = first["search"]["edges"][kind][:5]
        assert {e for e in range(14) if len(second["search"]["keep"][kind][e]) == 1} == set(done)
    assert second["v"].keys() == set(SPACE.names_of(second["search"]["keep"]))
    assert len(second["v"]) < len(first["v"])


def test_a_perturbed_network_is_the_one_without_the_operation() -> None:
    with torch_seed("weights"):
        weights = SPACE.new_weights("perturbed")
    x = torch.rand(5, 1, 4, 4)
    question = questions(Search.begin(SPACE, rng_of()), (1, 0))[0]
    net = SPACE.supernet().eval()
    net.load_state_dict(weights, strict=False)
    before = {n: t.clone() for n, t in net.state_dict().items() if not n.endswith("tracked")}
    for keep in question.candidates:
        other = SPACE.build_keep(keep).train()  # statistics of the images at hand
        other.load_state_dict(SPACE.cut_keep(weights, keep), strict=False)
        perturbed = Perturbed(net, SPACE).at(keep).eval()
        torch.testing.assert_close(perturbed(x), other(x))
        assert perturbed.cost == SPACE.cost_keep(keep)
    assert all(torch.equal(net.state_dict()[n], t) for n, t in before.items())  # running statistics are untouched
    assert not any(m.training for m in net.modules())


# against a plain reference ----------------------------------------------------------------------------------------


class PlainSGD:
    """SGD with momentum, decay and clipping, written out."""

    def __init__(self, net, local: Local) -> None:
        self.net, self.local, self.momenta = net, local, {}

    def step(self, x, y, anchor=None, lamda: float = 0.0) -> None:
        self.net.train().zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        named, slopes = dict(self.net.named_parameters()), {}
        for n, p in named.items():
            slopes[n] = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
            if anchor is not None:
                slopes[n] += lamda * (p.detach() - anchor[n])
        norm = math.sqrt(sum(float((g**2).sum()) for g in slopes.values()))
        with torch.no_grad():
            for n, p in named.items():
                g = slopes[n] * min(1.0, self.local.clip / (norm + 1e-6)) + self.local.weight_decay * p
                self.momenta[n] = g if n not in self.momenta else self.local.momentum * self.momenta[n] + g
                p -= self.local.lr * self.momenta[n]


def test_two_rounds_equal_a_plain_reference() -> None:
    lamda, rounds = 0.3, 2
    space = replace(SPACE, input=(1, 8, 8))  # large enough that normalisation does not amplify rounding
    pixels = [[(0, i % 2) for i in range(8)], [(0, i % 2) for i in range(1, 10)]]
    found = federation(Spider(lamda=lamda, warm_up=1, tau=1), space=space, pixels=pixels, trained=5)
    state = after(found, rounds)
    keeps = {k: state.memories[k]["search"]["keep"] for k in range(2)}

    def loaded(keep: Keep, weights):
        net = space.build_keep(keep)
        net.load_state_dict({n: weights[n] for n in tensors_of(net)}, strict=False)
        return net

    def images(k: int, which: int):
        split = found.store.split(k, which)
        at = slice(split.start, split.start + split.size)
        return split.images[at].float() / 255, split.labels[at]

    w = space.new_weights(0)
    v = {k: dict(w) for k in range(2)}
    keep = dict.fromkeys(range(2), space.full_keep)
    for t in range(rounds):
        sent = []
        for k in range(2):
            x, y = images(k, TRAIN)
            if t == 1:  # Algorithm 2, with the edges that were drawn: which operation was kept is checked here
                for kind in (0, 1):
                    (edge,) = (e for e in range(14) if len(keeps[k][kind][e]) == 1)
                    accuracies = []
                    for i in (0, 1):
                        tried = [list(edges) for edges in keep[k]]
                        tried[kind][edge] = (1 - i,)  # without operation i
                        net = loaded(tuple(map(tuple, tried)), v[k]).train()  # type: ignore[arg-type]
                        xv, yv = images(k, VAL)
                        accuracies.append(float((net(xv).argmax(1) == yv).float().mean()))
                    (kept,) = keeps[k][kind][edge]
                    assert accuracies[kept] == min(accuracies)
                    part = [list(edges) for edges in keep[k]]
                    part[kind][edge] = (kept,)
                    keep[k] = tuple(map(tuple, part))  # type: ignore[assignment]
            shared, own = loaded(space.full_keep, w), loaded(keep[k], v[k])
            a, b = PlainSGD(shared, LOCAL), PlainSGD(own, LOCAL)
            for _ in range(int(LOCAL.epochs)):  # five images are one batch
                a.step(x, y)
                b.step(x, y, w, lamda)
            sent.append(tensors_of(shared))
            v[k] = {n: p.detach().clone() for n, p in tensors_of(own).items()}
        counts = [seat.samples for seat in found.job.seats]
        w = {n: sum(m * s[n].detach() for m, s in zip(counts, sent, strict=True)) / sum(counts) for n in w}
    assert keep == keeps
    for n, tensor in w.items():
        torch.testing.assert_close(state.server.weights[n], tensor, rtol=1e-4, atol=2e-6, msg=n)
    for k in range(2):
        assert state.memories[k]["v"].keys() == v[k].keys()
        for n, tensor in v[k].items():
            torch.testing.assert_close(state.memories[k]["v"][n], tensor, rtol=1e-4, atol=2e-6, msg=n)
