"""Runs in the tools that people already use: `--log csv`, `--log tensorboard`, `--log mlflow`.

Each gets one number per round and metric: the mean over the clients that wrote it, named `split/metric`, or the sum for
what clients spend. The event log stays the whole truth; these are for looking at.
"""

from __future__ import annotations

import csv
import os
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..engine.loop import Event
from ..errors import UserError
from .compare import flatten
from .execute import Watcher

SUMMED = frozenset({"bytes_down", "bytes_up", "flops"})


def means(events: Sequence[Event]) -> dict[str, float]:
    """One number per metric of a round: sums of what was spent, means of the rest; text is left out."""
    found: dict[str, list[float]] = {}
    for event in events:
        if not isinstance(event.value, str):
            name = f"{event.split}/{event.metric}" if event.split else event.metric
            found.setdefault(name, []).append(float(event.value))
    known = {name: np.array(values)[~np.isnan(values)] for name, values in found.items()}
    return {
        name: float(values.sum() if name in SUMMED else values.mean()) for name, values in known.items() if len(values)
    }


class Log(Watcher, ABC):
    """Follows a run and writes its numbers somewhere."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self) -> dict[str, str]:
        """The run's configuration, flat; it is written down before a run begins."""
        found = tomllib.loads((self.folder / "config.toml").read_text(encoding="utf-8"))
        return {key: str(value) for key, value in flatten(found).items()}

    def begin(self, title: str, done: int, rounds: int) -> None:
        """The run goes on after `done` rounds; what was logged of later ones is written anew."""

    @abstractmethod
    def write(self, number: int, values: dict[str, float]) -> None:
        """Logs a round's numbers."""

    def events(self, number: int, events: Sequence[Event]) -> None:
        self.write(number, means(events))


class CsvLog(Log):
    """`metrics.csv` in the run's folder: a line per round, a column per metric."""

    name = "csv"

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.path = self.folder / "metrics.csv"
        self.rows: dict[int, dict[str, Any]] = {}
        self.heads = ["round"]
        if done and self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.heads = list(reader.fieldnames or self.heads)
                self.rows = {int(row["round"]): row for row in reader if int(row["round"]) <= done}

    def write(self, number: int, values: dict[str, float]) -> None:
        row = self.rows.setdefault(number, {"round": number})
        fresh = [name for name in values if name not in self.heads]
        again = len(row) > 1 or bool(fresh) or not self.path.is_file() or len(self.rows) == 1
        row |= {name: repr(value) for name, value in values.items()}
        self.heads += fresh
        with self.path.open("w" if again else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.heads, restval="")
            if again:
                writer.writeheader()
            writer.writerows(self.rows.values() if again else [row])


class TensorboardLog(Log):
    """Event files in `tensorboard/` of the run's folder: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def begin(self, title: str, done: int, rounds: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=done + 1 if done else None)
        lines = "\n".join(f"    {key} = {value}" for key, value in self.settings().items())
        self.writer.add_text("config", lines, done)

    def write(self, number: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    def end(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class MlflowLog(Log):
    """A run of the experiment `fedtailor`, at $MLFLOW_TRACKING_URI or else in `mlruns/` beside the run's folder."""

    name = "mlflow"

    def begin(self, title: str, done: int, rounds: int) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _missing("mlflow") from None
        where = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.resolve().parent / "mlruns").as_uri()
        note = self.folder / "mlflow.txt"
        try:
            self.client = MlflowClient(where)
            known = note.read_text(encoding="utf-8").strip() if done and note.is_file() else ""
            self.run = known or self._new(title)
        except MlflowException as error:
            raise UserError(f"--log mlflow: {where} does not answer ({error}).") from error
        note.write_text(self.run + "\n", encoding="utf-8")

    def _new(self, title: str) -> str:
        found = self.client.get_experiment_by_name("fedtailor")
        experiment = found.experiment_id if found else self.client.create_experiment("fedtailor")
        run = self.client.create_run(experiment, run_name=self.folder.resolve().name, tags={"title": title}).info.run_id
        for key, value in self.settings().items():
            self.client.log_param(run, key, value[:500])
        return run

    def write(self, number: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=number)

    def end(self) -> None:
        if hasattr(self, "run"):
            self.client.set_terminated(self.run)


LOGS: dict[str, type[Log]] = {log.name: log for log in (CsvLog, TensorboardLog, MlflowLog)}


def _missing(extra: str) -> UserError:
    return UserError(f"--log {extra} needs a package that is not installed: pip install 'fedtailor[{extra}]'")


class Several(Watcher):
    """Several watchers of one run."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers

    def begin(self, title: str, done: int, rounds: int) -> None:
        for watcher in self.watchers:
            watcher.begin(title, done, rounds)

    def round(self, number: int, facts: dict[str, float]) -> None:
        for watcher in self.watchers:
            watcher.round(number, facts)

    def events(self, number: int, events: Sequence[Event]) -> None:
        for watcher in self.watchers:
            watcher.events(number, events)

    def say(self, text: str) -> None:
        for watcher in self.watchers:
            watcher.say(text)

    def clients(self, states: dict[str, str]) -> None:
        for watcher in self.watchers:
            watcher.clients(states)

    def end(self) -> None:
        for watcher in self.watchers:
            watcher.end()


def with_logs(watch: Watcher, names: Sequence[str], folder: Path) -> Watcher:
    """The watcher, and a log for each name; logs begin first, so that a missing package ends nothing half begun."""
    require_logs(names)
    if not names:
        return watch
    return Several([*(LOGS[name](folder) for name in dict.fromkeys(names)), watch])


def require_logs(names: Sequence[str]) -> None:
    """Raises where a log has no such name, or wants a package that is not there."""
    from importlib.util import find_spec

    if isinstance(names, str):
        raise UserError(f"log = '{names}': give a list, for example ['{names}'].")
    for name in names:
        if name not in LOGS:
            raise UserError(f"--log {name}: there are {', '.join(LOGS)}.")
        if name in ("tensorboard", "mlflow") and find_spec(name) is None:
            raise _missing(name)
