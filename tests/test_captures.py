"""What the GPU engine does when a step cannot be captured, memory is full or somebody stops; mostly in pretence."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import needs_gpu
from fedtailor.data.partition import VAL
from fedtailor.engine import replay
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.jobs import Made, Recipe, Score
from fedtailor.engine.local import Cannot
from fedtailor.engine.replay import FitSlot, Forwards, Lane, Replay
from fedtailor.engine.room import Room
from fedtailor.runs.execute import prepare
from pretend_cuda import Graph, Stream, pretend
from test_sweep import config_of


class Party:
    """A federation of equal clients on a card that is pretended, and what its engine says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str = "fedavg", **changes: Any) -> None:
        self.said: list[str] = []
        self.captured: list[Replay] = []
        small = {"local__epochs": 0.3, "local__lr": 0.003, "precision": "fp32"}
        device, setup = pretend(monkeypatch), prepare(config_of(method, "", **(small | changes)))
        self.federation, _ = setup.federation(device, 1, say=self.said.append)
        found = self.federation.engine
        assert isinstance(found, CudaEngine)
        self.engine, self.task = found, self.federation.method.ask(self.federation.begin().server, setup.job.seats[0])
        real = Replay.capture

        def capture(slot: Replay, step: Callable[[], Tensor]) -> None:
            self.captured.append(slot)
            slot.lane.held += 1
            real(slot, step)

        monkeypatch.setattr(Replay, "capture", capture)

    def client(self, i: int) -> Any:
        return self.federation.client(self.federation.job.seats[i], {}, 1)

    async def trained(self, i: int) -> float:
        client = self.client(i)
        net = client.build(self.task)
        await client.fit(net)
        return await client.score(net)

    async def score(self, i: int) -> float:
        net = self.engine.network(self.federation.job.space, ())
        return await Score(net, self.federation.store.split(i, VAL))

    def train(self, clients: int) -> list[float]:
        return self.engine.run((f"client {i}", self.trained(i)) for i in range(clients))


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Party:
    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    return Party(monkeypatch, clients=8, participants=8)


# memory is full -----------------------------------------------------------------------------------------------------


def test_scoring_on_a_full_card_comes_to_rest(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = party.engine, party.engine._hits
    refused = [0]

    def hits(job: Score) -> Tensor:
        kept = len(engine.slots.lent) + sum(map(len, engine.slots.free.values()))
        if kept > 4:
            refused[0] += 1
            raise torch.OutOfMemoryError
        return real(job)

    monkeypatch.setattr(engine, "_hits", hits)
    seen: list[tuple[int, int]] = []
    for _ in range(6):
        assert len(party.train(8)) == 8
        seen.append((len(party.captured), refused[0]))
    assert seen[-1] == seen[-2] == seen[-3]  # nothing is captured anew, and nothing is refused
    assert 1 < engine.at_once <= 4
    assert engine.crowd > 8
    assert sum("memory is full" in text for text in party.said) == 2


def test_what_costs_least_goes_first(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real, refuse = party.engine, party.engine._hits, iter([True, False, True, False, True, False, False])
    party.train(6)
    assert sum(map(len, engine.slots.free.values())) == 6
    kept = next(iter(engine.slots.free.values()))[3:]

    def hits(job: Score) -> Tensor:
        if next(refuse, False):
            raise torch.OutOfMemoryError
        return real(job)

    monkeypatch.setattr(engine, "_hits", hits)
    before = len(engine.slots.lanes)
    engine.run([("one", party.score(0))])
    assert sum(map(len, engine.slots.free.values())) == 6  # the passes went
    engine.run([("one", party.score(0))])
    assert list(engine.slots.free.values()) == [kept]  # those unused for longest went, and networks
    assert engine.slots.most == 6  # as many as a round has used: fewer would be captured anew each time
    assert len(engine.slots.lanes) == before


def test_what_a_refused_pass_has_computed_is_gone_when_it_is_tried_again(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, computed, engine = party.engine._hits, list[Any](), party.engine

    def hits(job: Score) -> Tensor:
        assert all(ref() is None for ref in computed)
        if engine._passes._captures or len(engine.slots):
            images = torch.ones(3)
            computed.append(weakref.ref(images))
            raise torch.OutOfMemoryError
        return real(job)

    async def score() -> float:
        client = party.client(0)
        net = client.build(party.task)
        await client.fit(net)  # on the client's own network, a step that only stays until all are dropped
        return await client.score(net)

    monkeypatch.setattr(engine, "_hits", hits)
    assert len(engine.run([("one", score())])) == 1
    assert len(computed) == 2  # passes went, then all


def test_a_network_that_finds_no_room_is_made_when_there_is_some(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    party.train(4)
    engine, real, calls = party.engine, party.engine.slots.make, iter(range(99))

    def make(*args: Any) -> nn.Module:
        if next(calls) < 2:
            raise torch.OutOfMemoryError
        return real(*args)

    engine.slots._networks.clear()
    monkeypatch.setattr(engine.slots, "make", make)
    assert len(engine.run([("one", party.score(0))])) == 1
    monkeypatch.setattr(engine.slots, "make", lambda *_: make())
    calls = iter([0] * 99)
    with pytest.raises(torch.OutOfMemoryError):
        engine.run([("one", party.score(0)), ("two", party.score(1))])


@pytest.mark.parametrize("refusals", [1, 3])  # passes go first, then captured steps: each time a little
def test_batches_that_find_no_room_are_prepared_when_there_is_some(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BUFFER", 1)
    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    party = Party(monkeypatch, clients=6, participants=6, local__epochs=2.0)
    party.train(6)
    expected, real, calls = party.train(2), Replay._fill, iter(range(99))
    assert sum(map(len, party.engine.slots.free.values())) == 6

    def fill(slot: Replay) -> None:
        if slot.done and next(calls) in range(3, 3 + refusals):
            raise torch.OutOfMemoryError
        real(slot)

    monkeypatch.setattr(Replay, "_fill", fill)
    assert party.train(2) == expected
    assert next(calls) > 6
    assert sum("memory is full" in text for text in party.said) == 1


def test_a_capture_that_finds_no_room_is_tried_again_when_torch_holds_nothing_unused(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives a capture nothing of what it holds unused, be it all that the card has."""
    real, unused, tried = Replay.capture, [True], list[Any]()

    def capture(slot: Replay, step: Callable[[], Tensor]) -> None:
        if unused[0]:
            tried.append(weakref.ref(slot))
            raise torch.OutOfMemoryError
        real(slot, step)

    def empty() -> None:
        assert all(ref() is None for ref in tried)  # what it was given is among the unused
        unused[0] = False

    monkeypatch.setattr(Replay, "capture", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    before = party.engine.at_once
    assert len(party.train(3)) == 3
    assert len(tried) == 1
    assert party.engine.at_once == before
    assert not any("memory is full" in text for text in party.said)


def test_what_lanes_hold_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(pretend(monkeypatch))
    stats = {f"{kind}_bytes": {"all": {"current": size}} for kind, size in {"reserved": 900, "allocated": 100}.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert room.free() == 850
    assert room.free(lanes=600) == 250
    assert room.free(lanes=900) == 50  # something of theirs is in use


def test_memory_of_lanes_counts_until_their_last_step_is_gone(party: Party) -> None:
    party.train(3)
    slots = party.engine.slots
    assert slots.held == 3
    last = next(iter(slots.free.values()))[0]
    party.captured.clear()
    party.engine.forget()
    gc.collect()  # of a pretended graph
    assert slots.held == last.lane.held == 1
    del last
    gc.collect()
    assert slots.held == 0


def test_a_step_that_ran_while_all_were_dropped_does_not_hand_its_clients_network_to_others(party: Party) -> None:
    slots = party.engine.slots
    net = slots.network(party.federation.job.space, ())
    key = replay.Step(party.federation.job.space, (), None, (4, 1, 8, 8), party.federation.job.local, *[False] * 3)
    slot = slots.slot(key, net, set(), 4)
    assert slots.lent == {net: slot}
    slots.forget()
    slots.keep(slot)
    assert not slots.free
    slots.recycle()
    assert slots.network(party.federation.job.space, ()) is net


def test_kept_steps_let_go_of_what_clients_have(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party(monkeypatch, "scaffold", clients=3, participants=3)
    pushes: list[Any] = []
    real = FitSlot.begin
    monkeypatch.setattr(
        FitSlot, "begin", lambda slot, job: (pushes.append(weakref.ref(next(iter(job.push.values())))), real(slot, job))
    )
    state = party.federation.begin()
    next(party.federation.rounds(state, lambda event: None))
    assert len(pushes) == 3
    assert sum(map(len, party.engine.slots.free.values())) == 3
    assert not any(ref() is not None for ref in pushes)


# a step cannot be captured ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shrinking(Recipe):
    """Halves all weights."""

    def make(self, nets: Any, values: Any) -> Made:
        weights = list(nets[0].parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                torch._foreach_mul_(weights, 0.5)
            return x.mean()

        return Made(step, list)


def refusing(why: Iterator[Exception], tried: list[Any]) -> Callable[..., None]:
    def capture(slot: Replay, step: Callable[[], Tensor]) -> None:
        tried.append(slot)
        slot.graph = Graph()  # type: ignore[assignment]
        raise next(why)

    return capture


@pytest.mark.parametrize(("error", "tries"), [(Cannot("reads a value"), 2), (torch.OutOfMemoryError("full"), 12)])
def test_a_recipe_that_cannot_be_captured_is_not_tried_for_ever(
    error: Exception, tries: int, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(Replay, "capture", refusing(iter([error] * 99), tried))
    found: list[float] = []

    async def work(i: int) -> None:
        client = party.client(i)
        net = client.build(party.task)
        before = float(next(net.parameters()).detach().norm())
        await client.loop(Shrinking(), (net,), steps=3)
        found.append(float(next(net.parameters()).detach().norm()) / before)

    for _ in range(2):
        party.engine.run((f"client {i}", work(i)) for i in range(3))
    assert len(tried) == tries
    assert found == pytest.approx([0.125] * 6)
    assert sum("step by step" in text for text in party.said) == 1


def test_a_recipes_step_that_finds_no_room_for_batches_goes_with_the_others(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        client = party.client(0)
        await client.loop(Shrinking(), (client.build(party.task),), steps=3)

    slots, real = party.engine.slots, Replay.start

    def start(slot: Replay, *how: Any) -> None:
        if any(ref() is slot for ref in first):
            raise torch.OutOfMemoryError
        real(slot, *how)

    party.engine.run([("one", work())])
    first = [weakref.ref(slot) for kept in slots.loops.values() for slot in kept]
    party.captured.clear()
    monkeypatch.setattr(Replay, "start", start)
    gc.disable()  # nobody collects what refers to itself
    try:
        party.engine.run([("one", work())])
        assert [ref() for ref in first] == [None]
    finally:
        gc.enable()
    assert sum(map(len, slots.loops.values())) == 1


def test_a_fit_that_cannot_be_captured_is_not_tried_for_ever(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(Replay, "capture", refusing(iter([Cannot("reads a value")] * 99), tried))
    for _ in range(2):
        party.train(4)
    assert sum(isinstance(slot, FitSlot) for slot in tried) == 2
    assert len(tried) == 4  # nor as a step of its own
    assert sum("step by step" in text for text in party.said) == 1
    assert all(p.requires_grad for p in party.engine.network(party.federation.job.space, ()).parameters())


def test_a_pass_that_cannot_be_captured_is_tried_once(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(*_: Any) -> Any:
        tried.append(1)
        raise Cannot("reads a value")

    monkeypatch.setattr(replay, "Forward", refuse)
    forwards, net = Forwards(party.engine.slots.lanes[0]), nn.Linear(3, 2)
    for _ in range(4):
        assert forwards(net, torch.ones(4, 3), lambda: True).shape == (4, 2)
    assert len(tried) == 1


def test_a_step_that_ran_out_of_memory_half_way_is_not_run_again(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while steps are captured ahead, which may fail for want of memory."""
    space, real, halved = party.federation.job.space, Replay.capture, [0]
    shape = (4, *space.input)
    key = replay.Step(space, (), None, shape, replay._shared(party.federation.job.local), *[False] * 3)
    monkeypatch.setattr(party.engine, "_next", lambda *_: iter([key]))

    def capture(slot: Replay, step: Callable[[], Tensor]) -> None:
        if not isinstance(slot, FitSlot):
            raise Cannot("reads a value")
        real(slot, step)

    def step(x: Tensor, y: Tensor) -> Tensor:
        halved[0] += 1
        if halved[0] == 3:
            raise torch.OutOfMemoryError
        return x.mean()

    async def work() -> None:
        client = party.client(0)
        await client.loop(step, [client.build(party.task)], steps=8)

    monkeypatch.setattr(Replay, "capture", capture)
    monkeypatch.setattr("fedtailor.engine.cuda.AHEAD", 1)
    with pytest.raises(torch.OutOfMemoryError):
        party.engine.run([("one", work())])
    assert halved == [3]


# somebody stops the run ---------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch is told of captures and their memory, which it finds no fault with."""
    pretend(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(Graph, "capture_end", lambda self: told.append(self))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: told.append((name, *args)), raising=False)
    return told


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt("stop"), KeyboardInterrupt),
        (ValueError("wrong"), Cannot),
        (torch.OutOfMemoryError(), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError),
        (AssertionError(), Cannot),  # which has no text
    ],
)
def test_a_capture_that_is_broken_off_leaves_its_memory_to_the_next(
    error: BaseException, raised: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, graph = Lane(Stream()), Graph()  # type: ignore[arg-type]
    pool, taken = lane._keeper.pool(), iter([100, 130])
    calls.clear()
    monkeypatch.setattr(replay, "held", lambda _: (next(taken), 0))
    with pytest.raises(raised), lane.recording(graph):  # type: ignore[arg-type]
        raise error
    assert calls == [graph]
    assert lane._keeper.pool() == pool
    assert lane.held == 30


@pytest.mark.parametrize("torch_has_ended_it", [False, True])
def test_a_void_capture_is_not_left_open(
    torch_has_ended_it: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, graph, ended = Lane(Stream()), Graph(), list[Any]()  # type: ignore[arg-type]
    pool = lane._keeper.pool()

    def end(self: Graph) -> None:
        ended.append(self)
        if self is graph:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def refuse(*_: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    calls.clear()
    monkeypatch.setattr(Graph, "capture_end", end)
    if torch_has_ended_it:
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(Cannot, match="wrong"), lane.recording(graph):  # type: ignore[arg-type]
        raise ValueError("wrong")
    released = [] if torch_has_ended_it else [("_cuda_endAllocateToPool", 0, pool), ("_cuda_releasePool", 0, pool)]
    assert calls == released  # never without the first, as what a graph releases itself
    assert lane._keeper.pool() != pool
    assert ended == [graph, lane._keeper]  # a capture that ends, after the one that did not
    assert lane.held == 0


def test_an_engine_goes_on_after_a_client_has_failed(party: Party) -> None:
    async def bad() -> float:
        client = party.client(1)
        await client.fit(client.build(party.task), lr=1e30)
        raise ValueError("wrong")

    with pytest.raises(RuntimeError, match="two: ValueError: wrong"):
        party.engine.run([("two", bad())])
    assert len(party.train(2)) == 2  # and nobody is told of a loss of that run


# on a card ----------------------------------------------------------------------------------------------------------

SCRATCH = 64 << 20  # entries


@pytest.mark.gpu
@needs_gpu
def test_a_lane_knows_what_it_holds() -> None:
    device = torch.device("cuda")
    room, lane, x = Room(device), Lane(torch.cuda.Stream()), torch.ones(1, device=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, graph = room.free(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(lane.stream), lane.recording(graph):
        x += (x.expand(SCRATCH) * 2).mean()
    assert 4 * SCRATCH <= lane.held < 5 * SCRATCH
    assert room.free() > before - SCRATCH  # what torch has unused, nobody but the lane can have
    assert room.free(lane.held) < before - 3 * SCRATCH
    held, other = lane.held, torch.cuda.CUDAGraph()
    with torch.cuda.stream(lane.stream), lane.recording(other):
        x += (x.expand(SCRATCH) * 3).mean()
    assert lane.held == held  # the same memory


@pytest.mark.gpu
@needs_gpu
def test_a_run_stopped_in_a_capture_can_be_saved() -> None:
    lane, x = Lane(torch.cuda.Stream()), torch.ones(3, device="cuda")
    torch.cuda.synchronize()

    def stopped() -> None:
        with torch.cuda.stream(lane.stream), lane.recording(torch.cuda.CUDAGraph()):
            x.add_(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert x.cpu().tolist() == [1.0, 1.0, 1.0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(lane.stream):
        with lane.recording(graph):
            x += 1
        graph.replay()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.gpu
@needs_gpu
def test_memory_goes_back_to_the_card_after_a_capture_that_was_void() -> None:
    device = torch.device("cuda")
    lane, x = Lane(torch.cuda.Stream()), torch.ones(3, device=device)
    torch.cuda.synchronize()
    with (
        pytest.raises(Cannot),
        torch.cuda.stream(lane.stream),
        lane.recording(torch.cuda.CUDAGraph()),
    ):
        float(x.sum())  # reads a value, which a capture cannot
    something = torch.empty(SCRATCH, device=device)
    reserved = torch.cuda.memory_reserved()
    del something
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 4 * SCRATCH
