"""What the GPU engine does on a card whose memory is full, for want of room or of a capture; in pretence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedtailor.engine.replay import FitSlot, Replay
from test_captures import Party


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Party:
    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    return Party(monkeypatch, clients=8, participants=8)


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
