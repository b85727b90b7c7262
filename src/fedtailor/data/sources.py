"""Where data comes from: one name, one loader. Nothing heavy is imported until a set is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, nearest
from . import cifar, compact, files, hub
from .dataset import Dataset
from .lists import Pictures, in_folder, in_manifest
from .pixels import Reading

NAMES = {
    "digits": "1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn, nothing to download",
    "cifar10": "60,000 colour photos, 32x32, 10 classes; official archive or compact pack in the data folder",
    "cifar100": "60,000 colour photos, 32x32, 100 classes; official archive or compact pack in the data folder",
    "hub:cifar10": "CIFAR-10 downloaded from the Hugging Face hub (needs the 'hub' extra)",
    "hub:cifar100": "CIFAR-100 downloaded from the Hugging Face hub (needs the 'hub' extra)",
    "npz:FILE": "your own arrays: images (or x), labels (or y), optional client and classes",
    "folder:DIR": "your own image files: DIR/class/*.png or DIR/client/class/*.png",
    "FILE.csv": "your own image files by a manifest: columns path, label, and perhaps client and split",
    "compact:DIR": "a folder in the compact layout (meta.json beside .webps, .xz and .npy files)",
    "PACK": "any compact pack in the data folder, by its folder's name",
}
_READERS = {"npz": files.read_npz, "compact": compact.read}


def load(
    name: str,
    folder: Path | str | None = None,
    reading: Reading | None = None,
    say: Callable[[str], None] | None = None,
) -> Dataset:
    """Reads the data set called `name`; `folder` (or the variable FEDTAILOR_DATA) is where downloaded sets lie.

    `reading` says how picture files become arrays, and `say` hears of a long reading's progress.
    """
    listed = pictures(name)
    if listed is not None:
        return files.read_pictures(listed, name, reading or Reading(), say)
    prefix, colon, rest = name.partition(":")
    if name == "digits":
        return _digits()
    if prefix == "hub" and colon:
        return hub.load(rest)
    if prefix in (*_READERS, "folder") and colon:
        if not rest:
            raise UserError(f"data.name = '{name}': a path has to follow the colon, as in '{prefix}:path/to/data'.")
        return _READERS[prefix](Path(rest).expanduser(), name)
    root = _data_folder(folder)
    if name in cifar.OFFICIAL:
        return cifar.load(name, root)
    if root and re.fullmatch(r"[\w.-]+", name) and (root / name / compact.META).is_file():
        return compact.read(root / name, name)
    raise _unknown(name, root)


def own(name: str) -> bool:
    """Whether the source is the user's own, which may grow or change after a run."""
    return name.endswith(".csv") or name.startswith(("folder:", "npz:"))


def pictures(name: str) -> Pictures | None:
    """The picture files of a source that consists of such; None for others."""
    if name.endswith(".csv"):
        return in_manifest(Path(name).expanduser())
    if name.startswith("folder:") and name != "folder:":
        return in_folder(Path(name.removeprefix("folder:")).expanduser())
    return None


def _data_folder(folder: Path | str | None) -> Path | None:
    given = str(folder) if folder else os.environ.get("FEDTAILOR_DATA", "")
    if not given:
        return None
    root = Path(given).expanduser()
    if not root.is_dir():
        key = "data.dir" if folder else "FEDTAILOR_DATA"
        raise UserError(f"{key} = '{given}': there is no such folder. Name the folder that holds the data.")
    return root


def _unknown(name: str, root: Path | None) -> UserError:
    packs = sorted(path.parent.name for path in root.glob(f"*/{compact.META}")) if root else []
    known = [*NAMES, *(pack for pack in packs if pack not in NAMES)]
    known.remove("PACK")
    where = f"the data folder {root}" if root else "a data folder (data.dir, --data-dir or FEDTAILOR_DATA; none is set)"
    return UserError(
        f"data.name = '{name}': no such data set.{nearest(name, known)} Known: {', '.join(known)}, "
        f"or any compact pack in {where}."
    )


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    # the scans count ink from 0 to 16; the full range of a byte keeps all 17 levels apart
    images = np.rint(bunch.images * (255 / 16))[..., None].astype(np.uint8)
    classes = tuple(str(digit) for digit in range(10))
    return Dataset("digits", images, bunch.target, classes, np.zeros(len(images), bool))
