"""Ten thousand clients in one federation on one GPU: what a round costs, and what memory they take.

    python bench/many.py --data-dir DIR [--clients 10000] [--rounds 300] [--method ditto]

CIFAR-10, six images a client, one hundred clients a round, a small convolutional network. Ditto's clients keep their
personal weights from round to round, so what the federation holds grows with the clients that were called; FedAvg's
keep nothing. One line of JSON every --every rounds, and one for the evaluation of everybody at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedtailor.config import load
from fedtailor.evaluate import evaluate
from fedtailor.runs.execute import choose_device, prepare
from fedtailor.values import bytes_of, tensors_in


def host_mib() -> float:
    """Memory of this process that is in use, pinned memory included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def held(memories: Mapping[int, Any], device: torch.device) -> dict[str, float]:
    """What clients keep, on the card and on the host, and what this process takes."""
    here = sum(t.nbytes for _, t in tensors_in(list(memories.values())) if t.is_cuda)
    found = {
        "keepers": len(memories),
        "kept_mib": bytes_of(list(memories.values())) / 2**20,
        "on_card_mib": here / 2**20,
    }
    found["host_mib"] = host_mib()
    if device.type == "cuda":
        found |= {
            "card_mib": torch.cuda.memory_allocated() / 2**20,
            "reserved_mib": torch.cuda.memory_reserved() / 2**20,
        }
    return {k: round(v, 1) for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--room", type=float, default=-1.0, help="MiB of the card for what clients keep; -1: a quarter")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device, began = choose_device(args.device), time.perf_counter()
    table = {
        "data.name": "cifar10",
        "data.dir": args.data_dir,
        "clients": args.clients,
        "participants": args.participants,
        "rounds": args.rounds,
        "precision": "tf32" if device.type == "cuda" else "fp32",
        "partition.name": "iid",
        "partition.samples": 6,
        "partition.min_samples": 6,
        "partition.val": 0.17,
        "partition.test": 0.17,
        "local.batch": 4,
        "method.name": args.method,
        "net.name": "cnn",
        "net.width": 16,
        "net.hidden": 64,
    }
    setup = prepare(load({}, table))
    federation, test = setup.federation(device, 0, "auto", lambda text: print(text, flush=True))
    if args.room >= 0:
        federation.engine.shelf.room = int(args.room * 2**20)  # type: ignore[attr-defined]
    state = federation.begin()
    print(json.dumps({"clients": args.clients, "ready_s": round(time.perf_counter() - began, 2)}), flush=True)
    last = time.perf_counter()
    for _ in federation.rounds(state, lambda _: None):
        if state.round % args.every == 0:
            took, last = time.perf_counter() - last, time.perf_counter()
            row = {"round": state.round, "round_s": round(took / args.every, 4)} | held(state.memories, device)
            print(json.dumps(row), flush=True)
            last = time.perf_counter()
    events, _ = evaluate(federation, state, test)
    scores = [float(e.value) for e in events if (e.metric, e.split) == ("personal_accuracy", "test")]
    row = {"evaluated": len(scores), "seconds": round(time.perf_counter() - last, 1)}
    print(json.dumps(row | {"mean": round(sum(scores) / len(scores), 4)} | held(state.memories, device)), flush=True)


if __name__ == "__main__":
    main()
