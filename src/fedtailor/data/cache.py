"""Pictures decoded once: blocks of uint8 arrays on disk, each named by what it was made from.

A block is known by its files' paths, sizes and times of change and by what pictures are made into. So a decoding that
was stopped goes on where it was, a changed file is read again, and a damaged block is made anew. A picture that could
not be read is tried again: a disk or a right may have been the cause.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from ..cached import read_cached, write_cached
from .pixels import Broken, Header, Target, decode, header

FORMAT = 3  # of a block, and of the rules by which a file becomes pixels
BLOCK = 256
Say = Callable[[str], None]


def headers(paths: Sequence[Path], say: Say | None = None) -> list[Header | Broken]:
    """Size and kind of every picture, or what is wrong with it."""

    def read(path: Path) -> Header | Broken:
        try:
            return header(path)
        except Broken as error:
            return error

    found: list[Header | Broken] = []
    with _workers() as pool, _Progress("looked at", len(paths), say) as progress:
        for block in _blocks(paths):
            key = _key("headers", block)
            kept = _read(key)
            told = json.loads(kept["headers"].tobytes()) if kept else [None] * len(block)
            missing = [i for i, entry in enumerate(told) if entry is None]
            part: list[Header | Broken] = [Header(*entry) if entry else Broken() for entry in told]
            for i, answer in zip(missing, pool.map(read, [block[i] for i in missing]), strict=True):
                part[i] = answer
            if any(isinstance(part[i], Header) for i in missing):
                told = [[h.height, h.width, h.mode] if isinstance(h, Header) else None for h in part]
                _write(key, {"headers": np.frombuffer(json.dumps(told).encode(), np.uint8)})
            found += part
            progress.add(len(block))
    return found


def pixels(paths: Sequence[Path], target: Target, say: Say | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """All pictures as one array, and the places of those that are broken, with the reason; these are black."""

    def read(path: Path) -> np.ndarray | Broken:
        try:
            return decode(path, target)
        except Broken as error:
            return error

    images = np.zeros((len(paths), target.height, target.width, target.channels), np.uint8)
    broken: dict[int, str] = {}
    at = 0
    with _workers() as pool, _Progress("decoded", len(paths), say) as progress:
        for block in _blocks(paths):
            key = _key(f"pixels {astuple(target)}", block)
            kept = _read(key)
            part = images[at : at + len(block)]
            missing = list(range(len(block)))
            if kept is not None and kept["images"].shape == part.shape:
                part[:] = kept["images"]
                missing = kept["missing"].tolist()
            bad: dict[int, str] = {}
            for i, found in zip(missing, pool.map(read, [block[i] for i in missing]), strict=True):
                if isinstance(found, Broken):
                    bad[i] = str(found)
                else:
                    part[i] = found
            if len(bad) < len(missing):
                _write(key, {"images": part, "missing": np.array(list(bad), np.int64)})
            broken |= {at + i: why for i, why in bad.items()}
            at += len(block)
            progress.add(len(block))
    return images, broken


def _workers() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(cores)  # Pillow decodes without holding Python's lock


def _blocks(paths: Sequence[Path]) -> list[Sequence[Path]]:
    return [paths[i : i + BLOCK] for i in range(0, len(paths), BLOCK)]


def _key(what: str, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {what}".encode())
    for path in paths:
        try:
            told = path.stat()
            # the second time moves with rights and renames too, and with a copy that keeps the first
            state = f"{told.st_size} {told.st_mtime_ns} {told.st_ctime_ns}"
        except OSError:
            state = "missing"
        digest.update(b"\0" + os.fsencode(path.absolute()) + f"\0{state}".encode())
    return digest.hexdigest()


def _read(key: str) -> dict[str, np.ndarray] | None:
    """A block, where it is there and whole."""
    found = read_cached(_place(key))
    if found is None:
        return None
    with np.load(io.BytesIO(found), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _write(key: str, arrays: dict[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_cached(_place(key), buffer.getvalue())


def _place(key: str) -> str:
    return f"{key[:2]}/{key}.npz"


class _Progress:
    """Says how far a long reading is, every few seconds."""

    def __init__(self, verb: str, total: int, say: Say | None, every: float = 3.0) -> None:
        self.verb, self.total, self.say, self.every = verb, total, say, every
        self.done = 0
        self.began = self.last = time.perf_counter()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def add(self, count: int) -> None:
        self.done += count
        now = time.perf_counter()
        if self.say and now - self.last >= self.every and self.done < self.total:
            left = (now - self.began) / self.done * (self.total - self.done)
            self.say(f"{self.verb} {self.done:,} of {self.total:,} pictures, {left:.0f} s left")
            self.last = now
