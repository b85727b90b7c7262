"""Checkpoints: the state of a run as value files, with a manifest that proves they are whole.

A checkpoint is a manifest `NNNNNN.json` naming the server's file and one file per client memory, each with its sha256.
Only memories that changed are written again. The manifest is written last and carries its own hash, so a torn or
altered checkpoint is noticed; the one before it is then used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..engine.loop import State
from ..errors import UserError
from ..method import Job, Server
from ..values import read_value, write_bytes, write_value

KEEP = 2  # checkpoints kept
CPU = torch.device("cpu")  # where memories wait; a client fetches its own when it needs it


def save(folder: Path, state: State, events_bytes: int) -> None:
    """Writes a checkpoint of a state at the end of a round."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _newest_manifest(folder)
    memories: dict[str, dict[str, str]] = dict(before["memories"]) if before else {}
    name = f"server-{state.round:06d}.safetensors"
    server = {"file": name, "sha256": write_value(folder / name, state.server.values)}
    for client in sorted(state.memories if before is None else state.touched):
        name = f"memory-{client:06d}-{state.round:06d}.safetensors"
        memories[str(client)] = {"file": name, "sha256": write_value(folder / name, state.memories[client])}
    manifest = {"round": state.round, "events_bytes": events_bytes, "server": server, "memories": memories}
    manifest["sha256"] = _digest(manifest)
    write_bytes(folder / f"{state.round:06d}.json", json.dumps(manifest, indent=1).encode())
    state.touched.clear()
    _tidy(folder)


def load(folder: Path, job: Job, device: torch.device, say: Callable[[str], None]) -> tuple[State, int] | None:
    """The newest whole checkpoint as (state, bytes of the event log at that time), or None where none was ever written.

    Raises `UserError` where there are some and none is whole: to begin anew would overwrite what can still be saved.
    """
    manifests, problem = sorted(folder.glob("*.json"), reverse=True), None
    for path in manifests:
        try:
            manifest = _read_manifest(path)
            values = _read(folder, manifest["server"], device)
            memories = {int(c): _read(folder, entry, CPU) for c, entry in manifest["memories"].items()}
        except UserError as error:
            problem = error
            if path != manifests[-1]:
                say(f"checkpoint {path.stem} is damaged ({error}) The one before it is used.")
            continue
        server = Server(job, manifest["round"], **values)
        return State(server, memories, manifest["round"]), manifest["events_bytes"]
    if problem:
        raise UserError(
            f"{folder}: no checkpoint can be read ({problem}) Nothing was changed. If the disk or its mount is to "
            f"blame, mend it and try again; to begin the run anew, delete {folder}."
        )
    return None


def go_back(folder: Path, round: int) -> None:
    """Forgets checkpoints beyond the one that a run goes on from: they are damaged, and nothing may build on them."""
    for path in folder.glob("*.json"):
        if int(path.stem) > round:
            path.unlink()


def _read(folder: Path, entry: dict[str, str], device: torch.device) -> Any:
    path = folder / entry["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path.name} cannot be read.") from error
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise UserError(f"{path.name} has changed since it was written.")
    return read_value(path, device)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        if manifest.pop("sha256") != _digest(manifest):
            raise UserError(f"{path.name} has changed since it was written.")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path.name} is not readable.") from error
    return manifest


def _newest_manifest(folder: Path) -> dict[str, Any] | None:
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            return _read_manifest(path)
        except UserError:
            path.unlink()  # a damaged one must not be built upon
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _tidy(folder: Path) -> None:
    """Removes manifests beyond the last few and files that none of them names."""
    manifests = sorted(folder.glob("*.json"))
    for path in manifests[:-KEEP]:
        path.unlink()
    named: set[str] = set()
    for path in manifests[-KEEP:]:
        try:
            manifest = _read_manifest(path)
        except UserError:
            continue
        named |= {manifest["server"]["file"], *(entry["file"] for entry in manifest["memories"].values())}
    for path in folder.glob("*.safetensors"):
        if path.name not in named:
            path.unlink()
