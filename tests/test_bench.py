"""The scripts behind the pages of results: pieces add up to whole runs, and the committed pages are what they say."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bench_tools import BENCH, call, made_up, script
from fedtailor.api import run
from fedtailor.config import load
from fedtailor.data import partition as partitions
from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import TEST
from fedtailor.data.sources import load as load_data
from fedtailor.registry import lookup, names
from pretend_cuda import pretend

SMALL = {"clients": 3, "participants": 2, "rounds": 4, "local": {"batch": 8}, "partition": {"samples": 40}}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/cifar.py with one federation of digits."""
    rows, kept, cifar = script("cifar_rows"), script("cifar_kept"), script("cifar")
    preset = tmp_path / "small.toml"
    preset.write_text(load(SMALL).to_toml())
    config = load(preset)
    made = partitions.make(load_data("digits"), config.make_partition(), config.clients, config.seed)
    endings = {"as it is": rows.Ending(), "fine-tuned@0.01": rows.tuned(1.0, 0.01)}
    row = rows.Row({"method.name": "ditto"}, endings, (0.02, 0.1, 1e30))
    federations = {"small": rows.Federation(str(preset), made.hash, {"ditto": row})}
    for module in (rows, kept, cifar):
        monkeypatch.setattr(module, "FEDERATIONS", federations)
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "results")
    return cifar


def test_pieces_on_two_machines_are_one_run(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ("small", "--rows", "ditto", "--lr", "0.05", "--device", "cpu", "--workers", "1")
    (whole,) = call(small, monkeypatch, *plain, "--work", tmp_path / "w", "--out", tmp_path / "o")
    lefts = iter([100.0, 0.0] + [100.0] * 100)  # the time is over after the second round
    monkeypatch.setattr(small.Clock, "left", lambda self: next(lefts))
    assert call(small, monkeypatch, *plain, "--work", tmp_path / "w1", "--out", tmp_path / "o1") == []
    assert list((tmp_path / "o1").glob("*.part00"))
    (tmp_path / "w1").rename(tmp_path / "elsewhere")
    more = ("--work", tmp_path / "w2", "--out", tmp_path / "o2", "--parts", tmp_path / "o1")
    (pieces,) = call(small, monkeypatch, *plain, *more)
    for key in ("endings", "curves", "loss", "bytes_up", "partition_hash"):
        assert whole[key] == pieces[key]
    assert set(whole["endings"]) == {"as it is", "fine-tuned@0.01"}
    there = ("--work", tmp_path / "w", "--out", tmp_path / "o")
    with pytest.raises(SystemExit, match=r"--tune tries 0.02, 0.1, 1e.30, not 0.05$"):
        call(small, monkeypatch, *plain, "--tune", *there)
    tried, kept = call(small, monkeypatch, *plain, "--tune", "--lr", "0.1", *there)  # one of its rates alone
    assert tried["lr"] == 0.1
    assert kept == whole  # later commands leave a folder's rows alone
    assert len(whole["endings"]["as it is"]["test"]) == 3


def test_a_row_whose_rounds_are_done_shows_the_endings_it_has(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ("small", "--rows", "ditto", "--lr", "0.1", "--device", "cpu", "--workers", "1", "--work", tmp_path / "w")
    lefts = iter([100.0] * 5 + [0.0] + [100.0] * 100)  # four rounds and the first ending
    monkeypatch.setattr(small.Clock, "left", lambda self: next(lefts))
    (begun,) = call(small, monkeypatch, *plain, "--out", tmp_path / "begun")
    assert list(begun["endings"]) == ["as it is"]
    (whole,) = call(small, monkeypatch, *plain, "--out", tmp_path / "whole")
    assert list(whole["endings"]) == ["as it is", "fine-tuned@0.01"]
    assert begun["endings"]["as it is"] == whole["endings"]["as it is"]
    monkeypatch.setattr(script("cifar_kept"), "chosen", lambda *_: 0.1)
    for folder, endings in (("begun", 1), ("whole", 2), ("begun", 2)):  # fewer never take the place of more
        call(small, monkeypatch, "--collect", tmp_path / folder)
        assert len(json.loads((tmp_path / "results" / "small-ditto-0.json").read_text())["endings"]) == endings


def test_tuning_reads_val_alone_and_decides_the_rate(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ("small", "--rows", "ditto", "--device", "cpu", "--workers", "1", "--work", tmp_path / "w")
    tried = call(small, monkeypatch, *plain, "--tune", "--out", tmp_path / "o")
    assert [t["lr"] for t in tried] == [0.02, 0.1, 1e30]
    assert tried[2]["val"] == 0  # it ended in what is no number, which is no reason to end the others
    assert not any("test" in json.loads(f.read_text()) for f in tmp_path.glob("w/tune-*/endings/*.json"))
    best = max(tried, key=lambda t: (t["val"], -t["lr"]))["lr"]
    call(small, monkeypatch, "--collect", tmp_path / "o")
    assert f"ditto = {best}" in (tmp_path / "results" / "tuned.toml").read_text()
    call(small, monkeypatch, *plain, "--tune-first", "--out", tmp_path / "o1")
    call(small, monkeypatch, *plain, "--lr", "0.07", "--out", tmp_path / "o2")
    for _ in range(2):
        call(small, monkeypatch, "--collect", tmp_path / "o1", tmp_path / "o2")
    row = json.loads((tmp_path / "results" / "small-ditto-0.json").read_text())
    (other,) = map(json.loads, (tmp_path / "results" / "rates.jsonl").read_text().splitlines())
    assert [run["config"]["local"]["lr"] for run in (row, other)] == [best, 0.07]


def pinned() -> list[tuple[str, str]]:
    """A row for every partition that some row is pinned to."""
    found = {}
    for name, federation in script("cifar_rows").FEDERATIONS.items():
        for row, spec in federation.rows.items():
            found.setdefault(spec.partition or federation.partition, (name, row))
    return list(found.values())


def test_rows_are_rehearsed_in_small_and_those_that_cannot_be_run_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, cifar = script("cifar_rows"), script("cifar")
    changes = {"method.name": "fedavg", "net.name": "cnn"}
    ends = {"as it is": rows.Ending(), "fine-tuned@0.001": rows.tuned(10.0, 0.001), "half-way": rows.Ending(rows.HALF)}
    fine = rows.Row(changes, ends)
    late = rows.Row(changes, {**ends, "last": rows.Ending({"local.bn": "sideways"})})
    monkeypatch.setitem(
        rows.FEDERATIONS, "silos", replace(rows.FEDERATIONS["silos"], rows={"late": late, "fine": fine})
    )
    plain = ("silos", "--rehearse", "--device", "cpu", "--workers", "1")
    with pytest.raises(SystemExit, match=r"silos: these rows cannot be run: late$"):
        call(cifar, monkeypatch, *plain)
    said = capsys.readouterr()
    assert "local.bn = 'sideways'" in said.err
    assert said.out.count("half-way: val") == 2  # in both rows: what fails last is found too
    call(cifar, monkeypatch, *plain, "--rows", "fine")
    assert "silos: 1 rows ran in small" in capsys.readouterr().out
    assert "silos-in-small" not in rows.FEDERATIONS


def test_steps_are_timed_alone_side_by_side_and_by_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, here = script("steps"), pretend(monkeypatch)
    engine = steps.CudaEngine
    monkeypatch.setattr(steps, "CudaEngine", lambda _, precision, at_once: engine(here, precision, at_once))
    monkeypatch.setattr(steps.Lane, "recording", lambda lane, graph: contextlib.nullcontext())
    monkeypatch.setattr(steps.torch.cuda, "get_device_name", lambda: "pretence")
    monkeypatch.setattr(steps, "heaviest", lambda slot: (2.0, [("kernel", 2.0, 5.0)]))
    words = ["--set", "net.name=mobilenetv3_large", "--precision", "fp32", "--batch", "2", "--beside", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["steps.py", *words, "--layers", "1"])
    steps.main()
    said = capsys.readouterr().out
    assert all(f"one of  {number}:" in said for number in (1, 2))
    assert all(f"{kind} " in said for kind in ("1 x 1", "depthwise", "norms", "gates", "linear", "other convolutions"))
    assert "2 kernels" in said


def test_kernels_can_be_left_out_to_see_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.kernels import gates

    steps, started = script("steps"), []
    names = ("gates", "images", "weights")
    monkeypatch.setattr(gates, "compiled", lambda name, names, device: {n: n for n in names})
    monkeypatch.setattr(gates, "launch", lambda kernel, *rest: started.append(kernel))
    steps.leave_out("gates.images")
    for kernel in gates.compiled("gates", names, None).values():  # type: ignore[arg-type]
        gates.launch(kernel, (1, 1), 32)
    assert started == ["gates", "weights"]
    steps.leave_out("gates")
    assert not any(gates.compiled("gates", names, None).values())  # type: ignore[union-attr, arg-type]
    steps.leave_out("gates.nothing")
    with pytest.raises(SystemExit, match="has no kernel 'nothing': there are gates, images, weights"):
        gates.compiled("gates", names, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "row"), pinned())
def test_federations_are_the_pinned_ones(name: str, row: str) -> None:
    if not os.environ.get("FEDTAILOR_DATA"):
        pytest.skip("needs CIFAR-10 in the folder FEDTAILOR_DATA")
    federation = script("cifar_rows").FEDERATIONS[name]
    spec = federation.rows[row]
    config = load(spec.preset or federation.preset, spec.changes)
    made = script("cifar").deal(config, config.seed, spec)
    assert made.hash == (spec.partition or federation.partition)


def dots(labels: np.ndarray) -> Dataset:
    """As many images as CIFAR-10 has, of a point each."""
    images, official_test = np.zeros((60_000, 1, 1, 1), np.uint8), np.arange(60_000) >= 50_000
    return Dataset("dots", images, labels, tuple("abcdefghij"), official_test)


def test_the_deal_of_pfedhn_gives_every_image_to_one_of_the_two_class_clients() -> None:
    labels = np.random.default_rng(0).permutation(np.arange(60_000) % 10)
    data = dots(labels)
    dealt = script("authors.deals").pfedhn(data, 0)
    assert np.array_equal(np.bincount(dealt.split), [40_000, 10_000, 10_000])
    assert np.array_equal(dealt.split == TEST, data.official_test)
    held = [set(labels[dealt.owner == client]) for client in range(50)]
    assert all(len(classes) == 2 for classes in held)
    assert all(sum(label in classes for classes in held) == 10 for label in range(10))
    shares = [np.mean(dealt.owner[labels == label] == c) for c, classes in enumerate(held) for label in classes]
    assert min(shares) > 0.4 / (0.4 + 9 * 0.6) - 0.01
    assert max(shares) < 0.6 / (0.6 + 9 * 0.4) + 0.01


def test_the_deal_of_fedrep_is_of_shards_and_may_give_a_client_one_class_twice() -> None:
    labels = np.arange(60_000) % 10
    data = dots(labels)
    dealt = script("authors.deals").fedrep(data, 0)
    assert np.array_equal(dealt.sizes(), np.tile([450, 50, 100], (100, 1)))
    assert np.array_equal(dealt.split == TEST, data.official_test)
    train = dealt.counts(labels, 10) - dealt.counts(labels, 10, TEST)
    assert set(np.unique(train)) == {0, 250, 500}  # shards of 250, and some clients have two of one class
    assert np.array_equal(train, 5 * dealt.counts(labels, 10, TEST))


def test_every_row_is_a_config() -> None:
    for federation in script("cifar_rows").FEDERATIONS.values():
        for row in federation.rows.values():
            for ending in row.endings.values():
                changes = {**row.changes, **ending.changes}
                config = load(row.preset or federation.preset, changes)
                assert config.make_method().name == changes.get("method.name", config.method["name"])


def test_the_zoo_has_every_method_with_the_same_budget() -> None:
    zoo = script("zoo")
    rows = zoo.rows()
    shipped = {name for name in names("method") if lookup("method", name).__module__.startswith("fedtailor.")}
    assert shipped == {row.changes["method.name"] for row in rows.values()}
    assert {len(row.trials()) for row in rows.values()} == {8}
    for row in rows.values():
        load("zoo", {**row.changes, **row.trials()[-1]})


def test_tables_of_the_demo_stand_below_the_commands_that_make_them() -> None:
    demos = script("demos")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in demos.PAGES.glob("*.md")}
    assert {name for name, text in texts.items() if f"\n{demos.TITLE}\n" in text} == demos.TABLES.keys()
    for name, table in demos.TABLES.items():
        section = texts[name].split(f"\n{demos.TITLE}\n")[1].split("\n## ")[0]
        commands = " ".join(section.split("```")[1::2])
        for row in table.rows:
            settings = [f"{key}={str(value).lower()}" for key, value in row.changes.items()]
            assert all(f"--set {setting}" in commands for setting in settings), name
            assert row.method in commands, name
            assert demos.label(row) in section or table.head is None, name
        (found,) = (part for part in section.split("\n\n") if part.startswith("|"))
        assert len(found.splitlines()) == 2 + len(table.rows)
        assert demos.written(texts[name], found.splitlines()) == texts[name]
        changed = demos.written(texts[name], ["| a |", "|---|"])
        assert changed == texts[name].replace(found, "| a |\n|---|")


def test_committed_pages_are_what_the_results_say() -> None:
    results = script("results")
    for name, text in results.pages().items():
        assert (results.DOCS / name).read_bytes() == text.encode(), f"docs/{name}: run make results"


def test_the_readme_says_what_the_page_says() -> None:
    readme, page = ((BENCH.parent / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))
    table = readme.split("## What it has found so far")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and "| accuracy |" not in line]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert len(rows) > 6
    devices, silos, *_ = (text.split("\n\n")[0] for text in page.split("| row and ending |")[1:])
    summary = f"{devices}\n{silos}"
    for mean, worst, size, paper in rows:
        (line,) = (line for line in summary.splitlines() if f"**{mean}**" in line)
        assert f"| {worst} |" in line
        assert round(float(line.split("|")[-2].split()[0]), 1) == float(size.split()[0])
        assert paper.split(" ")[0] in page


def test_the_page_reports_seeds_and_lets_val_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script("results")
    pages = script("pages_cifar")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for seed, good in ((0, 0.8), (1, 0.6)):
        (tmp_path / f"devices-fedavg-{seed}.json").write_text(json.dumps(made_up(seed, good)))
    written = pages.pages()
    text = written["results.md"]
    row = next(line for line in text.splitlines() if line.startswith("| fedavg |"))
    assert "**55.00** ± 15.00 | 40.00 |" in row  # means 60 and 50, std over clients 20 and 10, of two clients the worse
    assert "0: 60.00, 1: 50.00 | 400 | 0.25 M | 3.0 | 1.50" in row
    assert "not tuned; 400 rounds instead of 800; tf32; not tried with every seed: fine-tuned at 0.0003, fine" in row
    tuned = next(line for line in text.splitlines() if "fine-tuned (lr 0.001)" in line)  # test would choose the other
    assert "**70.00**" in tuned
    assert "74.44" in tuned
    assert "| perfedrlnas-darts | not run yet |" in text
    assert "4 GPU minutes for 2 runs" in text
    assert written["assets/results-devices-curves.svg"].startswith("<svg")
    assert pages.pages() == written


def test_runs_at_other_rates_stand_beside_their_row_and_are_not_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("results")
    pages = script("pages_cifar")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for row, good in (("fedavg", 0.5), ("fedrep", 0.4)):
        (tmp_path / f"devices-{row}-0.json").write_text(json.dumps(made_up(0, good) | {"row": row}))
    whole = made_up(0, 0.9) | {"config": {"local": {"lr": 0.3}}, "beside": 4}
    means = {"federation": "devices", "row": "fedavg", "seed": 1, "lr": 0.1, "val": 0.7, "test": 0.625, "device": "cpu"}
    (tmp_path / "rates.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(means) + "\n")
    text = pages.pages()["results.md"]
    table = text.split("| row | personal | worst decile | paper |")[1]  # of devices
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    here = [i for i, line in enumerate(lines) if "at lr" in line]
    assert lines[here[0]].startswith("| … at lr 0.1 | **62.50** |")  # rates in order
    assert lines[here[1]].startswith("| … at lr 0.3 | **65.00** ± 25.00 | 40.00 |")
    assert lines[here[1]].endswith("| 0.5 | made afterwards |")  # two minutes, shared by four
    assert lines[here[2]].startswith("| … at lr 0.3, fine-tuned (lr 0.001) | **70.00** ± 10.00 |")
    fedavg, fedrep = (
        next(i for i, x in enumerate(lines) if x.startswith(f"| {row} | **")) for row in ("fedavg", "fedrep")
    )
    assert fedavg < here[0]
    assert here[-1] < fedrep
    assert {line.count("|") for line in lines[fedavg:fedrep]} == {len(pages.HEADS) + 1}
    ranked = text.split("| row and ending |")[1].split("\n\n")[0]
    assert "at lr" not in ranked
    assert "4 GPU minutes for 2 runs, 0 for 0 tuning runs and 0 for 1 at other rates" in text


STATISTICS_OF_ALL = ("statistics of all, as it is", "statistics of all, prior")


def test_choices_of_architectures_are_cut_from_one_supernet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choices, folder = script("choices"), tmp_path / "run"
    table = {**SMALL, "method": {"name": "perfedrlnas", "deploy": "as-is"}, "space": {"name": "tiny"}}
    run(table, out=folder, device="cpu", workers=1)
    monkeypatch.setattr(sys, "argv", ["", str(folder), "--device", "cpu", "--out", str(tmp_path / "found.json")])
    choices.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 10
    assert all(len(kept[split]) == 3 for kept in found.values() for split in ("val", "test"))
    # the policy's choice is what the run itself has scored at its end
    rows = [line.split(",") for line in (folder / "events.csv").read_text().splitlines()]
    scored = [float(r[4]) for r in rows if r[2:4] == ["test", "personal_accuracy"]]
    assert found["policy, as it is"]["test"] == pytest.approx(scored)
    said = capsys.readouterr().out
    assert "policy, as it is: val" in said
    assert "first +0.00 ahead on test (se 0.00)" in said
    fixed = {**table, "method": {"name": "largest-fit", "deploy": "as-is"}, "local": {"batch": 8, "bn": "recalibrate"}}
    run(fixed, out=tmp_path / "fixed", device="cpu", workers=1)
    monkeypatch.setattr(choices, "BATCHES", 4)
    words = ["", str(tmp_path / "fixed"), "--pooled", "--device", "cpu", "--out", str(tmp_path / "fixed.json")]
    monkeypatch.setattr(sys, "argv", words)
    choices.main()
    found = json.loads((tmp_path / "fixed.json").read_text())
    assert list(found) == [f"own, {how}" for how in ("as it is", "prior", *STATISTICS_OF_ALL)]
    run({**table, "method": {"name": "fedavg"}, "space": {}}, out=tmp_path / "other", device="cpu", workers=1)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "other")])
    with pytest.raises(SystemExit, match="no checkpoint of a supernet"):
        choices.main()


def test_the_zoo_page_has_means_over_seeds_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, pages = script("zoo"), script("pages_zoo")
    monkeypatch.setattr(zoo, "RESULTS", tmp_path / "runs.jsonl")
    facts = {"network": "cnn", "bytes": 2000, "curve": [[25, 0.5], [50, 0.6]], "partition_hash": "abc"}
    facts |= {"torch": "2", "python": "3", "cores": 1, "seconds": 4.0}
    runs = []
    for row, level in (("fedavg-ft", 0.9), ("fedavg", 0.8)):
        chosen = {**zoo.rows()[row].trials()[0], "method.name": row}
        for seed in zoo.SEEDS:
            test = [level + 0.01 * seed, level - 0.1 + 0.01 * seed]
            runs.append({"key": f"{row}{seed}", "row": row, "stage": "final", "seed": seed, "changes": chosen} | facts)
            runs[-1]["test"] = test
    runs.append({"key": "x", "row": "ditto", "stage": "tune", "seed": 100, "changes": {}, "error": "diverged"})
    error = "UserError: the training loss is not a number: try a smaller local.lr. It is 0.5."
    runs.append({"key": "y", "row": "scaffold", "stage": "final", "seed": 0, "changes": {}, "error": error})
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs))
    (tmp_path / "reasons.toml").write_text('fedavg = "it is one network for all."')
    text = pages.page()
    assert (
        "| **fedavg-ft** | cnn | 86.0 ± 1.0 | 81.0 ± 1.0 | – | 2.0 | 4 | 50.0 → 60.0 | lr 0.01, interpolate 0 |" in text
    )
    assert text.index("| **fedavg-ft** |") < text.index("| **fedavg** |")
    assert "- **fedavg** (−10.0): it is one network for all." in text
    assert "| ditto | | not run yet (1 of 11 runs are there) |" in text
    assert "of 3 seeds: UserError: the training loss is not a number: try a smaller local.lr |" in text
    assert "hash `abc`" in text


@pytest.mark.parametrize("federation", ["devices", "silos", "budgets"])
def test_rows_of_a_federation_train_on_the_same_images(federation: str) -> None:
    """Whoever trains on val has a third more images, and val can choose nothing for it."""
    spec = script("cifar_rows").FEDERATIONS[federation]
    for name, row in spec.rows.items():
        config = load(spec.preset, row.changes)
        method = config.make_method()
        assert not getattr(method, "merge_val", False), name
        assert config.partition == load(spec.preset).partition, name
