"""One captured training step on a GPU: its kernels, its time alone, and its time as one of several side by side.

    python bench/steps.py --set net.name=mobilenetv3_large
    python bench/steps.py --set method.name=perfedrlnas --set space.name=mobilenetv3 --random --precision bf16
    python bench/steps.py --set method.name=spider --set space.name=darts --set space.variant=s2 --beside 1 8
    FEDTAILOR_KERNELS=off python bench/steps.py --set net.name=mobilenetv3_large     # torch's kernels alone

Needs no data: images are zeros, and a step's kernels do not depend on them. The largest arch of a space is taken, or
with --random one that is drawn. Times are means over replays, in milliseconds for one step of one network.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from fedtailor.config import load
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.replay import FitSlot, Step

INPUT, CLASSES = (3, 32, 32), 10


def milliseconds(slots: Sequence[FitSlot], replays: int) -> float:
    """Of one step of one network while all of these run."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(replays):
        for slot in slots:
            with torch.cuda.stream(slot.stream):
                slot.counter.zero_()  # always the first batch
                slot.graph.replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / replays / len(slots)


def heaviest(slot: FitSlot, replays: int = 3) -> tuple[float, list[tuple[str, float, float]]]:
    """Kernels of a step, and by name how many there are and their microseconds when the step runs alone."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        milliseconds([slot], replays)
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    rows = [(name, len(times) / replays, sum(times) / replays) for name, times in found.items()]
    return sum(count for _, count, _ in rows), sorted(rows, key=lambda row: -row[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="tf32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--random", action="store_true", help="a random arch of the space, instead of the largest")
    parser.add_argument("--beside", type=int, nargs="+", default=[1, 4, 8, 16], help="networks side by side")
    parser.add_argument("--top", type=int, default=15, help="kernels listed")
    args = parser.parse_args()
    config = load({}, args.set)
    space = config.make_space(INPUT, CLASSES)
    engine = CudaEngine(torch.device("cuda"), args.precision, at_once=max(args.beside))
    arch = space.sample(np.random.default_rng(0)) if args.random else space.largest
    step = Step(space, arch, None, (args.batch, *INPUT), config.local, False, False, False)
    slots = [engine.slots.captured(step, lane) for lane in engine.slots.lanes]
    for slot in slots:
        slot.blank()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.precision}, batch {args.batch}, {space.name}"
    )
    for number in args.beside:
        milliseconds(slots[:number], 5)
        print(f"  one of {number:2d}: {milliseconds(slots[:number], 40):.3f} ms", flush=True)
    count, rows = heaviest(slots[0])
    print(f"  {count:.0f} kernels, {sum(row[2] for row in rows):.0f} us alone; the heaviest:")
    for name, number, spent in rows[: args.top]:
        print(f"  {number:6.1f} x {spent / number:7.2f} us = {spent:7.1f} us  {name[:80]}")


if __name__ == "__main__":
    main()
