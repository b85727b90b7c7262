"""events.csv as columns of numbers: a million rows in a fraction of a second, without a data frame library.

The log quotes nothing, so fields are found by their commas and read side by side, eight bytes of every row at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import UserError

HEADER = ["round", "client", "split", "metric", "value"]
SPLITS = ("", "train", "val", "test")
SERVER = -1  # the client number of server-wide rows, whose client field is empty
TEXTS = frozenset({"arch", "personal_arch", "new_arch"})  # text: '3' is an arch here, not a number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]
Columns = tuple[Ints, Ints, Ints, Ints, Floats, Ints]  # those of `Events`, in its order


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


def read_events(path: Path, names: Sequence[str] = ()) -> Events:
    """Read events.csv. A torn last line is ignored; of rows with the same key the last counts."""
    data = path.read_bytes()
    data = data[: data.rfind(b"\n") + 1]  # what follows the last newline was cut off while it was written
    head, _, body = data.partition(b"\n")
    require_header(path, head)
    reader = Reader(names)
    columns, broken = reader.read(body)
    if len(broken):
        raise UserError(
            f"{path} is damaged at line {2 + int(broken[0])}: it should read '{','.join(HEADER)}'. Restore the file, "
            "or run again; of an unfinished run, `fedtailor resume` keeps the rows up to its last checkpoint."
        )
    return reader.events([columns])


def require_header(path: Path, line: bytes) -> None:
    if line.rstrip(b"\r").decode(errors="replace").split(",") != HEADER:
        raise UserError(f"{path} is not an event table: its first line should be '{','.join(HEADER)}'.")


class Reader:
    """Whole lines to columns. Metrics and texts keep their numbers from one piece of a log to the next.

    `names` are all clients of the run: a row of another one is damaged.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._clients = len(names) or 10**8
        self._names = {name: i for i, name in reversed(list(enumerate(names))) if not name.isdecimal()}
        self._metrics: dict[str, int] = {}
        self._texts: dict[str, int] = {}

    def read(self, body: bytes) -> tuple[Columns, Ints]:
        """The rows of some lines, each with its newline, and the places of the lines that are none."""
        body = body.replace(b"\r\n", b"\n")
        found = np.frombuffer(body, np.uint8)
        ends, commas = np.flatnonzero(found == ord("\n")), np.flatnonzero(found == ord(","))
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        first = np.searchsorted(commas, starts)
        whole = np.diff(first, append=len(commas)) == len(HEADER) - 1
        at = first[whole]
        a, b, d, stop = commas[at], commas[at + 1], commas[at + 3], ends[whole]
        text = _Text(body)
        round, ok = text.numbers(starts[whole], a)
        client, known = text.numbers(a + 1, b)
        known &= client < self._clients
        for i in np.flatnonzero(~known):  # the server's rows, and clients by their names
            name = text.part(int(a[i]) + 1, int(b[i]))
            client[i] = self._names.get(name, SERVER)
            known[i] = not name or name in self._names
        split, metric, told = self._kinds(text, b + 1, d)
        ok &= known & (split >= 0)
        value, words = np.full(len(d), np.nan), np.full(len(d), -1, np.int64)
        said, plain = np.flatnonzero(ok & told), np.flatnonzero(ok & ~told)
        distinct, which = text.distinct(d[said] + 1, stop[said])
        words[said] = np.array([self._texts.setdefault(t, len(self._texts)) for t in distinct], np.int64)[which]
        value[plain], readable = text.floats(d[plain] + 1, stop[plain])
        ok[plain] &= readable
        good = np.flatnonzero(whole)[ok]
        columns = round[ok], client[ok], split[ok], metric[ok], value[ok], words[ok]
        return columns, np.setdiff1d(np.arange(len(ends)), good, assume_unique=True)

    def events(self, parts: Sequence[Columns], grown: bool = False) -> Events:
        """Several pieces as one table; a log that has only `grown` has no row twice."""
        nothing = np.zeros(0, np.int64)
        empty: Columns = nothing, nothing, nothing, nothing, np.zeros(0), nothing
        columns: list[Any] = [np.concatenate(column) for column in zip(empty, *parts, strict=True)]
        round, client, split, metric, value, text = columns
        if len(round) and not grown:
            keep = _last_of_each(round, client, split, metric)
            round, client, split, metric, value, text = (column[keep] for column in columns)
        return Events(round, client, split, metric, value, text, tuple(self._metrics), tuple(self._texts))

    def _kinds(self, text: _Text, start: Ints, end: Ints) -> tuple[Ints, Ints, Bools]:
        """Split, metric and whether the value is text; a split that there is not is -1."""
        distinct, which = text.distinct(start, end)
        table = np.zeros((len(distinct), 3), np.int64)
        for k, kind in enumerate(distinct):
            split, _, metric = kind.partition(",")
            number = self._metrics.setdefault(metric, len(self._metrics)) if split in SPLITS else -1
            table[k] = SPLITS.index(split) if split in SPLITS else -1, number, metric in TEXTS
        split, metric, told = table[which].T.copy()
        return split, metric, told.astype(bool)


class _Text:
    """Bytes of which many parts are read at once."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._bytes = np.frombuffer(body, np.uint8)
        padded = body + bytes(8)
        self._words: Words = np.ndarray((len(body) + 1,), np.dtype("<u8"), padded, strides=(1,))  # from every byte on

    def part(self, start: int, end: int) -> str:
        return self.body[start:end].decode(errors="replace")

    def numbers(self, start: Ints, end: Ints) -> tuple[Ints, Bools]:
        """Whole numbers of up to eight digits, and which parts are such."""
        length = end - start
        ok = (length > 0) & (length <= 8)
        shift = np.where(ok, 8 * (8 - length), 0).astype(np.uint64)
        digits = (self._words[start] ^ np.uint64(0x3030303030303030)) << shift
        big = np.uint64(0x7676767676767676)  # a byte above 9 reaches 0x80 with it
        ok &= ((digits + big) | digits) & np.uint64(0x8080808080808080) == 0
        for step, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
            tens = np.uint64(10 ** (step // 8))
            digits = (digits * tens + (digits >> np.uint64(step))) & np.uint64(mask)
        return digits.astype(np.int64), ok

    def distinct(self, start: Ints, end: Ints) -> tuple[list[str], Ints]:
        """The different parts, in the order in which they first come, and for every part which of them it is."""
        _, first, which = np.unique(self._hashes(start, end), return_index=True, return_inverse=True)
        order = np.argsort(first)
        return [self.part(int(start[i]), int(end[i])) for i in first[order]], np.argsort(order)[which]

    def _hashes(self, start: Ints, end: Ints) -> Words:
        """A number for each part: equal parts have equal ones, different ones the same by a chance of 2^-64."""
        found = (end - start).astype(np.uint64)
        for k in range(0, int((end - start).max(initial=0)), 8):
            left = np.clip(end - start - k, 0, 8)
            keep = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)[left]
            word = self._words[np.minimum(start + k, len(self.body))] & keep
            found = (found ^ word) * np.uint64(0x9E3779B97F4A7C15)
            found ^= found >> np.uint64(29)
        return found

    def floats(self, start: Ints, end: Ints) -> tuple[Floats, Bools]:
        """Numbers as Python reads them, and which parts are such."""
        found, whole = self.numbers(start, end)  # sizes and counts, which are many, need no decimal places
        values, ok, rest = found.astype(np.float64), whole.copy(), np.flatnonzero(~whole)
        values[rest], ok[rest] = self._decimals(start[rest], end[rest])
        return values, ok

    def _decimals(self, start: Ints, end: Ints) -> tuple[Floats, Bools]:
        inside = np.zeros(len(self.body) + 1, np.int8)
        inside[start] = 1
        inside[end + 1] -= 1  # the newline after each keeps them apart
        joined = self._bytes[np.cumsum(inside[:-1], dtype=np.int8).view(np.bool_)].tobytes()
        with warnings.catch_warnings(), contextlib.suppress(DeprecationWarning, ValueError):
            warnings.simplefilter("error")  # numpy warns where it cannot read on; then every line is read by itself
            values = np.fromstring(joined, np.float64, sep="\n")
            if len(values) == len(start) and not (start == end).any():
                return values, np.ones(len(start), bool)
        values = np.array([_number(line) for line in joined.split(b"\n")[:-1]], np.float64).reshape(len(start), 2)
        return values[:, 0], values[:, 1] > 0


def _number(text: bytes) -> tuple[float, float]:
    """A number, and 1 where it is one."""
    try:
        return float(text), 1.0
    except ValueError:
        return float("nan"), 0.0


def _last_of_each(round: Ints, client: Ints, split: Ints, metric: Ints) -> Ints:
    """The rows to keep, in file order: for each (round, client, split, metric) the one written last."""
    if not len(round):
        return np.zeros(0, np.int64)
    key = round * (client.max() + 2) + client + 1
    key = (key * len(SPLITS) + split) * (metric.max() + 1) + metric
    kept = np.unique(key[::-1], return_index=True)[1]
    return np.sort(len(key) - 1 - kept)
