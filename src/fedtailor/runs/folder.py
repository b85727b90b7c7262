"""A run's folder has one writer: two processes in one folder would mix their numbers, and nobody would notice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from ..values import disk_error


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; one that is still empty at the end goes again.

    The lock is the folder's own and ends with the process, however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        _lock(handle, folder)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserError(f"{folder} is in use: a run goes on there. Wait for it, or choose another --out.") from None
        # else the disk has no such locks, as some of a network have not


def new_folder(parent: Path, stem: str) -> Path:
    """Makes the first folder `stem-N` that is not there yet. Who made it has it: of runs that begin at the same
    moment no two get the same."""
    number = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                (parent / f"{stem}-{number}").mkdir()
                return parent / f"{stem}-{number}"
            number += 1
    except OSError as error:
        raise disk_error(parent, error) from error


def require_free(out: Path) -> None:
    """Raises where a new run would meet something that is there already."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file. Choose a folder for --out.")
    if out.exists() and any(out.iterdir()):
        if not (out / "run.json").exists():
            raise UserError(f"{out} is not empty. Choose another --out.")
        raise UserError(f"{out} holds another run. Continue it with 'fedtailor resume {out}', or choose another --out.")
