"""Values: trees of named tensors and plain numbers, and one safe file format for them.

Server state, client memory, tasks and replies are values. A value is saved as one safetensors file whose header
carries the tree as JSON; reading it can run no code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError

Value = Any  # Tensor | int | float | str | bool | None | list | tuple | dict[str, Value]


def tensors_in(value: Value, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a value with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{path}/{i}")


def bytes_of(value: Value) -> int:
    """Bytes of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return 0


def on_device(value: Value, device: torch.device) -> Value:
    """The value with its tensors on a device; out of pinned memory without waiting for them.

    What is in double precision, policies and the like, stays on the host: no network computes with it, Python reads it.
    """

    def placed(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float64:
            return tensor.cpu()
        return tensor.to(device, non_blocking=tensor.is_cpu and tensor.is_pinned())

    return mapped(value, placed)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device. Copied out of pinned memory, or else the host would wait for all that a GPU
    has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def mapped(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """The value with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    return value


def plain(value: Value, path: str = "") -> Value:
    """The value as JSON, tensors replaced by references to their paths."""
    if isinstance(value, Tensor):
        return {"$tensor": path}
    if isinstance(value, dict):
        bad = [k for k in value if not isinstance(k, str) or k.startswith("$") or "/" in k]
        if bad:
            raise TypeError(f"a value's keys are text without '/' and leading '$', not {bad[0]!r} (at '{path}')")
        return {k: plain(v, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [plain(v, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [plain(v, f"{path}/{i}") for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a value holds tensors, numbers, text, lists and dicts, not {type(value).__name__} (at '{path}')")


def restored(value: Value, tensors: dict[str, Tensor]) -> Value:
    """The value of which `plain` made JSON."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(restored(v, tensors) for v in value["$tuple"])
        return {k: restored(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [restored(v, tensors) for v in value]
    return value


def to_bytes(value: Value) -> bytes:
    tensors = {path: t.detach().contiguous().cpu() for path, t in tensors_in(value)}
    return safetensors.torch.save(tensors, metadata={"tree": json.dumps(plain(value))})


def write_value(path: Path, value: Value) -> str:
    """Writes a value atomically; returns the file's sha256."""
    data = to_bytes(value)
    write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


def read_value(path: Path, device: torch.device | str = "cpu") -> Value:
    """A value out of its file, on a device as `on_device` would have it."""
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            tree = json.loads((file.metadata() or {})["tree"])
            # cloned to aligned memory: matrix products round by the address of their operands
            value = restored(tree, {name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
        return on_device(value, torch.device(device))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a readable value file ({error}).") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file so that a crash leaves either the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> UserError:
    """What to tell a user when a file cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"no space left on the disk while writing {path}. Nothing saved before is lost: free some space, then "
            f"go on, with a run of this machine by 'fedtailor resume RUN'."
        )
    return UserError(f"cannot write {path}: {error.strerror or error}.")
