"""A GPU in pretence: the scheduling of the GPU engine on a processor, where a captured step is a step kept for later.

What a card would do at the same time happens one after the other here, and memory is not shared. Everything else is the
engine's own: slots, lanes, networks lent and taken back, stacks, steps captured ahead, memories.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine import cuda, loops, replay, stack
from fedtailor.engine.cuda import CudaEngine
from fedtailor.engine.local import lowered
from fedtailor.runs import execute

MEMORY = 1 << 40


class Stream:
    device, device_index = torch.device("cpu"), 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None

    def capture_begin(self, *_: Any, **__: Any) -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return 0, id(self)


class Forward:
    def __init__(self, net: nn.Module, images: Tensor, lane: Any) -> None:
        self.net = net

    def __call__(self, images: Tensor) -> Tensor:
        return self.net(images)


def capture(self: Any, step: Callable[[], Tensor]) -> None:
    net = self.net if isinstance(self, replay.FitSlot) else None

    def once() -> None:
        if net is not None:
            net.train()  # as it was captured, whatever the network has been used for since
        with lowered(self.precision):
            self.total += step()
        self.counter += 1

    self.graph = Graph()
    self.graph.replay = once


def optimiser(real: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Momenta are there before the first step, as they are on a card."""

    def made(self: Local, parameters: Any, lr: Any) -> torch.optim.Optimizer:
        found = real(self, parameters, lr)
        if isinstance(lr, Tensor) and isinstance(found, torch.optim.SGD) and self.momentum:
            for p in parameters:
                found.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return found

    return made


def pretend(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """From now on engines that a run makes for a processor are the GPU's; returns the device to ask for."""
    here = Stream()
    functions = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda *_: here,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats_as_nested_dict": lambda *_: {},
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=MEMORY),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for room in (cuda, loops, replay, stack):
        monkeypatch.setattr(room, "on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(replay, "Forward", Forward)
    monkeypatch.setattr(replay.Replay, "capture", capture)
    monkeypatch.setattr(Local, "optimiser", optimiser(Local.optimiser))
    real = execute.make_engine

    def make_engine(
        device: torch.device, workers: int, name: str = "auto", precision: str = "fp32", say: Any = print
    ) -> Any:
        return CudaEngine(device, precision, say=say) if name == "auto" else real(device, workers, name, precision, say)

    monkeypatch.setattr(execute, "make_engine", make_engine)
    return torch.device("cpu")
