"""Runs of SPIDER: what is sent, the other searcher, errors and what is drawn."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedtailor.cli.gain import cells_command, gain_command
from fedtailor.data.partition import TRAIN, VAL
from fedtailor.errors import UserError
from fedtailor.evaluate import evaluate
from fedtailor.fleet.fleet import FleetConfig, Limits
from fedtailor.method import Reply
from fedtailor.methods.fednas_perturbation import GlobalPerturbation
from fedtailor.methods.spider import Spider
from fedtailor.nets.darts import ALPHA, Mixture
from fedtailor.runs.execute import Watcher, open_space, read_networks, resume, start
from fedtailor.search.gain import Gain, _tune
from fedtailor.search.perturbation import Search
from fedtailor.search.spider_milenas import discrete, mixture, relaxed, train_relaxed
from fedtailor.spaces.darts import Darts
from fedtailor.spaces.tiny import Tiny
from fedtailor.values import read_value
from test_spider import LOCAL, PIXELS, SPACE, after, federation, finish
from tools import personal, rows, small_config

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
    other = whole_run(tmp_path / "other", method__lamda=0.2)
    for a, b in zip(finished.replies, other.replies, strict=True):
        assert a.facts == b.facts
        assert all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)
    assert not torch.equal(finished.memories[-1]["v"]["head.weight"], other.memories[-1]["v"]["head.weight"])
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
    pixels = [[(0, k % 2) for k in range(32)]] * 2  # of two images norms would make rounding large
    local = replace(LOCAL, epochs=1.0, batch=16)
    found = federation(Spider(searcher="milenas"), local=local, pixels=pixels, trained=16)
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


def test_a_global_search_that_could_not_end_is_refused() -> None:
    """Its clients decide together, so a node that has three edges to lose takes three rounds."""
    with pytest.raises(UserError, match="last decision of the search into round 19 of 18"):
        federation(GlobalPerturbation(warm_up=1, tau=1), rounds=18)
    found = federation(GlobalPerturbation(warm_up=1, tau=1), rounds=19, pixels=PIXELS[1:])
    search = Search(**after(found, 19).server.search)
    assert search.edges == search.nodes == ((), ())


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
