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


def config(clients: int = 3, rounds: int = 2, seed: int = 0, method: str = "fedavg", extra: str = "", lr: float = 0.1) -> str:
    return (
        f"seed = {seed}\nclients = {clients}\nparticipants = 2\nrounds = {rounds}\n"
        f'[method]\nname = "{method}"\n[net]\nname = "cnn"\n[data]\nname = "digits"\n'
        f'[partition]\nname = "dirichlet"\nalpha = 0.3\n[local]\nepochs = 1\nbatch = 32\nlr = {lr}\n'
        f'[fleet]\nname = "equal"\n{extra}'
    )


def write_run(folder: Path, events: Iterable[Event], run: dict[str, Any] | None = None, toml: str | None = None) -> Path:
    folder.mkdir(parents=True)
    lines = [HEADER, *(",".join(map(str, event)) for event in events)]
    (folder / "events.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(json.dumps(run or facts()))
    (folder / "config.toml").write_text(toml or config())
    return folder


def evaluation(round: int, split: str, **kinds: dict[int, float]) -> list[Event]:
    """personal={0: 0.5, 1: 0.7} as events."""
    return [(round, c, split, f"{kind}_accuracy", v) for kind, found in kinds.items() for c, v in found.items()]


def realistic(
    folder: Path, clients: int, rounds: int = 40, seed: int = 0, method: str = "fedavg", lift: float = 0.0,
    search: bool = False, new: int = 0, status: str = "done", **changes: Any,
) -> Path:  # fmt: skip
    """A run as an experiment would leave it: learning curves, unequal clients, costs, and archs where searched."""
    rng, people = np.random.default_rng([seed, *method.encode()]), np.random.default_rng(99)
    classes = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    counts = np.rint(people.dirichlet(np.full(10, 0.4), clients + new) * people.lognormal(5.5, 0.7, (clients + new, 1)))
    level = np.clip(people.normal(0.78, 0.1, clients + new) + 0.03 * np.log(counts.sum(1) / 250), 0.2, 0.97)
    level = np.clip(level + lift + rng.normal(0, 0.03, clients + new), 0.1, 0.99)
    dimensions = [{"name": n, "options": o} for n, o in (
        ("width", [16, 32, 64]), ("depth", [1, 2, 3, 4]), ("kernel", [3, 5, 7]), ("expand", [3, 4, 6]), ("block", ["conv", "mbconv"]),
        ("skip", ["yes", "no"]),
    )]  # fmt: skip
    events: list[Event] = []
    want = people.integers(0, 100, (clients, 6))
    done = rounds if status == "done" else rounds * 3 // 5
    participants = max(2, clients // 5)
    for r in range(1, done + 1):
        grown = 1 - 0.75 * np.exp(-4 * r / rounds)
        for c in rng.choice(clients, participants, replace=False).tolist():
            events.append((r, c, "train", "loss", 2.3 * np.exp(-3 * r / rounds) + rng.gamma(2, 0.08)))
            if search:
                arch = [int(w % len(d["options"])) if rng.random() < r / rounds else int(rng.integers(len(d["options"])))
                        for w, d in zip(want[c], dimensions, strict=True)]  # fmt: skip
                events.append((r, c, "", "arch", "-".join(map(str, arch))))
            for metric, value in (("bytes_down", 431_080 + 4_000 * c), ("bytes_up", 431_080), ("seconds", 30 + c), ("flops", 9e9)):
                events.append((r, c, "", metric, value))
        events += [(r, "", "", "round_seconds", 45.0 + r % 7), (r, "", "", "measured_seconds", rng.random())]
        if r % 4 == 0 or r == done:
            for split in ("val", "test") if r == rounds else ("val",):
                own = np.clip(level * grown + rng.normal(0, 0.015, clients + new), 0, 1)
                shared = np.clip(own - 0.09 + rng.normal(0, 0.07, clients + new), 0, 1)
                events += evaluation(r, split, personal=dict(enumerate(own[:clients].tolist())))
                events += evaluation(r, split, **{"global": dict(enumerate(shared[:clients].tolist()))})
                events += evaluation(r, split, new={c: own[c] - 0.05 for c in range(clients, clients + new)})
    for c in range(clients if status == "done" else 0):
        events += [(done, c, "", "personal_parameters", 107_770 * (1 + c % 3)), (done, c, "", "personal_flops", 12_400_000 * (1 + c % 3))]
        if search:
            arch = [int(w % len(d["options"])) for w, d in zip(want[c], dimensions, strict=True)]
            events.append((done, c, "", "personal_arch", "-".join(map(str, arch))))
    run = facts(
        clients, done, status=status, classes=classes, new_clients=new, train_counts=counts.astype(int).tolist(), seconds=842.0,
        client_names=[f"hospital {i:03d}" for i in range(clients + new)], command=f"fedtailor run --method {method} --seed {seed}",
        **({"dimensions": dimensions} if search else {}), **changes,
    )  # fmt: skip
    toml = config(clients, rounds, seed, method).replace("participants = 2", f"participants = {participants}")
    return write_run(folder, events, run, toml.replace("[net]", "[space]") if search else toml)
