"""Runs that are read while they are written: new rows only, and trouble that is said instead of raised."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedtailor.runs.columns import Reader, read_events
from fedtailor.runs.follow import Follower, peek
from fedtailor.runs.live import Live, whoami
from fedtailor.runs.results import Results
from synthetic_run import evaluation, facts, realistic, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "r", evaluation(1, "val", personal={0: 0.5, 1: 0.7}), facts(2, 1, status="running"))


def add(run: Path, text: str) -> None:
    with (run / "events.csv").open("a") as file:
        file.write(text)


def test_only_what_is_new_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    plain = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, body: (read.append(body), plain(self, body))[1])
    follower = Follower(run).read()
    add(run, "2,0,train,loss,0.25\n2,1,tra")
    follower.read()
    add(run, "in,loss,0.75\n")
    assert follower.read().results is not None
    assert [len(part.splitlines()) for part in read] == [2, 1, 1]
    series = follower.results.series("loss", "train")
    assert series.mean.tolist() == [0.5]
    assert follower.read().version == 3, "an unchanged folder is not read again"
    same = read_events(run / "events.csv")
    assert np.array_equal(same.value, follower.results.events.value)


def test_a_log_that_was_cut_back_is_read_anew(run: Path) -> None:
    whole = (run / "events.csv").read_text()
    add(run, "2,0,train,loss,0.25\n2,1,train,loss,0.5\n")
    follower = Follower(run).read()
    assert not follower.troubles()
    (run / "events.csv").write_text(whole + "2,0,train,loss,0.125\n2,1,train,loss,0.25\n3,0,train,loss,4.0\n")
    follower.read()
    assert follower.results is not None
    assert follower.results.series("loss", "train").mean.tolist() == [0.1875, 4.0]
    assert "read anew" in follower.troubles()[0]


def test_broken_lines_are_counted_and_left_out(run: Path) -> None:
    add(run, "2,0,train,loss,0.25\nwhat is this\n2,1,nowhere,loss,1\n2,1,train,loss,half\n")
    add(run, "x,1,train,loss,1\n3,0,train,loss,1\n")
    follower = Follower(run).read()
    assert follower.broken == [5, 6, 7, 8]
    assert "4 lines left out (line 5, 6, 7, 8)" in follower.troubles()[0]
    assert follower.results is not None
    assert follower.results.series("loss", "train").rounds.tolist() == [2, 3]
    add(run, "4,0,train\n")
    assert follower.read().broken[-1] == 10


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda run: (run / "run.json").write_text("{"), "run.json cannot be read"),
        (lambda run: (run / "run.json").write_text(json.dumps(facts(format=7, fedtailor="9.9"))), "fedtailor==9.9"),
        (lambda run: (run / "run.json").write_text("[]"), "not written by fedtailor"),
        (lambda run: (run / "config.toml").unlink(), "config.toml is missing"),
        (lambda run: (run / "events.csv").unlink(), "no events.csv yet"),
        (lambda run: (run / "events.csv").write_text(""), "empty so far"),
        (lambda run: (run / "events.csv").write_text("a,b\n"), "not an event table"),
        (lambda run: shutil.rmtree(run), "deleted or moved"),
    ],
)
def test_a_spoilt_folder_says_so_and_comes_back(run: Path, spoil, said: str) -> None:
    kept = {path.name: path.read_text() for path in run.iterdir()}
    follower = Follower(run).read()
    spoil(run)
    assert said in follower.read().problem
    assert follower.status == "broken"
    run.mkdir(exist_ok=True)
    for name, text in kept.items():
        (run / name).write_text(text)
    assert follower.read().problem == ""
    assert follower.results is not None


def test_a_killed_run_is_noticed(run: Path) -> None:
    assert Follower(run).read().status == "running"
    note = {"round": 2, "clients": [0], "since": 0, **whoami()}
    (run / "now.json").write_text(json.dumps(note))
    assert Follower(run).read().status == "running"
    (run / "now.json").write_text(json.dumps(note | {"pid": 2**22 + 12345}))
    follower = Follower(run).read()
    assert follower.status == "killed"
    assert "its process is gone" in follower.troubles()[0]
    os.utime(run / "events.csv", (0, 0))
    os.utime(run / "run.json", (0, 0))
    (run / "now.json").unlink()
    assert Follower(run).read().status == "killed", "without a sign for long"


def test_a_glance_sees_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = realistic(tmp_path / "r", 12, 20)
    whole = Results.read(folder)
    monkeypatch.setattr("fedtailor.runs.follow.PEEK", 6000)
    glance = peek(folder)
    assert len(glance.events) < len(whole.events) / 2
    assert glance.spreads["personal"] == whole.spreads["personal"]
    assert glance.rounds_done == whole.rounds_done


def test_every_kind_of_row(tmp_path: Path) -> None:
    lines = ["1,,,round_seconds,1e-05", "1,0,,arch,3", "12345678,7,val,accuracy,nan", "2,alpha,train,loss,-0.25"]
    path = tmp_path / "events.csv"
    path.write_bytes(("round,client,split,metric,value\r\n" + "\r\n".join(lines) + "\r\n").encode())
    events = read_events(path, ["zero", "alpha", *(f"client {i}" for i in range(2, 8))])
    assert events.round.tolist() == [1, 1, 12345678, 2]
    assert events.client.tolist() == [-1, 0, 7, 1]
    assert events.value[[0, 3]].tolist() == [1e-05, -0.25]
    assert np.isnan(events.value[[1, 2]]).all()
    assert [events.texts[i] for i in events.text.tolist() if i >= 0] == ["3"]


def test_policies_are_kept_now_and_then(tmp_path: Path) -> None:
    import torch

    live = Live(tmp_path, 200, 0)
    values = {"alpha": torch.tensor([[0.0, 0.0, 1.0], [50.0, 0.0, 0.0]])}
    for number in range(1, 201):
        live.policies(number, values, [2, 1])
    kept = sorted(path.name for path in (tmp_path / "policies").iterdir())
    assert len(kept) == 50
    assert kept[-1] == "000200.npy"
    assert np.load(tmp_path / "policies" / kept[0]).tolist() == [[128, 128, 255], [255, 0, 255]]
    Live(tmp_path, 200, 100)  # a resume from round 100 runs the later rounds again
    assert sorted(path.name for path in (tmp_path / "policies").iterdir())[-1] == "000100.npy"
    live.policies(1, {"alpha": torch.zeros(3)}, [2, 2])
    live.policies(1, {}, [2, 1])
    live.working(3, [1, 2])
    assert json.loads((tmp_path / "now.json").read_text())["clients"] == [1, 2]
    live.end()
    assert not (tmp_path / "now.json").exists()
