"""Whole rounds on one GPU: this engine against the plain path (client after client, eager), in one process.

    python bench/gpu.py --data-dir DIR [--only NAME ...] [--rounds 4]

Every line is a ratio of medians over rounds, measured in turn on the same federation with the same seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fedtailor.config import load
from fedtailor.runs.execute import prepare

DEVICES = {
    "data.name": "cifar10",
    "clients": 20,
    "participants": 5,
    "rounds": 1000,
    "partition.name": "iid",
    "partition.samples": 600,
    "partition.val": 50 / 600,
    "partition.test": 50 / 600,
    "local.epochs": 5.0,
    "local.batch": 32,
    "local.augment": "crop-flip",
    "local.lr": 0.02,
}
SILOS = DEVICES | {"clients": 8, "participants": 8, "partition.samples": 1500, "local.epochs": 1.0}
WORKLOADS: dict[str, dict[str, Any]] = {
    "perfedrlnas-5": DEVICES | {"method.name": "perfedrlnas", "space.name": "mobilenetv3"},
    "perfedrlnas-10": DEVICES | {"method.name": "perfedrlnas", "space.name": "mobilenetv3", "participants": 10},
    "perfedrlnas-20": DEVICES | {"method.name": "perfedrlnas", "space.name": "mobilenetv3", "participants": 20},
    "fedavg-10": DEVICES | {"method.name": "fedavg", "net.name": "mobilenetv3_large", "participants": 10},
    "ditto": SILOS | {"method.name": "ditto", "net.name": "resnet18"},
    "fedrep": SILOS | {"method.name": "fedrep", "net.name": "resnet18"},
}


Weights = dict[str, torch.Tensor]


def round_times(table: dict[str, Any], engine: str, rounds: int, warm: int) -> tuple[list[float], Weights]:
    """Seconds of each round after the warm ones, and the server's weights after round 1."""
    setup = prepare(load({}, table))
    federation, _ = setup.federation(torch.device("cuda"), 1, engine)
    state, times, first = federation.begin(), [], {}
    for _ in range(warm + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        next(federation.rounds(state, lambda _: None))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if state.round == 1:
            first = {n: t.clone() for n, t in state.server.weights.items()}
    federation.engine.close()
    return times[warm:], first


def difference(a: Weights, b: Weights) -> float:
    """Relative difference of two sets of weights."""
    apart = sum(float((a[n] - b[n]).double().pow(2).sum()) for n in a)
    return (apart / sum(float(t.double().pow(2).sum()) for t in a.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--eager-rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for name in args.only:
        table = WORKLOADS[name] | {"data.dir": args.data_dir}
        eager, plain = round_times(table, "eager", args.eager_rounds, 1)
        torch.cuda.reset_peak_memory_stats()
        fast, ours = round_times(table, "auto", args.rounds, 1)
        row = {
            "workload": name,
            "eager_s": statistics.median(eager),
            "ours_s": statistics.median(fast),
            "ratio": statistics.median(eager) / statistics.median(fast),
            "apart_after_round_1": difference(plain, ours),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
