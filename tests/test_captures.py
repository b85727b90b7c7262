"""What the GPU engine does when a step cannot be captured, or somebody stops; mostly in pretence."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import needs_gpu
from fedtailor.engine import replay
from fedtailor.engine.local import Cannot
from fedtailor.engine.replay import FitSlot, Forwards, Lane, Replay
from fedtailor.engine.room import Room
from party import Party, Shrinking
from pretend_cuda import Graph, Stream, pretend

# a step cannot be captured ------------------------------------------------------------------------------------------


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
def test_a_lane_knows_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    room, lane, x = Room(device), Lane(torch.cuda.Stream()), torch.ones(1, device=device)
    ours = torch.cuda.memory_reserved  # other processes may take memory while this runs
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room.size - ours(device), room.size))
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
