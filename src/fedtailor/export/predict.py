"""Classify pictures with an exported network. Needs onnxruntime, NumPy and Pillow; torch is never imported."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.pixels import SUFFIXES, Broken, Target, decode
from ..errors import UserError

FORMAT = 1  # of the description inside the file
KEY = "fedtailor"
BATCH = 64


@dataclass(frozen=True)
class Model:
    """An exported network, ready to run."""

    session: Any
    about: dict[str, Any]

    @property
    def classes(self) -> list[str]:
        return self.about["classes"]

    @property
    def target(self) -> Target:
        channels, height, width = self.about["input"]
        return Target(height, width, channels, self.about["fit"])

    def run(self, images: np.ndarray) -> np.ndarray:
        """Probabilities [number, classes] of uint8 pictures [number, height, width, channels]."""
        given = images.dtype, images.shape[1:]
        channels, height, width = self.about["input"]
        if images.ndim != 4 or given != (np.uint8, (height, width, channels)):
            raise UserError(
                f"this network takes uint8 pictures [number, {height}, {width}, {channels}], not {images.dtype} "
                f"{list(images.shape)}."
            )
        return self.session.run(None, {"images": images})[0]


def open_model(source: Path | bytes, threads: int = 0) -> Model:
    """Opens a file that `fedtailor export` wrote, or its bytes."""
    name = str(source) if isinstance(source, Path) else "the network"
    if isinstance(source, Path) and not source.is_file():
        raise UserError(f"{name}: there is no such file. 'fedtailor export RUN' writes one.")
    try:
        import onnxruntime
    except ImportError:
        raise UserError("this needs onnxruntime: pip install onnxruntime pillow numpy") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        given = str(source) if isinstance(source, Path) else source
        session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise UserError(
            f"{name}: onnxruntime {onnxruntime.__version__} cannot load it ({_first_line(error)}). If the file is "
            "whole, it was written for a newer onnxruntime: pip install --upgrade onnxruntime"
        ) from None
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise UserError(f"{name}: an ONNX file, but not one of 'fedtailor export': it does not name its classes.")
    return Model(session, _read_about(name, text))


def _read_about(name: str, text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
        version = about["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{name}: its description is damaged. Export it again.") from None
    if version != FORMAT:
        raise UserError(
            f"{name}: written by fedtailor {about.get('fedtailor', '?')} in export format {version}; this fedtailor "
            f"reads format {FORMAT}. Use that version, or export it again with this one."
        )
    return about


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def picture_paths(given: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the pictures in them, sorted."""
    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: there is no such file or folder.")
    if not found:
        raise UserError(f"{', '.join(given)}: no pictures.")
    return found


def predict(model: Model, paths: Sequence[Path]) -> Iterator[tuple[Path, np.ndarray | Broken]]:
    """Each picture with its probabilities, or with what is wrong with it."""
    for start in range(0, len(paths), BATCH):
        read: list[tuple[Path, np.ndarray | Broken]] = []
        for path in paths[start : start + BATCH]:
            try:
                read.append((path, decode(path, model.target)))
            except Broken as error:
                read.append((path, error))
        good = [pixels for _, pixels in read if isinstance(pixels, np.ndarray)]
        rows = iter(model.run(np.stack(good)) if good else ())
        yield from ((path, next(rows) if isinstance(found, np.ndarray) else found) for path, found in read)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fedtailor predict",
        description="Classify pictures with an exported network. Needs onnxruntime, NumPy and Pillow only.",
        epilog="Example: fedtailor predict runs/x/export/paris/network.onnx photos/*.jpg --csv > answers.csv",
    )
    made.add_argument("model", metavar="MODEL.onnx", type=Path, help="a file that 'fedtailor export' wrote")
    made.add_argument("images", metavar="IMAGES", nargs="+", help="picture files, or folders of them")
    made.add_argument("--csv", action="store_true", help="a CSV table with the probability of every class")
    made.add_argument("--top", type=int, default=1, metavar="N", help="classes to show for each picture (default 1)")
    return made


def _cell(text: str) -> str:
    """A name as a table's cell: one that a spreadsheet would take for a formula gets an apostrophe in front."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
    return text


def main(arguments: Sequence[str]) -> int:
    """The command. Exit code 0: all pictures read; 1: some are broken (named on standard error)."""
    told = parser().parse_args(arguments)
    model = open_model(told.model)
    table = csv.writer(sys.stdout, lineterminator="\n") if told.csv else None
    if table:
        table.writerow(["image", "class", "probability", *map(_cell, model.classes)])
    broken = 0
    for path, found in predict(model, picture_paths(told.images)):
        if isinstance(found, Broken):
            broken += 1
            print(f"{path}: not a readable picture ({found})", file=sys.stderr)
            continue
        best = np.argsort(-found, kind="stable")
        if table:
            name = model.classes[best[0]]
            table.writerow([_cell(str(path)), _cell(name), f"{found[best[0]]:.6f}", *(f"{p:.6f}" for p in found)])
        else:
            words = ", ".join(f"{model.classes[i]} {100 * found[i]:.1f} %" for i in best[: max(1, told.top)])
            print(f"{path}: {words}")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
