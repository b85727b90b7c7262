"""The figures that put several rows of a comparison into one drawing."""

from __future__ import annotations

import numpy as np

from fedtailor.report.plots import (
    BLUE,
    COLOURS,
    DASHES,
    HALF,
    INK,
    RED,
    Key,
    Picture,
    cut,
    drawing,
    known,
    percent_axis,
    round_axis,
)
from fedtailor.report.words import percent
from fedtailor.runs.compare import Comparison, Row
from fedtailor.runs.results import Floats, Ints


def look(row: int) -> tuple[str, str]:
    """Colour and dash of a row, the same in every drawing; when the colours come round, the dash is another."""
    return COLOURS[row % len(COLOURS)], list(DASHES)[row % len(DASHES)]


def over_rounds(row: Row, metric: str, split: str) -> tuple[Ints, Floats, Floats] | None:
    """Mean over seeds of the mean over clients, and the std over seeds, at rounds that all its runs share."""
    found = [run.series(metric, split) for run in row.runs]
    rounds = found[0].rounds
    for series in found[1:]:
        rounds = np.intersect1d(rounds, series.rounds)
    if not len(rounds):
        return None
    means = np.stack([series.mean[np.isin(series.rounds, rounds)] for series in found])
    return rounds, means.mean(0), means.std(0, ddof=1) if len(means) > 1 else np.zeros(len(rounds))


def curves(comparison: Comparison, metric: str, split: str, title: str) -> Picture | None:
    """One line per row; the band is the std over seeds, never the std over clients."""
    found = {i: lines for i, row in enumerate(comparison.rows) if (lines := over_rounds(row, metric, split))}
    if not found:
        return None
    share = metric.endswith("accuracy")
    with drawing(f"vs-{metric.replace('_', '-')}", HALF) as (_, (axes,), out):
        for i, (rounds, mean, std) in found.items():
            colour, dash = look(i)
            if std.any():
                axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
            axes.plot(rounds, mean, color=colour, linestyle=dash, marker="o" if len(rounds) < 4 else None, markersize=4)
        if share:
            percent_axis(axes)
        round_axis(axes)
    say = (lambda value: percent(value)) if share else (lambda value: f"{value:.3g}")
    alt = "; ".join(f"{comparison.rows[i].label} ends at {say(float(mean[-1]))}" for i, (_, mean, _) in found.items())
    whose = "clients" if share else "the round's participants"
    caption = f"Mean over {whose}" + (
        ", then over seeds; the band is one std over seeds." if any(std.any() for *_, std in found.values()) else "."
    )
    keys = tuple(Key(comparison.rows[i].label, look(i)[0], DASHES[look(i)[1]]) for i in found)
    return Picture(title, out[0], caption, alt, keys)


def final_by_client(row: Row) -> dict[int, float]:
    """Each client's personal accuracy at the end, mean over the row's seeds."""
    found = [known(run.per_client("personal_accuracy", *run.reported_at())) for run in row.runs]
    shared = set.intersection(*map(set, found))
    return {client: float(np.mean([run[client] for run in found])) for client in sorted(shared)}


def pairable(first: Row, other: Row) -> bool:
    """Whether client 7 is the same client in all runs of both rows: one partition, and the same split of it."""
    runs = (*first.runs, *other.runs)
    return len({(run.facts.get("partition_hash"), run.reported_at()[0]) for run in runs}) == 1


def paired(comparison: Comparison) -> Picture | None:
    """Client by client against the table's first row: a dot above the diagonal is a client that fares better."""
    first, *others = comparison.rows
    shown = [row for row in others if pairable(first, row)]
    base = final_by_client(first)
    pairs = [(row, np.array([(base[c], v) for c, v in final_by_client(row).items() if c in base]).T) for row in shown]
    pairs = [(row, points) for row, points in pairs if points.size]
    if not pairs:
        return None
    columns = min(4, max(3, len(pairs)))
    lines = -(-len(pairs) // columns)
    told = []
    with drawing("vs-pairs", (10.6, 10.6 / columns * lines + 0.2), lines, columns) as (_, panels, out):
        low = min(points.min() for _, points in pairs)
        high = max(points.max() for _, points in pairs)
        limits = (max(-0.02, low - 0.04), min(1.02, high + 0.04))
        for axes, (row, (x, y)) in zip(panels, pairs, strict=False):
            axes.plot(limits, limits, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            for keep, colour, marker in ((y > x, BLUE, "o"), (y <= x, RED, "D")):
                axes.scatter(x[keep], y[keep], s=13, color=colour, marker=marker, alpha=0.7, linewidth=0)
            axes.set(xlim=limits, ylim=limits, aspect="equal")
            axes.set_title(cut(row.label, 34), fontsize=8.5, color=INK, loc="left")
            axes.set_xlabel(cut(first.label, 34))
            percent_axis(axes)
            percent_axis(axes, "x")
            axes.grid()
            better, worse = int((y > x).sum()), int((y < x).sum())
            told.append(f"{row.label}: {better} of {len(x)} clients better off, {worse} worse off")
        for axes in panels[len(pairs) :]:
            axes.set_visible(False)
    alt = "; ".join(told)
    unpaired = [row.label for row in others if not any(row is other for other, _ in pairs)]
    caption = f"{alt}. One dot per client: across, its accuracy with {first.label}; up, with the other row."
    caption += f" Not paired, for want of the same partition and split: {', '.join(unpaired)}." if unpaired else ""
    keys = (Key("client better off than in the first row", BLUE, "dot"), Key("equal or worse off", RED, "diamond"))
    return Picture(f"Against {first.label}, the first row", out[0], caption, alt, keys, wide=True)


def traffic(comparison: Comparison) -> Picture | None:
    """What the accuracy costs on the wire."""
    points = []
    shapes = {"dot": "o", "square": "s", "diamond": "D", "up": "^"}
    shape = [list(shapes)[i % len(shapes)] for i in range(len(comparison.rows))]
    for i, row in enumerate(comparison.rows):
        accuracy, down, up = row.accuracy("personal"), row.cost("bytes_down"), row.cost("bytes_up")
        if row.finished and accuracy and down and up:  # half a run has half the traffic
            points.append((i, (down.mean + up.mean) / 1e6, accuracy.mean))
    if len(points) < 2:
        return None
    with drawing("vs-traffic", HALF) as (_, (axes,), out):
        for i, megabytes, accuracy in points:
            marker = shapes[shape[i]]
            axes.scatter([megabytes], [accuracy], s=46, color=look(i)[0], marker=marker, zorder=3, linewidth=0)
        axes.margins(0.12)
        axes.set_xlim(0, 1.08 * max(megabytes for _, megabytes, _ in points) or 1)
        percent_axis(axes)
        axes.set_xlabel("MB sent in all, down and up")
        axes.grid()
    told = [f"{comparison.rows[i].label}: {percent(y)} for {x:,.1f} MB" for i, x, y in points]
    keys = tuple(Key(comparison.rows[i].label, look(i)[0], shape[i]) for i, *_ in points)
    caption = "Finished rows only. Up and to the left is better."
    return Picture("Personal accuracy against traffic", out[0], caption, "; ".join(told), keys)
