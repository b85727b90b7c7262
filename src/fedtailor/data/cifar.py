"""CIFAR-10 and CIFAR-100 in the two official layouts (python, binary), or as a compact pack.

All three give the same arrays in the official order, train then test, and therefore the same hash.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from . import compact
from .dataset import Dataset

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
CIFAR100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)
# fmt: on
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Official:
    """What the official archives of one set look like; the last file is the test split."""

    classes: tuple[str, ...]
    python: tuple[str, ...]  # file names of the python layout
    key: str  # the labels' key in those files
    label_bytes: int  # bytes before the pixels of a binary record; the last one is the (fine) label
    sizes: tuple[int, ...]  # images per file
    folders: tuple[str, str]  # what the python and the binary archive unpack to
    archives: tuple[str, str]

    @property
    def binary(self) -> tuple[str, ...]:
        return tuple(f"{file}.bin" for file in self.python)


OFFICIAL = {
    "cifar10": Official(
        CIFAR10,
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
        "labels",
        1,
        (10_000,) * 6,
        ("cifar-10-batches-py", "cifar-10-batches-bin"),
        ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
    ),
    "cifar100": Official(
        CIFAR100,
        ("train", "test"),
        "fine_labels",
        2,
        (50_000, 10_000),
        ("cifar-100-python", "cifar-100-binary"),
        ("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
    ),
}


def load(name: str, root: Path | None) -> Dataset:
    """Finds the set in the data folder, in whichever layout it lies there."""
    official = OFFICIAL[name]
    for folder in [root, *(root / sub for sub in (name, *official.folders))] if root else []:
        if compact.name_of(folder) == name:
            return compact.read(folder, name)
        if (folder / official.python[0]).is_file():
            return _read(name, folder, official.python, _read_python)
        if (folder / official.binary[0]).is_file():
            return _read(name, folder, official.binary, _read_binary)
    raise _missing(name, root)


def _missing(name: str, root: Path | None) -> UserError:
    official = OFFICIAL[name]
    packed = (
        next((root / archive for archive in official.archives if (root / archive).is_file()), None) if root else None
    )
    if packed:
        return UserError(f"data.name = '{name}': {packed} is still packed. Unpack it there: tar -xzf {packed.name}")
    where = f"not found in {root}" if root else "no data folder is set"
    return UserError(
        f"data.name = '{name}': {where}. Download {official.archives[0]} (or {official.archives[1]}) from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and name the folder that then holds "
        f"{official.folders[0]}/ with --data-dir, data.dir or the variable FEDTAILOR_DATA. "
        f"Or install the 'hub' extra (pip install 'fedtailor[hub]') and use data.name = 'hub:{name}'."
    )


Reader = Callable[[Path, Official], tuple[np.ndarray, np.ndarray]]


def _read(name: str, folder: Path, names: tuple[str, ...], reader: Reader) -> Dataset:
    official = OFFICIAL[name]
    pixels, labels = [], []
    for file, size in zip(names, official.sizes, strict=True):
        path = folder / file
        if not path.is_file():
            raise UserError(f"{path} is missing; the other files of {name} lie beside it. {_again(official)}")
        images, ids = reader(path, official)
        if len(images) != size or len(ids) != size:
            raise UserError(f"{path}: {len(images)} images and {len(ids)} labels, {size} expected. {_again(official)}")
        pixels.append(images)
        labels.append(ids)
    planes = np.concatenate(pixels).reshape(-1, 3, 32, 32)
    official_test = np.repeat([False, True], [sum(official.sizes[:-1]), official.sizes[-1]])
    return Dataset(name, planes.transpose(0, 2, 3, 1), np.concatenate(labels), official.classes, official_test)


def _again(official: Official) -> str:
    return f"Unpack {' or '.join(official.archives)} again."


def _read_binary(path: Path, official: Official) -> tuple[np.ndarray, np.ndarray]:
    raw = np.fromfile(path, np.uint8)
    record = official.label_bytes + PIXELS
    if len(raw) % record:
        raise UserError(f"{path}: {len(raw)} bytes are not a whole number of {record}-byte images. {_again(official)}")
    rows = raw.reshape(-1, record)
    return rows[:, official.label_bytes :], rows[:, official.label_bytes - 1]


def _read_python(path: Path, official: Official) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file:
            batch = _SafeUnpickler(file, encoding="latin1").load()
        # files pickled again by Python 3 may carry bytes as keys
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels = batch["data"].array()
        labels = np.asarray(batch[official.key], np.int64)
        return pixels.reshape(-1, PIXELS), labels
    except UserError:
        raise
    # whatever a damaged or hostile file makes the unpickler or these lines stumble over, the cause is the file
    except Exception as error:
        raise UserError(f"{path}: not an official CIFAR file, or damaged ({error}). {_again(official)}") from error


class _Stub:
    """Stands in for NumPy's part in a pickle: keeps what it is told as plain values and runs nothing."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The bytes of a pickled uint8 array, as an array."""
        _, shape, dtype, fortran, raw = self.state
        if dtype.args[0] not in ("u1", "|u1"):
            raise ValueError(f"pixels of type {dtype.args[0]}")
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text encoded as '{encoding}'")
    return text.encode("latin1")


class _SafeUnpickler(pickle.Unpickler):
    """Reads plain values and arrays. No name in the file is ever looked up, so nothing of it can be run."""

    def find_class(self, module: str, name: str) -> Any:
        # each answer is a fresh lambda: a file can change the object it gets, never the one the next file gets
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")} or (
            module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct"
        ):
            return lambda *args: _Stub(*args)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: _latin1(text, encoding)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data has no need of")
