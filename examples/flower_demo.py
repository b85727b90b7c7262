"""A real federation on this machine: a server and four clients as separate processes, with TLS and keys.

    python examples/flower_demo.py [--out FOLDER] [--rounds 3]

Runs PerFedRLNAS and then SPIDER on digits, stops everything, and compares every number with the same runs on the local
engine: the server's weights, the event log, and the networks that the clients kept on their own disks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fedtailor.api import free_folder
from fedtailor.config import load
from fedtailor.engine.flower.loopback import Loopback
from fedtailor.runs.execute import start

NAMES = [f"client-{i:03d}" for i in range(4)]
SMALL = ["clients=4", "participants=4", "evaluate_every=1", "partition.classes=4", "partition.samples=120"]
CHANGES = {
    "perfedrlnas": ["local.epochs=1"],
    "spider": ["local.epochs=0.3", "partition.samples=60", "evaluate_every=3"],
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = (options.out or free_folder(Path("runs"), "demo-flower")).resolve()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

    federation = Loopback(folder, NAMES)
    say(f"keys for {', '.join(NAMES)} in {federation.keys}; logs in {folder}")
    changes = {m: [*SMALL, f"rounds={options.rounds}", f"method.name={m}", *more] for m, more in CHANGES.items()}
    try:
        federation.join_all()
        for method, sets in changes.items():
            say(f"{method}: the server starts on 127.0.0.1:{federation.port}, clients connect")
            federation.serve("demo", folder / method, sets)
            federation.wait()
            say(f"{method}: {options.rounds} rounds done")
    finally:
        federation.close()
    say("all processes are stopped; the same runs on the local engine:")
    good = True
    for method, sets in changes.items():
        local = start(load("demo", sets), folder / f"{method}-local", "cpu", 1)
        for what, equal in compare(folder / method, local, federation.sites):
            say(f"{method}: {what}: {'equal, bit for bit' if equal else 'DIFFERENT'}")
            good &= equal
    print("\nWhat left client-000, in its own words:\n")
    print("".join(line for line in federation.log("client-000").splitlines(keepends=True) if "sends" in line))
    return 0 if good else 1


def compare(served: Path, local: Path, sites: Path) -> list[tuple[str, bool]]:
    """Server state, event log and clients' networks of two runs."""
    last = sorted((local / "checkpoints").glob("server-*.safetensors"))[-1].name
    weights = (served / "checkpoints" / last).read_bytes() == (local / "checkpoints" / last).read_bytes()
    run = next(p for p in (sites / NAMES[0]).glob(f"{served.name}-*"))
    nets = all(
        (sites / name / run.name / "nets" / "000000.safetensors").read_bytes()
        == (local / "nets" / f"{i:06d}.safetensors").read_bytes()
        for i, name in enumerate(NAMES)
    )
    return [
        ("server's weights", weights),
        ("event log", rows(served) == rows(local)),
        ("personal networks on the clients' disks", nets),
    ]


def rows(folder: Path) -> list[str]:
    """The event log without measured times, and without what only a client knows of an arch that it found itself."""
    private = ("measured_seconds", "personal_arch", "personal_parameters", "personal_flops")
    return [r for r in (folder / "events.csv").read_text().splitlines() if r.split(",")[3] not in private]


if __name__ == "__main__":
    sys.exit(main())
