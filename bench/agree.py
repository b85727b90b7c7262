"""Whether fifty rounds end alike: the plain path and the GPU engine, in fp32, tf32 and bf16, over three seeds.

    python bench/agree.py --data-dir DIR [--only perfedrlnas fedavg] [--rounds 50] [--seeds 0 1 2]

Rounding differs between kernels, and training multiplies it, so single runs part; what they learn should not. Every run
of a seed has the same clients, batches and augmentations. Prints personal accuracy on test by run, one line of JSON
each, and last the means over seeds with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from fedtailor.config import load
from fedtailor.evaluate import evaluate
from fedtailor.runs.execute import choose_device, prepare

COMMON = {
    "data.name": "cifar10",
    "clients": 20,
    "participants": 3,
    "partition.name": "dirichlet-client",
    "partition.alpha": 0.5,
    "partition.samples": 500,
    "partition.val": 0.2,
    "partition.test": 0.3,
    "local.batch": 32,
    "local.lr": 0.05,
    "local.epochs": 0.5,
    "local.schedule": "cosine",
    "local.augment": "crop-flip",
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "perfedrlnas": {"method.name": "perfedrlnas", "space.name": "mobilenetv3", "local.bn": "recalibrate"},
    "fedavg": {"method.name": "fedavg-ft", "net.name": "mobilenetv3_large"},
    "ditto": {"method.name": "ditto", "net.name": "cnn", "net.width": 32},
    "spider": {"method.name": "spider", "space.name": "darts", "space.variant": "s2"}
    | {"space.channels": 4, "space.cells": 3},
}
WAYS = (("eager", "fp32"), ("auto", "fp32"), ("auto", "tf32"), ("auto", "bf16"))


def accuracy(table: dict[str, Any], engine: str, device: torch.device) -> float:
    """Mean personal accuracy on test at the end of a run."""
    setup = prepare(load({}, table))
    federation, test = setup.federation(device, 0, engine, lambda _: None)
    state = federation.begin()
    for _ in federation.rounds(state, lambda _: None):
        pass
    events, _ = evaluate(federation, state, test)
    federation.engine.close()
    return statistics.fmean(float(e.value) for e in events if (e.metric, e.split) == ("personal_accuracy", "test"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = choose_device(args.device)
    ways = WAYS if device.type == "cuda" else WAYS[:2]
    for name in args.only:
        found: dict[str, list[float]] = {}
        for seed in args.seeds:
            for engine, precision in ways:
                table = COMMON | WORKLOADS[name] | {"data.dir": args.data_dir, "seed": seed, "rounds": args.rounds}
                began = time.perf_counter()
                reached = 100 * accuracy(table | {"precision": precision}, engine, device)
                found.setdefault(f"{engine} {precision}", []).append(reached)
                row = {"workload": name, "seed": seed, "engine": engine, "precision": precision}
                row |= {"personal": round(reached, 2), "seconds": round(time.perf_counter() - began, 1)}
                print(json.dumps(row), flush=True)
        means = {way: round(statistics.fmean(values), 2) for way, values in found.items()}
        spread = {way: round(statistics.pstdev(values), 2) for way, values in found.items()}
        print(json.dumps({"workload": name, "mean": means, "std over seeds": spread}), flush=True)


if __name__ == "__main__":
    main()
