"""The tables "On the demo" in docs/methods: runs what they show and writes them anew.

    python bench/demos.py                     # all of them, ten minutes on two CPU cores: make demos
    python bench/demos.py ditto fedrep        # those of some pages

Runs are kept under --out, and finished ones are not run again. The commands that stand above a table are what its rows
are made of; this script only saves typing them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.api import resume, run
from fedtailor.runs.compare import compare

PAGES = Path(__file__).parent.parent / "docs" / "methods"
TITLE = "## On the demo"
NUMBERS = "personal | std over clients | worst decile | global | MB"


@dataclass(frozen=True)
class Row:
    """A line of a table: some settings, and the seeds over which it is a mean."""

    method: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        return "-".join([self.method, *(f"{key.split('.')[-1]}-{value}" for key, value in self.changes.items())])


@dataclass(frozen=True)
class Table:
    rows: Sequence[Row]
    head: str | None = ""  # of the labels; None: there are none
    ranked: bool = False


def alone(method: str) -> Table:
    return Table([Row(method)], head=None)


def seed_0(method: str, *rows: tuple[str, Mapping[str, Any]]) -> Table:
    return Table([Row(method, changes, label, (0,)) for label, changes in rows])


PRIOR = {"local.prior": True}
FEDAVG = [Row(method, changes) for method in ("fedavg", "fedavg-ft") for changes in ({}, PRIOR)]
FOUNDATION = ("local", "fedprox", "ditto", "fedrep", "fedbabu")
FAMILY = ("apfl", "fedbn", "fedper", "l2gd", "lg-fedavg", "per-fedavg", "pfedme")
AVERAGES = ("feddyn", "fednova", "fedopt", "scaffold")
LONGER = [("30 rounds", {}), ("150 rounds", {"rounds": 150})]
APART = {"partition.samples": 120, "public.name": "rest", "public.images": 200}
TABLES = {
    "index": Table([*FEDAVG, *map(Row, FOUNDATION)], "method", ranked=True),
    "fedavg": Table(FEDAVG, "method"),
    **{method: alone(method) for method in (*FOUNDATION, *FAMILY, *AVERAGES)},
    "fedmn": seed_0("fedmn", ("30 rounds", {}), ("the same, kept as it is", {"method.deploy": "as-is"})),
    "fedoras": seed_0(
        "fedoras",
        ("four batches a path, trained", {"method.draw_every": 4}),
        ("one batch a path, kept as it is", {"method.deploy": "as-is"}),
    ),
    "fedtp": seed_0("fedtp", *LONGER),
    "pfedhn": seed_0("pfedhn", *LONGER),
    "perfedckt": seed_0("perfedckt", ("30 rounds", APART)),
    **{method: seed_0(method, ("30 rounds", {})) for method in ("fml", "knn-per", "sfl")},
}


def finished(row: Row, seed: int, out: Path) -> Path:
    folder = out / f"{row.name}-{seed}"
    if folder.exists():
        return resume(folder, device="cpu").folder
    print(folder, flush=True)
    changes = {key.replace(".", "__"): value for key, value in row.changes.items()}
    return run("demo", out=folder, device="cpu", method=row.method, seed=seed, **changes).folder


def cells(row: Row, out: Path) -> tuple[float, str]:
    """The personal accuracy, and the numbers of a line."""
    (found,) = compare([finished(row, seed, out) for seed in row.seeds]).rows
    record = found.record()

    def percent(name: str) -> str:
        return "–" if record[name] is None else f"{100 * record[name]:.2f}"

    spread = f" ± {percent('personal_std_over_seeds')}" if len(row.seeds) > 1 else ""
    numbers = [
        percent("personal_mean") + spread,
        percent("personal_std_over_clients"),
        percent("personal_worst_decile"),
    ]
    sent = (record["bytes_down"] + record["bytes_up"]) / 1e6
    return record["personal_mean"], " | ".join([*numbers, percent("global_mean"), f"{sent:.1f}"])


def label(row: Row) -> str:
    settings = (f"{k}={str(v).lower()}" for k, v in row.changes.items())
    return row.label or ", ".join(f"`{word}`" for word in [row.method, *settings])


def lines(table: Table, out: Path) -> list[str]:
    made = [(row, *cells(row, out)) for row in table.rows]
    if table.ranked:
        made.sort(key=lambda one: (-one[1], label(one[0])))
    pairs = [(table.head or "", NUMBERS), *((label(row), numbers) for row, _, numbers in made)]
    if table.head is None:
        pairs = [(numbers,) for _, numbers in pairs]
    head, *rest = (f"| {' | '.join(pair)} |" for pair in pairs)
    return [head.replace("|  |", "| |"), "|" + "---|" * (head.count("|") - 1), *rest]


def written(text: str, table: Sequence[str]) -> str:
    """The page with another table as the first of its section."""
    before, section = text.split(f"\n{TITLE}\n", 1)
    found = section.split("\n")
    first = next(i for i, line in enumerate(found) if line.startswith("|"))
    last = next(i for i in range(first, len(found)) if not found[i].startswith("|"))
    return f"{before}\n{TITLE}\n" + "\n".join([*found[:first], *table, *found[last:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages without .md; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/demos"), help="run folders")
    args = parser.parse_args()
    if unknown := [name for name in args.pages if name not in TABLES]:
        sys.exit(f"no table of the demo: {', '.join(unknown)}. There are: {', '.join(TABLES)}")
    for name in args.pages or TABLES:
        path = PAGES / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        path.write_text(written(text, lines(TABLES[name], args.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
