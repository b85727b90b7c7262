"""Every registered method, and every method that searches on every space: it runs, repeats and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.config import Config
from fedtailor.registry import lookup, names
from fedtailor.runs.execute import Watcher, resume, start
from tools import rows, small_config

SPACES = {
    "tiny": {},
    "mobilenetv3": {},
    "mobilenetv2": {},
    "vit": {},
    "darts": {},
}
SEARCH = [m for m in names("method") if lookup("method", m).needs == "space"]
CASES = [(m, "") for m in names("method") if m not in SEARCH] + [
    (m, s) for m in SEARCH for s in names("space") if lookup("method", m).runs_on(lookup("space", s))
]


class Crash(Exception):
    """Stands for a power cut: nothing is saved on the way out."""


class CrashAt(Watcher):
    def __init__(self, number: int) -> None:
        self.number = number

    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == self.number:
            raise Crash


def config_of(method: str, space: str, **changes: object) -> Config:
    """The smallest run of a method; on the large spaces two clients and one or two steps are enough."""
    options: dict[str, object] = {"space__name": space, **SPACES.get(space, {})} if space else {}
    if space not in ("", "tiny"):
        options |= {"clients": 2, "participants": 1, "local__epochs": 0.2}
    return small_config(method, **(options | changes))


@pytest.mark.parametrize(("method", "space"), CASES)
def test_repeats_and_resumes_bit_for_bit(method: str, space: str, tmp_path: Path) -> None:
    config = config_of(method, space, checkpoint_every=1)
    whole = start(config, tmp_path / "whole", "cpu", workers=1)
    with pytest.raises(Crash):
        start(config, tmp_path / "cut", "cpu", workers=2, watch=CrashAt(3))
    resumed = resume(tmp_path / "cut", "cpu", workers=2)
    assert rows(whole) == rows(resumed)
    for file in sorted((whole / "nets").iterdir()):
        assert file.read_bytes() == (resumed / "nets" / file.name).read_bytes()
    accuracies = [float(r.split(",")[-1]) for r in rows(whole) if ",test,personal_accuracy," in r]
    assert len(accuracies) == config.clients
    assert all(0 <= a <= 1 for a in accuracies)


@pytest.mark.parametrize("method", names("method"))
def test_new_clients_and_the_prior_work_with_every_method(method: str, tmp_path: Path) -> None:
    config = config_of(method, "", partition__new_clients=2, local__prior=True, rounds=2)
    folder = start(config, tmp_path / "run", "cpu", workers=1)
    assert len([r for r in rows(folder) if ",test,new_accuracy," in r]) == 2
    assert len([r for r in rows(folder) if ",test,personal_accuracy," in r]) == config.clients


@pytest.mark.parametrize("policy", ["local", "recalibrate"])
@pytest.mark.parametrize("method", ["perfedrlnas"])
def test_statistics_leave_only_under_the_average_policy(method: str, policy: str, tmp_path: Path) -> None:
    config = config_of(method, "tiny", local__bn=policy)
    sent = start(config, tmp_path / policy, "cpu", workers=1)
    average = start(config_of(method, "tiny"), tmp_path / "average", "cpu", workers=1)

    def total(folder: Path) -> float:
        return sum(float(r.split(",")[-1]) for r in rows(folder) if r.split(",")[3] == "bytes_up")

    assert total(sent) < total(average)
