"""Looking at data before anything runs: what is there, what would be done to it, and what is wrong with it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from . import cache
from .dataset import Dataset
from .files import assemble, target_of
from .lists import SPLITS, Pictures
from .partition import PartitionConfig, make
from .pixels import DEEP, Broken, Header, Reading
from .sources import load, pictures
from .suspects import Judge, judge

Say = Callable[[str], None]
GUESS = 32  # pixels to look at pictures with, where they differ in size and none was asked for


@dataclass(frozen=True)
class Twins:
    """Pictures that are equal, pixel by pixel."""

    places: tuple[int, ...]
    clients: int  # that hold them
    splits: tuple[str, ...]  # given splits that they lie in
    labels: int  # different labels they have


@dataclass
class Inspection:
    """What was found."""

    name: str
    data: Dataset
    names: list[str]  # of the pictures, as a reader would say them
    sizes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    broken: dict[str, str] = field(default_factory=dict)
    twins: list[Twins] = field(default_factory=list)
    judge: Judge | None = None
    plan: list[str] = field(default_factory=list)  # what would be done
    wrong: list[str] = field(default_factory=list)  # what stops a run, or ought to
    remarks: list[str] = field(default_factory=list)  # what a reader should know

    @property
    def clients(self) -> tuple[str, ...]:
        return self.data.owners or ("all",)

    @property
    def counts(self) -> np.ndarray:
        """Pictures by client and class."""
        owner = self.data.owner if self.data.owner is not None else np.zeros(len(self.data), np.int64)
        table = np.zeros((len(self.clients), len(self.data.classes)), np.int64)
        np.add.at(table, (owner, self.data.labels), 1)
        return table

    def as_json(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "name": self.name,
            "pictures": len(self.data),
            "hash": self.data.hash,
            "shape": list(self.data.shape),
            "classes": list(self.data.classes),
            "clients": {
                name: {k: int(n) for k, n in zip(self.data.classes, row, strict=True) if n}
                for name, row in zip(self.clients, counts, strict=True)
            },
            "sizes": dict(self.sizes),
            "kinds": dict(self.kinds),
            "broken": self.broken,
            "duplicates": [
                {"pictures": [self.names[i] for i in t.places], "clients": t.clients, "labels": t.labels}
                for t in self.twins
            ],
            "suspects": [
                {
                    "picture": self.names[s.place],
                    "label": self.data.classes[s.label],
                    "looks": self.data.classes[s.looks],
                }
                for s in (self.judge.suspects if self.judge else ())
            ],
            "plan": self.plan,
            "wrong": self.wrong,
            "remarks": self.remarks,
        }


def inspect(
    name: str, folder: Path | None = None, reading: Reading | None = None, labels: bool = True, say: Say | None = None
) -> Inspection:
    """Everything that can be known of a source without training. Raises `UserError` only where nothing can be read."""
    listed = pictures(name)
    if listed is None:
        data = load(name, folder)
        found = Inspection(name, data, [f"image {i}" for i in range(len(data))])
        found.sizes[_size(*data.shape[1:])] = len(data)
        found.kinds["grey" if data.shape[0] == 1 else "colour"] = len(data)
    else:
        found = _look(name, listed, reading or Reading(), say)
    _clients(found)
    _twins(found)
    if labels:
        _labels(found)
    return found


def _look(name: str, listed: Pictures, reading: Reading, say: Say | None) -> Inspection:
    told = cache.headers(listed.paths, say)
    bad = {i: str(h) for i, h in enumerate(told) if isinstance(h, Broken)}
    good = [h for h in told if isinstance(h, Header)]
    if not good:
        raise UserError(f"{name}: none of the {len(listed)} pictures can be read, {listed.paths[0]}: {bad[0]}.")
    places = [i for i in range(len(listed)) if i not in bad]
    wrong: list[str] = []
    try:
        target = target_of(listed.at(places), good, reading)
    except UserError as error:
        wrong.append(str(error))
        target = target_of(listed, good, replace(reading, size=GUESS))
    images, worse = cache.pixels([listed.paths[i] for i in places], target, say)
    bad |= {places[i]: why for i, why in worse.items()}
    kept = [i for i in places if i not in bad]
    data = assemble(listed.at(kept), np.delete(images, list(worse), axis=0), name)
    found = Inspection(name, data, [listed.name(i) for i in kept], wrong=wrong)
    found.broken = {listed.name(i): why for i, why in sorted(bad.items())}
    found.sizes.update(_size(h.height, h.width) for h in good)
    found.kinds.update(_kind(h) for h in good)
    if listed.passed:
        kinds = ", ".join(f"{suffix} ({n:,})" for suffix, n in Counter(listed.passed).most_common(8))
        found.remarks.append(f"{len(listed.passed)} files are passed over, because pictures are not called so: {kinds}")
    if bad:
        what = "are left out (data.broken = skip)" if reading.broken == "skip" else "stop a run"
        missing = sum(not listed.paths[i].exists() for i in bad)
        some = f", {missing} of them are not there" if missing else ""
        text = f"{len(bad)} of {len(listed)} pictures cannot be read{some}; they {what}"
        (found.remarks if reading.broken == "skip" else found.wrong).append(text)
    _plan(found, good, reading)
    return found


def _plan(found: Inspection, headers: list[Header], reading: Reading) -> None:
    channels, height, width = found.data.shape
    if reading.size or len(found.sizes) == 1:
        other = len(headers) - found.sizes[_size(height, width)]
        odd = sum(h.height * width != h.width * height for h in headers)
        words = {"crop": "cropped at the sides", "squash": "squashed", "pad": "padded with black"}
        if other:
            some = f", {odd} of them {words[reading.fit]}" if odd else ""
            found.plan.append(f"{other} pictures are resized to {_size(height, width)}{some}")
        smaller = sum(h.height < height or h.width < width for h in headers)
        if smaller:
            found.remarks.append(f"{smaller} pictures are smaller than {_size(height, width)} and get enlarged")
    grey = sum(h.grey for h in headers)
    if channels == 3 and grey:
        found.plan.append(f"{grey} grey pictures become colour, because others are")
    if channels == 1 and grey < len(headers):
        found.plan.append(f"{len(headers) - grey} colour pictures become grey")
    deep = sum(h.mode in DEEP for h in headers)
    if deep:
        found.plan.append(f"{deep} pictures of 16 bits become 8 bits (divided by 257)")


def _clients(found: Inspection) -> None:
    data, counts, rules = found.data, found.counts, PartitionConfig()
    if data.owner is None:
        found.plan.append("the data names no clients: the partition deals the pictures out (partition.name)")
    else:
        found.plan.append(f"{len(data.owners)} clients with partition.name=natural and clients={len(data.owners)}")
    if data.split is not None:
        told = Counter(SPLITS[s] if s < len(SPLITS) else "not said" for s in data.split.tolist())
        found.plan.append(f"splits as given: {', '.join(f'{k} {n}' for k, n in told.items())}")
    else:
        shares = f"{1 - rules.val - rules.test:.0%} train, {rules.val:.0%} val, {rules.test:.0%} test"
        found.plan.append(f"every client's pictures are split: {shares} (partition.val, partition.test)")
    if data.owner is not None and data.split is not None and counts.sum(1).min() >= rules.smallest:
        try:
            make(data, replace(rules, name="natural"), len(data.owners), 0)
        except UserError as error:
            found.wrong.append(str(error))
    for client, row in zip(found.clients, counts, strict=True):
        if row.sum() < rules.smallest:
            found.wrong.append(
                f"client '{client}' has {row.sum()} pictures; a run needs {rules.smallest} of each client"
            )
        if (row > 0).sum() == 1 and len(data.classes) > 1:
            only = data.classes[int(row.argmax())]
            found.remarks.append(
                f"client '{client}' has one class only ({only}): any answer but this one is wrong for it, so its "
                "accuracy says little"
            )
    rare = [name for name, n in zip(data.classes, counts.sum(0).tolist(), strict=True) if n < 5]
    if rare:
        found.remarks.append(f"fewer than 5 pictures: {', '.join(rare)}")
    if len(data.classes) < 2:
        found.wrong.append(f"there is only one class ({', '.join(data.classes)}): nothing to tell apart")


def _twins(found: Inspection) -> None:
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, image in enumerate(found.data.images):
        groups[hashlib.sha256(image.data).digest()].append(i)
    data = found.data
    for places in groups.values():
        if len(places) > 1:
            owners = 1 if data.owner is None else len(set(data.owner[places].tolist()))
            given = set() if data.split is None else {int(s) for s in data.split[places] if s < len(SPLITS)}
            splits = tuple(SPLITS[s] for s in sorted(given))
            found.twins.append(Twins(tuple(places), owners, splits, len(set(data.labels[places].tolist()))))
    if not found.twins:
        return
    more = sum(len(t.places) - 1 for t in found.twins)
    found.remarks.append(f"{more} pictures are copies of another, pixel by pixel")
    across = sum(t.clients > 1 for t in found.twins)
    if across:
        found.remarks.append(f"{across} pictures are held by several clients")
    leaks = sum(len(t.splits) > 1 for t in found.twins)
    if leaks:
        found.wrong.append(f"{leaks} pictures lie in several splits: what is tested was trained on")
    elif data.split is None:
        found.remarks.append("copies may fall into different splits of a client, which flatters its test accuracy")
    quarrels = sum(t.labels > 1 for t in found.twins)
    if quarrels:
        found.wrong.append(f"{quarrels} pictures have copies with another label: one of them is wrong")


def _labels(found: Inspection) -> None:
    found.judge = judge(found.data)
    if found.judge.reason:
        found.remarks.append(found.judge.reason)
    elif found.judge.suspects:
        found.remarks.append(
            f"{len(found.judge.suspects)} labels look wrong to a simple classifier that is right on "
            f"{100 * found.judge.accuracy:.0f} % of the pictures: look at them"
        )


def _size(height: int, width: int) -> str:
    return f"{width}x{height}"


def _kind(h: Header) -> str:
    return "16-bit grey" if h.mode in DEEP else "grey" if h.grey else "colour"
