"""Every test process computes with one thread: two cores are shared by pytest's workers. No decoded picture is kept."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

import cuda_on_cpu
from fedtailor.kernels import (
    blocks,
    columns,
    depthwise,
    gates,
    halving,
    layout,
    mixing,
    norm,
    norm_last,
    norm_layer,
    products,
    random,
    update,
)
from fedtailor.spaces import layers

if TYPE_CHECKING:
    from party import Party

torch.set_num_threads(1)
os.environ["FEDTAILOR_CACHE"] = "off"
ROOMS = (
    blocks,
    columns,
    depthwise,
    gates,
    halving,
    layers,
    layout,
    mixing,
    norm,
    norm_last,
    norm_layer,
    products,
    random,
    update,
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_compiler = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no g++ here")


@pytest.fixture(
    params=[pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the kernels run: on a GPU, or their sources on a processor."""
    if request.param == "cpu":
        for room in ROOMS:
            for name in ("compiled", "launch", "applies", "takes"):
                if hasattr(room, name):
                    monkeypatch.setattr(room, name, getattr(cuda_on_cpu, name))
            if room not in (depthwise, layers, layout, norm_layer):
                monkeypatch.setattr(room, "THREADS", 64)
        monkeypatch.setattr(depthwise, "BLOCKS", 8)
        yield "cpu"
        return
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield "cuda"
    for switch, was in zip(switches, before, strict=True):
        switch.allow_tf32 = was


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> "Party":
    """Eight clients on a card that is pretended, never stacked."""
    from party import Party

    monkeypatch.setattr("fedtailor.engine.stack.FEWEST", 99)
    return Party(monkeypatch, clients=8, participants=8)
