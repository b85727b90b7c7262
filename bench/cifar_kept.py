"""What rows of the CIFAR-10 tables leave behind: results and tuning runs, parts of runs that travel, chosen rates."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from cifar_rows import FEDERATIONS

from fedtailor.engine.loop import Event
from fedtailor.runs.results import Results

RESULTS = Path(__file__).parent / "results" / "cifar"
PART, LARGEST = 14_000_000, 4  # bytes of a part, and how many parts may travel


def accuracies(events: Sequence[Event]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in events:
        kind, split = event.metric.removesuffix("_accuracy"), event.split
        if event.metric in ("personal_accuracy", "global_accuracy"):
            found.setdefault(split if kind == "personal" else f"global {split}", []).append(
                round(float(event.value), 4)
            )
    return found | {"parameters": [float(e.value) for e in events if e.metric == "personal_parameters"]}


def result(federation: str, row: str, folder: Path) -> dict[str, Any]:
    """What is kept of a row: small and tidy."""
    results = Results.read(folder)
    summary, facts = results.summary(), results.facts
    config = dict(results.config)
    config["partition"] = {k: v for k, v in config["partition"].items() if k != "file"}
    config["data"] = {"name": config["data"]["name"]}
    endings = {p.stem: json.loads(p.read_text()) for p in sorted((folder / "endings").glob("*.json"))}
    order = list(FEDERATIONS[federation].rows[row].endings)
    return {
        "federation": federation,
        "row": row,
        "seed": config["seed"],
        "rounds": results.rounds_done,
        "partition_hash": facts["partition_hash"],
        "data_hash": facts["data_hash"],
        "endings": {name: endings[name] for name in order if name in endings},
        "curves": {kind: curve(results, f"{kind}_accuracy", "val") for kind in ("personal", "global")},
        "loss": thinned(curve(results, "loss", "train")),
        "bytes_up": summary["bytes_up"],
        "bytes_down": summary["bytes_down"],
        "simulated_hours": round(summary["simulated_hours"], 4),
        "gpu_seconds": round(float(facts["seconds"]), 1),
        "round_seconds": round(float(np.median(results.series("measured_seconds", "").mean)), 4),
        "peak_gib": json.loads((folder / "peak.json").read_text()),
        "precision": facts["precision"],
        "device": facts["device"],
        "fedtailor": facts["fedtailor"],
        "torch": facts["torch"],
        "python": facts["python"],
        "config": config,
    }


def curve(results: Results, metric: str, split: str) -> list[list[float]]:
    series = results.series(metric, split)
    return [[int(r), round(float(m), 4)] for r, m in zip(series.rounds, series.mean, strict=True)]


def thinned(points: list[list[float]], most: int = 50) -> list[list[float]]:
    """Means over equal stretches of rounds."""
    if len(points) <= most:
        return points
    groups = np.array_split(np.array(points), most)
    return [[int(g[-1, 0]), round(float(g[:, 1].mean()), 4)] for g in groups]


# tuning --------------------------------------------------------------------------------------------------------------


def tunings(work: Path) -> list[dict[str, Any]]:
    """The tuning runs that are collected, and those made here."""
    path = RESULTS / "tuning.jsonl"
    committed = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    here = [json.loads(path.read_text()) for path in sorted(work.glob("tune-*/tune.json"))]
    return committed + [t for t in here if t not in committed]


def rows_in(out: Path, without: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that earlier commands left in a folder, but for those that were run anew."""
    path = out / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def key(line: dict[str, Any]) -> tuple[str, str, int]:
        return line["federation"], line["row"], line["seed"]

    anew = set(map(key, without))
    return [line for line in lines if "endings" in line and key(line) not in anew]


def chosen(federation: str, row: str, tried: Sequence[Mapping[str, Any]]) -> float | None:
    """The best learning rate of a row, once all were tried."""
    own = {t["lr"]: t for t in tried if (t["federation"], t["row"]) == (federation, row)}
    return best(list(own.values())) if own.keys() == set(FEDERATIONS[federation].rows[row].rates) else None


def best(tried: Sequence[Mapping[str, Any]]) -> float:
    return float(min(tried, key=lambda t: (-t["val"], t["lr"]))["lr"])


def lacking(federation: str) -> dict[str, list[int]]:
    """The seeds that the table wants and has no run of, by row."""
    wanted = {row: range(spec.seeds) for row, spec in FEDERATIONS[federation].rows.items()}
    left = {row: [s for s in seeds if not kept_in(federation, row, s).exists()] for row, seeds in wanted.items()}
    return {row: seeds for row, seeds in left.items() if seeds}


def kept_in(federation: str, row: str, seed: int) -> Path:
    return RESULTS / f"{federation}-{row}-{seed}.json"


# travelling ----------------------------------------------------------------------------------------------------------


def pack(folder: Path, out: Path) -> None:
    """A run folder as a few files that can travel; says so where it is too large."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        newest = max((folder / "checkpoints").glob("*.json"), key=lambda p: p.name)
        manifest = json.loads(newest.read_text())
        entries = [manifest["server"], *manifest["memories"].values()]
        wanted = {newest, *(newest.parent / entry["file"] for entry in entries)}
        loose = {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "checkpoints"}
        for path in sorted(wanted | loose):
            tar.add(path, path.relative_to(folder.parent))
    data = buffer.getbuffer()
    if len(data) > PART * LARGEST:
        print(f"{folder.name}: {len(data) / 1e6:.0f} MB are too large to travel; it goes on here", flush=True)
        return
    for i in range(0, len(data), PART):
        (out / f"{folder.name}.part{i // PART:02d}").write_bytes(data[i : i + PART])


def unpack(parts: Path, name: str, work: Path) -> None:
    files = sorted(parts.glob(f"{name}.part*"))
    if files:
        with tarfile.open(fileobj=io.BytesIO(b"".join(f.read_bytes() for f in files))) as tar:
            tar.extractall(work, filter="data")
        print(f"{name}: unpacked", flush=True)


# collecting ----------------------------------------------------------------------------------------------------------


def collect(folders: Sequence[Path]) -> None:
    """Puts results into bench/results/cifar: a file per row and seed, the tuning runs, and the rates they chose.

    A run at another rate than the one chosen for its row is kept apart.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for f in folders for line in (f / "results.jsonl").read_text().splitlines()]
    tried_file = RESULTS / "tuning.jsonl"
    tried = [json.loads(line) for line in tried_file.read_text().splitlines()] if tried_file.exists() else []
    others_file = RESULTS / "rates.jsonl"
    others = others_file.read_text().splitlines() if others_file.exists() else []
    for line in lines:
        if "endings" not in line and line not in tried:
            tried.append(line)
    for line in (line for line in lines if "endings" in line):
        text, lr = json.dumps(line, sort_keys=True), line["config"]["local"]["lr"]
        if lr == chosen(line["federation"], line["row"], tried):
            path = kept_in(line["federation"], line["row"], line["seed"])
            if path.exists() and len(json.loads(path.read_text())["endings"]) > len(line["endings"]):
                print(f"{path} has more endings: kept")
                continue
            path.write_text(f"{text}\n")
            print(path)
        elif text not in others:
            others.append(text)
            print(f"{line['federation']}, {line['row']}: a run at lr {lr:g}, not the chosen one: {others_file}")
    others_file.write_text("".join(f"{text}\n" for text in others))
    tried.sort(key=lambda t: (t["federation"], t["row"], t["lr"], t["rounds"]))
    tried_file.write_text("".join(json.dumps(t, sort_keys=True) + "\n" for t in tried))
    rates: dict[str, dict[str, float]] = {}
    for federation, spec in FEDERATIONS.items():
        for row in spec.rows:
            if (lr := chosen(federation, row, tried)) is not None:
                rates.setdefault(federation, {})[row] = lr
    text = (
        "# Learning rates by row, chosen on val among the runs in tuning.jsonl. Written by bench/cifar.py --collect.\n"
    )
    (RESULTS / "tuned.toml").write_text(text + tomli_w.dumps(rates))
