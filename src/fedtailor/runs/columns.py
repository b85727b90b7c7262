"""events.csv as columns of numbers: a million rows in a few seconds, without a data frame library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import UserError

HEADER = ["round", "client", "split", "metric", "value"]
SPLITS = ("", "train", "val", "test")
SERVER = -1  # the client number of server-wide rows, whose client field is empty
TEXTS = frozenset({"arch", "personal_arch", "new_arch"})  # text: '3' is an arch here, not a number
CHUNK = 1 << 16

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Events:
    """events.csv as columns. `text` points into `texts` for text metrics (-1 elsewhere, where `value` counts)."""

    round: Ints
    client: Ints
    split: Ints
    metric: Ints
    value: Floats
    text: Ints
    metrics: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.round)

    def where(self, metric: str, split: str | None = None, round: int | None = None) -> Bools:
        """The rows of one metric, where asked of one split or one round."""
        if metric not in self.metrics:
            return np.zeros(len(self), dtype=bool)
        rows = self.metric == self.metrics.index(metric)
        if split is not None:
            rows &= self.split == SPLITS.index(split)
        if round is not None:
            rows &= self.round == round
        return rows


class _Codes(dict[str, int]):
    """Text to number, worked out once per distinct text: a column holds few of them, however long it is."""

    def __init__(self, make: Callable[[str], int] | None = None):
        super().__init__()
        self._make = make

    def __missing__(self, key: str) -> int:
        code = self[key] = len(self) if self._make is None else self._make(key)
        return code


def read_events(path: Path, names: Sequence[str] = ()) -> Events:
    """Read events.csv. A torn last line is ignored; of rows with the same key the last counts."""
    data = path.read_bytes().replace(b"\r\n", b"\n")
    data = data[: data.rfind(b"\n") + 1]  # what follows the last newline was cut off while it was written
    head, _, body = data.partition(b"\n")
    if head.decode(errors="replace").split(",") != HEADER:
        raise UserError(f"{path} is not an event table: its first line should be '{','.join(HEADER)}'.")
    numbers = {name: i for i, name in reversed(list(enumerate(names))) if not name.isdecimal()}
    reader = _Reader(lambda field: numbers[field] if field in numbers else int(field) if field else SERVER)
    ends = _line_ends(path, body)
    parts: list[tuple[np.ndarray, ...]] = []
    for first in range(0, len(ends), CHUNK):
        begin, last = 0 if first == 0 else int(ends[first - 1]) + 1, min(first + CHUNK, len(ends)) - 1
        lines = body[begin : int(ends[last])].decode(errors="replace")
        try:
            parts.append(reader.columns(lines))
        except ValueError:
            raise _damage(path, 2 + first + reader.first_damaged(lines)) from None
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 6
    round, client, split, metric, value, text = columns
    keep = _last_of_each(round, client, split, metric)
    names_of = tuple(reader.metrics), tuple(reader.texts)
    return Events(
        round[keep], client[keep], split[keep], metric[keep], value.astype(np.float64)[keep], text[keep], *names_of
    )


class _Reader:
    """Lines to columns. The log quotes nothing, so a line can be cut at its commas without a csv parser."""

    def __init__(self, client_number: Callable[[str], int]):
        self.rounds, self.clients, self.splits = _Codes(int), _Codes(client_number), _Codes(SPLITS.index)
        self.metrics, self.texts = _Codes(), _Codes()

    def columns(self, lines: str) -> tuple[np.ndarray, ...]:
        fields = lines.replace("\n", ",").split(",")
        metric, value = fields[3::5], fields[4::5]
        n = len(value)
        if TEXTS.isdisjoint(metric):
            numbers, text = np.fromiter(map(float, value), np.float64, n), np.full(n, -1, np.int64)
        else:
            told = [name in TEXTS for name in metric]
            pairs = list(zip(value, told, strict=True))
            numbers = np.fromiter((np.nan if t else float(v) for v, t in pairs), np.float64, n)
            text = np.fromiter((self.texts[v] if t else -1 for v, t in pairs), np.int64, n)
        coded = (
            (self.rounds, fields[0::5]),
            (self.clients, fields[1::5]),
            (self.splits, fields[2::5]),
            (self.metrics, metric),
        )
        return *(np.fromiter(map(codes.__getitem__, column), np.int64, n) for codes, column in coded), numbers, text

    def first_damaged(self, lines: str) -> int:
        """The offset of the first line that cannot be read."""
        for i, line in enumerate(lines.split("\n")):
            try:
                self.columns(line)
            except ValueError:
                return i
        return 0


def _line_ends(path: Path, body: bytes) -> Ints:
    """Where the lines end, once every line is known to have five fields."""
    found = np.frombuffer(body, np.uint8)
    at = np.flatnonzero((found == ord(",")) | (found == ord("\n")))
    marks = found[at]
    ends = np.flatnonzero(marks == ord("\n"))
    wrong = np.flatnonzero(np.diff(ends, prepend=-1) != len(HEADER))
    if len(wrong):
        raise _damage(path, 2 + int(wrong[0]))
    return at[ends]


def _damage(path: Path, line: int) -> UserError:
    return UserError(
        f"{path} is damaged at line {line}: it should read '{','.join(HEADER)}'. Restore the file, or run again; of an "
        "unfinished run, `fedtailor resume` keeps the rows up to its last checkpoint."
    )


def _last_of_each(round: Ints, client: Ints, split: Ints, metric: Ints) -> Ints:
    """The rows to keep, in file order: for each (round, client, split, metric) the one written last."""
    if not len(round):
        return np.zeros(0, np.int64)
    key = round * (client.max() + 2) + client + 1
    key = (key * len(SPLITS) + split) * (metric.max() + 1) + metric
    kept = np.unique(key[::-1], return_index=True)[1]
    return np.sort(len(key) - 1 - kept)
