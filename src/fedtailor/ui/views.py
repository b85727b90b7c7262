"""A run as plain tables for JSON: what the live page asks for, and what the report carries within itself.

Everything here comes from the run's config, facts and events. What needs its networks or its data is in `networks`.
"""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..report import words
from ..report.archs import parse
from ..runs.results import KINDS, Results, Series, worst_tenth
from .numbers import number, numbers, shares
from .shelf import run_card

POINTS = 600  # of a curve over rounds
CURVE = 60  # of one client's curve, in the table of all
FRAMES = 40  # of policies that are told one by one
Choices = list[list[int]]  # of each dimension the options kept: one, or several, or none


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


# ---- their architectures


def archs(run: Results) -> dict[str, Any] | None:
    """Where clients stand in the space, and how the search went; None where nothing is searched."""
    dimensions = run.facts.get("dimensions") or []
    sizes = [len(d["options"]) for d in dimensions]
    if max(sizes, default=0) < 2:
        return None
    split, at = run.reported_at()
    table = clients(run)
    words_of = {c: text for c, text in enumerate(table["arch"] or []) if text}
    chosen = {c: found for c, text in words_of.items() if (found := choices(text, sizes)) is not None}
    frames = policy_rounds(run)
    told: dict[str, Any] = {
        "split": split,
        "round": at,
        "kept": table["kept"],
        "dimensions": [
            {"name": str(d["name"]), "options": [words.setting(o) for o in d["options"]]} for d in dimensions
        ],
        "numeric": [_numeric(d["options"]) for d in dimensions],
        "values": [_values(d["options"]) for d in dimensions],
        "clients": list(chosen),
        "choices": list(chosen.values()),
        "distinct": len({words_of[c] for c in chosen}),
        "odd": [table["name"][c] for c in words_of if c not in chosen],
        "shares": shares_over_rounds(run, sizes),
        "frames": {"rounds": frames[1], "source": frames[0]} if frames[1] else None,
    }
    if chosen:
        points, explained, order = atlas(list(chosen.values()), [d["options"] for d in dimensions])
        told |= {"xy": points, "explained": explained, "order": [list(chosen)[i] for i in order]}
    return told


def choices(text: str, sizes: Sequence[int]) -> Choices | None:
    """'1-0-2' as [[1], [0], [2]]; cells of SPIDER keep several operations of an edge, or none: '0+1-x'."""
    single = parse(text, list(sizes))
    if single is not None:
        return [[choice] for choice in single]
    parts = text.split("-")
    try:
        found = [[] if part == "x" else [int(i) for i in part.split("+")] for part in parts]
    except ValueError:
        return None
    fits = len(found) == len(sizes) and all(
        0 <= i < size for part, size in zip(found, sizes, strict=True) for i in part
    )
    return found if fits else None


def archs_of(texts: Sequence[str], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Many archs at once, one option per dimension: [archs, dimensions], and which of the texts are such."""
    form = re.compile(rf"[0-9]{{1,9}}(-[0-9]{{1,9}}){{{len(sizes) - 1}}}")
    good = np.array([form.fullmatch(text) is not None for text in texts], bool)
    table = np.zeros((len(texts), len(sizes)), np.int64)
    joined = "-".join(text for text, fits in zip(texts, good.tolist(), strict=True) if fits)
    table[good] = np.array(joined.split("-") if joined else [], np.int64).reshape(-1, len(sizes))
    good &= (table < np.array(sizes)).all(1)
    return table, good


def _numeric(options: Sequence[Any]) -> bool:
    return all(isinstance(o, (int, float)) and not isinstance(o, bool) for o in options)


def _values(options: Sequence[Any]) -> list[float]:
    """Options as heights: the numbers they are, or their places."""
    return [float(o) for o in options] if _numeric(options) else [float(i) for i in range(len(options))]


def atlas(
    archs: Sequence[Choices], options: Sequence[Sequence[Any]]
) -> tuple[list[list[float]], list[float], list[int]]:
    """Clients on a plane by how alike their archs are: classical scaling of the distances between them.

    Numbers (widths, depths) are apart by their difference in the range of the dimension, names (operations) by whether
    they are the same. Both are squared distances of coordinates, so that scaling is a principal component analysis.
    Also the share of the variance of either axis, and the clients along the first.
    """
    columns: list[np.ndarray] = []
    for d, of in enumerate(options):
        if _numeric(of) and max(of) > min(of) and all(len(arch[d]) == 1 for arch in archs):
            columns.append(np.array([[(of[arch[d][0]] - min(of)) / (max(of) - min(of))] for arch in archs], float))
        else:
            hot = np.zeros((len(archs), len(of)))
            for i, arch in enumerate(archs):
                hot[i, arch[d]] = np.sqrt(0.5 / max(1, len(arch[d])))
            columns.append(hot)
    x = np.concatenate(columns, axis=1)
    x -= x.mean(0)
    _, vectors = np.linalg.eigh(x.T @ x)
    axes = vectors[:, ::-1][:, :2]
    axes = axes * np.where(
        axes[np.abs(axes).argmax(0), [0, 1][: axes.shape[1]]] < 0, -1, 1
    )  # a sign that is always the same
    points = x @ axes
    if points.shape[1] < 2:
        points = np.column_stack([points, np.zeros(len(points))])
    total = float((x**2).sum())
    explained = [float((points[:, k] ** 2).sum() / total) if total else 0.0 for k in range(2)]
    order = np.lexsort((points[:, 1].round(9), points[:, 0].round(9)))
    return [[number(v, 4) or 0.0 for v in p] for p in points.tolist()], numbers(explained, 4), order.tolist()  # type: ignore[return-value]


def shares_over_rounds(run: Results, sizes: Sequence[int], windows: int = 40) -> dict[str, Any] | None:
    """How often each option was sent out, in windows of rounds."""
    rows = run.events.where("arch")
    rounds, codes = run.events.round[rows], run.events.text[rows]
    used, place = np.unique(codes, return_inverse=True)
    table, good = archs_of([run.events.texts[code] for code in used.tolist()], sizes)
    rounds, points = rounds[good[place]], table[place[good[place]]]
    if not len(rounds):
        return None
    distinct = np.unique(rounds)
    n = max(1, min(windows, len(distinct), len(points) // 10))
    edges = [int(part[0]) for part in np.array_split(distinct, n)] + [int(distinct[-1]) + 1]
    which = np.searchsorted(edges, rounds, side="right") - 1
    found = []
    for d, size in enumerate(sizes):
        counts = np.zeros((size, n))
        np.add.at(counts, (points[:, d], which), 1)
        found.append([numbers(row, 4) for row in counts / np.maximum(1, counts.sum(0))])
    return {"edges": edges, "dims": found}


# ---- policies over the rounds


def policy_rounds(run: Results) -> tuple[str, list[int]]:
    """Where policies are from, and the rounds that they can be shown at."""
    kept = sorted(int(p.stem) for p in (run.folder / "policies").glob("*.npy") if p.stem.isdecimal())
    kept = [r for r in kept if r <= run.rounds_done]
    if kept:
        return "policy", kept
    drawn = np.unique(run.events.round[run.events.where("arch")])
    return "draws", drawn[thin(len(drawn), FRAMES)].tolist() if len(drawn) else []


def policy_frame(run: Results, round: int) -> dict[str, Any] | None:
    """Every client's probabilities after a round as bytes, row by row, 255 is certain; or what it was sent so far."""
    sizes = [len(d["options"]) for d in run.facts.get("dimensions") or []]
    source, rounds = policy_rounds(run)
    if round not in rounds:
        return None
    if source == "policy":
        try:
            table = np.load(run.folder / "policies" / f"{round:06d}.npy", allow_pickle=False)
        except (OSError, ValueError):
            return None
        if table.ndim != 2 or table.shape[1] != sum(sizes) or table.dtype != np.uint8:
            return None
    else:
        table = _drawn(run, sizes, round)
    return {"round": round, "clients": len(table), "p": base64.b64encode(table.tobytes()).decode()}


def _drawn(run: Results, sizes: Sequence[int], last: int) -> np.ndarray:
    """Of the archs that a client was sent up to a round, the share with each option, in 255ths."""
    rows = run.events.where("arch") & (run.events.round <= last)
    offsets = np.cumsum([0, *sizes[:-1]])
    counts = np.zeros((count(run), sum(sizes)))
    for c, t in zip(run.events.client[rows].tolist(), run.events.text[rows].tolist(), strict=True):
        found = choices(run.events.texts[t], sizes)
        for d, kept in enumerate(found or []):
            for i in kept:
                counts[c, offsets[d] + i] += 1 / len(kept)
    times = np.maximum(1, np.bincount(run.events.client[rows], minlength=len(counts)))
    return np.round(255 * counts / times[:, None]).astype(np.uint8)


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


def comparison(runs: Iterable[Results]) -> dict[str, Any]:
    """What to know before reading runs side by side."""
    from ..runs.compare import compare

    found = compare(list(runs), order="given")
    rows = []
    for row in found.rows:
        record = {k: (number(v) if isinstance(v, float) else v) for k, v in row.record().items()}
        rows.append({**record, "names": [run.name for run in row.runs], "flags": list(row.flags)})
    return {
        "fair": found.fair,
        "unfair": list(found.unfair),
        "notes": list(found.notes),
        "rows": rows,
        "settings": [[key, values] for key, values in found.differing().items()],
    }
