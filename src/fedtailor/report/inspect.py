"""The page of `fedtailor data inspect`: counts, remarks and sample pictures in one file."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from ..data.inspect import Inspection
from .html import write_page

PER_CLASS = 2
CLIENTS = 30  # more are counted, not shown
GROUPS = 20  # of copies


def write_inspection(found: Inspection, out: Path) -> Path:
    data, counts = found.data, found.counts
    kind = "grey" if data.shape[0] == 1 else "colour"
    page: dict[str, Any] = {
        "title": found.name,
        "found": found,
        "lead": f"{len(data):,} {kind} pictures of {len(data.classes)} classes"
        + (f" at {len(data.owners)} clients." if data.owners else "; no clients are named."),
        "broken": list(found.broken.items())[:100],
        "table": [(name, int(row.sum()), row.tolist()) for name, row in zip(found.clients, counts, strict=True)],
        "samples": [(name, _samples(found, i)) for i, name in enumerate(found.clients[:CLIENTS])],
        "twins": [[_thumb(found, i, _who(found, i)) for i in t.places[:8]] for t in found.twins[:GROUPS]],
        "suspects": [
            _thumb(found, s.place, f"{data.classes[s.label]}, looks like {data.classes[s.looks]}")
            for s in (found.judge.suspects if found.judge else ())
        ],
    }
    return write_page("inspect.html", page, out)


def _samples(found: Inspection, client: int) -> list[dict[str, str]]:
    data = found.data
    mine = np.ones(len(data), bool) if data.owner is None else data.owner == client
    places = [np.flatnonzero(mine & (data.labels == k))[:PER_CLASS] for k in range(len(data.classes))]
    return [_thumb(found, int(i), data.classes[k]) for k, some in enumerate(places) for i in some]


def _who(found: Inspection, place: int) -> str:
    data = found.data
    label = data.classes[data.labels[place]]
    return label if data.owner is None else f"{data.owners[data.owner[place]]}, {label}"


def _thumb(found: Inspection, place: int, text: str) -> dict[str, str]:
    from PIL import Image

    pixels, buffer = found.data.images[place], io.BytesIO()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((96, 96))
    picture.save(buffer, "png")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"src": source, "name": found.names[place], "text": text}
