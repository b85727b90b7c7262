"""FedCS and FedPA, FedUniform, HeteroFL and FedRolex: by hand, against a slow plain reference, and within budgets."""

from __future__ import annotations

import asyncio
import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from fedtailor.config import Local
from fedtailor.data.partition import TRAIN
from fedtailor.engine.client import STATISTICS
from fedtailor.engine.loop import Event, Federation
from fedtailor.errors import UserError
from fedtailor.fleet import fleet as fleets
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.method import Job, Method, Reply, Seat, Server, Task
from fedtailor.methods.fedcs import FedCS
from fedtailor.methods.fedpa import FedPA
from fedtailor.methods.fedrolex import FedRolex
from fedtailor.methods.feduniform import FedAvgUniform, FedUniform
from fedtailor.methods.heterofl import HeteroFL, owned_part
from fedtailor.registry import lookup
from fedtailor.runs.execute import Watcher, resume, start
from fedtailor.runs.milestones import bytes_to_reach
from fedtailor.runs.results import Results
from fedtailor.search.partial import learnt, part_of, without_statistics
from fedtailor.search.pruning import Candidate, prune, shrink
from fedtailor.search.rolling import average_at, cut_at, grid, window
from fedtailor.search.supernet import affords
from fedtailor.search.uniform import ladder, ordered, uniform, widest
from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch, Dimension, Space, Weights
from fedtailor.spaces.mobilenetv2 import MobileNetV2
from fedtailor.spaces.tiny import Tiny
from tools import by_hand, one_round, personal, rows, small_config

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]


# a space with three weights: two hidden channels, of which a narrow network has the first ---------------------------


class _Wide(nn.Module):
    """One weight per hidden channel, then the head: logits = head (body x)."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.body = nn.Linear(1, width, bias=False)
        self.norm = nn.BatchNorm1d(width, affine=False) if norm else nn.Identity()
        self.head = nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x.flatten(1)[:, :1])))


@dataclass(frozen=True)
class Wide(Space):
    name = "wide"
    widths: tuple[int, ...] = (1, 2)
    norm: bool = False

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return (Dimension("width", self.widths),)

    def build(self, arch: Arch) -> nn.Module:
        return _Wide(self.widths[self.check(arch)[0]], self.norm)


def wide(body: Sequence[float], *head: Sequence[float]) -> Weights:
    return {"body.weight": torch.tensor([[float(b)] for b in body]), "head.weight": torch.tensor(head).float()}


def entries(weights: Weights) -> list[float]:
    return [float(v) for name in sorted(weights) for v in weights[name].flatten()]


@dataclass(frozen=True)
class Given(FedPA):
    """FedPA on archs that a test gives."""

    archs: tuple[Arch, ...] = ()

    def choose(self, job: Job, client: Seat) -> Arch:
        return self.archs[client.id]


# FedPA --------------------------------------------------------------------------------------------------------------


def test_fedpa_averages_owners_by_samples_and_leaves_the_rest() -> None:
    """Client 0 (one image of label 0) has both channels, client 1 (three of label 1) the first; all heads are 0.

    A step of 0.2 moves a head's row by 0.2 * 1/2 * the hidden value: by 0.1 for channel 0, by twice that for channel 1.
    """
    federation = by_hand(Given(archs=((1,), (0,))), DATA, PLAIN, Wide((1, 1, 1), 2))
    state = one_round(federation, weights=wide([1, 2], [0, 0], [0, 0]))
    # channel 0: (0.1 * 1 - 0.1 * 3) / 4; channel 1 is client 0's alone
    assert state.server.weights["head.weight"].tolist() == pytest.approx(np.array([[-0.05, 0.2], [0.05, -0.2]]))
    assert state.server.weights["body.weight"].flatten().tolist() == [1, 2]


def test_entries_that_nobody_owns_keep_their_bits() -> None:
    federation = by_hand(Given(archs=((0,), (0,))), DATA, PLAIN, Wide((1, 1, 1), 2))
    before = wide([1, -0.0], [0, 0.1], [0, -0.0])
    state = one_round(federation, weights=before)
    for name, axis in (("body.weight", 0), ("head.weight", 1)):
        after, was = (t[name].select(axis, 1).contiguous() for t in (state.server.weights, before))
        assert after.view(torch.int32).tolist() == was.view(torch.int32).tolist()
    assert state.server.weights["head.weight"][0, 0] != 0


@pytest.mark.parametrize("bn", ["average", "local", "recalibrate"])
@pytest.mark.parametrize("method", [FedPA(), FedUniform(), FedCS(warm_up=0.5), HeteroFL(), FedRolex()])
def test_statistics_are_in_no_message(method: Method, bn: str) -> None:
    space = Tiny((1, 8, 8), 3)
    data = [[(20 * i + j, j % 3) for j in range(6)] for i in range(4)]
    federation = by_hand(method, data, replace(PLAIN, bn=bn), space, 4, FleetConfig("capacity-high"))
    sent = spied(federation)
    for _ in federation.rounds(state := federation.begin(), lambda event: None):
        pass
    assert all(learnt(n) for message in sent for n in (*message.weights, *message.extra))
    assert all(learnt(n) for n in state.server.weights)
    assert len(sent) == 2 * 4 * 4
    keeps = isinstance(method, FedPA) and not isinstance(method, HeteroFL) and bn != "recalibrate"
    for memory in state.memories.values():
        kept = memory.get("statistics", {})
        assert bool(kept) == keeps
        assert all(n.endswith(STATISTICS) for n in kept)


def test_a_client_uses_the_statistics_it_kept() -> None:
    """Pixels 0 and 1 of one client: its running mean starts at its own images' mean, 0.5 * body, and stays there."""
    local = replace(PLAIN, lr=1e-9, bn="local", bn_batches=1)
    federation = by_hand(Given(archs=((1,),)), [[(0, 0), (255, 1)]], local, Wide((1, 1, 1), 2, norm=True))
    state = one_round(federation, weights=wide([1, 2], [0, 0], [0, 0]))
    assert state.memories[0]["statistics"]["norm.running_mean"].tolist() == pytest.approx([0.5, 1.0])
    seat = federation.job.seats[0]
    client = federation.client(seat, state.memories[0], 1)
    net = federation.engine.run([("", federation.method.personal(federation.method.offer(state.server, seat), client))])
    assert net[0].norm.running_mean.tolist() == pytest.approx([0.5, 1.0])


def spied(federation: Federation) -> list[Task | Reply]:
    """Every task and reply of the rounds to come."""
    found: list[Task | Reply] = []
    method = federation.method
    kind = type(method)

    class Spy(kind):  # type: ignore[valid-type, misc]
        def ask(self, server: Server, client: Seat) -> Task:
            found.append(super().ask(server, client))
            return found[-1]  # type: ignore[return-value]

        def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
            found.extend(replies)
            return super().merge(server, replies)

    federation.method = Spy(**vars(method))
    return found


# greedy pruning -----------------------------------------------------------------------------------------------------


def scripted(space: Space, limit: int, accuracy: dict[Arch, float], ratio: float = 0.5) -> tuple[Arch, list[Arch]]:
    """What is left when accuracies are as written (0 elsewhere) and at most `limit` parameters fit; archs tried."""
    tried: list[Arch] = []

    async def score(arch: Arch) -> float:
        tried.append(arch)
        return accuracy.get(arch, 0.0)

    def need(arch: Arch) -> float:
        return space.cost(arch).parameters

    return asyncio.run(prune(space, ratio, lambda arch: need(arch) <= limit, need, score)), tried


def test_the_group_with_the_smallest_drop_goes_and_the_others_are_as_before() -> None:
    space = Tiny((1, 8, 8), 3)
    first, second = (1, 1, 1, 1, 0, 1), (1, 0, 1, 1, 0, 1)  # the second kernel, then the first
    limit = space.cost(second).parameters
    arch, tried = scripted(space, limit, {first: 0.9, second: 0.8, (1, 1, 1, 1, 1, 0): 0.1})
    assert arch == second
    six = [tuple(int(i != d) for i in range(6)) for d in range(6)]  # from the largest, one dimension each
    five = [tuple(0 if i == d else v for i, v in enumerate(first)) for d in range(6) if d != 4]
    assert tried == [*six, *five]  # every tentative cut starts from the arch before it: restored exactly


def test_of_equal_accuracies_the_cheapest_network_wins() -> None:
    space = Tiny((1, 8, 8), 3)
    arch, tried = scripted(space, space.cost(space.largest).parameters - 1, {})
    assert arch == min(tried, key=lambda a: space.cost(a).parameters)


def test_nothing_is_tried_where_everything_fits_and_nothing_fits_is_an_error() -> None:
    space = Tiny((1, 8, 8), 3)
    assert scripted(space, 10**9, {}) == (space.largest, [])
    with pytest.raises(UserError, match="smallest"):
        scripted(space, 1, {})


def test_cuts_are_those_of_the_slimmable_space() -> None:
    space = MobileNetV2((3, 32, 32), 10)
    rng = rng_of("cuts")
    for arch in [space.largest, space.smallest, *(space.sample(rng) for _ in range(5))]:
        for d, group in enumerate(space.groups):
            for ratio in (0.1, 0.25, 0.5, 0.9):
                assert shrink(space, arch, d, ratio) == space.shrink(arch, group, ratio)


def test_a_cut_takes_tied_layers_along() -> None:
    """Stage 4 of MobileNetV2 is added up over four blocks: one number narrows all that read or write the sum."""
    space = MobileNetV2((3, 32, 32), 10)
    d = space.groups.index("stage4")
    arch = shrink(space, space.largest, d, 0.25)
    assert arch is not None
    assert space.counts(arch)[d] == 48
    changed = {n for n, at in space.index(arch).items() if at}
    wanted = {f"body.stage4.{i}.project.{t}" for i in range(4) for t in ("conv.weight", "norm.weight", "norm.bias")}
    wanted |= {f"body.stage4.{i}.expand.conv.weight" for i in (1, 2, 3)} | {"body.stage5.0.expand.conv.weight"}
    assert {n for n in changed if learnt(n)} == wanted


def test_numbers_and_words_shrink() -> None:
    @dataclass(frozen=True)
    class Mixed(Wide):
        @property
        def dimensions(self) -> tuple[Dimension, ...]:
            return Dimension("width", (1, 2, 3, 10)), Dimension("act", ("relu", "swish")), Dimension("x", (0.5, 1.0))

    space = Mixed((1, 1, 1), 2)
    assert shrink(space, (3, 1, 1), 0, 0.75) == (1, 1, 1)  # round(2.5) is 2
    assert shrink(space, (3, 1, 1), 0, 0.01) == (2, 1, 1)  # at least one step
    assert shrink(space, (3, 1, 1), 1, 0.25) == (3, 0, 1)
    assert shrink(space, (3, 1, 1), 2, 0.25) == (3, 1, 0)
    assert shrink(space, (0, 1, 1), 0, 0.25) is None


def test_a_candidate_is_the_network_with_statistics_of_the_images() -> None:
    space = Tiny((1, 8, 8), 3)
    weights, arch = space.new_weights(0), (0, 1, 1, 1, 0, 1)
    x = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    net = space.build(arch).train()
    net.load_state_dict(space.cut(weights, arch), strict=False)
    lent = Candidate(space, without_statistics(weights), arch).eval()
    assert torch.allclose(lent(x), net(x), atol=1e-5)
    assert lent.cost == space.cost(arch)


def test_pruning_on_a_client_keeps_the_channel_that_its_data_needs() -> None:
    """Two groups of equal cost: one carries the class, the other nothing. The one without use goes."""

    class Pair(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, a, bias=False), nn.Linear(1, b, bias=False)
            self.head = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)[:, :1]
            return self.head(self.a(x).sum(1, keepdim=True) + self.b(x).sum(1, keepdim=True))

    @dataclass(frozen=True)
    class Pairs(Space):
        name = "pairs"

        @property
        def dimensions(self) -> tuple[Dimension, ...]:
            return Dimension("a", (1, 2)), Dimension("b", (1, 2))

        def build(self, arch: Arch) -> nn.Module:
            return Pair(arch[0] + 1, arch[1] + 1)

    space = Pairs((1, 1, 1), 2)
    data = [[(0, 0), (255, 1), (0, 0), (255, 1)]] * 2
    fleet = FleetConfig("capacity-high", quantity="parameters", fractions=(1.0, 0.9, 0.9))
    method = FedCS(warm_up=0.0, images=3)
    federation = by_hand(method, data, replace(PLAIN, lr=1e-9), space, 1, fleet)
    small = next(seat.id for seat in federation.job.seats if not seat.fits(space.largest))
    for useful, left in (("b", (0, 1)), ("a", (1, 0))):
        weights = {"a.weight": torch.zeros(2, 1), "b.weight": torch.zeros(2, 1)}
        weights[f"{useful}.weight"][1] = 2.0
        weights |= {"head.weight": torch.tensor([[-1.0], [1.0]]), "head.bias": torch.tensor([1.0, -1.0])}
        state = one_round(federation, weights=weights)
        assert state.server.archs[small] == left
        assert state.memories[small]["arch"] == left
        assert state.server.archs[1 - small] == (1, 1)


# FedCS in a federation ----------------------------------------------------------------------------------------------


def tiny_federation(method: Method, rounds: int = 6, clients: int = 6, fleet: str = "capacity-high") -> Federation:
    """Six clients with a few grey images each: three can afford the largest arch, two half of it, one a third."""
    data = [[(17 * ((3 * i + j) % 15), j % 3) for j in range(8)] for i in range(clients)]
    return by_hand(method, data, PLAIN, Tiny((1, 8, 8), 3), rounds, FleetConfig(fleet))


def test_warm_up_is_for_clients_with_the_capacity_and_the_others_count_nothing() -> None:
    federation = tiny_federation(FedCS(warm_up=0.5))
    space, seats = federation.job.space, federation.job.seats
    sent = spied(federation)
    state, events = federation.begin(), list[Event]()
    rounds = federation.rounds(state, events.append)
    for _ in range(3):
        next(rounds)
    able = {seat.id for seat in seats if seat.fits(space.largest)}
    assert len(able) == 3
    tasks = [m for m in sent if isinstance(m, Task)]
    replies = [m for m in sent if isinstance(m, Reply)]
    assert [bool(t.weights) for t in tasks] == [i % 6 in able for i in range(18)]
    assert all(bool(r.weights) == (r.client in able) for r in replies)
    for metric in ("bytes_down", "bytes_up", "flops", "seconds"):
        assert all((e.value == 0) == (e.client not in able) for e in events if e.metric == metric)
    assert state.server.archs == [space.largest if i in able else () for i in range(6)]
    assert not state.server.warm

    sent.clear()
    next(rounds)  # the first round after warm-up: everybody prunes, on what is also trained
    asked = [m for m in sent if isinstance(m, Task)]
    assert all(bool(t.arch) == (i in able) and not t.extra for i, t in enumerate(asked))
    assert all(affords(seat, arch) for seat, arch in zip(seats, state.server.archs, strict=True))
    sent.clear()
    next(rounds)  # and is sent its part from then on
    assert [t.arch for t in sent if isinstance(t, Task)] == state.server.archs


def test_us_net_training_is_the_sandwich_rule_on_the_clients_batches() -> None:
    """With n = 2 and one image nothing is drawn: a step of the largest on labels and of the smallest on its outputs."""
    federation = by_hand(FedCS(warm_up=1.0, widths=2), [[(255, 0)]], PLAIN, Wide((1, 1, 1), 2))
    begun = wide([1.0, -0.5], [0.3, 0.2], [0.1, -0.4])
    state = one_round(federation, weights=begun)
    leaves = {n: t.clone().requires_grad_() for n, t in begun.items()}
    whole = leaves["head.weight"] @ leaves["body.weight"]
    narrow = leaves["head.weight"][:, :1] @ leaves["body.weight"][:1]
    loss = F.cross_entropy(whole.T, torch.tensor([0])) + F.cross_entropy(narrow.T, whole.detach().softmax(0).T)
    loss.backward()
    for name, leaf in leaves.items():
        assert torch.allclose(state.server.weights[name], leaf.detach() - 0.2 * leaf.grad, atol=1e-6)
    cost = federation.job.space.cost
    client = federation.client(federation.job.seats[0], {}, 1)
    task = federation.method.ask(federation.begin().server, client.seat)
    federation.engine.run([("", federation.method.work(task, client))])
    assert client.flops == cost((1,)).train_flops + cost((0,)).train_flops


@pytest.mark.parametrize("inherit", [True, False])
def test_inherit_or_start_anew(inherit: bool) -> None:
    federation = tiny_federation(FedCS(warm_up=0.5, inherit=inherit))
    job = federation.job
    rounds = federation.rounds(state := federation.begin(), lambda event: None)
    for _ in range(3):
        next(rounds)
    warm = state.server.weights
    tasks = [federation.method.ask(state.server, seat) for seat in job.seats]
    first = warm if inherit else without_statistics(job.space.new_weights(job.seed))
    for seat, task in zip(job.seats, tasks, strict=True):
        part = part_of(job.space, first, task.arch) if task.arch else first
        assert task.weights.keys() == part.keys()
        assert all(torch.equal(task.weights[n], part[n]) for n in part)
        if not seat.fits(job.space.largest) and not inherit:
            assert all(torch.equal(task.extra[n], warm[n]) for n in warm)
    next(rounds)
    assert all(torch.equal(state.server.warm[n], warm[n]) for n in warm)
    assert any(not torch.equal(state.server.weights[n], first[n]) for n in first)


def test_pruning_looks_at_the_supernet_of_the_warm_up_whenever_it_happens() -> None:
    federation = tiny_federation(FedCS(warm_up=0.5, inherit=False))
    rounds = federation.rounds(state := federation.begin(), lambda event: None)
    for _ in range(4):
        next(rounds)
    late = state.server.replace(archs=[() for _ in state.server.archs])
    late.round = 5
    for seat in federation.job.seats[:6]:
        task = federation.method.ask(late, seat)
        assert all(torch.equal(task.extra[n], state.server.warm[n]) for n in state.server.warm)


def test_a_client_that_was_never_called_prunes_at_the_end_and_not_before() -> None:
    federation = tiny_federation(FedCS(warm_up=0.5))
    state = federation.begin()
    small = next(seat for seat in federation.job.seats if not seat.fits(federation.job.space.largest))
    state.server.round = 5
    between = federation.method.offer(state.server, small)
    assert between.arch == widest(federation.job.space, small.fits)
    state.server.round = 6
    last = federation.method.offer(state.server, small)
    assert last.arch == ()
    client = federation.client(small, {}, 6)
    net = federation.engine.run([("", federation.method.personal(last, client))])[0]
    assert small.fits(net.arch)
    assert net.arch == client.memory["arch"]
    shared = federation.method.shared(state.server)
    assert shared is not None
    assert shared.arch == federation.job.space.largest


def test_a_late_reply_does_not_make_a_client_prune_twice() -> None:
    federation = tiny_federation(FedCS(warm_up=0.0))
    small = next(seat for seat in federation.job.seats if not seat.fits(federation.job.space.largest))
    client = federation.client(small, {"arch": federation.job.space.smallest}, 1)
    task = federation.method.ask(federation.begin().server, small)
    reply = federation.engine.run([("", federation.method.work(task, client))])
    assert reply[0].arch == federation.job.space.smallest


@pytest.mark.parametrize("inherit", [True, False])
def test_resumes_bit_for_bit_from_every_phase(inherit: bool, tmp_path: Path) -> None:
    class Crash(Exception):
        """Stands for a power cut."""

    class CrashAt(Watcher):
        def __init__(self, at: int) -> None:
            self.at = at

        def round(self, number: int, facts: dict[str, float]) -> None:
            if number == self.at:
                raise Crash

    options = {"clients": 5, "participants": 4, "rounds": 6, "fleet__name": "capacity-high", "checkpoint_every": 1}
    config = small_config("fedcs", method__warm_up=0.5, method__inherit=inherit, **options)
    whole = start(config, tmp_path / "whole", "cpu", workers=1)
    for at in (3, 4, 5):  # the end of warm-up is on disk, then the first pruned clients
        with pytest.raises(Crash):
            start(config, tmp_path / str(at), "cpu", workers=2, watch=CrashAt(at))
        resumed = resume(tmp_path / str(at), "cpu", workers=2)
        assert rows(resumed) == rows(whole)
        for file in sorted((whole / "nets").iterdir()):
            assert file.read_bytes() == (resumed / "nets" / file.name).read_bytes()


def test_errors_say_what_to_do() -> None:
    with pytest.raises(UserError, match="capacity-high"):
        by_hand(FedCS(), DATA, PLAIN, Tiny((1, 8, 8), 3), 1, FleetConfig(budget=fleets.Limits(flops="50%")))
    by_hand(FedCS(warm_up=0.0), DATA, PLAIN, Tiny((1, 8, 8), 3), 1, FleetConfig(budget=fleets.Limits(flops="50%")))
    darts = lookup("space", "darts")((3, 8, 8), 3, channels=4, cells=3)
    for method in (FedCS(), FedUniform(), HeteroFL(), FedRolex()):
        assert not method.runs_on(type(darts))
        with pytest.raises(UserError, match="mobilenetv2"):
            by_hand(method, DATA, PLAIN, darts)
    assert FedPA.runs_on(type(darts))
    vit = lookup("space", "vit")
    assert FedCS.runs_on(vit)
    assert not FedRolex.runs_on(vit)
    with pytest.raises(UserError, match="feduniform"):
        by_hand(FedAvgUniform(width=0.9), DATA * 5, PLAIN, MobileNetV2((3, 8, 8), 3), 1, FleetConfig("capacity-low"))
    by_hand(FedAvgUniform(width=0.5), DATA * 5, PLAIN, MobileNetV2((3, 8, 8), 3), 1, FleetConfig("capacity-low"))


# uniform networks ---------------------------------------------------------------------------------------------------


def test_tiers_get_the_papers_widths() -> None:
    space = MobileNetV2((3, 32, 32), 10)
    for quantity in ("flops", "parameters"):
        rules = FleetConfig("capacity-high", quantity=quantity)
        federation = by_hand(FedUniform(), DATA * 5, PLAIN, space, 1, rules)
        found = {federation.method.choose(federation.job, seat) for seat in federation.job.seats}  # type: ignore
        assert found == {space.uniform(w) for w in (1.0, 0.75, 0.5)}


@pytest.mark.parametrize("name", ["tiny", "mobilenetv2", "mobilenetv3", "vit"])
def test_the_ladder_goes_down_in_all_dimensions(name: str) -> None:
    space = lookup("space", name)((3, 32, 32), 10)
    assert ordered(type(space))
    archs = ladder(space)
    assert archs[0] == space.largest
    assert archs[-1] == space.smallest
    for a, b in itertools.pairwise(archs):
        assert all(x >= y for x, y in zip(a, b, strict=True))
        assert space.cost(a).flops > space.cost(b).flops
    for arch in archs:  # in step: no dimension is ahead of another by more than a place
        if name != "mobilenetv2":
            ends = [len(d.options) - 1 for d in space.dimensions]
            low = max((i - 1) / n for i, n in zip(arch, ends, strict=True))
            high = min((i + 1) / n for i, n in zip(arch, ends, strict=True))
            assert low <= high
    assert uniform(space, 1.0) == space.largest


def test_fedavg_with_one_width_averages_statistics_where_the_run_does() -> None:
    space = Tiny((1, 8, 8), 3)
    data = [[(20 * i + j, j % 3) for j in range(6)] for i in range(2)]
    for bn in ("average", "local"):
        federation = by_hand(FedAvgUniform(), data, replace(PLAIN, bn=bn), space)
        state = one_round(federation)
        assert any(not learnt(n) for n in state.server.weights) == (bn == "average")
        shared = federation.method.shared(state.server)
        assert shared is not None
        assert shared.arch == uniform(space, 0.5)


# HeteroFL and FedRolex ----------------------------------------------------------------------------------------------


def test_heterofl_counts_clients_and_only_those_with_the_class() -> None:
    """Client 0 has one image of label 0, client 1 two images of each label.

    Client 0 masks the logit of label 1, so its row 1 gets no gradient and has no part in the average. Row 0 is the mean
    of both clients, although one has four times the samples.
    """
    data = [[(255, 0)], [(255, 1), (255, 1), (255, 0), (255, 0)]]
    space = Wide((1, 1, 1), 2)
    state = one_round(by_hand(HeteroFL(), data, PLAIN, space), weights=wide([1, 2], [0, 0], [0, 0.7]))
    # client 1's logits: 0 and 2 * 0.7; its gradient in row 1 is (p - 1/2) * (1, 2)
    p = 1 / (1 + np.exp(-1.4))
    row = np.array([0, 0.7]) - 0.2 * (p - 0.5) * np.array([1, 2])
    assert state.server.weights["head.weight"][1].tolist() == pytest.approx(row.tolist())
    # client 0's logits: 0 and, masked, 0: gradient -1/2 * (1, 2); client 1's: (1/2 - p) * (1, 2)
    moved = -0.2 * np.array([-0.5 * np.array([1, 2]), -(p - 0.5) * np.array([1, 2])])
    assert state.server.weights["head.weight"][0].tolist() == pytest.approx(moved.mean(0).tolist())


def test_heterofl_without_a_mask_is_a_plain_mean() -> None:
    state = one_round(
        by_hand(HeteroFL(mask=False), DATA, PLAIN, Wide((1, 1, 1), 2)), weights=wide([1, 2], [0, 0], [0, 0])
    )
    assert state.server.weights["head.weight"].flatten().tolist() == pytest.approx([0, 0, 0, 0], abs=1e-7)


def test_a_personal_network_of_heterofl_has_no_opinion_on_absent_classes() -> None:
    federation = by_hand(HeteroFL(), DATA, PLAIN, Wide((1, 1, 1), 2))
    state = one_round(federation, weights=wide([1, 2], [0.5, 0.5], [0.5, 0.5]))
    head = personal(federation, state, 0)["head.weight"]
    assert head[1].tolist() == [0, 0]
    assert head[0].tolist() != [0, 0]


def test_windows_roll_by_one_each_round_and_wrap() -> None:
    space = Wide((1, 1, 1), 2, widths=(3, 5))
    for shift, channels in ((0, [0, 1, 2]), (1, [1, 2, 3]), (3, [3, 4, 0]), (5, [0, 1, 2]), (9, [4, 0, 1])):
        found = window(space, (0,), shift)
        assert [a.tolist() for a in found["body.weight"]] == [channels, [0]]
        assert [a.tolist() for a in found["head.weight"]] == [[0, 1], channels]  # classes stay where they are
    whole = window(space, (1,), 3)
    assert whole["head.weight"][1].tolist() == [0, 1, 2, 3, 4]


def test_a_rolled_network_is_the_supernet_with_the_rest_at_zero() -> None:
    """Tied axes are in step: otherwise outputs of one layer would meet other layers' zeros."""
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for name in ("tiny", "mobilenetv2", "mobilenetv3"):
        space = lookup("space", name)((3, 16, 16), 5)
        weights = {n: t + 0.1 * torch.rand_like(t) for n, t in space.new_weights(0).items()}
        for shift in (1, 13):
            arch = space.sample(rng_of("rolled", name, shift))
            places = window(space, arch, shift)
            part = cut_at(weights, places)
            masked = {n: torch.zeros_like(t) for n, t in weights.items()}
            for n, axes in places.items():
                masked[n][grid(axes)] = part[n]
            small, large = space.build(arch).eval(), space.supernet().eval()
            small.load_state_dict(part, strict=False)
            large.load_state_dict(masked, strict=False)
            assert torch.allclose(small(x), large(x), atol=1e-4, rtol=1e-4)
            back = average_at({n: torch.zeros_like(t) for n, t in weights.items()}, [(part, places, 2.0)])
            assert all(torch.allclose(back[n], masked[n]) for n in masked)


def test_fedrolex_trains_every_entry_in_as_many_rounds_as_channels() -> None:
    space = Wide((1, 1, 1), 2, widths=(2, 5))
    fleet = FleetConfig(budget=fleets.Limits(parameters=float(space.cost((0,)).parameters)))
    federation = by_hand(FedRolex(), DATA, PLAIN, space, 5, fleet)
    seen, state = torch.zeros(5), federation.begin()
    state.server = state.server.replace(weights=wide([1] * 5, [0] * 5, [0] * 5))
    was = state.server.weights["head.weight"]
    for t, _ in enumerate(federation.rounds(state, lambda event: None)):
        now = state.server.weights["head.weight"]
        moved = (now != was).any(0)
        assert moved.nonzero().flatten().tolist() == sorted({t % 5, (t + 1) % 5})
        seen += moved
        was = now
    assert seen.tolist() == [2] * 5


def test_average_at_places_by_hand() -> None:
    old = {"w": torch.tensor([[1.0, 2.0], [3.0, -0.0]])}
    first = ({"w": torch.tensor([[5.0]])}, {"w": (torch.tensor([0]), torch.tensor([1]))}, 1.0)
    second = ({"w": torch.tensor([[8.0], [0.0]])}, {"w": (torch.tensor([0, 1]), torch.tensor([1]))}, 3.0)
    third = ({"w": torch.tensor([[9.0]])}, {"w": (torch.tensor([1]), torch.tensor([0]))}, 2.0)
    merged = average_at(old, [first, second, third])
    assert merged["w"].tolist() == [[1.0, (5 + 3 * 8) / 4], [9.0, 0.0]]
    kept = average_at(old, [third])
    assert kept["w"][1, 1].view(torch.int32) == old["w"][1, 1].view(torch.int32)  # not even -0.0 changes
    part, places = owned_part({"head.weight": torch.eye(2)}, {"head.weight": (torch.arange(2), torch.arange(2))},
                              torch.tensor([False, True]))  # fmt: skip
    assert part["head.weight"].tolist() == [[0.0, 1.0]]
    assert places["head.weight"][0].tolist() == [1]


# budgets ------------------------------------------------------------------------------------------------------------


def test_no_budget_is_exceeded_over_ten_thousand_draws() -> None:
    """What the methods give clients of every kind of fleet. Accuracies are drawn, so pruning takes any path."""
    rng, drawn = np.random.default_rng(0), 0
    cases = [(Tiny((1, 8, 8), 3), seed) for seed in range(140)] + [(MobileNetV2((3, 32, 32), 10), 0)]

    async def score(arch: Arch) -> float:
        return float(rng.integers(4))

    for space, seed in cases:
        seats = seats_of(space, seed)
        job = Job(space, tuple(seats), len(seats), 1, 1, seed, PLAIN)
        for seat in seats:
            fits = lambda arch, seat=seat: affords(seat, arch)  # noqa: E731
            need = lambda arch, seat=seat: max(seat.use(arch).values())  # noqa: E731
            archs = [FedPA().choose(job, seat), FedUniform().choose(job, seat)]
            if space.name == "tiny" or seat.id == 0:
                archs += [asyncio.run(prune(space, float(rng.uniform(0.2, 0.9)), fits, need, score))]
            for arch in archs:
                cost, drawn = space.cost(arch), drawn + 1
                assert seat.fits(arch)
                assert all(getattr(cost, q) <= limit for q, limit in seat.budget.limits.items() if q != "memory")
                assert cost.training_memory(seat.batch) <= seat.budget.limits.get("memory", np.inf)
    assert drawn >= 10_000


def seats_of(space: Space, seed: int) -> list[Seat]:
    """Eight clients each of the capacity fleets and of one whose memory is short."""
    largest, least = space.cost(space.largest), space.cost(space.smallest).training_memory(32) / 1e9
    found = []
    for name in ("capacity-high", "capacity-low", "uniform-memory"):
        rules = FleetConfig(name, quantity=("flops", "parameters")[seed % 2], memory_gb=(least, 2 * least))
        for i, device in enumerate(fleets.make(rules, 8, seed)):
            budget = device.budget.absolute(largest, 32, device.profile, 100)
            found.append(Seat(i, str(i), 100, device.profile, budget, True, space, 32, 100))
    return found


@pytest.mark.parametrize("method", ["fedcs", "fedpa", "feduniform", "heterofl", "fedrolex"])
def test_archs_in_the_log_keep_to_the_budget(method: str, tmp_path: Path) -> None:
    options = {
        "clients": 6,
        "participants": 4,
        "rounds": 4,
        "partition__new_clients": 1,
        "fleet__name": "capacity-high",
    }
    config = small_config(method, **options)
    run = Results.read(start(config, tmp_path / "run", "cpu", workers=1))
    devices = fleets.make(config.make_fleet(), 7, config.seed)
    space = config.make_space((1, 8, 8), 10)
    largest = space.cost(space.largest).flops
    told = run.events.where("arch") | run.events.where("personal_arch") | run.events.where("new_arch")
    assert told.sum() >= 7
    for client, text in zip(run.events.client[told], run.events.text[told], strict=True):
        arch = tuple(int(i) for i in run.events.texts[text].split("-"))
        limits = devices[client].budget.of_largest
        assert limits is not None
        assert limits.flops is not None
        assert space.cost(arch).flops <= limits.flops * largest
    kept = run.per_client("personal_flops", "") | run.per_client("new_flops", "")
    assert len(kept) == 7


# against a slow plain reference -------------------------------------------------------------------------------------


def test_two_rounds_are_those_of_a_plain_reference() -> None:
    """FedPA on real sub-networks, written again with loops over entries, full supernets and torch's own optimiser."""
    space, local = Tiny((1, 8, 8), 3), Local(epochs=2.0, batch=4, lr=0.1, momentum=0.9, weight_decay=1e-3, bn="local")
    archs = ((1, 0, 1, 0, 1, 1), (0, 1, 0, 1, 0, 1))
    rng = np.random.default_rng(0)
    data = [[(int(rng.integers(256)), int(rng.integers(3))) for _ in range(n)] for n in (4, 2)]
    federation = by_hand(Given(archs=archs), data, local, space, 2)
    noise = torch.from_numpy(rng.integers(0, 256, (6, 1, 8, 8))).to(torch.uint8)
    for key, split in list(federation.store.ranges.items()):
        federation.store.ranges[key] = replace(split, images=noise)
    state = federation.begin()
    supernet = {n: t.clone() for n, t in state.server.weights.items()}
    for _ in federation.rounds(state, lambda event: None):
        pass

    for _ in range(2):
        parts = []
        for client, arch in enumerate(archs):
            split = federation.store.split(client, TRAIN)
            net = space.build(arch).train()
            named = dict(net.named_parameters())
            for name, parameter in named.items():
                off = offsets(parameter, supernet[name])
                for at in np.ndindex(*parameter.shape):  # entry by entry
                    parameter.data[at] = supernet[name][tuple(np.add(at, off))]
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            for _ in range(2):  # two epochs of one batch: these clients have no more images than that
                mine = slice(split.start, split.start + split.size)
                optimiser.zero_grad()
                F.cross_entropy(net(split.images[mine].float() / 255), split.labels[mine]).backward()
                optimiser.step()
            parts.append((len(data[client]), {n: p.detach() for n, p in named.items()}))
        merged = {n: t.clone() for n, t in supernet.items()}
        for name, tensor in supernet.items():
            for at in np.ndindex(*tensor.shape):
                owners = []
                for mass, part in parts:
                    if name not in part:
                        continue
                    inner = np.subtract(at, offsets(part[name], tensor))
                    if (inner >= 0).all() and (inner < part[name].shape).all():
                        owners.append((mass, float(part[name][tuple(inner)])))
                if owners:
                    merged[name][at] = sum(m * v for m, v in owners) / sum(m for m, _ in owners)
        supernet = merged
    assert state.server.weights.keys() == supernet.keys()
    for name, tensor in supernet.items():
        assert torch.allclose(state.server.weights[name], tensor, atol=2e-5), name


def offsets(part: Tensor, whole: Tensor) -> list[int]:
    """Where a sub-network's tensor begins in the supernet's: leading channels, centred kernels."""
    return [(w - s) // 2 if axis > 1 else 0 for axis, (s, w) in enumerate(zip(part.shape, whole.shape, strict=True))]


# pictures and milestones --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    parent = tmp_path_factory.mktemp("runs")
    options = {"clients": 5, "participants": 4, "rounds": 4, "fleet__name": "capacity-high", "evaluate_every": 1}
    return {
        m: Results.read(start(small_config(m, **options), parent / m, "cpu", workers=1))
        for m in ("fedcs", "feduniform")
    }


def test_shrinkage_of_a_run(runs: dict[str, Results], tmp_path: Path) -> None:
    from fedtailor.report.shrink import read_shrinkage

    found = read_shrinkage(runs["fedcs"])
    assert found.shares.shape == (5, 6)
    assert sum(map(len, found.groups.values())) == 5
    assert next(iter(found.groups)) == "flops ≤ 100 % of largest"
    assert (found.mean("flops ≤ 100 % of largest") == 1).all()
    assert found.distance("flops ≤ 100 % of largest") == 0
    # kernels of 3 are 0.6 of 5, widths and depths 0.5
    assert set(found.shares.flatten().tolist()) <= {0.5, 0.6, 1.0}
    found.to_svg(tmp_path / "shrink.svg")
    assert (tmp_path / "shrink.svg").read_text().startswith("<svg")
    found.to_csv(tmp_path / "shrink.csv")
    lines = list(csv.DictReader((tmp_path / "shrink.csv").read_text().splitlines()))
    assert len(lines) == 30
    assert {line["dimension"] for line in lines} == set(found.dimensions)


def test_bytes_to_reach_an_accuracy(runs: dict[str, Results]) -> None:
    run = runs["feduniform"]
    rounds, mean, _, _ = run.series("personal_accuracy", "val")
    reached = bytes_to_reach(run, float(mean[-1]))
    assert reached is not None
    first = int(np.flatnonzero(mean >= mean[-1])[0])
    assert reached.round == rounds[first]
    assert all(mean[:first] < mean[-1])
    total = sum(
        float(v) for r, m, v in zip(run.events.round, run.events.metric, run.events.value, strict=True)
        if r <= reached.round and run.events.metrics[m] in ("bytes_up", "bytes_down")
    )  # fmt: skip
    assert reached.bytes == total > 0
    assert bytes_to_reach(run, 1.1) is None
    with pytest.raises(UserError, match="personal"):
        bytes_to_reach(run, 0.5, "best")


def test_commands(runs: dict[str, Results], tmp_path: Path) -> None:
    import typer

    from fedtailor.cli.milestones import milestones_command
    from fedtailor.cli.shrink import shrink_command

    app = typer.Typer()
    app.command("shrink")(shrink_command)
    app.command("milestones")(milestones_command)
    folders = [str(run.folder) for run in runs.values()]
    out = CliRunner().invoke(app, ["shrink", folders[0], "--csv", str(tmp_path / "s.csv")])
    assert out.exit_code == 0, out.output
    assert (runs["fedcs"].folder / "shrink.svg").is_file()
    arguments = ["milestones", *folders, "-a", "0.05", "-a", "1.0", "--csv", str(tmp_path / "m.csv")]
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 0, out.output
    lines = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert [(line["run"], line["wanted"]) for line in lines] == [(m, a) for m in runs for a in ("0.05", "1.0")]
    assert all(line["round"] for line in lines if line["wanted"] == "0.05")
