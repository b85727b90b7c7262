"""Whole rounds on one GPU: this engine against the plain path (client after client, eager), in one process.

    python bench/gpu.py --data-dir DIR [--only NAME ...] [--rounds 4] [--precision tf32]

Every line is a ratio of medians over rounds, measured in turn on the same federation with the same seeds and in the
same precision. Both paths do all of a round's work: cutting, training, scoring, pasting, the policy's update.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor.config import load
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.loop import Federation, State
from fedtailor.engine.replay import FitSlot, Lane, Step
from fedtailor.evaluate import evaluate
from fedtailor.runs.execute import Setup, prepare

DEVICES = {
    "data.name": "cifar10",
    "clients": 100,
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
SILOS = DEVICES | {"clients": 8, "participants": 8, "partition.samples": 6000, "local.epochs": 1.0}
SEARCH = SILOS | {"partition.samples": 1500, "partition.val": 0.2, "partition.test": 0.2}
SEARCH |= {"space.name": "darts", "space.channels": 16}
BUDGETS = DEVICES | {"clients": 20, "participants": 10, "partition.samples": 3000, "partition.val": 0.2}
BUDGETS |= {"partition.test": 0.2, "local.epochs": 2.0, "local.batch": 64, "local.bn": "local"}
V3 = DEVICES | {"method.name": "perfedrlnas", "space.name": "mobilenetv3"}
WORKLOADS: dict[str, dict[str, Any]] = {
    "perfedrlnas-5": V3,
    "perfedrlnas-10": V3 | {"participants": 10},
    "perfedrlnas-20": V3 | {"participants": 20},
    "fedavg-10": DEVICES | {"method.name": "fedavg", "net.name": "mobilenetv3_large", "participants": 10},
    "ditto": SILOS | {"method.name": "ditto", "net.name": "resnet18"},
    "fedrep": SILOS | {"method.name": "fedrep", "net.name": "resnet18"},
    "feduniform": BUDGETS | {"method.name": "feduniform", "space.name": "mobilenetv2", "fleet.name": "capacity-high"},
    "spider": SEARCH | {"method.name": "spider", "space.variant": "s2"},
    "fednas": SEARCH | {"method.name": "fednas", "local.batch": 64, "partition.samples": 1280},
    "evaluate": V3
    | {"method.deploy": "as-is", "clients": 100, "partition.samples": 120, "partition.val": 0.5, "partition.test": 0.1},
}
Weights = dict[str, torch.Tensor]


@dataclass
class Measured:
    """What some rounds took."""

    seconds: list[float] = field(default_factory=list)
    busy: float | None = None  # per cent, as nvidia-smi sees it
    waited: float = 0.0  # seconds of them in which Python waited for the card or for room in its queue
    first: Weights = field(default_factory=dict)  # the server's weights after round 1
    images: int = 0  # trained on in the last round
    space: Any = None


@contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Notes the seconds of every call of a static method."""
    real = getattr(owner, name)

    def wrapper(*args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*args, **more)
        finally:
            spent.append(time.perf_counter() - began)

    setattr(owner, name, staticmethod(wrapper))
    try:
        yield
    finally:
        setattr(owner, name, staticmethod(real))


def measure(setup: Setup, scoring: bool, engine: str, rounds: int, warm: int) -> Measured:
    """Rounds after the warm ones or, where `scoring`, evaluations of every client's personal network."""
    federation, _ = setup.federation(torch.device("cuda"), 1, engine, lambda _: None)
    state, found, spent = federation.begin(), Measured(space=setup.job.space), []
    count_blocks(setup.job.space)
    act = evaluation if scoring else one_round
    with ExitStack() as stack:
        stack.enter_context(timed(CudaEngine, "_queue", spent))
        stack.enter_context(timed(CudaEngine, "_read", spent))
        for i in range(warm + rounds):
            if i == warm:
                spent.clear()
                stack.enter_context(watched(found))
            torch.cuda.synchronize()
            began = time.perf_counter()
            act(federation, state, found)
            torch.cuda.synchronize()
            found.seconds.append(time.perf_counter() - began)
            print(f"{engine}, round {i + 1} of {warm + rounds}: {found.seconds[-1]:.3f} s", file=sys.stderr, flush=True)
            if i == 0:
                found.first = {n: t.clone() for n, t in state.server.weights.items()}
    found.waited = sum(spent)
    federation.engine.close()
    return found


def count_blocks(space: Any) -> None:
    """Costs of blocks are counted once in a process; whoever runs first should not pay for both."""
    rng = np.random.default_rng(0)
    for _ in range(0 if space.fixed else 200):
        space.cost(space.sample(rng))


def one_round(federation: Federation, state: State, found: Measured) -> None:
    flops: list[float] = []
    next(federation.rounds(state, lambda e: flops.append(float(e.value)) if e.metric == "flops" else None))
    local = federation.job.local
    found.images = sum(int(s.samples * local.epochs) for s in federation.job.seats[: federation.job.participants])


def evaluation(federation: Federation, state: State, found: Measured) -> None:
    """Every client's network as it is now; the policies are pushed apart so that the networks differ."""
    if state.round == 0:
        one_round(federation, state, found)
        alpha = state.server.alpha
        drawn = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(alpha.shape)))
        state.server = state.server.replace(alpha=drawn.to(alpha))
    evaluate(federation, state, None)


def floor(found: Measured, batch: int, precision: str, local: Any) -> float:
    """Seconds for a round's images as one network at a large batch."""
    rng, rates = np.random.default_rng(0), []
    for _ in range(3):
        arch = found.space.sample(rng) if not found.space.fixed else found.space.largest
        net = found.space.build(arch).cuda()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step = Step(found.space, arch, None, (batch, *found.space.input), local, False, False, False)
            slot = FitSlot(step, net, Lane(stream), precision)
            for x, y in slot.buffers:
                x.zero_()
                y.zero_()
            slot.counter.zero_()
            slot.graph.replay()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(10):
                slot.counter.zero_()  # always the first batch
                slot.graph.replay()
            torch.cuda.synchronize()
            rates.append(10 * batch / (time.perf_counter() - began))
    return found.images / statistics.mean(rates)


@contextmanager
def watched(found: Measured) -> Iterator[None]:
    """Notes the median of what nvidia-smi calls utilisation meanwhile."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        watch.terminate()
    seen = [float(line) for line in (watch.communicate()[0] or "").split() if line.isdigit()]
    found.busy = statistics.median(seen) if seen else None


def difference(a: Weights, b: Weights) -> float:
    """Relative difference of two sets of weights."""
    apart = sum(float((a[n] - b[n]).double().pow(2).sum()) for n in a)
    return (apart / sum(float(t.double().pow(2).sum()) for t in a.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--eager-rounds", type=int, default=1)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.only:
        table = WORKLOADS[name] | {"data.dir": args.data_dir, "precision": args.precision}
        setup, scoring = prepare(load({}, table)), name == "evaluate"
        torch.cuda.reset_peak_memory_stats()
        warm = 1 if name == "fednas" else 2  # its own steps are captured anew in every round
        ours = measure(setup, scoring, "auto", args.rounds, warm)
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        eager = measure(setup, scoring, "eager", args.eager_rounds, int(scoring))
        seconds, plain = statistics.median(ours.seconds[warm:]), statistics.median(eager.seconds[-args.eager_rounds :])
        row = {
            "workload": name,
            "precision": args.precision,
            "eager_s": plain,
            "ours_s": seconds,
            "ratio": plain / seconds,
            "first_round_s": ours.seconds[0],
            "busy_percent": ours.busy,
            "python_share": 1 - ours.waited / sum(ours.seconds[warm:]),
            "peak_gib": peak / 2**30,
            "apart_after_round_1": difference(eager.first, ours.first),
        }
        if name not in ("feduniform", "spider", "fednas", "evaluate"):
            row["floor_s"] = floor(ours, 1024, args.precision, setup.config.local)
        rows.append(row)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    if args.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
