"""A card's memory, in pretence: a run's share of it, what counts as taken, and what goes where it is full."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.engine import replay
from fedtailor.engine.jobs import Score
from fedtailor.engine.replay import FitSlot, Replay
from fedtailor.engine.room import Room
from fedtailor.errors import UserError
from fedtailor.spaces.measure import Cost
from party import Party
from pretend_cuda import pretend


def test_a_run_plans_with_its_share_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch)
    whole = Room(device)
    assert 0 < whole.free() <= whole.size
    monkeypatch.setenv("FEDTAILOR_GPU_SHARE", "0.25")
    allowed: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: allowed.append(args))
    part = Room(device)
    assert allowed == [(0.25, device.index)]  # nobody else is to be refused for what this one takes
    assert part.size == whole.size // 4
    assert part.free() <= part.size
    held = {"reserved": 3 * part.size // 4, "allocated": part.size // 2}
    stats = {f"{kind}_bytes": {"all": {"current": size}} for kind, size in held.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (whole.size, whole.size))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert part.free() == part.size - held["allocated"]
    stats["reserved_bytes"]["all"]["current"] = 2 * part.size
    assert part.free() == 2 * part.size - held["allocated"]  # more than its share, but it is there
    for wrong in ("0", "2", "half", "nan"):
        monkeypatch.setenv("FEDTAILOR_GPU_SHARE", wrong)
        with pytest.raises(UserError, match="part of a card"):
            Room(device)


@pytest.mark.parametrize(("lanes", "more", "side_by_side", "kept"), [(20, 5, 20, 25), (4, 1, 4, 5), (40, 0, 32, 36)])
def test_steps_that_share_a_lane_are_kept_for_little(
    lanes: int, more: int, side_by_side: int, kept: int, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = Cost(parameters=1 << 20, buffers=0, flops=0, activations=1 << 26, peak=0)
    full = 1.3 * (12 * 2**20 + 32 * 2**26) + 2**26
    another = 1.3 * 12 * 2**20 + 2**27 + 2**26  # weights, batches, the libraries' room: no activations
    room = lanes * full + 2 * more * another if more else 32 * full + 8 * another
    monkeypatch.setattr(party.engine, "_free", lambda: int(room) + 1024)
    party.engine.plan(largest, batch=32, clients=32)
    assert (party.engine.at_once, party.engine.slots.most) == (side_by_side, kept)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lanes_that_a_round_has_no_use_for_leave_room_for_steps(
    precision: str, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, engine = Cost(activations=1 << 26), party.engine
    each, another = 1.3 * 32 * 2**26 / (2 if precision == "bf16" else 1) + 2**26, 2**27 + 2**26
    monkeypatch.setattr(engine, "precision", precision)
    monkeypatch.setattr(engine, "_free", lambda: int(12 * each + 2 * 7 * another) + 1024)
    engine.plan(largest, batch=32, clients=12)
    assert engine.slots.most == 12 + 7
    engine.slots.most = 96
    engine.plan(largest, batch=32, clients=5)
    assert engine.slots.most == 5 + 7 + int(7 * each / 2 / another)
    assert engine.at_once >= 12  # after the rounds all clients may train


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


@pytest.mark.parametrize(("free", "many"), [(0.2, 1), (0.1, 0)])
def test_a_pass_is_captured_where_a_little_is_free(
    free: float, many: int, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [0]

    class Forward(replay.Forward):
        def __init__(self, *how: Any) -> None:
            made[0] += 1
            super().__init__(*how)

    async def work() -> None:
        client = party.client(0)
        net = client.build(party.task)
        for _ in range(3):
            await client.score(net)

    monkeypatch.setattr(replay, "Forward", Forward)
    monkeypatch.setattr(party.engine, "_free", lambda: int(free * party.engine.room.size))
    party.engine.run([("one", work())])
    assert made == [many]
