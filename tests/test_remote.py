"""The same numbers whether clients are in this process or behind messages, for every registered method."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.config import Config
from fedtailor.registry import names
from fedtailor.runs.execute import start
from fedtailor.runs.serve import serve
from grid import MemoryPost
from tools import rows, small_config

NAMES = tuple(f"client-{i:03d}" for i in range(4))
PRIVATE = ("personal_arch", "personal_parameters", "personal_flops", "new_arch", "new_parameters", "new_flops")


def config_of(method: str, **changes: object) -> Config:
    return small_config(method, **{"rounds": 2, "evaluate_every": 1, "local__epochs": 0.2, **changes})


def public(folder: Path) -> list[str]:
    """The rows that are the same wherever clients are: not what only a client knows of its own network."""
    return [row for row in rows(folder) if row.split(",")[3] not in PRIVATE]


def same_networks(local: Path, sites: Path) -> bool:
    return all(
        (local / "nets" / f"{i:06d}.safetensors").read_bytes()
        == next(sites.glob(f"{name}/*/network.safetensors")).read_bytes()
        for i, name in enumerate(NAMES)
    )


@pytest.mark.parametrize("method", names("method"))
def test_every_method_gives_the_same_numbers_over_messages(method: str, tmp_path: Path) -> None:
    config = config_of(method)
    local = start(config, tmp_path / "local", "cpu", 1)
    post = MemoryPost(tmp_path / "sites", NAMES)
    served = serve(config, tmp_path / "served", post, NAMES)
    assert public(served) == public(local)
    last = "server-000002.safetensors"
    assert (served / "checkpoints" / last).read_bytes() == (local / "checkpoints" / last).read_bytes()
    assert same_networks(local, tmp_path / "sites")
