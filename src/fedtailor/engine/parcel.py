"""A value as bytes and back, for a message's way.

A parcel is one flat array of bytes and a JSON layout that says which tensors lie in it, so that a network of hundreds
of tensors costs one transfer. Nothing is pickled, and nothing that comes in is used before it is checked: `Refused`
says what is wrong with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..values import Value, plain, restored, tensors_in

FORMAT = 1
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}
ALIGN = 8  # bytes; tensors begin at multiples of it
LAYOUT_LIMIT = 16 << 20  # bytes of JSON
EMPTY = 1 << 16  # entries that a tensor without any may have along its other dimensions


class Refused(Exception):
    """A message that is not used, and why."""


@dataclass(frozen=True)
class Parcel:
    """A message on its way."""

    layout: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.layout) + len(self.data)


def pack(value: Value) -> Parcel:
    """The value's tensors end to end, and where each lies."""
    tensors = {path: t.detach().cpu().contiguous() for path, t in tensors_in(value)}
    pieces: list[Any] = []
    for tensor in tensors.values():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        pieces += [raw, bytes(-len(raw) % ALIGN)]
    shapes = {path: [str(t.dtype).removeprefix("torch."), *t.shape] for path, t in tensors.items()}
    return Parcel(json.dumps({"format": FORMAT, "tree": plain(value), "tensors": shapes}), b"".join(pieces))


def unpack(parcel: Parcel) -> Value:
    """The value of a parcel. Its tensors share one piece of memory."""
    if len(parcel.layout) > LAYOUT_LIMIT:
        raise Refused(f"its layout has {len(parcel.layout)} bytes, more than {LAYOUT_LIMIT}")
    try:
        layout = json.loads(parcel.layout)
        if layout["format"] != FORMAT:
            raise Refused(f"it is of message format {layout['format']!r}, not {FORMAT}")
        return restored(layout["tree"], _tensors(layout["tensors"], parcel.data))
    except Refused:
        raise
    except Exception as error:  # a hostile layout may make this fail in any way
        raise Refused(f"it is no message of this package ({type(error).__name__})") from error


def _tensors(shapes: dict[str, list[Any]], data: bytes) -> dict[str, Tensor]:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    at = 0
    for path, (name, *shape) in shapes.items():
        if name not in DTYPES:
            raise Refused(f"'{path}' has the unknown type {name!r}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise Refused(f"'{path}' has the impossible shape {shape}")
        if math.prod(max(n, 1) for n in shape) > len(data) + EMPTY:  # 10^9 rows of nothing hold no byte
            raise Refused(f"'{path}' has the shape {str(shape)[:80]}, too large for {len(data)} bytes")
        dtype = DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        if size > len(data) - at:
            raise Refused(f"'{path}' reaches beyond the message's end")
        raw = flat[at : at + size]
        if dtype == torch.bool and size and int(raw.max()) > 1:
            raise Refused(f"'{path}' holds bytes that are neither true nor false")
        found[path] = raw.view(dtype).reshape(shape)
        at += size + -size % ALIGN
    if at != len(data):
        raise Refused(f"it holds {len(data)} bytes, its layout describes {at}")
    return found
