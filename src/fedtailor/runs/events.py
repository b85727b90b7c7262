"""The event log: one append-only tidy table, `round,client,split,metric,value`."""

from __future__ import annotations

import os
from pathlib import Path

from ..engine.loop import Event
from ..values import disk_error

HEADER = "round,client,split,metric,value\n"


class EventLog:
    """Appends rows; a resumed run first cuts the file back to what the checkpoint knew."""

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self.path = path
        try:
            if keep_bytes is None or not path.exists():
                path.write_text(HEADER, encoding="utf-8")
            else:
                os.truncate(path, keep_bytes)
            self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as error:
            raise disk_error(path, error) from error

    def add(self, event: Event) -> None:
        client = "" if event.client is None else event.client
        value = repr(event.value) if isinstance(event.value, float) else event.value
        try:
            self._file.write(f"{event.round},{client},{event.split},{event.metric},{value}\n")
        except OSError as error:
            raise disk_error(self.path, error) from error

    def show(self) -> None:
        """Hands the rows to the system, where those who watch the run find them."""
        try:
            self._file.flush()
        except OSError as error:
            raise disk_error(self.path, error) from error

    def flush(self) -> int:
        """Puts the rows on disk; returns the file's length."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(self.path, error) from error
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
