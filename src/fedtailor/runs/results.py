"""Reading a run folder: its config, its facts and its events, and the few numbers a reader should take from them.

Numbers come from the last round only. A run that did not finish gives validation numbers and says so.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedtailor.errors import UserError
from fedtailor.runs.columns import SPLITS, Bools, Events, Floats, Ints, read_events

FORMAT = 1
MEASURED = frozenset({"measured_seconds"})  # the only metric that may differ between two equal runs
KINDS = {"personal": "personal_accuracy", "global": "global_accuracy", "new": "new_accuracy"}


class Spread(NamedTuple):
    """One number of every client, told in four: the std is over the clients, which are all there are (ddof 0)."""

    mean: float
    std: float
    worst_decile: float  # mean of the lowest tenth of the clients, rounded up, so at least one
    n: int


class Series(NamedTuple):
    """A metric over the rounds in which it was written; mean and std over the clients that wrote it."""

    rounds: Ints
    mean: Floats
    std: Floats
    n: Ints


def worst_tenth(n: int) -> int:
    """How many of n clients the worst decile holds: a tenth, rounded up."""
    return -(-n // 10)


def spread(values: Sequence[float] | Floats) -> Spread | None:
    """Mean, std over clients, worst decile and n; clients without a value (nan) do not count; None where nobody has."""
    known = np.asarray(values, dtype=np.float64)
    known = np.sort(known[~np.isnan(known)])
    if not len(known):
        return None
    lowest = known[: worst_tenth(len(known))]
    return Spread(float(known.mean()), float(known.std()), float(lowest.mean()), len(known))


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None or np.isnan(seconds):
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True, eq=False)
class Results:
    """One run, read from its folder."""

    folder: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    events: Events

    @staticmethod
    def read(folder: Path) -> Results:
        """Read a run folder, or say what is wrong with it."""
        folder = Path(folder)
        _check_folder(folder)
        facts = _parse(folder / "run.json", json.loads)
        if not isinstance(facts, dict) or "format" not in facts:
            raise UserError(
                f"{folder / 'run.json'} was not written by fedtailor. Give a folder that `fedtailor run` wrote."
            )
        if facts["format"] != FORMAT:
            raise UserError(
                f"{folder} has run format {facts['format']}, this fedtailor reads format {FORMAT}. "
                f"Read it with the version that wrote it: pip install fedtailor=={facts.get('fedtailor', '<version>')}"
            )
        config = _parse(folder / "config.toml", tomllib.loads)
        events = read_events(folder / "events.csv", [str(name) for name in facts.get("client_names") or ()])
        return Results(folder, config, facts, events)

    # ---- what kind of run this is

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def finished(self) -> bool:
        return self.facts.get("status") == "done"

    @property
    def rounds_done(self) -> int:
        """The last whole round; run.json of an unfinished run may lag behind its events."""
        told, events = int(self.facts.get("rounds_done") or 0), self.events
        return told if self.finished or not len(events) else max(told, int(events.round.max()))

    @property
    def rounds_planned(self) -> int:
        return int(self.config.get("rounds") or self.rounds_done)

    @property
    def method(self) -> str:
        return self.section("method")

    @property
    def network(self) -> str:
        """The search space, or the fixed network, which is the space with one point."""
        return self.section("space") or self.section("net")

    def section(self, table: str, key: str = "name") -> str:
        """A config entry such as `[data] name`, as text; empty where there is none."""
        value = self.config.get(table)
        value = value.get(key, "") if isinstance(value, dict) else value
        return "" if value is None else str(value)

    def client_name(self, client: int) -> str:
        names = self.facts.get("client_names") or ()
        return str(names[client]) if 0 <= client < len(names) else f"client {client}"

    # ---- columns to numbers

    def series(self, metric: str, split: str) -> Series:
        """A metric round by round: mean and std over the clients that wrote it in that round."""
        rows = self.events.where(metric, split)
        rounds, group = np.unique(self.events.round[rows], return_inverse=True)
        values, n = self.events.value[rows], np.bincount(group, minlength=len(rounds))
        mean = np.bincount(group, values, minlength=len(rounds)) / n
        variance = np.bincount(group, (values - mean[group]) ** 2, minlength=len(rounds)) / n
        return Series(rounds, mean, np.sqrt(variance), n)

    def per_client(self, metric: str, split: str, round: int | None = None) -> dict[int, float]:
        """A metric client by client, at one round (the last in which it was written unless told)."""
        rows = self._rows_at(metric, split, round)
        return dict(zip(self.events.client[rows].tolist(), self.events.value[rows].tolist(), strict=True))

    def per_client_text(self, metric: str, round: int | None = None) -> dict[int, str]:
        """A text metric such as `personal_arch` client by client, at one round (the last unless told)."""
        rows = self._rows_at(metric, None, round)
        texts = [self.events.texts[i] for i in self.events.text[rows].tolist()]
        return dict(zip(self.events.client[rows].tolist(), texts, strict=True))

    def total(self, metric: str) -> float | None:
        """The sum over all rounds and clients; None where the metric was never written."""
        rows = self.events.where(metric)
        return float(self.events.value[rows].sum()) if rows.any() else None

    def _rows_at(self, metric: str, split: str | None, round: int | None) -> Bools:
        rows = self.events.where(metric, split, round)
        if round is None and rows.any():
            rows &= self.events.round == self.events.round[rows].max()
        return rows

    # ---- the numbers to report

    def reported_at(self) -> tuple[str, int]:
        """Split and round of the reported numbers: test at the last round, or val at the last whole evaluation."""
        if self.finished:
            tested = any(self.events.where(metric, "test", self.rounds_done).any() for metric in KINDS.values())
            return ("test" if tested else "val"), self.rounds_done
        # A run killed while evaluating leaves a round with only some of its clients: that round is not a result.
        rounds, _, _, n = self.series(KINDS["personal"], "val")
        return "val", int(rounds[n == n.max()][-1]) if len(rounds) else 0

    def warnings(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        split, at = self.reported_at()
        found = []
        if not self.finished:
            status = self.facts.get("status", "unknown")
            found.append(
                f"UNFINISHED RUN: {self.rounds_done} of {self.rounds_planned} rounds done (status: {status}). Numbers "
                f"are validation numbers of round {at}, not results. For test numbers: "
                + shlex.join(["fedtailor", "resume", str(self.folder)])
            )
        elif split != "test":
            found.append(f"NO TEST NUMBERS in round {at} although the run is done; the numbers are validation numbers.")
        for kind, metric in KINDS.items():
            missing = sum(np.isnan(v) for v in self.per_client(metric, split, at).values())
            if missing:
                found.append(
                    f"{missing} client(s) have no {kind} accuracy (nan, no {split} data) and are left out of it."
                )
        return found

    @cached_property
    def spreads(self) -> dict[str, Spread | None]:
        """personal, global and new accuracy over the clients, at the reported split and round."""
        split, at = self.reported_at()
        return {kind: spread(list(self.per_client(metric, split, at).values())) for kind, metric in KINDS.items()}

    def summary(self) -> dict[str, Any]:
        """Every number worth quoting, as a plain dict; None where the run has no such number."""
        return dict(self._summary)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        split, at = self.reported_at()
        seconds, simulated = self.facts.get("seconds"), self.total("round_seconds")
        sizes = {
            metric: spread(list(self.per_client(metric, found, at).values()))
            for metric in ("personal_parameters", "personal_flops")
            for found in [self._split_of(metric)]
        }
        return {
            "method": self.method,
            "space" if "space" in self.config else "net": self.network,
            "data": self.section("data"),
            "partition_hash": str(self.facts.get("partition_hash") or ""),
            "seed": self.config.get("seed"),
            "finished": self.finished,
            "rounds": self.rounds_done,
            "split": split,
            "round": at,
            **{kind: s and s._asdict() for kind, s in self.spreads.items()},
            **{metric: s and s.mean for metric, s in sizes.items()},
            "bytes_up": self.total("bytes_up"),
            "bytes_down": self.total("bytes_down"),
            "simulated_hours": None if simulated is None else simulated / 3600,
            "measured_seconds": self.total("measured_seconds") if seconds is None else float(seconds),
        }

    def _split_of(self, metric: str) -> str:
        """The split a metric was written under; sizes of networks belong to none, but need not be written so."""
        rows = self.events.where(metric)
        return SPLITS[int(self.events.split[rows][-1])] if rows.any() else ""

    def table(self) -> Table:
        """The reported numbers for a terminal."""
        from fedtailor.report.words import SPACE, count, size  # which reads this module; one number, one unit

        summary, loud = self.summary(), Text("" if self.finished else "UNFINISHED ", style="bold red")
        table = Table(title=loud + Text(f"{self.name}: {self.method}"), title_justify="left", caption_justify="left")
        for head in ("accuracy", "mean", "std over clients", "worst decile", "clients", "split", "round"):
            table.add_column(head, justify="left" if head in ("accuracy", "split") else "right")
        for kind, s in self.spreads.items():
            if s:
                cells = (f"{100 * v:.2f} %" for v in (s.mean, s.std, s.worst_decile))
                at = (str(s.n), summary["split"], str(summary["round"]))
                table.add_row(kind, *cells, *at, style="bold" if kind == "personal" else None)
        costs = [
            f"{say(summary[key]).replace(SPACE, ' ')} {unit}"
            for key, say, unit in (
                ("bytes_down", size, "down"),
                ("bytes_up", size, "up"),
                ("personal_parameters", count, "parameters"),
                ("personal_flops", count, "FLOPs"),
            )
            if summary[key] is not None
        ]
        if summary["simulated_hours"] is not None:
            costs.append(f"{duration(3600 * summary['simulated_hours'])} simulated")
        if summary["measured_seconds"] is not None:
            costs.append(f"{duration(summary['measured_seconds'])} measured")
        lines = [Text(", ".join(costs)), *(Text(warning, style="bold red") for warning in self.warnings())]
        table.caption = Text("\n").join(line for line in lines if line.plain)
        return table


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give a folder that `fedtailor run` wrote.")
    missing = [name for name in ("run.json", "config.toml", "events.csv") if not (folder / name).is_file()]
    if "run.json" in missing:
        inner = sorted(path.parent for path in folder.glob("*/run.json"))
        hint = f" It holds runs, though: {', '.join(map(str, inner[:3]))}." if inner else ""
        raise UserError(
            f"{folder} is not a run folder: it has no run.json.{hint} Give a folder that `fedtailor run` wrote."
        )
    if missing:
        raise UserError(
            f"{folder} is a run folder without {' and '.join(missing)}. If the run has just started, wait for its "
            "first round; otherwise restore the file or run it again."
        )


def _parse(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # the json, toml and unicode errors are all of this kind
        raise UserError(f"{path} cannot be read ({error}). Restore the file, or run the experiment again.") from None
