"""One run, one folder: whoever else wants it is told so, and a run that does not begin leaves nothing."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor import UserError, api
from fedtailor.cli.main import app
from fedtailor.engine.loop import Event
from fedtailor.runs import execute
from fedtailor.runs.execute import Watcher, resume, start
from fedtailor.runs.facts import read_facts
from fedtailor.runs.folder import held
from fedtailor.runs.results import Results
from tools import small_config


class Meddler(Watcher):
    """Does something in the middle of a run."""

    def __init__(self, act) -> None:
        self.act, self.error = act, ""

    def events(self, number: int, events: list[Event]) -> None:
        if number == 2 and not self.error:
            with pytest.raises(UserError) as caught:
                self.act()
            self.error = str(caught.value)


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path: Path) -> None:
    found: list[Path] = []
    gate = threading.Barrier(8)

    def take() -> None:
        gate.wait()
        found.append(api.free_folder(tmp_path / "runs", "digits", "ditto"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f.name for f in found) == [f"digits-ditto-{n}" for n in range(1, 9)]


def test_a_second_process_in_a_running_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    meddler = Meddler(lambda: resume(out, "cpu", 1))
    start(small_config("fedavg", rounds=3), out, "cpu", 1, meddler)
    assert "is in use" in meddler.error
    whole = start(small_config("fedavg", rounds=3), tmp_path / "whole", "cpu", 1)
    seen = [
        [line for line in (f / "events.csv").read_text().splitlines() if "measured" not in line] for f in (out, whole)
    ]
    assert seen[0] == seen[1]


def test_two_runs_do_not_begin_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes while the first still loads its data: the folder looks free."""
    out, prepare = tmp_path / "run", execute.prepare

    def slow(*args, **kwargs):
        monkeypatch.setattr(execute, "prepare", prepare)
        with pytest.raises(UserError, match="is in use"):
            start(small_config("fedavg", seed=7), out, "cpu", 1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(execute, "prepare", slow)
    start(small_config("fedavg", seed=5), out, "cpu", 1)
    assert "seed = 5" in (out / "config.toml").read_text()


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "data.name=npz:nowhere.npz"],
        ["--workers", "-3"],
        ["--engine", "fast"],
        ["--device", "tpu"],
        ["--log", "paper"],
        ["--set", "partition.name=natural"],
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["run", "demo", "--set", "rounds=1", *options])
    assert isinstance(found.exception, UserError)
    assert not list(tmp_path.glob("runs/*"))


def test_ctrl_c_before_a_run_has_begun_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "prepare", stopped)
    found = CliRunner().invoke(app, ["run", "demo", "--out", str(tmp_path / "run")])
    assert found.exit_code == 130
    assert "nothing to resume" in found.output
    assert not (tmp_path / "run").exists()


def test_commands_to_copy_survive_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    typed = ["run", "demo", "--quiet", "--set", "rounds = 2", "--out", "my runs/one"]
    monkeypatch.setattr(sys, "argv", ["fedtailor", *typed])
    monkeypatch.setattr(Watcher, "round", stopped)
    found = CliRunner().invoke(app, typed)
    assert "Continue with: fedtailor resume 'my runs/one'" in found.output
    folder = Path("my runs/one")
    assert shlex.split(read_facts(folder)["command"]) == ["fedtailor", *typed]
    assert "fedtailor resume 'my runs/one'" in Results.read(folder).warnings()[0]


def test_somebodys_folder_is_no_run_to_continue(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path))} is not empty. Choose another --out.$"):
        start(small_config("fedavg"), tmp_path, "cpu", 1)


def test_a_folder_that_is_held_by_another_stays(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        with pytest.raises(UserError), held(tmp_path / "run"):
            pass
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


def test_python_takes_runs_where_it_takes_folders(tmp_path: Path) -> None:
    run = api.Run(start(small_config("fedavg", rounds=1), tmp_path / "run", "cpu", 1))
    assert len(api.compare([run, run.folder]).rows) == len(api.compare([run.folder, str(run.folder)]).rows)
    assert len(api.compare(str(run.folder)).rows) == 1
    with pytest.raises(UserError, match="give a list"):
        api.run("demo", log="csv", out=tmp_path / "log")
