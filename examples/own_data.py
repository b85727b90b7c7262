"""Data of your own: three silos that draw circles, squares and crosses, each with a hand of its own.

The images go into an .npz file with the arrays `images`, `labels`, `client` and `classes`; the partition `natural` then
gives every silo its own images.

Run it:  python examples/own_data.py [FOLDER]        (FOLDER is new or empty; default: runs/own-data)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedtailor.api import Run, run

CLASSES = ["circle", "square", "cross"]
SILOS = {"north": (4, 90), "east": (5, 160), "south": (6, 250)}  # size and brightness of a silo's drawings
SIDE = 16


def draw(shape: str, size: float, rng: np.random.Generator) -> np.ndarray:
    """One outline, somewhere near the middle: True where there is ink."""
    rows, columns = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2 - rng.uniform(-1.5, 1.5, (2, 1, 1))
    if shape == "cross":
        away = np.minimum(abs(rows), abs(columns))
        return (away < 1) & (np.maximum(abs(rows), abs(columns)) < size)
    distance = np.hypot(rows, columns) if shape == "circle" else np.maximum(abs(rows), abs(columns))
    return abs(distance - size) < 1


def write(path: Path, per_class: int = 40) -> None:
    """Images are uint8 [N, height, width] or [N, height, width, channels]; labels are numbers from 0."""
    rng = np.random.default_rng(0)
    images, labels, silos = [], [], []
    for silo, (size, ink) in SILOS.items():
        for label, shape in enumerate(CLASSES):
            for _ in range(per_class):
                pixels = ink * draw(shape, size, rng) + rng.normal(0, 60, (SIDE, SIDE))
                images.append(np.clip(pixels, 0, 255).astype(np.uint8))
                labels.append(label)
                silos.append(silo)
    np.savez_compressed(path, images=np.stack(images), labels=labels, client=silos, classes=CLASSES)


def main(folder: Path, **changes: object) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "shapes.npz")
    return run(
        "demo",
        method="ditto",
        data=f"npz:{folder / 'shapes.npz'}",
        partition="natural",
        clients=len(SILOS),
        participants=len(SILOS),
        out=folder / "run",
        **{"rounds": 10, **changes},
    )


if __name__ == "__main__":
    done = main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-data"))
    done.table()
    print(f"report: {done.report()}")
