"""Several runs in one table: last-round numbers only, and a flag on everything that makes the comparison unfair.

Two spreads are kept apart everywhere: *std over clients* (how differently the clients of one run fare) and *std over
seeds* (how much the result moves when only the seed changes).
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from fedtailor.errors import UserError
from fedtailor.runs.columns import Events
from fedtailor.runs.results import KINDS, MEASURED, Results, duration

Order = Literal["personal", "given"]
COSTS = ("personal_parameters", "personal_flops", "bytes_down", "bytes_up", "simulated_hours", "measured_seconds")

# The columns of the terminal's table, narrow enough for 80 characters: only the headline carries its ± over seeds.
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("seeds", lambda row: str(len(row.runs))),
    ("personal", lambda row: _percent(row.accuracy("personal"), seeds=True)),
    ("std over\nclients", lambda row: _percent(row.accuracy("personal", "std"))),
    ("worst\ndecile", lambda row: _percent(row.accuracy("personal", "worst_decile"))),
    ("global", lambda row: _percent(row.accuracy("global"))),
    ("new", lambda row: _percent(row.accuracy("new"))),
    ("MB", lambda row: _megabytes(row.cost("bytes_down"), row.cost("bytes_up"))),
    ("sim.\ntime", lambda row: duration(3600 * cost.mean) if (cost := row.cost("simulated_hours")) else "–"),
)

# What must be equal for two rows to be comparable. Each gives one value per run; a row is compared by its set of them.
FAIR: dict[str, Callable[[Results], Any]] = {
    "partition": lambda run: run.facts.get("partition_hash"),
    "data": lambda run: run.facts.get("data_hash"),
    "rounds": lambda run: run.rounds_planned,
    "seeds": lambda run: run.config.get("seed"),
    "clients": lambda run: run.config.get("clients"),
    "participants": lambda run: run.config.get("participants"),
    "new clients": lambda run: run.facts.get("new_clients"),
}


@dataclass(frozen=True)
class Over:
    """A number over the runs of a row; the std is over seeds (ddof 1), and there is none for a single run."""

    mean: float
    std_over_seeds: float | None
    runs: int


def over_seeds(values: Iterable[float | None]) -> Over | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Over(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in nothing but the seed, told as one."""

    label: str
    runs: tuple[Results, ...]
    flags: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.runs[0].finished

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(run.config.get("seed") for run in self.runs)

    def accuracy(self, kind: str, number: str = "mean") -> Over | None:
        """mean, std (over clients) or worst_decile of personal, global or new accuracy, over the row's seeds."""
        return over_seeds(s and getattr(s, number) for s in (run.spreads[kind] for run in self.runs))

    def clients(self, kind: str) -> int | None:
        found = [s.n for s in (run.spreads[kind] for run in self.runs) if s]
        return min(found) if found else None

    def cost(self, name: str) -> Over | None:
        return over_seeds(run.summary()[name] for run in self.runs)

    def record(self) -> dict[str, Any]:
        """One line of the CSV: raw numbers, None where there is none."""
        split, at = self.runs[0].reported_at()
        line: dict[str, Any] = {
            "label": self.label,
            "method": self.runs[0].method,
            "network": self.runs[0].network,
            "data": self.runs[0].section("data"),
            "seeds": " ".join(map(str, self.seeds)),
            "runs": len(self.runs),
            "finished": self.finished,
            "split": split,
            "round": at,
        }
        for kind in KINDS:
            mean, std, worst = (self.accuracy(kind, number) for number in ("mean", "std", "worst_decile"))
            line[f"{kind}_mean"] = mean and mean.mean
            line[f"{kind}_std_over_seeds"] = mean and mean.std_over_seeds
            line[f"{kind}_std_over_clients"] = std and std.mean
            line[f"{kind}_worst_decile"] = worst and worst.mean
            line[f"{kind}_worst_decile_std_over_seeds"] = worst and worst.std_over_seeds
            line[f"{kind}_clients"] = self.clients(kind)
        for name in COSTS:
            cost = self.cost(name)
            line[name] = cost and cost.mean
        hashes = sorted({str(run.facts.get("partition_hash")) for run in self.runs})
        return {**line, "partition_hash": " ".join(hashes), "flags": "; ".join(self.flags)}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rows to be read side by side, and what to know before doing so."""

    rows: tuple[Row, ...]
    unfair: tuple[str, ...]  # differences that make the comparison unfair, in words
    notes: tuple[str, ...]  # the rest: identical runs, mixed versions

    @property
    def fair(self) -> bool:
        return not self.unfair

    def differing(self) -> dict[str, list[str]]:
        """The settings that are not the same in every row, seed aside: setting to one text per row."""
        return differing([row.runs[0] for row in self.rows])

    def table(self) -> Table:
        """For a terminal; accuracies in percent."""
        title = "last round, test split" if all(row.finished for row in self.rows) else "last round"
        table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("run", overflow="fold")
        columns = [(head, [say(row) for row in self.rows]) for head, say in COLUMNS]
        columns = [(head, cells) for head, cells in columns if set(cells) != {"–"}]
        for head, _ in columns:
            table.add_column(head, justify="right", no_wrap=True)
        if any(row.flags for row in self.rows):
            table.add_column("not equal", overflow="fold")
        for i, row in enumerate(self.rows):
            flags = [Text(", ".join(row.flags), style="bold red")] if any(row.flags for row in self.rows) else []
            cells = (cells[i] for _, cells in columns)
            table.add_row(Text(row.label), *cells, *flags, style=None if row.finished else "dim")
        table.caption = Text("\n").join(
            [
                Text("Accuracies in percent; ± is the std over seeds, where a row holds two runs. MB: down and up."),
                *(Text(f"UNFAIR: {line}", style="bold red") for line in self.unfair),
                *(Text(line) for line in self.notes),
            ]
        )
        table.caption_justify = table.title_justify = "left"
        return table

    def to_csv(self, path: Path) -> None:
        """One line per row, raw numbers with all their digits, empty where there is none."""
        records = [row.record() for row in self.rows]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)

    def to_html(self, path: Path) -> None:
        from fedtailor.report.html import write_comparison_page  # the report needs extras that a table does not

        write_comparison_page(self, Path(path))


def _percent(number: Over | None, seeds: bool = False) -> str:
    if number is None:
        return "–"
    std = f" ± {100 * number.std_over_seeds:.2f}" if seeds and number.std_over_seeds is not None else ""
    return f"{100 * number.mean:.2f}{std}"


def _megabytes(*costs: Over | None) -> str:
    known = [cost.mean for cost in costs if cost]
    return f"{sum(known) / 1e6:,.1f}" if known else "–"


# ---- building a comparison


def compare(folders: Sequence[Path | Results], order: Order = "personal") -> Comparison:
    """Read runs, join those that differ only in the seed, flag what is unfair; by personal accuracy unless told."""
    if not folders:
        raise UserError("nothing to compare: give one or more run folders.")
    runs = [folder if isinstance(folder, Results) else Results.read(folder) for folder in folders]
    groups = _by_seed(runs)
    if order == "personal":  # unfinished runs have another split's numbers, so they come last whatever they are
        groups.sort(key=lambda group: (not group[0].finished, -_personal(group)))
    labels = _labels([group[0] for group in groups])
    unfair, flags = _unfair(groups, labels)
    rows = tuple(Row(*parts) for parts in zip(labels, map(tuple, groups), flags, strict=True))
    return Comparison(rows, tuple(unfair), tuple(_notes(rows)))


def identical(a: Path | Results, b: Path | Results) -> bool:
    """Whether two runs have the same events, measured times aside: a resumed run equals an uninterrupted one."""
    left, right = (run if isinstance(run, Results) else Results.read(run) for run in (a, b))
    metrics = sorted({*left.events.metrics, *right.events.metrics} - MEASURED)
    texts = sorted({*left.events.texts, *right.events.texts})
    columns = [_canonical(run.events, metrics, texts) for run in (left, right)]
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*columns, strict=True))


def _canonical(events: Events, metrics: list[str], texts: list[str]) -> list[np.ndarray]:
    """The unmeasured rows with metric and text numbered alike in both runs, in an order that forgets the file's."""
    number = np.array([metrics.index(name) if name in metrics else -1 for name in events.metrics] or [-1])
    word = np.array([*map(texts.index, events.texts), -1])  # the last entry answers for code -1, a numeric row
    metric, text = number[events.metric], word[events.text]
    columns = [events.round, events.client, events.split, metric, text, events.value]
    columns = [column[metric >= 0] for column in columns]
    order = np.lexsort(columns[:4])
    return [column[order] for column in columns]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'local': {'lr': 1}} as {'local.lr': 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differing(runs: Sequence[Results]) -> dict[str, list[str]]:
    configs = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(itertools.chain.from_iterable(configs))
    told = {key: [str(config.get(key, "–")) for config in configs] for key in keys if key != "seed"}
    return {key: values for key, values in told.items() if len(set(values)) > 1}


def _by_seed(runs: Sequence[Results]) -> list[list[Results]]:
    """Runs with equal settings and equal standing join, one per seed: a second run of a seed is no new evidence."""
    groups: list[list[Results]] = []
    for run in runs:
        for group in groups:
            alike = not differing([group[0], run]) and group[0].reported_at() == run.reported_at()
            if alike and run.config.get("seed") not in [other.config.get("seed") for other in group]:
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _personal(group: list[Results]) -> float:
    number = Row("", tuple(group)).accuracy("personal")
    return number.mean if number else -1.0


def _labels(runs: Sequence[Results]) -> list[str]:
    """The method's name; where several rows share it, what differs between them; where nothing does, the folder."""
    labels = [run.method or run.name for run in runs]
    for name, count in Counter(labels).items():
        if count == 1:
            continue
        same = [i for i, run in enumerate(runs) if (run.method or run.name) == name]
        settings = differing([runs[i] for i in same])
        for position, i in enumerate(same):
            told = [f"{key.removesuffix('.name')} {values[position]}" for key, values in list(settings.items())[:3]]
            labels[i] = ", ".join([name, *told])
    repeated = {label for label, count in Counter(labels).items() if count > 1}
    places = _places(runs)
    return [f"{label} ({places[run]})" if label in repeated else label for label, run in zip(labels, runs, strict=True)]


def _places(runs: Sequence[Results]) -> dict[Results, str]:
    """Each run's folder in short: its name, with those above it where others have the same."""
    paths = {run: run.folder.resolve().parts for run in runs}
    told = {}
    for run, path in paths.items():
        others = [other for other in paths.values() if other != path]
        length = next(n for n in range(1, len(path) + 1) if path[-n:] not in [other[-n:] for other in others])
        told[run] = "/".join(path[-length:])
    return told


def _unfair(groups: list[list[Results]], labels: list[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The differences in words, and for each row those in which it is not like most rows."""
    words: list[str] = []
    flags: list[list[str]] = [[] for _ in groups]
    for name, of in FAIR.items():
        values = [", ".join(sorted({_short(of(run)) for run in group})) for group in groups]
        usual = Counter(values).most_common(1)[0][0]
        if len(set(values)) > 1:
            who = {value: [label for label, v in zip(labels, values, strict=True) if v == value] for value in values}
            told = "; ".join(
                f"{', '.join(rows)} ha{'s' if len(rows) == 1 else 've'} {value}" for value, rows in who.items()
            )
            words.append(f"not the same {name} in all rows ({told}).")
        for flag, value in zip(flags, values, strict=True):
            if value != usual:
                flag.append(name)
    for group, label, flag in zip(groups, labels, flags, strict=True):
        split, at = group[0].reported_at()
        if not group[0].finished:
            flag.append("unfinished")
            words.append(f"{label} is unfinished: its numbers are from the {split} split of round {at}.")
        elif split != "test":
            flag.append("split")
            words.append(f"{label} has no test numbers: its numbers are from the {split} split.")
    return words, [tuple(flag) for flag in flags]


def _short(value: Any) -> str:
    """A hash by its first digits, anything else whole."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) > 16 else text


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    runs = [(row, run) for row in rows for run in row.runs]
    places = _places([run for _, run in runs])
    for (_, a), (_, b) in itertools.combinations(runs, 2):
        if a.config.get("seed") != b.config.get("seed") or differing([a, b]):
            continue
        if identical(a, b):
            notes.append(f"{places[a]} and {places[b]} are identical, measured times aside: one result, not two.")
        else:
            notes.append(f"{places[a]} and {places[b]} have the same settings and seed but not the same events.")
    for row in rows:
        partitions = {run.facts.get("partition_hash") for run in row.runs}
        if len(partitions) > 1:
            notes.append(f"{row.label}: {len(partitions)} partitions, so its std over seeds includes the partition.")
    for key in ("fedtailor", "torch", "device"):
        found = sorted({str(run.facts.get(key)) for _, run in runs})
        if len(found) > 1:
            notes.append(f"runs were made with different {key}: {', '.join(found)}.")
    return notes
