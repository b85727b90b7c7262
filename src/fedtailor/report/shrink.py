"""The shrink-ratio picture of Luo et al. (Figure 3): how much of every layer clients kept, by what they can afford."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtailor.config import load
from fedtailor.errors import UserError
from fedtailor.fleet import fleet as fleets
from fedtailor.report.archs import parse
from fedtailor.report.plots import COLOURS, MUTED, cut, drawing, percent_axis
from fedtailor.runs.results import Floats, Results


@dataclass(frozen=True, eq=False)
class Shrinkage:
    """The kept share of every dimension of every client's network, the clients in groups of equal budgets."""

    run: str
    dimensions: list[str]
    clients: list[int]
    names: list[str]
    shares: Floats  # [clients, dimensions]: the chosen option by the largest
    groups: dict[str, list[int]]  # budget in words: rows of `shares`, the group that keeps most first

    def mean(self, group: str) -> Floats:
        return self.shares[self.groups[group]].mean(0)

    def distance(self, group: str) -> float:
        """Mean L2 distance between two clients' shares: how different are networks that cost the same?"""
        pairs = list(itertools.combinations(self.groups[group], 2))
        return float(np.mean([np.linalg.norm(self.shares[a] - self.shares[b]) for a, b in pairs])) if pairs else 0.0

    def to_csv(self, path: Path) -> None:
        """One line per client and dimension."""
        group_of = {row: group for group, rows in self.groups.items() for row in rows}
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("client", "name", "budget", "dimension", "kept"))
            for row, (client, name) in enumerate(zip(self.clients, self.names, strict=True)):
                for dimension, share in zip(self.dimensions, self.shares[row], strict=True):
                    writer.writerow((client, name, group_of[row], dimension, f"{share:.6g}"))

    def to_svg(self, path: Path) -> None:
        path.write_text(self.draw(), encoding="utf-8")

    def draw(self) -> str:
        """A panel per group: thin lines are clients, the thick one is their mean."""
        n, x = len(self.groups), np.arange(len(self.dimensions))
        size = max(7.0, 1.6 + 0.3 * len(x)), 0.9 + 2.0 * n
        with drawing("shrink", size, n) as (_, panels, out):
            for axes, colour, (group, rows) in zip(panels, itertools.cycle(COLOURS), self.groups.items(), strict=False):
                for row in rows:
                    axes.plot(x, self.shares[row], color=colour, alpha=0.35, linewidth=0.9)
                axes.plot(x, self.mean(group), color=colour, linewidth=2.4, marker="o", markersize=3.5)
                clients = "1 client" if len(rows) == 1 else f"{len(rows)} clients"
                title = f"{group}: {clients}, mean distance {self.distance(group):.2f}"
                axes.set_title(title, fontsize=9, loc="left", pad=4)
                axes.set(ylim=(0, 1.05), xlim=(-0.5, len(x) - 0.5))
                axes.set_xticks(x, [], rotation=60, ha="right")
                axes.set_ylabel("kept", color=MUTED)
                axes.grid(axis="both")
                percent_axis(axes)
            panels[-1].set_xticks(x, [cut(name, 16) for name in self.dimensions], rotation=60, ha="right")
        return out[0]


def read_shrinkage(run: Results) -> Shrinkage:
    """What a finished run's clients kept of every dimension."""
    found = run.facts.get("dimensions") or []
    options = [dimension["options"] for dimension in found]
    sizes = [len(o) for o in options]
    archs = {client: parse(text, sizes) for client, text in run.per_client_text("personal_arch").items()}
    kept = {client: arch for client, arch in sorted(archs.items()) if arch}
    if not kept or max(sizes) < 2:
        raise UserError(
            f"{run.folder} has no architectures to compare: give a finished run of a method that chooses them, for "
            "example fedcs or feduniform."
        )
    shares = np.array([[_share(o, i) for o, i in zip(options, arch, strict=True)] for arch in kept.values()])
    config = load(run.folder / "config.toml")
    names = [run.client_name(client) for client in kept]
    everybody = len(run.facts.get("client_names") or kept)  # capacities are dealt to clients held out of training too
    devices = fleets.make(config.make_fleet(), everybody, config.seed)
    groups: dict[str, list[int]] = {}
    for row, client in enumerate(kept):
        groups.setdefault(str(devices[client].budget), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: -shares[item[1]].mean())
    return Shrinkage(run.name, [str(d["name"]) for d in found], list(kept), names, shares, dict(ordered))


def _share(options: Sequence[object], chosen: int) -> float:
    """An option by the largest one; where options are no numbers, by its place among them."""
    numbers = [o for o in options if isinstance(o, int | float) and o > 0]
    return numbers[chosen] / max(numbers) if len(numbers) == len(options) else (chosen + 1) / len(options)
