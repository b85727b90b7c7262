"""A search as plain tables for JSON: where clients stand in the space, and how their policies went."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..report import words
from ..report.archs import parse
from ..runs.results import Results
from .numbers import number, numbers
from .views import clients, count, thin

FRAMES = 40  # of policies that are told one by one
Choices = list[list[int]]  # of each dimension the options kept: one, or several, or none


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
