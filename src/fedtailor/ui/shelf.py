"""Where the runs are: folders with a run.json below one root, each followed while somebody looks at it.

A run is known by its path below the root. Names that a browser sends are looked up among the folders that were found;
they never become a path themselves, and a link that leads out of the root is not followed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs.follow import Follower, peek
from ..runs.results import Results
from .numbers import number

DEPTH = 4  # of folders below the root
WARM = 3  # runs that are read before anybody asks
FILES = ("run.json", "config.toml", "events.csv", "now.json", "gain.csv", "partition.npz", "policies", "nets")


class Shelf:
    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder. Give the folder that holds runs, or one run.")
        self.root = root.resolve()
        self.born = f"{time.time_ns():x}"  # versions count from here: those of an earlier server mean nothing
        self._followers: dict[str, Follower] = {}
        self._cards: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def found(self) -> dict[str, Path]:
        """Every run folder below the root by its name; a root that is a run is the only one."""
        if (self.root / "run.json").is_file():
            return {readable(self.root.name): self.root}
        runs: dict[str, Path] = {}
        for folder, names, files in os.walk(self.root, followlinks=False):
            here = Path(folder)
            if "run.json" in files and self._inside(here):
                runs[readable(here.relative_to(self.root).as_posix())] = here
                names.clear()
            elif len(here.relative_to(self.root).parts) >= DEPTH:
                names.clear()
            names[:] = sorted(n for n in names if not n.startswith("."))
        return runs

    def _inside(self, folder: Path) -> bool:
        """Whether what is read of a run is in the root: a file may be a link to anywhere."""
        return all((folder / name).resolve().is_relative_to(self.root) for name in FILES)

    def follower(self, run: str) -> Follower:
        """The run of a name, brought up to date."""
        with self._lock:
            follower = self._followers.get(run)
            if follower is None:
                folder = self.found().get(run)
                if folder is None:
                    raise KeyError(run)
                follower = self._followers[run] = Follower(folder)
        if follower.folder.is_dir() and not self._inside(follower.folder):
            raise KeyError(run)
        return follower.read()

    def warm(self) -> None:
        """Reads the runs that were written last, which are the likeliest to be looked at."""
        found = sorted(self.found().items(), key=lambda item: -_mtime(item[1] / "events.csv"))
        for name, _ in found[:WARM]:
            with contextlib.suppress(Exception):  # who asks for the run is told what is wrong with it
                self.follower(name)

    def cards(self) -> list[dict[str, Any]]:
        """All runs at a glance, newest first; those that cannot be read say why."""
        found = [self._card(name, folder) for name, folder in self.found().items()]
        return sorted(found, key=lambda card: (card["status"] == "running", card["created"]), reverse=True)

    def _card(self, name: str, folder: Path) -> dict[str, Any]:
        stamp = [_stamp(folder / file) for file in ("run.json", "config.toml", "events.csv", "now.json")]
        known = self._cards.get(name)
        if known and known[0] == stamp and known[1]["status"] != "running":
            return known[1]
        try:
            follower = Follower(folder)
            results = peek(folder)
            follower.results, follower.now = results, follower.note()
            card = run_card(name, results, follower.status)
        except UserError as error:
            card = broken_card(name, str(error))
        except Exception as error:  # run.json may hold anything: one damaged run must not hide the others
            card = broken_card(name, f"This could not be read ({type(error).__name__}: {error}).")
        self._cards[name] = stamp, card
        return card


def readable(name: str) -> str:
    """A file's name as text that JSON and an address can hold: a name may be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def run_card(name: str, run: Results, status: str) -> dict[str, Any]:
    """What a list of runs says of one."""
    split, at = run.reported_at()
    spread = run.spreads["personal"] if at else None
    return {
        "id": name,
        "name": readable(run.name),
        "status": status,
        "method": run.method,
        "network": run.network,
        "data": run.section("data"),
        "partition": run.section("partition"),
        "fleet": run.section("fleet"),
        "created": str(run.facts.get("created") or ""),
        "rounds": run.rounds_planned,
        "done": run.rounds_done,
        "clients": run.config.get("clients"),
        "participants": run.config.get("participants"),
        "seed": run.config.get("seed"),
        "split": split,
        "round": at,
        "personal": number(spread.mean) if spread else None,
        "worst": number(spread.worst_decile) if spread else None,
        "device": str(run.facts.get("device") or ""),
        "seconds": number(run.facts.get("seconds")),
        "problem": "",
    }


def broken_card(name: str, problem: str) -> dict[str, Any]:
    empty = dict.fromkeys(("method", "network", "data", "partition", "fleet", "created", "split", "device"), "")
    none = dict.fromkeys(("rounds", "done", "clients", "participants", "seed", "round", "personal", "worst", "seconds"))
    return {"id": name, "name": name.rpartition("/")[2], "status": "broken", **empty, **none, "problem": problem}


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stamp(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
