"""The GPU engine against the plain path. Needs a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.engine.local import LocalEngine
from fedtailor.engine.loop import Event, Federation, State
from fedtailor.runs.execute import make_engine, prepare
from fedtailor.values import tensors_in
from test_sweep import CASES, config_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run this on a machine with one"),
]


def one_round(method: str, space: str, engine: str, **changes: Any) -> tuple[State, list[Event], Federation]:
    # one or two steps a client: rounding differs between kernels, and training multiplies it by ten every few steps
    setup = prepare(config_of(method, space, rounds=2, local__epochs=0.3, local__lr=0.01, **changes))
    federation, _ = setup.federation(torch.device("cuda"), 1, engine)
    state, events = federation.begin(), []
    next(federation.rounds(state, events.append))
    return state, events, federation


def tensors(state: State) -> dict[str, Tensor]:
    values = {"server": state.server.values, **{str(k): v for k, v in state.memories.items()}}
    return {name: t.double() for name, t in tensors_in(values) if t.is_floating_point()}


@pytest.mark.parametrize(("method", "space"), CASES)
def test_engines_agree_after_one_round(method: str, space: str) -> None:
    eager, eager_events, _ = one_round(method, space, "eager")
    ours, our_events, _ = one_round(method, space, "auto")
    a, b = tensors(eager), tensors(ours)
    assert a.keys() == b.keys()
    apart = sum(float((a[n] - b[n]).nan_to_num().pow(2).sum()) for n in a)
    size = sum(float(t.nan_to_num().pow(2).sum()) for t in a.values())
    assert apart <= 1e-8 * size  # 1e-4 relative
    who = [[(e.round, e.client, e.value) for e in ev if e.metric == "arch"] for ev in (eager_events, our_events)]
    assert who[0] == who[1]


def test_a_captured_step_is_used_again() -> None:
    setup = prepare(config_of("fedavg", "", rounds=4, participants=3))
    federation, _ = setup.federation(torch.device("cuda"), 1)
    state = federation.begin()
    counts = []
    for _ in federation.rounds(state, lambda event: None):
        counts.append(sum(len(s) for s in federation.engine._slots.values()))  # type: ignore[attr-defined]
    assert counts == [3, 3, 3, 3]


def test_a_step_that_cannot_be_captured_runs_all_the_same() -> None:
    said: list[str] = []
    engine = make_engine(torch.device("cuda"), 1, say=said.append)
    setup = prepare(config_of("fedavg", "", rounds=1))
    federation, _ = setup.federation(torch.device("cuda"), 1)
    federation.engine = engine
    client = federation.client(setup.job.seats[0], {}, 1)
    weight = torch.zeros(10, 64, device="cuda")
    seen: list[float] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = ((x.flatten(1) @ weight.T) ** 2).mean()
        seen.append(loss.item())  # control flow on a value: no graph can hold this
        return loss

    async def work() -> float:
        net = client.build(federation.method.ask(federation.begin().server, setup.job.seats[0]))
        return await client.loop(step, (net,), epochs=1.0)

    assert engine.run([("one", work()), ("two", work())]) == [0.0, 0.0]
    assert len(said) == 1
    assert "cannot be captured" in said[0]


def test_a_full_card_trains_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine.cuda import CudaEngine

    real, calls = CudaEngine._train_part, []

    def tight(self: CudaEngine, batch: list) -> dict[int, float]:
        calls.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("full")
        return real(self, batch)

    monkeypatch.setattr(CudaEngine, "_train_part", tight)
    setup = prepare(config_of("fedavg", "", rounds=1, participants=4))
    federation, _ = setup.federation(torch.device("cuda"), 1, say=lambda text: None)
    state = federation.begin()
    next(federation.rounds(state, lambda event: None))
    assert state.round == 1
    assert calls[-1] == 1
    assert isinstance(federation.engine, LocalEngine)


@pytest.mark.parametrize(
    "name", ["mobilenetv3", "mobilenetv2", "vit", "darts", "mobilenetv3_large", "densenet", "levit"]
)
def test_training_memory_is_foreseen_within_15_percent(name: str) -> None:
    from fedtailor.registry import lookup, names

    kind = "space" if name in names("space") else "net"
    space = lookup(kind, name)((3, 32, 32), 10)
    net = space.build(space.largest).cuda().train()
    optimiser = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True)
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    base = torch.cuda.memory_allocated() - sum(p.numel() * 4 for p in net.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    peak = torch.cuda.max_memory_allocated() - base
    assert abs(space.cost(space.largest).training_memory(64) / peak - 1) < 0.15
