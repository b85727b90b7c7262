"""Which pictures there are: a tree of folders or a CSV manifest, as a list of files with label, client and split."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import UserError
from .pixels import SUFFIXES

SPLITS = ("train", "val", "test")
COLUMNS = ("path", "label", "client", "split")


@dataclass(frozen=True)
class Pictures:
    """Picture files with what is known of each; `clients` and `splits` are empty where the source names none."""

    root: Path  # what the paths are told relative to
    paths: tuple[Path, ...]
    labels: tuple[str, ...]
    clients: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()  # train, val, test, or empty text: not said
    manifest: bool = False
    passed: tuple[str, ...] = ()  # suffixes of the folder's other files, which are no pictures

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        """The picture's path as a reader would say it."""
        path = self.paths[i]
        return _said(str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path))

    def at(self, places: Sequence[int]) -> Pictures:
        """Some of them."""

        def some(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[i] for i in places) if values else ()

        paths = tuple(self.paths[i] for i in places)
        return replace(
            self, paths=paths, labels=some(self.labels), clients=some(self.clients), splits=some(self.splits)
        )


def in_folder(root: Path) -> Pictures:
    """DIR/class/image or DIR/client/class/image, in sorted order. Where the clients would be called train and test,
    they are the official splits instead."""
    files = _walk(root)
    paths = _ordered(root, [path for path in files if path.suffix.lower() in SUFFIXES])
    passed = tuple(sorted(path.suffix.lower() or path.name for path in files if path.suffix.lower() not in SUFFIXES))
    parts = [path.relative_to(root).parts for path in paths]
    labels = tuple(_said(part[-2]) for part in parts)
    tops = tuple(_said(part[0]) for part in parts) if len(parts[0]) == 3 else ()
    if set(tops) == {"train", "test"}:
        return Pictures(root, tuple(paths), labels, splits=tops, passed=passed)
    return Pictures(root, tuple(paths), labels, clients=tops, passed=passed)


def _said(name: str) -> str:
    """The name of a file for pages and files in UTF-8: bytes of it that are not become their numbers."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _walk(root: Path) -> list[Path]:
    """The files below a folder, none hidden. Links to folders are followed, and a link that leads nowhere is a file:
    one that cannot be read, which is told."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename}: its files cannot be listed ({error.strerror}).")

    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder.")
    found: list[Path] = []
    for at, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        here = Path(at)
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(here, name)]
        paths = [here / name for name in files if not name.startswith(".")]
        found += [path for path in paths if path.is_file() or path.is_symlink()]
    return found


def _leads_back(here: Path, name: str) -> bool:
    """Whether a folder is a link to one that it lies in, so that following it would not end."""
    path = here / name
    return path.is_symlink() and here.resolve().is_relative_to(path.resolve())


def _ordered(root: Path, paths: list[Path]) -> list[Path]:
    """The pictures in the order of their names, where they lie as they should."""
    paths = sorted(paths, key=lambda path: path.relative_to(root).parts)
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
    folders = (path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    empty = sorted(set(folders) - tops)
    if empty:
        raise UserError(f"{root / empty[0]}: holds no images. Fill it or remove it.")
    return paths


def in_manifest(path: Path) -> Pictures:
    """A CSV file with the columns path and label, and perhaps client and split. Paths are relative to its folder."""
    rows = _rows(path)
    root = path.parent
    clients = tuple(row["client"] for _, row in rows) if "client" in rows[0][1] else ()
    splits = tuple(row["split"].lower() for _, row in rows) if "split" in rows[0][1] else ()
    seen: dict[Path, int] = {}
    for line, row in rows:
        file = root / row["path"]
        for key in ("path", "label"):
            if not row[key]:
                raise UserError(f"{path}, line {line}: the {key} is empty.")
        if clients and not row["client"]:
            raise UserError(
                f"{path}, line {line}: the client is empty. Name a client in every row, or drop the column."
            )
        if splits and row["split"].lower() not in ("", *SPLITS):
            raise UserError(
                f"{path}, line {line}: split '{row['split']}'. Allowed are {', '.join(SPLITS)}, or nothing."
            )
        if file in seen:
            raise UserError(f"{path}: '{row['path']}' is in line {seen[file]} and again in line {line}.")
        seen[file] = line
    return Pictures(root, tuple(seen), tuple(row["label"] for _, row in rows), clients, splits, True)


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line numbers and cells of a manifest."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. A manifest is a CSV file with the columns path and label.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            heads = [head.strip().lower() for head in reader.fieldnames or ()]
            missing = [column for column in COLUMNS[:2] if column not in heads]
            if missing:
                raise UserError(
                    f"{path}: no column '{missing[0]}' in its first line ({', '.join(heads) or 'which is empty'}). A "
                    "manifest has the columns path and label, and perhaps client and split."
                )
            twice = next((column for column in COLUMNS if heads.count(column) > 1), None)
            if twice:
                raise UserError(f"{path}: two columns are called '{twice}'. Rename or remove one.")
            reader.fieldnames = heads
            rows: list[tuple[int, dict[str, str]]] = []
            for row in reader:
                if None in row:
                    raise UserError(
                        f"{path}, line {reader.line_num}: more cells than the first line has columns ({len(heads)}). A "
                        'cell with a comma in it has to stand in quotes: "cat, black".'
                    )
                rows.append((reader.line_num, {key: (row[key] or "").strip() for key in COLUMNS if key in heads}))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a readable CSV file in UTF-8 ({error}).") from error
    if not rows:
        raise UserError(f"{path}: lists no pictures.")
    return rows


def numbered(texts: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """The different texts, sorted, and each one's number."""
    found, numbers = np.unique(np.asarray(texts, dtype=str), return_inverse=True)
    return tuple(str(text) for text in found.tolist()), numbers.astype(np.int64)
