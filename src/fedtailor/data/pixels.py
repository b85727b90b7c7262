"""From a picture file to bytes of one size: the one way in which training and prediction read pictures.

Needs NumPy and Pillow alone. Pictures are turned as their camera says (EXIF), 16-bit grey becomes 8-bit by dividing by
257, and grey becomes colour, or colour grey, where the others are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
GREY = {"1", "L", "LA"}
DEEP = {"I", "I;16", "I;16B", "I;16L", "I;16N"}  # 16 bits of grey; Pillow calls some of them 32-bit
COLOUR = {"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV"}
Fit = Literal["crop", "squash", "pad"]
ORIENTATION, WIDTH, HEIGHT = 0x0112, 0x0100, 0x0101  # tags of EXIF


@dataclass(frozen=True)
class Target:
    """What every picture is made into."""

    height: int
    width: int
    channels: int  # 1 or 3
    fit: Fit = "crop"  # pictures of other proportions: cut off the sides, squash, or pad with black


@dataclass(frozen=True)
class Reading:
    """How picture files are read: the options of [data]."""

    size: int = 0  # pixels high and wide; 0: as they are, all of one size
    fit: Fit = "crop"
    colour: Literal["auto", "grey", "colour"] = "auto"  # auto: grey where all pictures are
    broken: Literal["stop", "skip"] = "stop"
    target: Target | None = None  # exactly this, whatever the pictures are


@dataclass(frozen=True)
class Header:
    """What a picture says of itself before it is decoded."""

    height: int
    width: int
    mode: str

    @property
    def grey(self) -> bool:
        return self.mode in GREY | DEEP


class Broken(Exception):
    """A picture that cannot be read; the message says why."""


def header(path: Path) -> Header:
    """Size and kind of a picture; raises `Broken`."""
    from PIL import Image

    with _reading(), path.open("rb") as file, Image.open(file) as image:
        width, height = image.size
        exif = image.getexif()
        if image.format == "TIFF":  # some of Pillow's versions tell the size of the turned picture
            width, height = int(exif[WIDTH]), int(exif[HEIGHT])
        if exif.get(ORIENTATION) in (5, 6, 7, 8):  # turned by a quarter
            width, height = height, width
        return Header(height, width, _known(image.mode))


def decode(path: Path, target: Target) -> np.ndarray:
    """The picture as uint8 [height, width, channels]; raises `Broken`."""
    from PIL import Image

    # not by its name: Pillow would map the file into memory, and scramble the rows of a grey TIFF that is to be turned
    with _reading(), path.open("rb") as file, Image.open(file) as opened:
        mode = _known(opened.mode)
        image = _turned(opened)
        image.info.pop("transparency", None)  # goes with the alpha; Pillow would warn of it
        if mode in DEEP:
            image = _eight_bits(image)
        image = _fitted(image.convert("L" if target.channels == 1 else "RGB"), target)
        return np.asarray(image, np.uint8).reshape(target.height, target.width, target.channels)


def _turned(image: Image) -> Image:
    """As the camera says. Pillow's own function writes EXIF anew as well, and fails where that is odd."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    image.load()  # turns a TIFF, which then does not ask for it any more
    turn = turns.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _known(mode: str) -> str:
    if mode not in GREY | DEEP | COLOUR:
        raise Broken(f"pixels of mode '{mode}' do not become bytes by a rule: convert it to 8 or 16 bits")
    return mode


def _eight_bits(image: Image) -> Image:
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise Broken(f"pixels from {values.min()} to {values.max()} are neither 8 nor 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _fitted(image: Image, target: Target) -> Image:
    from PIL import Image, ImageOps

    size = (target.width, target.height)
    if image.size == size:
        return image
    how = Image.Resampling.BILINEAR  # Pillow's averages over all pixels it shrinks, so nothing is skipped
    if target.fit == "squash":
        return image.resize(size, how)
    return ImageOps.fit(image, size, how) if target.fit == "crop" else ImageOps.pad(image, size, how)


class _reading:  # noqa: N801 - used as a statement
    """Turns whatever a damaged file makes a decoder raise into `Broken`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from PIL import Image, UnidentifiedImageError

        if isinstance(error, UnidentifiedImageError):
            raise Broken("not a picture of a known kind") from error
        known = (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError, struct.error)
        if isinstance(error, (*known, Image.DecompressionBombError)):
            raise Broken(str(error) or type(error).__name__) from error
