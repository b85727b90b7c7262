"""What run.json says of a run: versions, machine, clients, space and method; read and written."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import __version__
from ..config import FORMAT
from ..data.partition import TRAIN
from ..errors import UserError
from ..method import Job, Method
from ..values import write_bytes

if TYPE_CHECKING:
    from .execute import Setup


def facts_of(setup: Setup, device: torch.device, command: str) -> dict[str, Any]:
    """What run.json says when a run begins."""
    partition, dataset = setup.partition, setup.dataset
    return {
        **common_facts(setup.method, setup.job, dataset.classes, device, command),
        "data_hash": dataset.hash,
        "partition_hash": partition.hash,
        "new_clients": partition.new_clients,
        "train_counts": partition.counts(dataset.labels, len(dataset.classes), TRAIN).tolist(),
    }


def common_facts(
    method: Method, job: Job, classes: Sequence[str], device: torch.device, command: str
) -> dict[str, Any]:
    """What run.json says of every run, wherever its clients are."""
    space = job.space
    return {
        "format": FORMAT,
        "fedtailor": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": describe_device(device),
        "status": "running",
        "rounds_done": 0,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "parameters": {
            "smallest": space.cost(space.smallest).parameters,
            "largest": space.cost(space.largest).parameters,
        },
        "command": command or shlex.join(["fedtailor", *sys.argv[1:]]),
        "input": list(space.input),
        "classes": list(classes),
        "client_names": [seat.name for seat in job.seats],
        "method_paper": method.paper,
        "deviations": list(method.deviations),
        "method_card": {
            "shared": method.card.shared,
            "personal": method.card.personal,
            "policy": method.card.policy,
            "search": method.card.search,
        },
        "dimensions": [{"name": d.name, "options": list(d.options)} for d in space.dimensions],
    }


def describe_device(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def read_facts(out: Path) -> dict[str, Any]:
    path = out / "run.json"
    if not path.is_file():
        raise UserError(f"{out} is not a run folder: it has no run.json. 'fedtailor run' makes one.")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version = facts["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not readable ({error}).") from error
    if version != FORMAT:
        raise UserError(
            f"{out} was written by another version of fedtailor (run format {version}, this one is {FORMAT})."
        )
    return facts


def write_facts(out: Path, facts: dict[str, Any]) -> None:
    write_bytes(out / "run.json", json.dumps(facts, indent=1).encode())
