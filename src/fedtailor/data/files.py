"""The user's own data: arrays in an .npz file, or a tree of image files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ..errors import UserError
from .dataset import Dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_GREY = {"1", "L", "LA"}
_COLOUR = {"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV"}


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


def read_folder(root: Path, name: str) -> Dataset:
    """DIR/class/image or DIR/client/class/image, in sorted order. Where the clients would be called train and test,
    they are the official splits instead."""
    paths = _image_paths(root)
    parts = [path.relative_to(root).parts for path in paths]
    size, channels = _size_and_channels(paths)
    images = np.empty((len(paths), size[1], size[0], channels), np.uint8)
    for row, path in zip(images, paths, strict=True):
        row[:] = _decode(path, channels)
    classes, labels = np.unique([part[-2] for part in parts], return_inverse=True)
    official_test = np.zeros(len(paths), bool)
    owner, owners = None, ()
    if len(parts[0]) == 3:
        tops = [part[0] for part in parts]
        if set(tops) == {"train", "test"}:
            official_test = np.array([top == "test" for top in tops])
        else:
            found, owner = np.unique(tops, return_inverse=True)
            owners = tuple(found.tolist())
    return Dataset(name, images, labels, tuple(classes.tolist()), official_test, owner, owners)


def _image_paths(root: Path) -> list[Path]:
    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder.")
    seen = [path for path in root.rglob("*") if not any(p.startswith(".") for p in path.relative_to(root).parts)]
    paths = [path for path in seen if path.suffix.lower() in SUFFIXES and path.is_file()]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    if not paths:
        raise UserError(f"{root}: no images. Expected {root}/class/image.png or {root}/client/class/image.png.")
    depths: dict[int, Path] = {}
    for path in paths:
        depths.setdefault(len(path.relative_to(root).parts), path)
    if len(depths) > 1:
        first, second = (depths[depth].relative_to(root) for depth in sorted(depths)[:2])
        raise UserError(
            f"{root}: '{first}' and '{second}' lie at different depths. Put every image at class/image, or every "
            "image at client/class/image."
        )
    if depths.keys() - {2, 3}:
        raise UserError(f"{root}: '{paths[0].relative_to(root)}' is neither class/image nor client/class/image.")
    tops = {path.relative_to(root).parts[0] for path in paths}
    empty = sorted(path.name for path in seen if path.parent == root and path.is_dir() and path.name not in tops)
    if empty:
        raise UserError(f"{root / empty[0]}: holds no images. Fill it or remove it.")
    return paths


def _size_and_channels(paths: list[Path]) -> tuple[tuple[int, int], int]:
    """One size for all, and one channel where every image is grey. Only headers are read."""
    from PIL import Image

    sizes, modes = [], set()
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.append(image.size)
                modes.add(image.mode)
                mode = image.mode
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{path}: not a readable image ({error}). Repair or remove it.") from error
        if mode not in _GREY | _COLOUR:
            raise UserError(f"{path}: pixels of mode '{mode}' do not fit a byte. Convert the images to 8 bits first.")
        if sizes[-1] != sizes[0]:
            (w0, h0), (w1, h1) = sizes[0], sizes[-1]
            raise UserError(
                f"{paths[0]} is {w0}x{h0} and {path} is {w1}x{h1}. All images need one size: resize them first, for "
                "example with ImageMagick: mogrify -resize '32x32!' FILES"
            )
    return sizes[0], 1 if modes <= _GREY else 3


def _decode(path: Path, channels: int) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path}: the image is damaged or cut short ({error}). Repair or remove it.") from error
    return pixels.reshape(*pixels.shape[:2], channels)
