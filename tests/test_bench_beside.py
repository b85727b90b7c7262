"""Rows of the CIFAR-10 tables side by side: queues, lanes, what is started again and what is still to be run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from bench_tools import call, made_up, script


def test_rows_side_by_side_start_again_when_a_process_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = script("cifar_beside")
    codes, ran = iter([1, 0, 0]), []

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        assert env["FEDTAILOR_GPU_SHARE"] == "1.000"
        ran.append((command[command.index("--rows") + 1], "--tune-first" in command, command[-3:]))
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(beside.subprocess, "run", run)
    monkeypatch.setattr(beside.time, "sleep", lambda _: None)
    monkeypatch.setattr(beside.shutil, "which", lambda _: None)
    monkeypatch.setattr(
        sys, "argv", ["", "devices:fedrep,local:--seed=1,--lr=0.05", "--minutes", "9", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        beside.main()
    assert ended.value.code == 0
    seed = ["--beside=1", "--seed=1", "--lr=0.05"]
    assert ran == [("fedrep", True, seed), ("fedrep", True, seed), ("local", True, seed)]
    codes = iter([1] * beside.TRIES + [0])
    with pytest.raises(SystemExit) as ended:
        beside.main()
    assert ended.value.code == 1
    assert [row for row, *_ in ran[3:]] == ["fedrep"] * beside.TRIES + ["local"]  # the others run all the same


def test_a_queue_of_rows_may_go_on_with_other_options() -> None:
    jobs = script("cifar_beside").jobs
    assert [job[:3] for job in jobs("budgets:fedcs,feduniform+silos:ditto:--seed=1,--lr=0.05")] == [
        ("budgets", "fedcs", []),
        ("budgets", "feduniform", []),
        ("silos", "ditto", ["--seed=1", "--lr=0.05"]),
    ]
    with pytest.raises(SystemExit, match="'silo' is no federation: there are devices, silos"):
        jobs("budgets:fedcs+silo:ditto")


def test_a_federation_alone_means_what_its_table_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, cifar, pages = script("cifar_kept"), script("cifar"), script("pages_cifar")
    for module in (kept, pages):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    rows = script("cifar_rows").FEDERATIONS["devices"].rows
    for row in rows.keys() - {"fedbabu"}:
        kept.kept_in("devices", row, 0).write_text("{}")
    kept.kept_in("devices", "fedavg", 0).write_text(json.dumps(made_up(0, 0.8)))
    assert kept.lacking("devices") == {"fedavg": [1], "fedbabu": [0], "perfedrlnas-mobilenetv3": [1]}
    assert [job[:3] for job in script("cifar_beside").jobs("devices::--rounds=5")] == [
        ("devices", "fedbabu", ["--seed=0", "--rounds=5"]),
        ("devices", "fedavg", ["--seed=1", "--rounds=5"]),
        ("devices", "perfedrlnas-mobilenetv3", ["--seed=1", "--rounds=5"]),
    ]
    call(cifar, monkeypatch, "--list")
    assert "fedbabu: not run yet with seed 0\n" in capsys.readouterr().out
    for path in tmp_path.iterdir():
        if path.name != "devices-fedavg-0.json":
            path.unlink()
    (row,) = (line for line in pages.pages()["results.md"].splitlines() if line.startswith("| fedavg | **"))
    assert "not run yet with seed 1 |" in row


def test_lanes_try_rates_beside_each_other_and_run_rows_when_these_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, kept = script("cifar_beside"), script("cifar_kept")
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "none")
    work = tmp_path / "work"
    known = {"federation": "silos", "row": "spider", "val": 0.5}
    for lr in (0.01, 0.02, 0.03):
        kept_at = work / f"tune-{lr}" / "tune.json"
        kept_at.parent.mkdir(parents=True)
        kept_at.write_text(json.dumps(known | {"lr": lr}))
    both, ran, tuning = Barrier(2), [], Counter()

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        row, how = command[command.index("--rows") + 1], command[command.index("--rows") + 2 :]
        assert how[0] == ("--tune" if how[1].startswith("--lr=") else "--tune-first")
        if how[0] == "--tune":
            tuning[row] += 1
            if how[1] in ("--lr=0.01", "--lr=0.03"):
                both.wait(timeout=20)  # two rates of Ditto are tried at the same time
            ran.append((row, how[1]))
            tuning[row] -= 1
        else:
            assert not tuning[row]
            both.wait(timeout=20)  # and so are the two seeds
            ran.append((row, command[-1]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(beside.subprocess, "run", run)
    monkeypatch.setattr(beside.time, "sleep", lambda _: None)
    monkeypatch.setattr(beside.shutil, "which", lambda _: None)
    words = ["silos:ditto:--seed=0+silos:ditto:--seed=1", "silos:spider:--seed=0+silos:spider:--seed=1", "--lanes", "2"]
    more = ["--minutes", "9", "--out", str(tmp_path / "out"), "--work", str(work)]
    monkeypatch.setattr(sys, "argv", ["", *words, *more])
    with pytest.raises(SystemExit) as ended:
        beside.main()
    assert ended.value.code == 0
    assert sorted(ran) == [
        *(("ditto", f"--lr={lr}") for lr in (0.01, 0.03, 0.06, 0.1)),
        *(("ditto", f"--seed={seed}") for seed in (0, 1)),
        ("spider", "--lr=0.06"),  # the one that was not tried yet
        *(("spider", f"--seed={seed}") for seed in (0, 1)),
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lane-0", "lane-1"}
