"""Run folders written by hand: the format a run leaves behind, with numbers chosen by the test."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Event = tuple[int, int | str, str, str, float | str]
HEADER = "round,client,split,metric,value"


def facts(clients: int = 3, rounds: int = 2, **changes: Any) -> dict[str, Any]:
    """run.json of a finished run; changes replace or add entries."""
    return {
        "format": 1,
        "fedtailor": "0.1.0",
        "python": "3.11.9",
        "torch": "2.13.0",
        "numpy": "2.4.6",
        "device": "cpu",
        "platform": "Linux-6.1-x86_64",
        "data_hash": "d" * 64,
        "partition_hash": "a" * 64,
        "status": "done",
        "rounds_done": rounds,
        "created": "2025-11-15T12:00:00+00:00",
        "seconds": 12.5,
        "parameters": {},
        "command": "fedtailor run --method fedavg --seed 0",
        "classes": ["cat", "dog"],
        "client_names": [f"client {i}" for i in range(clients)],
        "new_clients": 0,
        "train_counts": [[10 + i, 5] for i in range(clients)],
        "method_paper": "McMahan et al., Communication-Efficient Learning, 2017, arXiv:1602.05629",
        "deviations": ["clients are drawn without replacement"],
        **changes,
    }


def config(
    clients: int = 3, rounds: int = 2, seed: int = 0, method: str = "fedavg", extra: str = "", lr: float = 0.1
) -> str:
    return (
        f"seed = {seed}\nclients = {clients}\nparticipants = 2\nrounds = {rounds}\n"
        f'[method]\nname = "{method}"\n[net]\nname = "cnn"\n[data]\nname = "digits"\n'
        f'[partition]\nname = "dirichlet"\nalpha = 0.3\n[local]\nepochs = 1\nbatch = 32\nlr = {lr}\n'
        f'[fleet]\nname = "equal"\n{extra}'
    )


def write_run(
    folder: Path, events: Iterable[Event], run: dict[str, Any] | None = None, toml: str | None = None
) -> Path:
    folder.mkdir(parents=True)
    lines = [HEADER, *(",".join(map(str, event)) for event in events)]
    (folder / "events.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(json.dumps(run or facts()))
    (folder / "config.toml").write_text(toml or config())
    return folder


def evaluation(round: int, split: str, **kinds: dict[int, float]) -> list[Event]:
    """personal={0: 0.5, 1: 0.7} as events."""
    return [(round, c, split, f"{kind}_accuracy", v) for kind, found in kinds.items() for c, v in found.items()]


CLASSES = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
DIMENSIONS: list[dict[str, Any]] = [
    {"name": "width", "options": [16, 32, 64]},
    {"name": "depth", "options": [1, 2, 3, 4]},
    {"name": "kernel", "options": [3, 5, 7]},
    {"name": "block", "options": ["conv", "mbconv"]},
]
SIZES = np.array([len(dimension["options"]) for dimension in DIMENSIONS])


def realistic(
    folder: Path,
    clients: int,
    rounds: int = 40,
    seed: int = 0,
    method: str = "fedavg",
    lift: float = 0.0,
    search: bool = False,
    new: int = 0,
    status: str = "done",
    **changes: Any,
) -> Path:
    """A run as an experiment would leave it: learning curves, unequal clients, costs, and archs where searched."""
    rng, people, everyone = np.random.default_rng([seed, *method.encode()]), np.random.default_rng(99), clients + new
    counts = np.rint(people.dirichlet(np.full(10, 0.4), everyone) * people.lognormal(5.5, 0.7, (everyone, 1))).astype(
        int
    )
    level = people.normal(0.78, 0.1, everyone) + 0.03 * np.log(counts.sum(1) / 250)
    level = np.clip(level + lift + rng.normal(0, 0.03, everyone), 0.1, 0.99)
    wanted = people.integers(0, 1000, (clients, len(SIZES))) % SIZES
    done, participants = rounds if status == "done" else rounds * 3 // 5, max(2, clients // 5)
    events: list[Event] = []
    for r in range(1, done + 1):
        for c in rng.choice(clients, participants, replace=False).tolist():
            events.append((r, c, "train", "loss", 2.3 * np.exp(-3 * r / rounds) + rng.gamma(2, 0.08)))
            events += [(r, c, "", "bytes_down", 431_080 + 4_000 * c), (r, c, "", "bytes_up", 431_080)]
            events += [(r, c, "", "seconds", 30 + c), (r, c, "", "flops", 9e9)]
            if search:
                arch = np.where(rng.random(len(SIZES)) < r / rounds, wanted[c], rng.integers(0, SIZES))
                events.append((r, c, "", "arch", "-".join(map(str, arch))))
        events += [(r, "", "", "round_seconds", 45.0 + r % 7), (r, "", "", "measured_seconds", rng.random())]
        for split in ("val", "test") if r == rounds else ("val",) if r % 4 == 0 or r == done else ():
            own = np.clip(level * (1 - 0.75 * np.exp(-4 * r / rounds)) + rng.normal(0, 0.015, everyone), 0, 1)
            shared = np.clip(own - 0.09 + rng.normal(0, 0.07, everyone), 0, 1)
            events += evaluation(r, split, personal=dict(enumerate(own[:clients].tolist())))
            events += evaluation(r, split, **{"global": dict(enumerate(shared[:clients].tolist()))})
            events += evaluation(r, split, new={c: own[c] - 0.05 for c in range(clients, everyone)})
    for c in range(clients if status == "done" else 0):
        events.append((done, c, "", "personal_parameters", 107_770 * (1 + c % 3)))
        events.append((done, c, "", "personal_flops", 12_400_000 * (1 + c % 3)))
        events += [(done, c, "", "personal_arch", "-".join(map(str, wanted[c])))] if search else []
    told = {
        "status": status,
        "classes": CLASSES,
        "new_clients": new,
        "train_counts": counts.tolist(),
        "seconds": 842.0,
        "client_names": [f"hospital {i:03d}" for i in range(everyone)],
        "command": f"fedtailor run --method {method} --seed {seed}",
        "dimensions": DIMENSIONS if search else [],
    }
    toml = config(clients, rounds, seed, method).replace("participants = 2", f"participants = {participants}")
    run = facts(clients, done, **{**told, **changes})
    return write_run(folder, events, run, toml.replace("[net]", "[space]") if search else toml)
