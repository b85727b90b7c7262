"""A labelled set of images in memory, checked once when it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import UserError

UNSAID = 255  # the split of an image that the data does not put into one


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images, their labels and, where the data has them, the natural clients they belong to."""

    name: str
    images: np.ndarray  # uint8 [N, H, W, C]
    labels: np.ndarray  # int64 [N]
    classes: tuple[str, ...]
    official_test: np.ndarray  # bool [N]: images of the official test split (all False where there is none)
    owner: np.ndarray | None = None  # int64 [N]: natural client of each image
    owners: tuple[str, ...] = ()  # natural clients' names
    split: np.ndarray | None = None  # uint8 [N]: the split that the data gives an image, or UNSAID

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Brings the arrays to their declared types where that loses nothing; a UserError says what is wrong."""
        images = _pixels(self.name, self.images)
        n = len(images)
        fixed = {
            "images": images,
            "labels": _ids(self.name, "labels", self.labels, n, len(self.classes), "classes"),
            "classes": tuple(self.classes),
            "official_test": np.asarray(self.official_test, dtype=bool),
            "owners": tuple(self.owners),
        }
        if fixed["official_test"].shape != (n,):
            raise UserError(
                f"{self.name}: official_test has shape {fixed['official_test'].shape}, {n} images need ({n},)."
            )
        if self.owner is not None:
            fixed["owner"] = _ids(self.name, "clients", self.owner, n, len(self.owners), "client names")
        if self.split is not None:
            fixed["split"] = np.ascontiguousarray(self.split, np.uint8)
        for key, value in fixed.items():
            object.__setattr__(self, key, value)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        _, height, width, channels = self.images.shape
        return channels, height, width

    @cached_property
    def hash(self) -> str:
        """What the data is, wherever it was read from: sha256 over shape, pixels, labels, clients and given splits."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        digest.update(self.images.data)
        digest.update(self.labels.astype("<i8").data)
        if self.owner is not None:
            digest.update(self.owner.astype("<i8").data)
        if self.split is not None:
            digest.update(self.split.data)
        return digest.hexdigest()


def fingerprints(images: np.ndarray) -> np.ndarray:
    """16 bytes for each image by which it is known again, uint8 [N, 16]: the beginning of its pixels' sha256."""
    found = b"".join(hashlib.sha256(np.ascontiguousarray(image).data).digest()[:16] for image in images)
    return np.frombuffer(found, np.uint8).reshape(-1, 16)


def _pixels(name: str, images: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    if len(images) == 0:
        raise UserError(f"{name}: there are no images. A data set needs at least one.")
    if not isinstance(images, np.ndarray) or images.dtype == object:
        shapes = [np.shape(image) for image in images]
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0)
        if odd:
            raise UserError(
                f"{name}: image 0 has shape {shapes[0]} and image {odd} has {shapes[odd]}. All images need the same "
                "height, width and channels; resize or convert them first."
            )
        images = np.stack([np.asarray(image) for image in images])
    if images.ndim != 4 or 0 in images.shape:
        raise UserError(
            f"{name}: images have shape {images.shape}, expected [number, height, width, channels], none of them zero."
        )
    if images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        raise UserError(
            f"{name}: images have shape {images.shape}, which looks like channels first. Expected [number, height, "
            "width, channels]: move the axis with images.transpose(0, 2, 3, 1)."
        )
    if images.dtype != np.uint8:
        _refuse_inexact(name, images)
    return np.ascontiguousarray(images, dtype=np.uint8)


def _refuse_inexact(name: str, images: np.ndarray) -> None:
    if images.dtype.kind not in "biuf":
        raise UserError(f"{name}: pixels have type {images.dtype}. Save them as uint8 from 0 to 255.")
    if np.isnan(images).any():
        first = int(np.argwhere(np.isnan(images))[0, 0])
        raise UserError(
            f"{name}: image {first} holds pixels that are not numbers (NaN). Repair or leave out such images."
        )
    low, high = images.min(), images.max()
    if low < 0 or high > 255 or (images.dtype.kind == "f" and (images != np.rint(images)).any()):
        scale = "Multiply by 255" if low >= 0 and high <= 1 else "Scale"
        raise UserError(
            f"{name}: pixels are {images.dtype} from {low:g} to {high:g} and do not fit whole numbers from 0 to 255 "
            f"exactly. {scale}, round and save as uint8."
        )


def _ids(name: str, what: str, ids: np.ndarray, n: int, limit: int, of: str) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.shape != (n,):
        raise UserError(f"{name}: {what} have shape {ids.shape}, {n} images need ({n},): one whole number per image.")
    if ids.dtype.kind not in "biuf" or not np.isfinite(ids).all() or (ids != np.rint(ids)).any():
        raise UserError(f"{name}: {what} of type {ids.dtype} are not whole numbers. Number them from 0 to {limit - 1}.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        raise UserError(
            f"{name}: {what} hold {wrong} (image {int(np.argmax(ids == wrong))}) but there are {limit} {of}. "
            f"Allowed are 0 to {limit - 1}."
        )
    return np.ascontiguousarray(ids, dtype=np.int64)
