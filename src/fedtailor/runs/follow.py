"""A run read while it is written: new rows only, and whatever is wrong is said instead of raised."""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from ..errors import UserError
from .columns import Columns, Events, Reader, require_header
from .results import FORMAT, Results

TAIL = 64  # bytes before the place where reading stopped: were they changed, the log was cut back and written anew
PEEK = 1 << 20  # a glance at a log reads so much of its end
STALE = 600.0  # seconds without a sign after which a run that says 'running' on another machine is doubted


class Follower:
    """One run folder. `read` brings it up to date and costs as much as was written since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0  # rises whenever something changed
        self.results: Results | None = None
        self.problem = ""  # why there are no results; else ''
        self.now: dict[str, Any] | None = None  # who works, while the run goes on
        self._seen: Any = None
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._reader: Reader | None = None
        self._parts: list[Columns] = []
        self._events: Events | None = None
        self._offset, self._tail, self._lines = 0, b"", 1
        self._top = -1  # the highest round read
        self.broken: list[int] = []  # numbers of lines that could not be read
        self.restarts = -1  # how often the log was read from its beginning again
        self._names: list[str] = []

    def read(self) -> Follower:
        with self._lock:
            return self._read()

    def _read(self) -> Follower:
        try:
            seen = self._stamp()
            if seen == self._seen:
                return self
            self._refresh()
            self._seen, self.problem = seen, ""
        except UserError as error:
            changed, self.problem = self.problem != str(error), str(error)
            self.version += changed
            self._seen, self.results = None, None
            return self
        self.version += 1
        return self

    def troubles(self) -> list[str]:
        """What a reader should know that `Results.warnings` cannot."""
        found = []
        if self.broken:
            lines = ", ".join(map(str, self.broken[:5])) + (" and more" if len(self.broken) > 5 else "")
            rows = "1 line" if len(self.broken) == 1 else f"{len(self.broken)} lines"
            found.append(f"events.csv is damaged: {rows} left out (line {lines}). The rest is shown.")
        if self.restarts > 0:
            found.append("events.csv was cut back and read anew: the run was resumed from its last checkpoint.")
        if self.status == "killed":
            known = self.now is not None and self.now.get("host") == socket.gethostname()
            why = (
                "its process is gone." if known else "it has written nothing for ten minutes: long rounds, or its end."
            )
            again = shlex.join(["fedtailor", "resume", str(self.folder)])
            found.append(f"The run says that it is running, but {why} Continue it with: {again}")
        return found

    @property
    def status(self) -> str:
        """running, stopped, done, killed (it says running, but its process is gone) or broken."""
        if self.results is None:
            return "broken"
        told = str(self.results.facts.get("status", "unknown"))
        return "killed" if told == "running" and not self._alive() else told

    def note(self) -> dict[str, Any] | None:
        """What the run says of its current round, if it does."""
        try:
            found = json.loads((self.folder / "now.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _alive(self) -> bool:
        note = self.now
        if note and note.get("host") == socket.gethostname():
            return _lives(int(note.get("pid") or 0))
        newest = max(_mtime(self.folder / name) for name in ("events.csv", "run.json", "now.json"))
        return time.time() - newest < STALE

    def _stamp(self) -> Any:
        """What changes when the folder does: two looks with the same stamp see the same run."""
        if not self.folder.is_dir():
            raise UserError("the folder is gone: it was deleted or moved while it was watched.")
        return [(name, _stat(self.folder / name)) for name in ("run.json", "config.toml", "events.csv", "now.json")]

    def _refresh(self) -> None:
        facts = _parse(self.folder / "run.json", json.loads)
        if not isinstance(facts, dict) or "format" not in facts:
            raise UserError("run.json was not written by fedtailor.")
        if facts["format"] != FORMAT:
            raise UserError(
                f"this run has format {facts['format']}, this fedtailor reads format {FORMAT}. Read it with the "
                f"version that wrote it: pip install fedtailor=={facts.get('fedtailor', '<version>')}"
            )
        config = _parse(self.folder / "config.toml", tomllib.loads)
        names = [str(name) for name in facts.get("client_names") or ()]
        if names != self._names:
            self._forget()
            self._names = names
        self._read_on()
        self.now = self.note() if facts.get("status") == "running" else None
        assert self._events is not None
        self.results = Results(self.folder, config, facts, self._events)

    def _read_on(self) -> None:
        """Reads the whole lines that were added to events.csv."""
        path = self.folder / "events.csv"
        try:
            with open(path, "rb") as file:
                if self._reader is not None and not self._continues(file):
                    restarts, names = self.restarts, self._names
                    self._forget()
                    self.restarts, self._names = restarts, names
                if self._reader is None:
                    file.seek(0)
                    self._begin(path, file.readline())
                file.seek(self._offset)
                data = file.read()
        except OSError:
            raise UserError(
                "it has no events.csv yet. A run that has just started writes it in its first round."
            ) from None
        data = data[: data.rfind(b"\n") + 1]  # half a line waits until it is whole
        if data:
            self._add(data)

    def _begin(self, path: Path, header: bytes) -> None:
        if not header.endswith(b"\n"):
            raise UserError("its events.csv is empty so far.")
        require_header(path, header[:-1])
        self._reader, self._offset, self._tail = Reader(self._names), len(header), header[-TAIL:]
        self._events = self._reader.events([])
        self.restarts += 1

    def _continues(self, file: Any) -> bool:
        """Whether what was read before is still there."""
        if os.fstat(file.fileno()).st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _add(self, data: bytes) -> None:
        assert self._reader is not None
        columns, broken = self._reader.read(data)
        self.broken += [self._lines + 1 + int(i) for i in broken]
        self._lines += data.count(b"\n")
        self._offset += len(data)
        self._tail = (self._tail + data)[-TAIL:]
        rounds = columns[0]
        grown = bool(len(self._parts)) and (not len(rounds) or int(rounds.min()) > self._top)
        self._top = max(self._top, int(rounds.max(initial=-1)))
        self._parts.append(columns)
        self._events = self._reader.events(self._parts, grown)
        e = self._events
        self._parts = [(e.round, e.client, e.split, e.metric, e.value, e.text)]


def peek(folder: Path) -> Results:
    """A run at a glance: its facts and the end of its log, which is where its latest numbers are."""
    facts = _parse(folder / "run.json", json.loads)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        told = facts.get("format", "none") if isinstance(facts, dict) else "none"
        raise UserError(f"this run has format {told}, this fedtailor reads format {FORMAT}.")
    config = _parse(folder / "config.toml", tomllib.loads)
    reader, path = Reader([str(name) for name in facts.get("client_names") or ()]), folder / "events.csv"
    try:
        with open(path, "rb") as file:
            require_header(path, file.readline().rstrip(b"\n"))
            if os.fstat(file.fileno()).st_size > PEEK:
                file.seek(-PEEK, os.SEEK_END)
                file.readline()
            data = file.read()
    except OSError:
        raise UserError("it has no events.csv yet.") from None
    columns, _ = reader.read(data[: data.rfind(b"\n") + 1])
    return Results(folder, config, facts, reader.events([columns]))


def _parse(path: Path, parse: Any) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path.name} is missing or cannot be opened.") from None
    except ValueError as error:  # the json, toml and unicode errors are all of this kind
        raise UserError(f"{path.name} cannot be read ({error}).") from None


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _mtime(path: Path) -> float:
    found = _stat(path)
    return found[0] / 1e9 if found else 0.0


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 asks and does nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return pid > 0
