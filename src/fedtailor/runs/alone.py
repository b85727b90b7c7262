"""The folder of one client: a run folder that holds its pictures, its network, and what the network was made from.

A client that joins later gets one, and every client of a real federation keeps one on its own disk. `export`, `report`
and `personalize` need nothing else.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config, Data, Public
from ..data.dataset import Dataset
from ..data.partition import Partition
from ..engine.loop import Event, Memory
from ..engine.wire import task_of, task_value
from ..evaluate import Kept
from ..fleet import fleet as fleets
from ..method import Job, Method, Seat, Task
from ..options import table_of
from ..values import read_value, write_bytes, write_value
from .events import EventLog
from .execute import Setup, save_networks
from .facts import facts_of, write_facts

OFFER = "offer.safetensors"


@dataclass(frozen=True)
class Offered:
    """What a client makes its network from: the server's last task for it, and its own memory."""

    task: Task
    memory: Memory
    round: int

    def write(self, folder: Path) -> None:
        apart = lambda tensors: {name: t.clone() for name, t in tensors.items()}  # noqa: E731 - no two share memory
        task = replace(self.task, weights=apart(self.task.weights), extra=apart(self.task.extra))
        write_value(folder / OFFER, {"task": task_value(task), "memory": self.memory, "round": self.round})

    @staticmethod
    def read(folder: Path, device: torch.device) -> Offered | None:
        """None where the folder is not that of one client."""
        if not (folder / OFFER).is_file():
            return None
        value = read_value(folder / OFFER, device)
        return Offered(task_of(value["task"]), value["memory"], value["round"])


def part_of(data: Dataset, at: np.ndarray) -> Dataset:
    """Some images, without clients."""
    split = None if data.split is None else data.split[at]
    return Dataset(data.name, data.images[at], data.labels[at], data.classes, data.official_test[at], None, (), split)


def deal_of(own: Dataset, split: np.ndarray, run: str, name: str) -> Partition:
    """The partition of one client's images."""
    return Partition(np.zeros(len(own), np.int32), split, 1, 0, own.hash, {"run": run, "client": name}, (name,))


def write_alone(
    out: Path,
    config: Config,
    method: Method,
    own: Dataset,
    deal: Partition,
    seat: Seat,
    device: fleets.Device,
    offered: Offered,
    kept: Kept,
    events: Sequence[Event],
    where: torch.device,
    facts: Mapping[str, Any],
    public: np.ndarray | None = None,
) -> None:
    """Writes the folder. `config` is the run's, `seat` the client's place in it; here it is the only client."""
    out, method = out.resolve(), method.at_home(seat)
    save_networks(out / "nets", seat.space, [replace(kept, client=0)])
    data = Data(name=f"npz:{out / 'data.npz'}", fit=config.data.fit)
    archs = str(out) if config.archs else ""  # the arch that it was given is that of its network
    options = {"name": config.method["name"], **table_of(method)}
    alone = replace(config, clients=1, participants=1, data=data, archs=archs, method=options)
    one = Job(seat.space, (replace(seat, id=0),), 1, 1, config.rounds, config.seed, config.local)
    if public is not None:
        _write_arrays(out / "public.npz", images=public, labels=np.zeros(len(public), np.int64))
        alone = replace(alone, public=Public(name=f"npz:{out / 'public.npz'}"))
        one = replace(one, public=len(public))
    offered.write(out)
    _write_arrays(out / "data.npz", images=own.images, labels=own.labels, classes=np.array(own.classes))
    deal.save(out / "partition.npz")
    write_bytes(out / "config.toml", alone.to_toml().encode())
    log = EventLog(out / "events.csv")
    for event in events:
        log.add(replace(event, client=0))
    log.flush()
    log.close()
    told = facts_of(Setup(alone, method, own, deal, one, (device,)), where, "")
    told |= {"status": "done", "rounds_done": offered.round, "devices": [fleets.table_of(device)], **facts}
    write_facts(out, told)


def _write_arrays(path: Path, **arrays: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())
