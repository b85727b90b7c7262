"""A run as plain tables for JSON: what the live page asks for, and what the report carries within itself.

Everything here comes from the run's config, facts and events. What needs its networks or its data is in `networks`;
what is about a search, its architectures and policies, in `searches`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..report import words
from ..runs.compare import Comparison
from ..runs.results import KINDS, Results, Series, worst_tenth
from .numbers import number, numbers, shares
from .shelf import run_card

POINTS = 600  # of a curve over rounds
CURVE = 60  # of one client's curve, in the table of all


# ---- the run


def overview(
    run: Results, name: str, status: str, troubles: Sequence[str] = (), now: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The run as a whole; `status`, `troubles` and `now` are what its follower knows."""
    return {
        **run_card(name, run, status),
        "lead": words.sentence(run),
        "warnings": run.warnings(),
        "troubles": list(troubles),
        "now": now,
        "finished": run.finished,
        "spreads": {kind: s and {k: number(v) for k, v in s._asdict().items()} for kind, s in run.spreads.items()},
        "series": {
            **{kind: curve(run.series(metric, "val")) for kind, metric in KINDS.items()},
            "loss": curve(run.series("loss", "train")),
            "worst": worst_curve(run),
        },
        "costs": costs(run),
        "summary": {k: number(v) for k, v in run.summary().items() if isinstance(v, (int, float))},
    }


def curve(series: Series) -> dict[str, Any] | None:
    """A metric over the rounds, thinned where it has more points than a screen."""
    if not len(series.rounds):
        return None
    keep = thin(len(series.rounds), POINTS)
    return {
        "rounds": series.rounds[keep].tolist(),
        "mean": numbers(series.mean[keep]),
        "std": numbers(series.std[keep]),
        "n": series.n[keep].tolist(),
    }


def thin(n: int, most: int) -> np.ndarray:
    """Places spread evenly over n, the last always among them."""
    return np.arange(n) if n <= most else np.unique(np.linspace(0, n - 1, most).round().astype(int))


def worst_curve(run: Results) -> dict[str, Any] | None:
    """The worst decile's mean at every evaluation."""
    rows = run.events.where(KINDS["personal"], "val")
    rounds, values = run.events.round[rows], run.events.value[rows]
    at = np.unique(rounds)
    if not len(at):
        return None
    at = at[thin(len(at), CURVE)]
    known = [np.sort(v[~np.isnan(v)]) for v in (values[rounds == r] for r in at)]
    return {"rounds": at.tolist(), "mean": [number(v[: worst_tenth(len(v))].mean()) if len(v) else None for v in known]}


def costs(run: Results) -> dict[str, Any]:
    """What the rounds cost: sums over participants, in bins of rounds where there are many."""
    last = run.rounds_done
    size = max(1, -(-last // POINTS))
    bins = -(-last // size)
    told: dict[str, Any] = {"rounds": [min(last, size * (i + 1)) for i in range(bins)], "per": size}
    for key, metric in (
        ("down", "bytes_down"),
        ("up", "bytes_up"),
        ("flops", "flops"),
        ("simulated", "round_seconds"),
        ("measured", "measured_seconds"),
        ("late", "late"),
    ):
        rows = run.events.where(metric) & (run.events.round >= 1) & (run.events.round <= last)
        place = (run.events.round[rows] - 1) // size
        told[key] = numbers(np.bincount(place, run.events.value[rows], minlength=bins)) if bins else []
    rows = run.events.where("seconds") & (run.events.round >= 1) & (run.events.round <= last)
    place = (run.events.round[rows] - 1) // size
    told["participants"] = np.bincount(place, minlength=bins).tolist() if bins else []
    return told


# ---- its clients


def clients(run: Results) -> dict[str, Any]:
    """One entry per client in every list; accuracies are those that the run reports, with their split and round."""
    split, at = run.reported_at()
    n = count(run)
    found = {kind: run.per_client(metric, split, at) for kind, metric in KINDS.items()}
    own = found["personal"] | {c: v for c, v in found["new"].items() if c not in found["personal"]}
    held = n - int(run.facts.get("new_clients") or 0)
    counts = run.facts.get("train_counts") or []
    samples = [sum(row) for row in counts] or list(run.facts.get("samples") or [])
    archs = run.per_client_text("personal_arch") | run.per_client_text("new_arch")
    latest = {} if archs else latest_text(run, "arch")
    sizes = {
        key: run.per_client(f"personal_{key}", "") | run.per_client(f"new_{key}", "") for key in ("parameters", "flops")
    }
    everyone = range(n)
    return {
        "split": split,
        "round": at,
        "seed": run.config.get("seed"),
        "classes": [str(name) for name in run.facts.get("classes") or ()],
        "name": [run.client_name(c) for c in everyone],
        "samples": [samples[c] if c < len(samples) else None for c in everyone],
        "counts": counts or None,
        "personal": numbers(own.get(c) for c in everyone),
        "global": numbers(found["global"].get(c) for c in everyone) if found["global"] else None,
        "held": [c >= held for c in everyone],
        "arch": [archs.get(c, latest.get(c, "")) for c in everyone] if archs or latest else None,
        "kept": bool(archs),
        **{key: numbers(of.get(c) for c in everyone) if of else None for key, of in sizes.items()},
        "rounds_taken": _per_client_count(run, "seconds", n),
        "bytes": [int(a) for a in _per_client_sum(run, "bytes_down", n) + _per_client_sum(run, "bytes_up", n)],
        "seconds": numbers(_per_client_sum(run, "seconds", n)),
        "curves": curves(run, n),
    }


def count(run: Results) -> int:
    highest = int(run.events.client.max(initial=-1)) + 1
    return max(len(run.facts.get("client_names") or ()), highest)


def _per_client_sum(run: Results, metric: str, n: int) -> np.ndarray:
    rows = run.events.where(metric) & (run.events.client >= 0)
    return np.bincount(run.events.client[rows], np.nan_to_num(run.events.value[rows]), minlength=n)


def _per_client_count(run: Results, metric: str, n: int) -> list[int]:
    rows = run.events.where(metric) & (run.events.client >= 0)
    return np.bincount(run.events.client[rows], minlength=n).tolist()


def latest_text(run: Results, metric: str) -> dict[int, str]:
    """Each client's newest text, whenever it was."""
    rows = np.flatnonzero(run.events.where(metric))
    order = rows[np.argsort(run.events.round[rows], kind="stable")]
    return {
        c: run.events.texts[t]
        for c, t in zip(*(x[order].tolist() for x in (run.events.client, run.events.text)), strict=True)
    }


def curves(run: Results, n: int) -> dict[str, Any] | None:
    """Personal validation accuracy of every client at up to 60 evaluations, in ten-thousandths."""
    rows = run.events.where(KINDS["personal"], "val") & (run.events.client >= 0)
    rounds = np.unique(run.events.round[rows])
    if not len(rounds):
        return None
    rounds = rounds[thin(len(rounds), CURVE)]
    table = np.full((n, len(rounds)), np.nan)
    place = np.searchsorted(rounds, run.events.round[rows])
    there = (place < len(rounds)) & (rounds[np.minimum(place, len(rounds) - 1)] == run.events.round[rows])
    table[run.events.client[rows][there], place[there]] = run.events.value[rows][there]
    return {"rounds": rounds.tolist(), "personal": [shares(row) for row in table]}


def client(run: Results, number_: int) -> dict[str, Any]:
    """All that the events say of one client."""
    mine = run.events.client == number_
    told: dict[str, Any] = {"client": number_, "series": {}, "archs": []}
    for key, metric, split in (
        ("personal", KINDS["personal"], "val"),
        ("global", KINDS["global"], "val"),
        ("loss", "loss", "train"),
        ("accuracy", "accuracy", "val"),
        ("seconds", "seconds", ""),
        ("down", "bytes_down", ""),
        ("up", "bytes_up", ""),
    ):
        rows = np.flatnonzero(mine & run.events.where(metric, split))
        rows = rows[thin(len(rows), POINTS)] if len(rows) else rows
        if len(rows):
            told["series"][key] = {
                "rounds": run.events.round[rows].tolist(),
                "value": numbers(run.events.value[rows]),
            }
    rows = np.flatnonzero(mine & run.events.where("arch"))
    rows = rows[thin(len(rows), POINTS)] if len(rows) else rows
    told["archs"] = [
        [r, run.events.texts[t]]
        for r, t in zip(*(x[rows].tolist() for x in (run.events.round, run.events.text)), strict=True)
    ]
    tested = {kind: run.per_client(metric, "test").get(number_) for kind, metric in KINDS.items()}
    told["test"] = {kind: number(value) for kind, value in tested.items() if value is not None}
    return told


# ---- studies that were made of it


def gain(run: Results) -> dict[str, Any] | None:
    """The matrix that `fedtailor gain` left in the folder."""
    try:
        with open(run.folder / "gain.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = list(dict.fromkeys(row["client"] for row in rows))
        found = {(row["client"], row["architecture_of"]): float(row["test_accuracy"]) for row in rows}
        return {"names": names, "accuracy": [[number(found[a, b]) for b in names] for a in names]}
    except (OSError, KeyError, ValueError):
        return None


# ---- what a reviewer needs


def about(run: Results) -> dict[str, Any]:
    from ..report.html import settings

    facts = run.facts
    return {
        "settings": [
            {"title": title, "name": str(name), "entries": [[key, words.setting(value)] for key, value in entries]}
            for title, name, entries in settings(run.config)
        ],
        "made": [
            [key, words.moment(facts[key]) if key == "created" else str(facts[key])]
            for key in ("fedtailor", "python", "torch", "numpy", "device", "platform", "created")
            if facts.get(key)
        ],
        "hashes": [
            [key.replace("_", " "), str(facts[key])] for key in ("data_hash", "partition_hash") if facts.get(key)
        ],
        "paper": words.pieces_with_links(str(facts.get("method_paper") or "")),
        "card": {k: str(v) for k, v in (facts.get("method_card") or {}).items()},
        "deviations": [str(text) for text in facts.get("deviations") or ()],
        "definitions": words.DEFINITIONS,
        "command": str(facts.get("command") or ""),
        "config": _text(run.folder / "config.toml"),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def comparison(found: Comparison, ids: Mapping[Results, str]) -> dict[str, Any]:
    """What to know before reading runs side by side, their rows, and the runs behind each by the ids given."""
    rows = []
    for row in found.rows:
        record = {k: (number(v) if isinstance(v, float) else v) for k, v in row.record().items()}
        runs = [
            {"id": ids[run], "seed": run.config.get("seed"), "partition": run.facts.get("partition_hash")}
            for run in row.runs
        ]
        rows.append({**record, "runs": runs, "flags": list(row.flags)})
    return {
        "fair": found.fair,
        "unfair": list(found.unfair),
        "notes": list(found.notes),
        "problems": [],
        "rows": rows,
        "settings": [[key, values] for key, values in found.differing().items()],
    }
