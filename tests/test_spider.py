"""SPIDER: updates by hand, the search step by step, what is sent, a slow plain reference, and the gain matrix."""

from __future__ import annotations

import csv
import math
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedtailor.cli.gain import cells_command, gain_command
from fedtailor.config import Local
from fedtailor.data.partition import TRAIN, VAL
from fedtailor.engine.jobs import Fit, Score
from fedtailor.errors import UserError
from fedtailor.evaluate import evaluate
from fedtailor.fleet.fleet import FleetConfig, Limits
from fedtailor.method import Reply
from fedtailor.methods.fednas_perturbation import GlobalPerturbation
from fedtailor.methods.spider import Spider
from fedtailor.nets.darts import ALPHA, Mixture
from fedtailor.runs.execute import Watcher, open_space, read_networks, resume, start
from fedtailor.search.gain import Gain, _tune
from fedtailor.search.perturbation import Perturbed, Schedule, Search, answered, decide, questions
from fedtailor.search.spider_milenas import discrete, mixture, relaxed, train_relaxed
from fedtailor.seeds import rng_of, torch_seed
from fedtailor.spaces.darts import Darts, Keep
from fedtailor.spaces.darts_ops import EDGES_INTO
from fedtailor.spaces.measure import tensors_of
from fedtailor.spaces.tiny import Tiny
from fedtailor.values import read_value
from tools import Three, by_hand, numbers, one_round, personal, rows, small_config, three

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
    found = by_hand(Hand(lamda=0.0), pixels, replace(PLAIN, batch=3, momentum=0.9), HAND)
    found.engine.initial = lambda space, seed: three(1, 0.3, 0)  # type: ignore[method-assign]
    state = one_round(found, weights=three(1, 0.3, 0))
    # without a pull these are the same steps from the same start, so equal batches lead to equal weights
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
        perturbed = Perturbed(net, SPACE, keep).eval()
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


# what is sent -----------------------------------------------------------------------------------------------------

SMALL = {
    "space__name": "darts",
    "space__channels": 2,
    "space__cells": 3,
    "space__variant": "s2",
    "clients": 2,
    "participants": 2,
    "rounds": 4,
    "partition__samples": 25,
    "local__batch": 16,
    "checkpoint_every": 1,
}


@dataclass
class Finished:
    """A whole run and all that was said in it."""

    folder: Path
    tasks: list[Any]
    replies: list[Any]
    memories: list[Any]  # of the clients when they replied


def whole_run(folder: Path, **options) -> Finished:
    found = Finished(folder, [], [], [])
    ask, work = Spider.ask, Spider.work

    def asked(self, server, client):
        assert server.values.keys() == {"weights"}
        found.tasks.append(ask(self, server, client))
        return found.tasks[-1]

    async def worked(self, task, client):
        reply = await work(self, task, client)
        found.replies.append(reply)
        found.memories.append(client.memory)
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spider, "ask", asked)
        patch.setattr(Spider, "work", worked)
        start(small_config("spider", **SMALL, **options), folder, "cpu", workers=1)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return whole_run(tmp_path_factory.mktemp("spider") / "run", method__lamda=0.1)


def test_no_message_holds_anything_of_the_local_network(finished: Finished, tmp_path: Path) -> None:
    assert len(finished.replies) == 2 * 4
    supernet = open_space(finished.folder).full_shapes
    for message in finished.tasks + finished.replies:
        assert {n: tuple(t.shape) for n, t in message.weights.items()} == supernet  # all of it, always
        assert message.arch == ()
        assert message.extra == {}
    assert all(task.facts == {} for task in finished.tasks)
    assert all(reply.facts.keys() == {"loss"} for reply in finished.replies)
    assert len(finished.memories[-1]["v"]) < len(supernet)  # the search did happen
    for reply, memory in list(zip(finished.replies, finished.memories, strict=True))[2:]:  # in round 1 both start at w
        own = [t for t in memory["v"].values() if t.numel() > 8]
        assert not any(torch.equal(t, s) for t in own for s in reply.weights.values() if s.shape == t.shape)
    # whatever a client does with its own network, what it sends is the same to the last bit
    alone = whole_run(tmp_path / "alone", method__lamda=0.0)
    for a, b in zip(finished.replies, alone.replies, strict=True):
        assert a.facts == b.facts
        assert all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)
    assert not torch.equal(finished.memories[-1]["v"]["head.weight"], alone.memories[-1]["v"]["head.weight"])
    # the table of events learns the arch from the evaluation after the last round, not from messages
    assert not [r for r in rows(finished.folder) if r.split(",")[3] == "arch"]
    assert [r.split(",")[0] for r in rows(finished.folder) if r.split(",")[3] == "personal_arch"] == ["4", "4"]


class Stop(Watcher):
    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == 3:
            raise InterruptedError


def test_a_search_resumes_in_its_middle(finished: Finished, tmp_path: Path) -> None:
    config = small_config("spider", **SMALL, method__lamda=0.1)
    with pytest.raises(InterruptedError):
        start(config, tmp_path / "cut", "cpu", workers=2, watch=Stop())
    newest = sorted((tmp_path / "cut" / "checkpoints").glob("memory-000000-*"))[-1]
    assert 0 < len(read_value(newest)["search"]["edges"][0]) < 14
    resumed = resume(tmp_path / "cut", "cpu", workers=2)
    assert rows(finished.folder) == rows(resumed)
    for path in sorted((finished.folder / "nets").iterdir()):
        assert path.read_bytes() == (resumed / "nets" / path.name).read_bytes()


# the other searcher, and the baseline -----------------------------------------------------------------------------


def test_milenas_moves_alpha_by_a_plain_step_on_train_and_val() -> None:
    found = federation(Spider(searcher="milenas"), local=replace(LOCAL, epochs=1.0))
    client = found.client(found.job.seats[1], {}, 1)
    v = relaxed(SPACE.new_weights(0), client)
    plain = mixture(v, client).searched().train()
    slopes = []
    for which in (TRAIN, VAL):
        split = found.store.split(1, which)
        x, y = split.at(torch.arange(split.start, split.start + split.size))
        slopes.append(torch.autograd.grad(F.cross_entropy(plain(x), y), plain.alpha))
    expected = [v[n] - 0.05 * (a + 2.0 * b) for n, a, b in zip(ALPHA, *slopes, strict=True)]
    net = mixture(v, client)
    found.engine.run([("", train_relaxed(net, client, SPACE.new_weights(0), 0.1, 0.05, 2.0))])
    for alpha, wanted in zip(net.alpha, expected, strict=True):
        torch.testing.assert_close(alpha, wanted, rtol=1e-4, atol=1e-6)
    assert not any(a.requires_grad for a in net.alpha)


def test_milenas_searches_for_two_fifths_and_then_keeps_the_largest_alpha() -> None:
    found = federation(Spider(searcher="milenas"), rounds=5, pixels=PIXELS[1:])
    state = found.begin()
    for number, _ in enumerate(found.rounds(state, lambda event: None), 1):
        memory = state.memories[0]
        searching = number <= 2
        assert (ALPHA[0] in memory["v"]) == searching
        if searching:
            best = discrete(memory["v"])
            assert memory["search"]["keep"] == SPACE.full_keep
        else:
            assert memory["search"]["keep"] == best
            assert memory["v"].keys() == set(SPACE.names_of(best))
        if number == 2:
            seat = found.job.seats[0]
            client = found.client(seat, memory, number)
            net = found.engine.run([("", found.method.personal(found.method.offer(state.server, seat), client))])[0]
            assert isinstance(net, Mixture)
            assert evaluate(found, state, None)[0]
    for wrong in ({"lamda": math.inf}, {"search_rounds": 5}):
        with pytest.raises(UserError, match="milenas"):
            federation(Spider(searcher="milenas", **wrong), rounds=5)


def test_the_global_search_decides_by_the_mean_of_the_clients() -> None:
    method = GlobalPerturbation(warm_up=1, tau=1)
    found = federation(method)
    state = after(found, 1)
    assert Search(**state.server.search).keep == SPACE.full_keep
    task = method.ask(state.server, found.job.seats[0])
    assert task.extra["candidates"].shape == (4, 2, 14, 2)  # two operations of one edge of each cell type
    replies = [
        Reply(task.weights, task.arch, {"accuracies": torch.tensor(a, dtype=torch.float64)}, client=i, samples=1)
        for i, a in enumerate(([0.1, 0.5, 0.2, 0.9], [0.9, 0.6, 0.2, 0.1]))  # means 0.5, 0.55 and 0.2, 0.5
    ]
    search = Search(**method.merge(state.server, replies).search)
    for kind, kept in enumerate((0, 0)):
        (edge,) = (e for e in range(14) if len(search.keep[kind][e]) == 1)
        assert search.keep[kind][edge] == (kept,)
    replies[1] = replace(replies[1], extra={"accuracies": torch.tensor([0.9, 0.0, 0.9, 0.1], dtype=torch.float64)})
    other = Search(**method.merge(state.server, replies).search)
    assert [[p for p in kind if len(p) == 1] for kind in other.keep] == [[(1,)], [(1,)]]


def test_the_global_search_ends_with_one_cell_for_all() -> None:
    found = federation(GlobalPerturbation(), rounds=8, pixels=PIXELS[1:])
    state = after(found, 8)
    search = Search(**state.server.search)
    assert search.edges == search.nodes == ((), ())
    assert [sum(map(bool, kind)) for kind in search.keep] == [8, 8]
    assert all(len(places) <= 1 for kind in search.keep for places in kind)
    assert personal(found, state, 0).keys() == set(SPACE.names_of(search.keep))


# errors, gain and drawings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Spider(), GlobalPerturbation()])
def test_what_cannot_be_searched_is_refused(method) -> None:
    with pytest.raises(UserError, match=r"space.name=darts"):
        federation(method, space=Tiny((1, 4, 4), 2))
    assert not method.runs_on(Tiny)
    assert method.runs_on(Darts)
    with pytest.raises(UserError, match="whole supernet"):
        federation(method, fleet=FleetConfig(budget=Limits(parameters=2000.0)))
    with pytest.raises(UserError, match=r"partition.val"):
        after(federation(method, trained=4, pixels=[PIXELS[0]]), 1)


def test_gain_by_hand() -> None:
    gain = Gain(("a", "b", "c"), np.array([[0.9, 0.8, 0.6], [0.5, 0.5, 0.7], [0.1, 0.2, 0.3]]))
    assert gain.gains == pytest.approx([0.2, -0.1, 0.15])
    assert gain.mean == pytest.approx(0.25 / 3)


def test_the_epoch_of_a_gain_is_chosen_on_val() -> None:
    class Scripted:
        scores, epoch, loaded = [0.2, 0.8, 0.8, 0.4], 0, None

        async def fit(self, net, **options):
            self.epoch += 1

        async def score(self, net):
            return self.scores[self.epoch - 1]

        def copy(self, net):
            return self.epoch

        def load(self, net, weights):
            self.loaded = weights

    client = Scripted()
    finish(_tune(None, client, 4, 0.1))  # type: ignore[arg-type]
    assert client.loaded == 2


def test_gain_and_cells_of_a_finished_run(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run = finished.folder
    gain_command(run, epochs=1, csv=tmp_path / "g.csv", svg=tmp_path / "g.svg", device="cpu")
    with (tmp_path / "g.csv").open() as file:
        found = list(csv.DictReader(file))
    names = ("client-000", "client-001")
    assert [(r["client"], r["architecture_of"]) for r in found] == [(a, b) for a in names for b in names]
    assert all(0 <= float(r["test_accuracy"]) <= 1 for r in found)
    assert "architecture of" in (tmp_path / "g.svg").read_text()
    assert "mean gain" in capsys.readouterr().out
    with pytest.raises(UserError, match="two clients"):
        gain_command(run, epochs=1, clients="0", device="cpu")
    cells_command(run, tmp_path / "cells")
    drawings = sorted((tmp_path / "cells").iterdir())
    assert [p.name for p in drawings] == ["000000.svg", "000001.svg"]
    assert all(p.read_text().count("8 edges") == 2 for p in drawings)
    space = open_space(run)
    for client, (_, arch, weights) in read_networks(run, space).items():
        assert arch == finished.memories[-2:][client]["search"]["keep"]
        assert weights.keys() == set(space.names_of(arch))  # type: ignore[attr-defined]
