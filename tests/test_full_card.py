"""What the GPU engine does on a card whose memory is full, for want of room or of a capture; in pretence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.engine import client as client_room
from fedtailor.engine import replay, shelf
from fedtailor.engine.local import Cannot
from fedtailor.engine.replay import FitSlot, Forwards, Replay
from fedtailor.engine.slots import Slots
from fedtailor.errors import UserError
from fedtailor.runs.execute import prepare
from party import Party, Shrinking
from pretend_cuda import Graph, Stream, pretend
from test_sweep import config_of


def test_clients_that_find_no_room_beside_kept_steps_still_train_side_by_side(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real = party.engine, Replay.capture
    before = engine.at_once, engine.crowd
    party.train(8)

    def capture(slot: Replay, step: Any) -> None:
        if len(engine.slots.lent) + sum(map(len, engine.slots.free.values())) > 6:
            raise torch.OutOfMemoryError("full of kept steps")
        real(slot, step)

    async def work(i: int) -> float:
        client = party.client(i)
        net = client.build(party.task)
        await client.fit(net, only=lambda name: i == 0 or "bias" in name)  # the first one's step is there
        return await client.score(net)

    monkeypatch.setattr(Replay, "capture", capture)
    assert len(engine.run((f"client {i}", work(i)) for i in range(8))) == 8
    assert (engine.at_once, engine.crowd) == before


def test_what_ran_side_by_side_does_so_again_when_a_larger_client_fits_only_alone(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedtailor.engine.starting import Starter

    real, engine = Starter.start, party.engine
    engine.at_once = 4
    large = {"client 5", "client 6", "client 7"}

    def start(self: Starter, label: str, job: Any, taken: set[Any], own: int) -> Any:
        if taken and label in large:
            raise torch.OutOfMemoryError
        return real(self, label, job, taken, own)

    monkeypatch.setattr(Starter, "start", start)
    assert len(party.train(8)) == 8
    assert engine.at_once == 4


def test_a_client_for_whom_an_empty_card_is_too_small_ends_the_run(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    party.train(2)
    monkeypatch.setattr(FitSlot, "start", start)
    with pytest.raises(RuntimeError, match="client 0: the GPU's memory is too small for one client"):
        party.train(2)


def test_a_round_finds_the_steps_of_the_round_before_after_memory_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    monkeypatch.setattr(replay, "BUFFER", 1)
    changes = {"clients": 6, "participants": 6, "local__epochs": 2.0, "rounds": 6, "precision": "fp32"}
    federation, _ = prepare(config_of("ditto", "", **changes)).federation(pretend(monkeypatch), 1, say=lambda _: None)
    captures, refusals, real, fill_ = [0], [0], Replay.capture, Replay._fill

    def capture(slot: Replay, step: Any) -> None:
        captures[0] += 1
        real(slot, step)

    def fill(slot: Replay) -> None:
        if refusals[0] and slot.done:
            refusals[0] -= 1
            raise torch.OutOfMemoryError
        fill_(slot)

    monkeypatch.setattr(Replay, "capture", capture)
    monkeypatch.setattr(Replay, "_fill", fill)
    seen: list[int] = []
    for _ in federation.rounds(federation.begin(), lambda event: None):
        seen.append(captures[0])
        captures[0], refusals[0] = 0, 2 if len(seen) == 2 else 0
    assert seen[0] == 12  # a client's copy of the global network, and its own network
    assert 0 < seen[2] < 12
    assert seen[3:] == [0, 0, 0]


class Accumulating:
    """A step that adds to the gradients that it finds; the weights follow them."""

    def __init__(self, net: Any) -> None:
        self.parameters = list(net.parameters())
        self.net = net

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in self.parameters:
                p.sub_(0.01 * p.grad)
        return loss.detach()


@pytest.mark.parametrize("error", [Cannot("reads a value"), torch.OutOfMemoryError("full")])
def test_gradients_of_a_capture_that_failed_are_not_added_to(
    error: Exception, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Tensor] = []

    async def work() -> None:
        client = party.client(0)
        net = client.build(party.task)
        await client.loop(Accumulating(net).step, (net,), steps=3)
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))

    def capture(slot: Any, step: Any) -> None:
        slot.graph = Graph()
        for p in slot.nets[0].parameters():
            p.grad = torch.full_like(p, 1e6)  # of memory that nothing was written to
        raise error

    party.engine.run([("one", work())])
    monkeypatch.setattr(Replay, "capture", capture)
    party.engine.run([("one", work())])
    assert torch.equal(*found)


def test_captures_of_own_steps_and_passes_find_room_when_torch_holds_nothing_unused(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused, tried, stepped, real = [True], list[Any](), [0], Replay.capture

    def capture(slot: Any, step: Any) -> None:
        tried.append(slot)
        if unused[0]:
            slot.graph = Graph()
            raise torch.OutOfMemoryError
        real(slot, step)

    def step(x: Tensor, y: Tensor) -> Tensor:
        stepped[0] += 1
        return x.mean()

    async def work() -> None:
        client = party.client(0)
        await client.loop(step, (client.build(party.task),), steps=5)

    monkeypatch.setattr(Replay, "capture", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: unused.__setitem__(0, False))
    party.engine.run([("one", work())])
    assert len(tried) == 2
    assert stepped[0] == 5
    assert not any("step by step" in text for text in party.said)


def test_a_pass_that_finds_no_room_is_tried_twice(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(*_: Any) -> Any:
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(replay, "Forward", refuse)
    forwards, net = Forwards(party.engine.slots.lanes[0]), nn.Linear(3, 2)
    for _ in range(5):
        assert forwards(net, torch.ones(4, 3), lambda: True).shape == (4, 2)
    assert len(tried) == 2


@pytest.mark.parametrize("words", ["CUDA out of memory.", "CUDA error: out of memory"])
def test_a_first_step_that_was_broken_off_is_not_begun_again(
    words: str, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its networks are the client's own: what is half changed would be changed once more."""
    halved = [0]

    async def work() -> None:
        client = party.client(0)
        net = client.build(party.task)
        weights = list(net.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            halved[0] += 1
            with torch.no_grad():
                torch._foreach_mul_(weights, 0.5)
            raise (torch.OutOfMemoryError if words.startswith("CUDA out") else RuntimeError)(words)

        await client.loop(step, (net,), steps=3)

    party.train(2)  # there are steps that could be let go of
    with pytest.raises(UserError, match="one: the GPU's memory is full, half way"):
        party.engine.run([("one", work())])
    assert halved == [1]


def test_a_launch_for_which_the_driver_has_no_room_is_tried_again(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, real, refused = party.train(3), Replay.launch, [0]

    def launch(slot: Replay) -> None:
        if slot.done == 1 and not refused[0]:
            refused[0] += 1
            raise RuntimeError("CUDA error: out of memory")
        real(slot)

    monkeypatch.setattr(FitSlot, "launch", launch)
    assert party.train(3) == expected
    assert refused == [1]


def test_an_own_step_that_cannot_be_captured_is_not_tried_for_ever(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def capture(slot: Any, step: Any) -> None:
        tried.append(slot)
        slot.graph = Graph()
        raise Cannot("reads a value")

    async def work(i: int) -> None:
        client = party.client(i)
        net = client.build(party.task)

        def step(x: Tensor, y: Tensor) -> Tensor:
            return x.mean()

        def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(net(x), y)

        await client.loop(step, (net,), steps=4)
        await client.fit(net, loss=loss, steps=4)

    monkeypatch.setattr(Replay, "capture", capture)
    for _ in range(3):
        party.engine.run((f"client {i}", work(i)) for i in range(4))
    assert len(tried) == 4  # two for each
    assert sum("step by step" in text for text in party.said) == 1


def test_what_clients_take_and_fetch_has_the_room_of_kept_steps(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    free = party.engine.slots.free

    def tight(real: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            if sum(map(len, free.values())) > most[0]:
                raise torch.OutOfMemoryError("full")
            return real(*args)

        return wrapper

    async def work() -> Any:
        client = party.federation.client(party.federation.job.seats[0], {"here": torch.ones(2)}, 1)
        net = client.build(party.task)
        taken = client.take(net)
        most[0] = 1
        assert client.copy(net).keys() >= taken.keys()
        most[0] = 0
        return client.memory["here"]

    most = [99]
    party.train(8)
    monkeypatch.setattr(client_room, "copies", tight(client_room.copies))
    monkeypatch.setattr(shelf, "on_device", tight(shelf.on_device))
    monkeypatch.setattr(shelf, "_away", lambda memory: True)
    most = [3]
    party.engine.expect({0: {"here": torch.ones(2)}})  # which is only ahead of its time
    assert sum(map(len, free.values())) == 8
    assert torch.equal(party.engine.run([("one", work())])[0], torch.ones(2))
    assert not sum(map(len, free.values()))


def test_steps_of_recipes_too_make_room_for_a_clients_network(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, slots, real = party.engine, party.engine.slots, party.engine.slots.make

    async def work() -> int:
        client = party.client(0)
        net, kept = client.build(party.task), len(slots.loops)
        await client.loop(Shrinking(), (net,), steps=3)
        return kept

    def make(*args: Any) -> nn.Module:
        if slots.loops:
            raise torch.OutOfMemoryError("full")
        return real(*args)

    engine.run([("one", work())])
    assert slots.loops
    slots._networks.clear()
    monkeypatch.setattr(slots, "make", make)
    assert engine.run([("one", work())]) == [0]


def test_outputs_that_find_no_room_are_computed_when_there_is_some(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real = party.engine, party.engine._predict

    async def outputs() -> Tensor:
        client = party.client(0)
        return await client.predict(client.build(party.task))

    def predict(job: Any) -> Tensor:
        if sum(map(len, engine.slots.free.values())) > 2:
            raise torch.OutOfMemoryError("full")
        return real(job)

    party.train(8)
    monkeypatch.setattr(engine, "_predict", predict)
    found = engine.run([("one", outputs())])[0]
    assert found.isfinite().all()
    assert sum(map(len, engine.slots.free.values())) == 2


def test_a_trial_of_a_stack_that_finds_no_room_is_let_go_when_the_card_is_through_with_it(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was captured has where its tensors lie copied to the card, behind all that its lane has to do."""
    engine, told, real = party.engine, list[str](), Slots.captured

    def captured(slots: Slots, *args: Any) -> FitSlot:
        told.append("captured")
        if len(told) == 3:
            raise torch.OutOfMemoryError("full")
        return real(slots, *args)

    async def work(i: int) -> float:
        client = party.client(i)
        return float(await client.fit(client.build(party.task)))

    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 2)
    monkeypatch.setattr(Slots, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: told.append("waited"))
    assert len(engine.run((f"client {i}", work(i)) for i in range(4))) == 4
    assert told[:4] == ["captured"] * 3 + ["waited"]


def test_the_shelf_copies_on_no_lane(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 streams of a kind, which it hands out in turn."""
    asked: list[dict[str, Any]] = []

    class Asked(Stream):
        def __init__(self, *_: Any, **how: Any) -> None:
            asked.append(how)

    monkeypatch.setattr(torch.cuda, "Stream", Asked)
    shelf.Shelf(party.engine.device, 0)
    assert asked == [{"priority": -1}]
