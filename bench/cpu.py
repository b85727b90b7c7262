"""One training step on a processor core: images inside networks with their channels last, as fedtailor has them, and
as torch has them by itself, in turns.

    python bench/cpu.py
    python bench/cpu.py --seconds 5 --batch 16

Images are noise, weights are drawn; times are medians of steps, forth and back and SGD with momentum, in milliseconds.
The largest arch of a space is taken. Needs no data.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedtailor.config import Config
from fedtailor.engine import local
from fedtailor.spaces.base import Space

DIGITS, PHOTOS = (1, 8, 8), (3, 32, 32)
TURNS = 3  # of each layout: a processor's clock changes under way
CASES: tuple[tuple[dict[str, Any], tuple[int, int, int]], ...] = (
    ({"net": {"name": "cnn"}}, DIGITS),
    ({"net": {"name": "cnn"}}, PHOTOS),
    ({"net": {"name": "mobilenetv3_large"}}, PHOTOS),
    ({"net": {"name": "mobilenetv2"}}, PHOTOS),
    ({"net": {"name": "resnet18"}}, PHOTOS),
    ({"net": {"name": "densenet"}}, PHOTOS),
    ({"net": {"name": "darts-cell", "channels": 8, "cells": 4}}, PHOTOS),
    ({"space": {"name": "tiny"}}, PHOTOS),
    ({"space": {"name": "mobilenetv3"}}, PHOTOS),
    ({"space": {"name": "vit"}}, PHOTOS),
    ({"space": {"name": "darts", "variant": "s2", "channels": 4, "cells": 3}}, DIGITS),
    ({"space": {"name": "darts", "variant": "full", "channels": 8, "cells": 4}}, PHOTOS),
)


def made(space: Space, lay: Callable[[nn.Module, tuple[int, int, int]], None]) -> nn.Module:
    """A network as the engine makes it, but for the layout."""
    own, local.lay_last = local.lay_last, lay
    try:
        net = local.LocalEngine(torch.device("cpu"), 1).network(space, space.largest)
    finally:
        local.lay_last = own
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    return net


def steps(net: nn.Module, space: Space, batch: int, seconds: float) -> list[float]:
    """How long each of some steps takes."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    images, labels = torch.randn(batch, *space.input), torch.randint(space.classes, (batch,))
    taken: list[float] = []
    while sum(taken[2:]) < seconds or len(taken) < 5:
        began = time.perf_counter()
        optimiser.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimiser.step()
        taken.append(time.perf_counter() - began)
    return taken[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps, for each layout in each of its turns")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, one core; torch {torch.__version__}, batch {args.batch}")
    print(f"{'network':34} {'images':10} {'usual':>9} {'last':>9}  ratio")
    for config, shape in CASES:
        space = Config(**config).make_space(shape, 10)
        nets = {"usual": made(space, lambda *_: None), "last": made(space, local.lay_last)}
        taken: dict[str, list[float]] = {"usual": [], "last": []}
        for _ in range(TURNS):
            for name, net in nets.items():
                taken[name] += steps(net, space, args.batch, args.seconds / TURNS)
        usual, last = (1e3 * statistics.median(taken[name]) for name in nets)
        table = next(iter(config.values()))
        called = " ".join(map(str, table.values()))
        print(f"{called:34} {'x'.join(map(str, shape)):10} {usual:9.2f} {last:9.2f}  {usual / last:.2f}", flush=True)


if __name__ == "__main__":
    main()
