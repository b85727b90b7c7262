"""Cut, paste and costing in the MobileNetV3 space at 32x32.

    python bench/spaces.py [--device cpu|cuda] [--archs 100] [--steps 20]

100 random sub-networks in groups of five, as the five participants of a round: cut for each, one paste for the five.
The round they are compared with is 5 clients x 500 images x 5 epochs in batches of 32: 400 steps of plain eager SGD
with momentum. It is extrapolated from measured steps, evenly over some of the sub-networks, and holds nothing else: no
augmentation, no evaluation, which would make the share of cut and paste smaller. Archs are costed on one core of the
CPU whatever the device, each for the first time, after a warm-up with as many others.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch, Weights
from fedtailor.spaces.mobilenetv3 import MobileNetV3
from fedtailor.spaces.pasting import paste

PARTICIPANTS, IMAGES, EPOCHS, BATCH = 5, 500, 5, 32
STEPS = PARTICIPANTS * EPOCHS * -(-IMAGES // BATCH)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long the work takes, to the end of what it started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cut_and_paste(space: MobileNetV3, weights: Weights, archs: list[Arch]) -> tuple[list[float], list[float]]:
    """Seconds per sub-network to cut and to paste, one number for each group."""
    device = weights["head.bias"].device
    cuts, pastes = [], []
    for i in range(0, len(archs), PARTICIPANTS):
        group, parts = archs[i : i + PARTICIPANTS], []
        taken = seconds(device, lambda: parts.extend((space.cut(weights, a), a, 500.0) for a in group))  # noqa: B023
        cuts.append(taken / len(group))
        pastes.append(seconds(device, lambda: paste(space, weights, parts)) / len(group))  # noqa: B023
    return cuts, pastes


def one_step(space: MobileNetV3, weights: Weights, arch: Arch) -> float:
    """Seconds of one training step of a sub-network, after two to warm up."""
    device = weights["head.bias"].device
    net = space.build(arch).to(device).train()
    net.load_state_dict(space.cut(weights, arch), strict=False)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(BATCH, *space.input, device=device)
    y = torch.randint(space.classes, (BATCH,), device=device)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()

    for _ in range(2):
        step()
    repeats = 10 if device.type == "cuda" else 1
    return seconds(device, lambda: [step() for _ in range(repeats)]) / repeats


def costed_per_second(space: MobileNetV3, n: int = 10_000) -> float:
    """How many archs never seen before are costed in a second."""
    rng = rng_of("bench", "cost")
    for _ in range(n):
        space.cost(space.sample(rng))
    archs = [space.sample(rng) for _ in range(n)]
    return n / seconds(torch.device("cpu"), lambda: [space.cost(a) for a in archs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--archs", type=int, default=100, help="sub-networks to cut and paste")
    parser.add_argument("--steps", type=int, default=20, help="sub-networks of which a step is timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor() or 'cpu'}, one core"

    space = MobileNetV3((3, 32, 32), 10)
    rng = rng_of("bench", "archs")
    archs = [space.sample(rng) for _ in range(options.archs)]
    weights = {n: t.to(device) for n, t in space.new_weights(0).items()}
    for arch in archs:  # counting blocks for the first time is no part of cutting
        space.cost(arch)
    cut_and_paste(space, weights, archs[: 2 * PARTICIPANTS])
    cuts, pastes = cut_and_paste(space, weights, archs)
    cut_s, paste_s = statistics.median(cuts), statistics.median(pastes)
    step_s = statistics.mean(one_step(space, weights, arch) for arch in archs[: options.steps])
    training = STEPS * step_s
    share = PARTICIPANTS * (cut_s + paste_s) / (PARTICIPANTS * (cut_s + paste_s) + training)

    size = statistics.mean(space.cost(a).parameters for a in archs) / 1e6
    print(f"MobileNetV3 space at 32x32 on {name}; torch {torch.__version__}")
    print(f"{len(archs)} random sub-networks, {size:.2f} M parameters on average\n")
    rows = [
        ("cut, per sub-network", f"{1e3 * cut_s:.2f} ms"),
        ("paste, per sub-network (five at once)", f"{1e3 * paste_s:.2f} ms"),
        (f"one training step, batch {BATCH} (mean of {options.steps} sub-networks)", f"{1e3 * step_s:.1f} ms"),
        (f"training of a round ({STEPS} steps, extrapolated)", f"{training:.2f} s"),
        ("share of cut and paste in a round", f"{100 * share:.2f} %"),
        ("archs costed per second, one CPU core", f"{costed_per_second(space):,.0f}"),
    ]
    print("| what | measured |\n|---|---|")
    print("\n".join(f"| {what} | {value} |" for what, value in rows))


if __name__ == "__main__":
    main()
