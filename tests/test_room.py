"""A process' share of a card's memory, on a card that is pretended."""

from __future__ import annotations

import pytest
import torch

from fedtailor.engine.room import Room
from fedtailor.errors import UserError
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
