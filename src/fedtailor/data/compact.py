"""The compact layout: a folder with meta.json, images in .webps or .xz files and small arrays in .npy files.

meta.json names the splits; each has the `shape` and `dtype` of its images, the `files` that hold them in order, further
`arrays` (labels, silo, ...) and the `sha256` of every array's bytes. A .webps file is a row of lossless WebP pictures,
each a strip of images from top to bottom; a .xz file is the array's bytes, LZMA-compressed.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .dataset import Dataset

META = "meta.json"


def name_of(folder: Path) -> str | None:
    """The name of the pack in this folder, or None where there is no pack."""
    return _meta(folder).get("name") if (folder / META).is_file() else None


def read(folder: Path, name: str) -> Dataset:
    """Reads all splits of a pack in the order of meta.json; every array is compared with its sha256."""
    if not (folder / META).is_file():
        raise UserError(f"{name}: there is no {META} in {folder}. Name a folder in the compact layout.")
    meta = _meta(folder)
    splits = meta.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise UserError(f"{folder / META}: no splits. Copy the pack again.")
    parts = [_Split(folder, split, info).arrays() for split, info in splits.items()]
    images, labels = [part["images"] for part in parts], [part["labels"] for part in parts]
    if len({part.shape[1:] for part in images}) > 1:
        raise UserError(f"{folder / META}: the splits hold images of different sizes. Read them as separate sets.")
    joined = np.concatenate(labels)
    silos = np.concatenate([part["silo"] for part in parts]) if all("silo" in part for part in parts) else None
    return Dataset(
        name=name,
        images=images[0] if len(images) == 1 else np.concatenate(images),
        labels=joined,
        classes=tuple(meta.get("classes") or _numbered("", joined)),
        official_test=np.repeat([split == "test" for split in splits], [len(part) for part in labels]),
        owner=silos,
        owners=() if silos is None else tuple(meta.get("silos") or _numbered("silo-", silos)),
    )


def _numbered(prefix: str, ids: np.ndarray) -> list[str]:
    return [f"{prefix}{i}" for i in range(int(ids.max(initial=-1)) + 1)]


def _meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / META}: cannot be read ({error}). Copy the pack again.") from error
    if not isinstance(meta, dict):
        raise UserError(f"{folder / META}: not the description of a pack. Copy the pack again.")
    return meta


class _Split:
    """One split of a pack while it is read."""

    def __init__(self, folder: Path, split: str, info: dict[str, Any]) -> None:
        self.folder, self.split = folder, split
        try:
            self.shape = tuple(int(size) for size in info["shape"])
            self.files = [self._inside(file) for file in info["files"]]
            self.extra = {key: self._inside(file) for key, file in info["arrays"].items()}
            self.sums = dict(info.get("sha256", {}))
            byte_images = np.dtype(info.get("dtype", "uint8")) == np.uint8
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{folder / META}: split '{split}' is not described in full ({error!r}).") from error
        if not byte_images or len(self.shape) not in (3, 4) or min(self.shape) < 1 or "labels" not in self.extra:
            raise UserError(
                f"{folder / META}: split '{split}' needs labels and uint8 images of shape [number, height, width] or "
                f"[number, height, width, channels]; found {info.get('dtype', 'uint8')} {list(self.shape)}, "
                f"arrays {', '.join(self.extra) or 'none'}."
            )

    def _inside(self, file: str) -> Path:
        # a pack may only name files of its own folder
        if Path(file).name != file:
            raise ValueError(f"'{file}' is not a plain file name")
        return self.folder / file

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays of the split, images as [number, height, width, channels]."""
        images = np.empty(self.shape, np.uint8)
        at = 0
        for path in self.files:
            with _blaming(path):
                rows = (
                    _webps(path, self.shape[1:])
                    if path.suffix == ".webps"
                    else _xz(path, self.shape[1:], images.nbytes)
                )
            if at + len(rows) > len(images):
                raise UserError(f"{path}: holds more images than {META} says ({len(images)}). Copy the pack again.")
            images[at : at + len(rows)] = rows
            at += len(rows)
        if at < len(images):
            last = self.files[-1] if self.files else self.folder / META
            raise UserError(f"{last}: ends after {at} of {len(images)} images of '{self.split}'. Copy the pack again.")
        self._compare("images", images, ", ".join(path.name for path in self.files))
        out = {"images": images if images.ndim == 4 else images[..., None]}
        for key, path in self.extra.items():
            with _blaming(path):
                out[key] = np.load(path, allow_pickle=False)
            if len(out[key]) != len(images):
                raise UserError(f"{path}: {len(out[key])} values for {len(images)} images. Copy the pack again.")
            self._compare(key, out[key], path.name)
        return out

    def _compare(self, key: str, array: np.ndarray, files: str) -> None:
        if key in self.sums and hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() != self.sums[key]:
            raise UserError(
                f"{self.folder}: {key} of '{self.split}' ({files}) differ from what was packed. Copy the pack again."
            )


class _blaming:  # noqa: N801 - used as a statement
    """Turns whatever a damaged file makes a decoder raise into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{self.path} is missing. Copy the pack again.") from error
        if isinstance(error, (OSError, ValueError, EOFError, SyntaxError, lzma.LZMAError)):
            raise UserError(f"{self.path}: damaged or cut short ({error}). Copy the pack again.") from error


def _webps(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    from PIL import Image

    blob = memoryview(path.read_bytes())
    strips, at = [], 0
    while at < len(blob):
        # RIFF, then the length of what follows: the pictures need no index
        size = 8 + int.from_bytes(blob[at + 4 : at + 8], "little")
        if bytes(blob[at : at + 4]) != b"RIFF" or at + size > len(blob):
            raise ValueError(f"no whole picture at byte {at}")
        with Image.open(io.BytesIO(blob[at : at + size]), formats=["WEBP"]) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        strips.append((pixels[..., 0] if len(shape) == 2 else pixels).reshape(-1, *shape))
        at += size
    return np.concatenate(strips)


def _xz(path: Path, shape: tuple[int, ...], limit: int) -> np.ndarray:
    with lzma.open(path) as file:
        # one byte more than the split can hold shows that there is too much, however far a bad file would unpack
        return np.frombuffer(file.read(limit + 1), np.uint8).reshape(-1, *shape)
