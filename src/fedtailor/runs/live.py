"""What a run leaves for those who watch it: who works now, and how policies move. Nothing here is needed to resume."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

FRAMES = 50  # policies are kept at most this often in a run
ROOM = 16_000_000  # and, with many clients and options, only as often as fits into so many bytes
PACE = 0.25  # seconds between two notes on who works: a watcher looks less often


class Live:
    """Writes `now.json` while a run goes on, and `policies/NNNNNN.npy`: probabilities in 255ths, [clients, options].

    A disk that is full or slow must not end a run, so what cannot be written is left out.
    """

    def __init__(self, folder: Path, rounds: int, done: int) -> None:
        self.folder, self.rounds = folder, rounds
        self._noted = 0.0
        for path in (folder / "policies").glob("*.npy"):  # of rounds that will be run again
            if int(path.stem) > done:
                path.unlink(missing_ok=True)

    def working(self, number: int, clients: Sequence[int]) -> None:
        """Round `number` has begun with these clients."""
        now = time.monotonic()
        if now - self._noted < PACE:
            return
        self._noted = now
        note = {"round": number, "clients": list(clients), "since": time.time(), **whoami()}
        _write(self.folder / "now.json", json.dumps(note).encode())

    def policies(self, number: int, values: dict[str, Any], sizes: Sequence[int]) -> None:
        """Keeps the clients' policies after a round, where the server's state has them."""
        alpha = values.get("alpha")
        if not isinstance(alpha, torch.Tensor) or alpha.ndim > 2 or alpha.shape[-1] != sum(sizes) or not sizes:
            return
        table = alpha.reshape(-1, sum(sizes))
        frames = max(2, min(FRAMES, ROOM // max(1, table.numel())))
        if number % max(1, -(-self.rounds // frames)) and number != self.rounds:
            return
        chances = torch.cat([part.softmax(1) for part in table.double().cpu().split(list(sizes), 1)], 1)
        buffer = io.BytesIO()
        np.save(buffer, (255 * chances).round().to(torch.uint8).numpy())
        _write(self.folder / "policies" / f"{number:06d}.npy", buffer.getvalue())

    def end(self) -> None:
        (self.folder / "now.json").unlink(missing_ok=True)


def whoami() -> dict[str, Any]:
    """The process, so that a watcher on the same machine sees whether it still lives."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _write(path: Path, data: bytes) -> None:
    """Like `values.write_bytes`, but without waiting for the disk and without complaint."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        return
