"""Rows of the CIFAR-10 tables side by side: queues, lanes, what is started again and what is still to be run."""

from __future__ import annotations

import json
import sys
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
    assert jobs("budgets:fedcs,feduniform+silos:ditto:--seed=1,--lr=0.05") == [
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
    assert script("cifar_beside").jobs("devices::--rounds=5") == [
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


def test_lanes_take_what_is_next_and_never_two_seeds_of_a_row_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = script("cifar_beside")
    both, running, ran = Barrier(2), [], []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        row, seed = command[command.index("--rows") + 1], command[-1]
        assert row not in running
        running.append(row)
        if seed == "--seed=0":
            both.wait(timeout=20)  # the two rows do run at the same time
        ran.append((row, seed))
        running.remove(row)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(beside.subprocess, "run", run)
    monkeypatch.setattr(beside.time, "sleep", lambda _: None)
    monkeypatch.setattr(beside.shutil, "which", lambda _: None)
    words = ["silos:ditto:--seed=0+silos:ditto:--seed=1", "silos:spider:--seed=0+silos:spider:--seed=1", "--lanes", "2"]
    monkeypatch.setattr(sys, "argv", ["", *words, "--minutes", "9", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        beside.main()
    assert ended.value.code == 0
    assert sorted(ran) == [(row, f"--seed={seed}") for row in ("ditto", "spider") for seed in (0, 1)]
    assert {path.name for path in tmp_path.iterdir()} == {"lane-0", "lane-1"}
