"""Who got which architecture, and how often each option was sampled: tables for the report of a search run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from fedtailor.report.plots import Picture, option_shares, step_colour
from fedtailor.report.words import setting
from fedtailor.runs.results import Results

PANELS = 24  # more dimensions than this are told in the table alone
WINDOWS = 40  # the most windows of rounds to draw
PER_WINDOW = 20  # and the least architectures in one, or the picture would be noise


@dataclass(frozen=True)
class Cell:
    """An option in the table: its name, and its place among its dimension's options as a colour."""

    text: str
    colour: str
    dark: bool


@dataclass(frozen=True)
class Archs:
    dimensions: list[str]
    rows: list[tuple[str, list[Cell]]]  # client name, one cell per dimension; alike architectures stand together
    odd: list[tuple[str, str]]  # clients whose arch does not fit the dimensions, as written
    shares: list[tuple[str, list[tuple[Cell, float, float]]]]  # dimension: option, share kept, share sampled
    distinct: int
    picture: Picture | None
    undrawn: int  # dimensions left out of the picture


def read_archs(run: Results) -> Archs | None:
    """The search part of a run; None where the run searched nothing."""
    dimensions = run.facts.get("dimensions") or []
    if all(len(dimension["options"]) < 2 for dimension in dimensions):
        return None  # a fixed network is the space with one point
    kept = run.per_client_text("personal_arch")
    if not (kept or run.events.where("arch").any()):
        return None
    names = [str(dimension["name"]) for dimension in dimensions]
    options = [[setting(option) for option in dimension["options"]] for dimension in dimensions]
    sizes = [len(option) for option in options]
    archs = {client: parse(text, sizes) for client, text in kept.items()}
    good = {client: arch for client, arch in archs.items() if arch is not None}
    cells = [[_cell(option, i, len(chosen)) for i, option in enumerate(chosen)] for chosen in options]
    rows = [
        (run.client_name(client), [cell[choice] for cell, choice in zip(cells, arch, strict=True)])
        for client, arch in sorted(good.items(), key=lambda item: (item[1], item[0]))
    ]
    sampled, picture = _sampled(run, names, sizes)
    kept_counts = [Counter(arch[d] for arch in good.values()) for d in range(len(names))]
    shares = [
        (name, [(cell, kept_counts[d][i] / max(1, len(good)), float(sampled[d][i])) for i, cell in enumerate(cells[d])])
        for d, name in enumerate(names)
    ]
    odd = [(run.client_name(client), kept[client]) for client, arch in archs.items() if arch is None]
    undrawn = max(0, len(names) - PANELS) if picture else 0
    return Archs(names, rows, odd, shares, len(set(good.values())), picture, undrawn)


def parse(text: str, sizes: list[int]) -> tuple[int, ...] | None:
    """'1-0-2' as (1, 0, 2), or None where it is no point of the space."""
    try:
        arch = tuple(int(choice) for choice in text.split("-"))
    except ValueError:
        return None
    fits = len(arch) == len(sizes) and all(0 <= choice < size for choice, size in zip(arch, sizes, strict=True))
    return arch if fits else None


def _cell(text: str, step: int, steps: int) -> Cell:
    return Cell(text, step_colour(step, steps), step / max(1, steps - 1) > 0.55)


def _sampled(run: Results, names: list[str], sizes: list[int]) -> tuple[list[np.ndarray], Picture | None]:
    """Shares of each option over the whole run, and over windows of rounds as a picture."""
    events, rows = run.events, run.events.where("arch")
    point_of = {code: parse(events.texts[code], sizes) for code in set(events.text[rows].tolist())}
    pairs = zip(events.round[rows].tolist(), events.text[rows].tolist(), strict=True)
    found = [(round, point) for round, code in pairs if (point := point_of[code]) is not None]
    if not found:
        return [np.zeros(size) for size in sizes], None
    rounds, points = np.array([round for round, _ in found]), np.array([point for _, point in found])
    total = [np.bincount(points[:, d], minlength=size) / len(points) for d, size in enumerate(sizes)]
    distinct = np.unique(rounds)
    windows = min(WINDOWS, len(distinct), len(points) // PER_WINDOW)
    if windows < 2:
        return total, None  # too little for a development to show; the totals say it all
    window = np.array_split(distinct, windows)
    parts = [points[(rounds >= part[0]) & (rounds <= part[-1])] for part in window]
    shares = [
        np.stack([np.bincount(part[:, d], minlength=size) / len(part) for part in parts], axis=1)
        for d, size in enumerate(sizes[:PANELS])
    ]
    edges = np.array([*(part[0] - 0.5 for part in window), distinct[-1] + 0.5])
    return total, option_shares(names[:PANELS], sizes[:PANELS], edges, shares)
