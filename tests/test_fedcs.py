"""FedCS and FedPA, FedUniform, HeteroFL and FedRolex: by hand, against a slow plain reference, and within budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.config import Local
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
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.registry import lookup
from fedtailor.runs.execute import Watcher, resume, start
from fedtailor.search.partial import learnt, part_of, without_statistics
from fedtailor.search.pruning import Candidate, prune, shrink
from fedtailor.search.supernet import affords
from fedtailor.search.uniform import widest
from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch, Dimension, Space, Weights
from fedtailor.spaces.mobilenetv2 import MobileNetV2
from fedtailor.spaces.tiny import Tiny
from tools import by_hand, one_round, rows, small_config

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

    async def score(arch: Arch, whole: Arch) -> float:
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
