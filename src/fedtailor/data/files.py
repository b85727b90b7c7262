"""The user's own data: arrays in an .npz file, or picture files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ..errors import UserError
from . import cache
from .dataset import UNSAID, Dataset
from .lists import Pictures, numbered
from .pixels import Broken, Header, Reading, Target

Say = Callable[[str], None]
GIVEN = {"train": 0, "val": 1, "test": 2}  # as in a partition


def read_npz(path: Path, name: str) -> Dataset:
    """Arrays `images` (or x) and `labels` (or y), optional `client` (numbers or names) and `classes` (names)."""
    advice = "Write it with np.savez(file, images=..., labels=...); arrays of objects are not allowed."
    arrays = arrays_of(path, ("images", "x", "labels", "y", "client", "classes"), advice)
    images, labels = _either(path, arrays, "images", "x"), _either(path, arrays, "labels", "y")
    if images.ndim == 3:
        images = images[..., None]
    if "classes" in arrays:
        classes = tuple(_texts(arrays["classes"]))
    else:
        highest = labels.max(initial=-1) if labels.dtype.kind in "biuf" else 0
        classes = tuple(str(i) for i in range(int(np.nan_to_num(highest)) + 1))
    owner, owners = None, ()
    if "client" in arrays:
        if arrays["client"].dtype.kind not in "iuUS":
            raise UserError(
                f"{path}: client has type {arrays['client'].dtype}; give each image a whole number or a name."
            )
        found, owner = np.unique(arrays["client"], return_inverse=True)
        owners = tuple(_texts(found))
    return Dataset(name, images, labels, classes, np.zeros(len(images), bool), owner, owners)


def arrays_of(path: Path, keys: Sequence[str], advice: str) -> dict[str, np.ndarray]:
    """Those of the named arrays that an .npz file holds. Nothing is unpickled."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. {advice}")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {key: file[key] for key in keys if key in file}
    # what NumPy and zip raise on damaged files; TypeError and AttributeError are bare .npy files
    except (OSError, ValueError, TypeError, AttributeError, EOFError, RuntimeError, BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays, or damaged ({error}). {advice}") from error


def _either(path: Path, arrays: dict[str, np.ndarray], name: str, short: str) -> np.ndarray:
    if name not in arrays and short not in arrays:
        raise UserError(f"{path}: no array '{name}' (or '{short}'); found {', '.join(arrays) or 'none that is known'}.")
    return arrays.get(name, arrays.get(short, np.empty(0)))


def _texts(values: np.ndarray) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist()]


def read_pictures(listed: Pictures, name: str, reading: Reading, say: Say | None = None) -> Dataset:
    """Decodes picture files, or takes them from the cache, into one array."""
    if reading.target is None:
        told = cache.headers(listed.paths, say)
        bad = {i: str(h) for i, h in enumerate(told) if isinstance(h, Broken)}
        listed = _without(listed, bad, reading, say)
        target = target_of(listed, [h for h in told if isinstance(h, Header)], reading)
    else:
        target = reading.target
    images, bad = cache.pixels(listed.paths, target, say)
    kept = _without(listed, bad, reading, say)
    return assemble(kept, np.delete(images, list(bad), axis=0) if bad else images, name)


def assemble(kept: Pictures, images: np.ndarray, name: str) -> Dataset:
    """The data set of some pictures and their pixels."""
    classes, labels = numbered(kept.labels)
    owners, owner = numbered(kept.clients) if kept.clients else ((), None)
    official_test = np.array([split == "test" for split in kept.splits] or [False] * len(kept))
    # folders called train and test are an official split, to be dealt anew; a manifest says what is to be used for what
    said = np.array([GIVEN.get(split, UNSAID) for split in kept.splits], np.uint8) if kept.manifest else None
    return Dataset(name, images, labels, classes, official_test, owner, owners, said if kept.splits else None)


def target_of(listed: Pictures, headers: Sequence[Header], reading: Reading) -> Target:
    """What all pictures are made into; an error where that is not clear."""
    grey = all(h.grey for h in headers) if reading.colour == "auto" else reading.colour == "grey"
    channels = 1 if grey else 3
    if reading.size:
        return Target(reading.size, reading.size, channels, reading.fit)
    first = headers[0]
    for i, h in enumerate(headers):
        if (h.height, h.width) != (first.height, first.width):
            raise UserError(
                f"{listed.paths[0]} is {first.width}x{first.height} and {listed.paths[i]} is {h.width}x{h.height}. All "
                "images need one size: let fedtailor resize them with data.size, for example --set data.size=32 "
                "(--size 32 where a command has no --set)."
            )
    return Target(first.height, first.width, channels, reading.fit)


def _without(listed: Pictures, bad: dict[int, str], reading: Reading, say: Say | None) -> Pictures:
    """The pictures that can be read. Others are an error that names them, or skipped, as asked for."""
    if not bad:
        return listed
    named = [f"{listed.paths[i]} ({why})" for i, why in list(bad.items())[:3]]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    if reading.broken == "stop":
        raise UserError(
            f"{len(bad)} of {len(listed)} pictures cannot be read: {', '.join(named)}{more}. Repair or remove them, or "
            "leave them out with --set data.broken=skip (--skip-broken where a command has no --set)."
        )
    if len(bad) == len(listed):
        raise UserError(f"none of the {len(listed)} pictures can be read: {named[0]}{more}.")
    if say:
        say(f"skipped {len(bad)} of {len(listed)} pictures: {', '.join(named)}{more}")
    return listed.at([i for i in range(len(listed)) if i not in bad])
