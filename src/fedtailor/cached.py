"""What was made once and can be made again: files in a folder of the user's, each sealed by a hash.

The folder is $FEDTAILOR_CACHE, or fedtailor in the user's cache folder; it can be deleted at any time. `off` keeps
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

SEAL = 32  # bytes before what is kept


def cache_folder() -> Path | None:
    """Where things are kept; None: nowhere."""
    told = os.environ.get("FEDTAILOR_CACHE", "")
    if told == "off":
        return None
    if told:
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedtailor"


def read_cached(name: str) -> bytes | None:
    """What is kept under a name, where it is there and whole."""
    folder = cache_folder()
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        found = (folder / name).read_bytes()
        if hashlib.sha256(found[SEAL:]).digest() == found[:SEAL]:
            return found[SEAL:]
    return None


def write_cached(name: str, data: bytes) -> None:
    """Keeps something, whole or not at all. A disk that is full or read-only costs time, not the run."""
    folder = cache_folder()
    if folder is None:
        return
    path = folder / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
