"""Runs that were killed, interrupted, damaged or out of disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedtailor import values
from fedtailor.engine.loop import Federation
from fedtailor.errors import UserError
from fedtailor.runs.execute import Watcher, resume, start
from tools import rows, small_config


class Stop(Watcher):
    """Raises something when a round ends, and remembers what was said."""

    def __init__(self, number: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.number, self.error, self.said = number, error, []

    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == self.number:
            raise self.error

    def say(self, text: str) -> None:
        self.said.append(text)


def test_kill_9_in_the_middle_of_a_round(tmp_path: Path) -> None:
    changes = [
        "method.name=ditto",
        "clients=4",
        "participants=3",
        "rounds=8",
        "checkpoint_every=2",
        "partition.name=iid",
    ]
    arguments = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "fedtailor", "run", "demo", "-q", *arguments, "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, str(whole)], check=True)
    process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL)
    while not (killed / "checkpoints" / "000004.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)  # somewhere inside a later round
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run([sys.executable, "-m", "fedtailor", "resume", str(killed)], check=True, capture_output=True)
    assert b"personal" in done.stdout
    assert rows(whole) == rows(killed)


def test_ctrl_c_saves_the_last_finished_round(tmp_path: Path) -> None:
    config = small_config("fedavg", rounds=6, checkpoint_every=6, evaluate_every=6)
    whole = start(config, tmp_path / "whole", "cpu", 1)
    with pytest.raises(KeyboardInterrupt):
        start(config, tmp_path / "cut", "cpu", 1, Stop(4))
    assert rows(whole) == rows(resume(tmp_path / "cut", "cpu", 1))


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    folder = start(small_config("fedavg"), tmp_path / "run", "cpu", 1)
    before = (folder / "events.csv").read_bytes()
    watch = Stop()
    resume(folder, "cpu", 1, watch)
    assert (folder / "events.csv").read_bytes() == before
    assert "finished" in watch.said[0]


@pytest.mark.parametrize("damage", ["torn manifest", "altered weights", "missing weights"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(damage: str, tmp_path: Path) -> None:
    config = small_config("ditto", rounds=4, checkpoint_every=1)
    whole = start(config, tmp_path / "whole", "cpu", 1)
    cut = tmp_path / "cut"
    with pytest.raises(RuntimeError):
        start(config, cut, "cpu", 1, Stop(4, RuntimeError))
    manifest, weights = cut / "checkpoints" / "000003.json", cut / "checkpoints" / "server-000003.safetensors"
    if damage == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif damage == "altered weights":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
    else:
        weights.unlink()
    watch = Stop()
    assert rows(resume(cut, "cpu", 1, watch)) == rows(whole)
    assert "000003 is damaged" in watch.said[0]


def test_a_damaged_checkpoint_is_not_built_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memories are of rounds that a run which goes on from the one before has yet to come to."""
    config = small_config("ditto", rounds=8, checkpoint_every=3, clients=6, participants=2)
    whole, cut = start(config, tmp_path / "whole", "cpu", 1), tmp_path / "cut"
    with pytest.raises(RuntimeError):
        start(config, cut, "cpu", 1, Stop(7, RuntimeError))
    (cut / "checkpoints" / "server-000006.safetensors").unlink()
    real = Federation.exchange

    def stopped(self: Federation, method: Any, server: Any, memories: Any, number: int, *more: Any) -> Any:
        if number == 5:
            raise KeyboardInterrupt
        return real(self, method, server, memories, number, *more)

    monkeypatch.setattr(Federation, "exchange", stopped)
    with pytest.raises(KeyboardInterrupt):
        resume(cut, "cpu", 1)
    monkeypatch.undo()
    assert (cut / "checkpoints" / "000004.json").exists()
    assert rows(resume(cut, "cpu", 1)) == rows(whole)


def test_a_run_without_a_readable_checkpoint_is_left_as_it_is(tmp_path: Path) -> None:
    config = small_config("fedavg", rounds=6, checkpoint_every=2)
    whole, cut = start(config, tmp_path / "whole", "cpu", 1), tmp_path / "cut"
    with pytest.raises(RuntimeError):
        start(config, cut, "cpu", 1, Stop(5, RuntimeError))
    away = [path.rename(tmp_path / path.name) for path in (cut / "checkpoints").glob("server-*")]  # a mount is gone
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"no checkpoint can be read .*try again.*begin the run anew, delete"):
        resume(cut, "cpu", 1)
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before
    for path in away:
        path.rename(cut / "checkpoints" / path.name)
    assert rows(resume(cut, "cpu", 1)) == rows(whole)


def test_disk_full_while_saving_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("fedavg", rounds=4, checkpoint_every=1)
    whole = start(config, tmp_path / "whole", "cpu", 1)
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 14:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(values.os, "fsync", full)
    with pytest.raises(UserError, match=r"no space left.*resume"):
        start(config, tmp_path / "cut", "cpu", 1)
    monkeypatch.undo()
    assert rows(resume(tmp_path / "cut", "cpu", 1)) == rows(whole)


def test_another_run_is_never_overwritten(tmp_path: Path) -> None:
    start(small_config("fedavg"), tmp_path, "cpu", 1)
    before = (tmp_path / "events.csv").read_bytes()
    with pytest.raises(UserError, match="holds another run"):
        start(small_config("fedavg"), tmp_path, "cpu", 1)
    assert (tmp_path / "events.csv").read_bytes() == before


def test_resume_refuses_what_is_no_run_and_other_versions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run.json"):
        resume(tmp_path, "cpu", 1)
    folder = start(small_config("fedavg"), tmp_path / "run", "cpu", 1)
    facts = (folder / "run.json").read_text().replace('"format": 1', '"format": 99')
    (folder / "run.json").write_text(facts)
    with pytest.raises(UserError, match="another version"):
        resume(folder, "cpu", 1)
