"""One captured training step on a GPU: its kernels, its time alone and as one of several, and what starting it takes.

    python bench/steps.py --set net.name=mobilenetv3_large
    python bench/steps.py --set method.name=perfedrlnas --set space.name=mobilenetv3 --random --precision bf16
    python bench/steps.py --set method.name=spider --set space.name=darts --set space.variant=s2 --supernet --beside 1 8
    python bench/steps.py --set net.name=mobilenetv3_large --layers 16               # where a full card's time goes
    python bench/steps.py --set net.name=mobilenetv2 --without norm.backward depthwise   # or: what a kernel costs there
    FEDTAILOR_KERNELS=off python bench/steps.py --set net.name=mobilenetv3_large     # torch's kernels alone

Needs no data: images are zeros, and a step's kernels do not depend on them. The largest arch of a space is taken, with
--random one that is drawn, with --supernet all operations of a DARTS space. Times are means over replays, in
milliseconds for one step of one network.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor.config import load
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.local import lowered
from fedtailor.engine.replay import FitSlot, Lane, Step
from fedtailor.spaces.base import Arch
from fedtailor.spaces.darts import Darts
from fedtailor.spaces.layers import SqueezeExcite

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


def launched(slot: FitSlot, replays: int = 4) -> float:
    """Milliseconds of this process for starting a step, with room in the card's queue."""
    torch.cuda.synchronize()
    with torch.cuda.stream(slot.stream):
        began = time.perf_counter()
        for _ in range(replays):
            slot.graph.replay()
        spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * spent / replays


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


@dataclass
class Layers:
    """All layers of one kind, forth and back on inputs of their own, as one graph on a lane."""

    seen: list[tuple[nn.Module, Tensor, dict[str, Any]]]  # with inputs laid out as the network lays them
    lane: Lane
    precision: str

    def __post_init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.lane.stream):
            inputs = [torch.randn_like(x).requires_grad_() for _, x, _ in self.seen]
            torch.cuda.synchronize()
            with self.lane.recording(self.graph):
                for x, (layer, _, more) in zip(inputs, self.seen, strict=True):
                    with lowered(self.precision):
                        y = layer(x, **more)
                    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
        self.inputs = inputs  # the graph reads them

    def replay(self) -> None:
        with torch.cuda.stream(self.lane.stream):
            self.graph.replay()


def leave_out(word: str) -> None:
    """From now on a kernel of ours, MODULE.KERNEL or all of a MODULE's, is not started: what it would cost is saved.

    Steps then compute nonsense, in the time of the rest.
    """
    module_name, _, kernel = word.partition(".")
    module: Any = importlib.import_module(f"fedtailor.kernels.{module_name}")
    made, start = module.compiled, module.launch

    def compiled(name: str, names: tuple[str, ...], device: torch.device, **values: int) -> dict[str, Any]:
        found = made(name, names, device, **values)
        if kernel and kernel not in names:
            raise SystemExit(f"{module_name} has no kernel '{kernel}': there are {', '.join(names)}")
        return {n: None if kernel in (n, "") else found[n] for n in names}

    module.compiled = compiled
    module.launch = lambda kernel, *rest: None if kernel is None else start(kernel, *rest)


def kind_of(layer: nn.Module) -> str:
    """Of layers that are looked at one by one; an empty word for all others."""
    if isinstance(layer, nn.Conv2d):
        return "depthwise" if layer.groups > 1 else "1 x 1" if layer.kernel_size == (1, 1) else "other convolutions"
    kinds = {nn.modules.batchnorm._BatchNorm: "norms", SqueezeExcite: "gates", nn.Linear: "linear"}
    return next((name for kind, name in kinds.items() if isinstance(layer, kind)), "")


def layers_of(net: nn.Module, batch: int, precision: str) -> dict[str, list[tuple[nn.Module, Tensor, dict[str, Any]]]]:
    """A network's layers by kind, with their inputs and what else they are called with."""
    found: dict[str, list[tuple[nn.Module, Tensor, dict[str, Any]]]] = defaultdict(list)

    def note(layer: nn.Module, args: tuple[Any, ...], more: dict[str, Any], _: object) -> None:
        found[kind_of(layer)].append((layer, args[0].detach(), more))

    inside = {id(part) for m in net.modules() if kind_of(m) == "gates" for part in m.modules() if part is not m}
    looked_at = [m for m in net.modules() if kind_of(m) and id(m) not in inside]
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in looked_at]
    with lowered(precision):
        net(torch.zeros(batch, *INPUT, device=next(net.parameters()).device))
    for handle in handles:
        handle.remove()
    return found


def full_card(slots: Sequence[FitSlot], batch: int, replays: int = 40) -> dict[str, float]:
    """Milliseconds for all layers of a kind while as many networks do the same."""
    by_kind: dict[str, list[Layers]] = defaultdict(list)
    for slot in slots:
        for kind, seen in layers_of(slot.net, batch, slot.precision).items():
            by_kind[kind].append(Layers(seen, slot.lane, slot.precision))
    spent: dict[str, float] = {}
    for kind, graphs in by_kind.items():
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for graph in [g for _ in range(replays) for g in graphs]:
                graph.replay()
            torch.cuda.synchronize()
            spent[kind] = 1e3 * (time.perf_counter() - began) / replays / len(graphs)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="tf32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--random", action="store_true", help="a random arch of the space, instead of the largest")
    parser.add_argument("--supernet", action="store_true", help="all operations of a DARTS space")
    parser.add_argument("--beside", type=int, nargs="+", default=[1, 4, 8, 16], help="networks side by side")
    parser.add_argument("--layers", type=int, default=0, help="times by kind of layer with so many networks at once")
    parser.add_argument("--without", nargs="+", default=[], metavar="MODULE[.KERNEL]", help="kernels to leave out")
    parser.add_argument("--top", type=int, default=15, help="kernels listed")
    args = parser.parse_args()
    for word in args.without:
        leave_out(word)
    config = load({}, args.set)
    space = config.make_space(INPUT, CLASSES)
    engine = CudaEngine(torch.device("cuda"), args.precision, at_once=max(*args.beside, args.layers))
    arch = space.sample(np.random.default_rng(0)) if args.random else space.largest
    if args.supernet:
        if not isinstance(space, Darts):
            parser.error(f"--supernet is for the space 'darts', not '{space.name}'")
        arch = cast(Arch, space.full_keep)
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
    if args.layers:
        found = full_card(slots[: args.layers], args.batch)
        print(f"  with {args.layers} networks: " + ", ".join(f"{kind} {spent:.3f} ms" for kind, spent in found.items()))
    count, rows = heaviest(slots[0])
    alone = sum(row[2] for row in rows)
    print(f"  {count:.0f} kernels, {alone:.0f} us alone, started in {1e3 * launched(slots[0]):.0f} us; the heaviest:")
    for name, number, spent in rows[: args.top]:
        print(f"  {number:6.1f} x {spent / number:7.2f} us = {spent:7.1f} us  {name[:80]}")


if __name__ == "__main__":
    main()
