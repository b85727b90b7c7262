"""The GPU engine against the plain path, on a GPU (`pytest -m gpu`) and, what can be, in pretence on a processor."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.data.partition import VAL
from fedtailor.engine.jobs import Score
from fedtailor.engine.loop import Event, Federation, State
from fedtailor.errors import Diverged
from fedtailor.runs import execute
from fedtailor.runs.execute import prepare
from fedtailor.values import tensors_in
from pretend_cuda import pretend
from test_sweep import CASES, config_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
on_a_gpu = [pytest.mark.gpu, needs_gpu]
device = torch.device("cuda")


@pytest.fixture(params=["pretence", pytest.param("cuda", marks=on_a_gpu)], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the engine runs."""
    there = pretend(monkeypatch) if request.param == "pretence" else torch.device("cuda")
    monkeypatch.setitem(globals(), "device", there)
    return request.param


def only_on_a_gpu(test: Any) -> Any:
    """For what a processor cannot pretend: captures themselves, and memory."""
    return pytest.mark.parametrize("place", [pytest.param("cuda", marks=on_a_gpu)], indirect=True)(test)


def one_round(method: str, space: str, engine: str, **changes: Any) -> tuple[State, list[Event], Federation]:
    # one or two steps a client: rounding differs between kernels, and training multiplies it by ten every few steps
    small = {"rounds": 2, "local__epochs": 0.3, "local__lr": 0.003, "precision": "fp32"}
    setup = prepare(config_of(method, space, **(small | changes)))
    federation, _ = setup.federation(device, 1, engine)
    state, events = federation.begin(), []
    next(federation.rounds(state, events.append))
    return state, events, federation


def tensors(state: State) -> dict[str, Tensor]:
    values = {"server": state.server.values, **{str(k): v for k, v in state.memories.items()}}
    return {name: t.double() for name, t in tensors_in(values) if t.is_floating_point()}


# on a processor one space a method, and every space with one of them: the engine never asks which it is
PRETENDED = [
    (m, s) for m, s in CASES if s in ("", "tiny") or m in ("perfedrlnas", "spider", "fednas", "fednas-personal")
]
EVERYWHERE = [(m, s, "pretence") for m, s in PRETENDED]
EVERYWHERE += [pytest.param(m, s, "cuda", marks=on_a_gpu) for m, s in CASES]


@pytest.mark.parametrize(("method", "space", "place"), EVERYWHERE, indirect=["place"])
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
    federation, _ = setup.federation(device, 1)
    state = federation.begin()
    counts = []
    for _ in federation.rounds(state, lambda event: None):
        counts.append(sum(len(s) for s in federation.engine.slots.free.values()))  # type: ignore[attr-defined]
    assert counts == [3, 3, 3, 3]


@only_on_a_gpu
def test_a_step_that_cannot_be_captured_runs_all_the_same() -> None:
    said: list[str] = []
    engine = execute.make_engine(device, 1, say=said.append)
    setup = prepare(config_of("fedavg", "", rounds=1))
    federation, _ = setup.federation(device, 1)
    federation.engine = engine
    client = federation.client(setup.job.seats[0], {}, 1)
    weight = torch.zeros(10, 64, device=device)
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
    assert torch.randn(3, device=device).isfinite().all()  # the failed capture left torch's generator as it was


@pytest.mark.parametrize("method", ["fedavg", "ditto", "scaffold", "fedrep"])
def test_equal_clients_trained_as_a_stack_agree(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine import stack

    asked: list[int] = []

    def always(trial: Any, lanes: Any, clients: int, steps: int) -> bool:
        asked.append(clients)
        return True

    monkeypatch.setattr(stack, "stacking_pays", always)
    crowd = {"clients": 6, "participants": 5}
    eager, _, _ = one_round(method, "", "eager", **crowd)
    ours, _, federation = one_round(method, "", "auto", **crowd)
    assert asked
    assert len(federation.engine._stacks)  # type: ignore[attr-defined]
    assert apart(eager, ours) < 1e-4


STACKED = [("cnn", {"net__norm": "batch"}), ("cnn", {"net__dropout": 0.5}), ("mobilenetv3_large", {}), ("resnet18", {})]


@pytest.mark.parametrize(("net", "options"), STACKED)
def test_layers_of_every_kind_can_be_stacked(
    net: str, options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedtailor.engine import stack

    if place == "pretence" and net != "cnn":
        pytest.skip("takes long on a processor, where a stack computes with the same layers anyway")
    crowd = {"clients": 5, "participants": 4, "net__name": net, "local__lr": 1e-4} | options
    states = {}
    for pays in (True, False):
        monkeypatch.setattr(stack, "stacking_pays", lambda *_, pays=pays: pays)
        states[pays], _, federation = one_round("fedavg", "", "auto", **crowd)
        assert bool(len(federation.engine._stacks)) == pays  # type: ignore[attr-defined]
    assert apart(states[True], states[False]) < 1e-3  # a statistic that does not move would be a tenth off


def apart(a: State, b: State) -> float:
    """Relative difference of all that two runs hold."""
    one, two = tensors(a), tensors(b)
    assert one.keys() == two.keys()
    difference = sum(float((one[n] - two[n]).nan_to_num().pow(2).sum()) for n in one)
    return (difference / sum(float(t.nan_to_num().pow(2).sum()) for t in one.values())) ** 0.5


def run(lanes: int = 0, engine: str = "auto", **changes: Any) -> tuple[State, Federation, list[str]]:
    """Three rounds of a search with six clients a round, on so many lanes."""
    said: list[str] = []
    small = {
        "rounds": 3,
        "clients": 8,
        "participants": 6,
        "local__epochs": 0.3,
        "local__lr": 0.001,
        "precision": "fp32",
    }
    setup = prepare(config_of("perfedrlnas", "tiny", **(small | changes)))
    federation, _ = setup.federation(device, 1, engine, said.append)
    if lanes:
        federation.engine.at_once = lanes  # type: ignore[attr-defined]
    state = federation.begin()
    for _ in federation.rounds(state, lambda event: None):
        pass
    return state, federation, said


def test_more_clients_than_lanes_change_nothing() -> None:
    plain, _, _ = run(engine="eager")
    for lanes in (1, 2, 4):
        assert apart(plain, run(lanes)[0]) < 1e-4


def test_batches_of_large_images_are_prepared_a_few_at_a_time(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine import replay

    assert replay.ahead([(32, 3, 32, 32)]) == replay.ahead([(64, 3, 32, 32)]) == replay.CHUNK
    assert replay.ahead([(32, 3, 224, 224)]) == 6
    assert replay.ahead([(64, 3, 1024, 1024)] * 2) == 1
    for method, space in (("fedavg", ""), ("fednas", "darts")):
        changes = {"local__epochs": 0.6, "local__lr": 0.001}
        whole, _, _ = one_round(method, space, "auto", **changes)
        with monkeypatch.context() as tight:
            tight.setattr(replay, "BUFFER", 1)
            few, _, _ = one_round(method, space, "auto", **changes)
        assert apart(whole, few) < (1e-4 if place == "pretence" else 1e-2)


def test_steps_of_the_next_round_are_captured_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine.slots import Slots

    used: list[bool] = []
    real = Slots.slot

    def watched(self: Slots, *args: Any) -> Any:
        before = len(self.free) + len(self.lent)
        slot = real(self, *args)
        used.append(len(self.free) + len(self.lent) <= before)  # it was there already
        return slot

    monkeypatch.setattr(Slots, "slot", watched)
    run(clients=25, participants=3, rounds=6)
    assert not any(used[:3])
    assert sum(used[3:]) >= 6


@pytest.mark.parametrize("lr_end", [0.0, 0.001])
def test_steps_of_a_recipe_are_captured_once(lr_end: float, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine.loops import OwnStep

    captured: list[Any] = []
    real = OwnStep._begin
    monkeypatch.setattr(OwnStep, "_begin", lambda self, own: captured.append(self) or real(self, own))
    changes = {"rounds": 2, "clients": 3, "participants": 2, "local__epochs": 0.4, "local__lr": 0.003}
    changes |= {"method__lr_end": lr_end, "local__prior": True, "method__stage": "search", "precision": "fp32"}

    def trained(engine: str) -> tuple[State, Federation]:
        setup = prepare(config_of("fednas", "darts", **changes))
        federation, _ = setup.federation(device, 1, engine)
        state = federation.begin()
        for _ in federation.rounds(state, lambda event: None):
            pass
        return state, federation

    plain, _ = trained("eager")
    ours, federation = trained("auto")
    assert len(captured) == 2  # one for each of the clients that train at once
    assert sum(map(len, federation.engine.slots.loops.values())) == 2  # type: ignore[attr-defined]
    assert apart(plain, ours) < (1e-4 if place == "pretence" else 1e-2)
    federation.engine.close()
    assert not federation.engine.slots.loops  # type: ignore[attr-defined]


def test_a_full_card_trains_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine.starting import Starter

    plain, _, _ = run()
    real = Starter.start

    def tight(self: Starter, label: str, job: Any, taken: set[Any], own: int) -> Any:
        if len(taken) == 3:
            raise torch.OutOfMemoryError("full")
        return real(self, label, job, taken, own)

    monkeypatch.setattr(Starter, "start", tight)
    state, federation, said = run()
    assert state.round == 3
    assert federation.engine.at_once == 3  # type: ignore[attr-defined]
    assert sum("memory is full" in text for text in said) == 2  # less is kept, then fewer train
    assert apart(plain, state) < 1e-4


@only_on_a_gpu
def test_captured_forward_passes_read_the_weights_where_they_lie_and_share_a_lane() -> None:
    from fedtailor.engine.replay import Forwards, Lane

    _, federation, _ = run(rounds=1)
    engine, space = federation.engine, federation.job.space
    lane = Lane(torch.cuda.Stream())
    nets = [engine.network(space, arch).eval() for arch in (space.largest, space.smallest)]
    passes = [Forwards(lane) for _ in nets]
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(lane.stream):
        for scale in (1.0, 0.5, 2.0):
            for net, forwards in zip(nets, passes, strict=True):
                for p in net.parameters():
                    p.fill_(0.01 * scale)
                x = torch.randn(7, *space.input, device=device)
                assert torch.allclose(forwards(net, x, lambda: True), net(x), atol=1e-5)
    assert all(forwards._by_size[7, False] is not None for forwards in passes)


def test_clients_whose_steps_share_a_lane_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.engine.slots import Slots

    plain, _, _ = run()
    monkeypatch.setattr(Slots, "idle", lambda self, taken: self.lanes[0])
    assert apart(plain, run()[0]) < 1e-4


@only_on_a_gpu
def test_a_lane_goes_on_after_a_step_that_could_not_be_captured() -> None:
    from fedtailor.engine.local import Cannot
    from fedtailor.engine.replay import Forward, Lane

    lane = Lane(torch.cuda.Stream())
    net, images = torch.nn.Linear(3, 2).cuda(), torch.ones(4, 3, device=device)
    torch.cuda.synchronize()

    class Impatient(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())  # reads a value, which a capture cannot

    with torch.no_grad(), torch.cuda.stream(lane.stream):
        before = Forward(net, images, lane)
        with pytest.raises(Cannot):
            Forward(Impatient(), images, lane)
        after = Forward(net, images, lane)
        for forward in (before, after):
            assert torch.allclose(forward(images), net(images))


@only_on_a_gpu
def test_rounds_with_new_archs_do_not_take_more_and_more_memory() -> None:
    setup = prepare(config_of("perfedrlnas", "tiny", rounds=60, clients=8, participants=4, local__epochs=0.3))
    federation, _ = setup.federation(device, 1)
    federation.engine.slots.most = 8  # type: ignore[attr-defined]
    held: list[int] = []
    for _ in federation.rounds(federation.begin(), lambda event: None):
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= 1.2 * held[len(held) // 2]


@only_on_a_gpu
@pytest.mark.parametrize(
    "name", ["mobilenetv3", "mobilenetv2", "vit", "darts", "mobilenetv3_large", "densenet", "levit"]
)
def test_training_memory_is_foreseen_within_15_percent(name: str) -> None:
    from fedtailor.registry import lookup, names

    kind = "space" if name in names("space") else "net"
    space = lookup(kind, name)((3, 32, 32), 10)
    net = space.build(space.largest).cuda().train()
    optimiser = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.zeros(64, dtype=torch.long, device=device)
    weights = sum(p.numel() * 4 for p in net.parameters())
    for _ in range(2):  # the first makes workspaces and momenta
        optimiser.zero_grad()
        base = torch.cuda.memory_allocated() - weights
        torch.cuda.reset_peak_memory_stats()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    base -= weights  # momenta were there already
    peak = torch.cuda.max_memory_allocated() - base
    assert abs(space.cost(space.largest).training_memory(64) / peak - 1) < 0.15


@only_on_a_gpu
def test_memories_that_find_no_room_on_the_card_wait_in_host_memory() -> None:
    small = {"rounds": 3, "local__epochs": 0.3, "local__lr": 0.01, "precision": "fp32"}

    def three_rounds(room: int) -> State:
        setup = prepare(config_of("ditto", "", clients=6, participants=3, **small))
        federation, _ = setup.federation(device, 1)
        federation.engine.shelf.room = room  # type: ignore[attr-defined]
        state = federation.begin()
        for _ in federation.rounds(state, lambda event: None):
            pass
        return state

    here, away = three_rounds(1 << 40), three_rounds(0)
    assert all(t.is_cuda for _, t in tensors_in(here.memories))
    assert all(t.is_pinned() for _, t in tensors_in(away.memories))
    assert len(away.memories) > 3  # some were fetched again
    for (path, expected), (_, found) in zip(tensors_in(here.memories), tensors_in(away.memories), strict=True):
        assert torch.allclose(expected.cpu(), found, rtol=1e-3, atol=1e-5), path


def test_a_loss_that_is_not_a_number_stops_the_round_and_names_the_client() -> None:
    setup = prepare(config_of("fedavg", "", rounds=1, local__lr=1e30))
    federation, _ = setup.federation(device, 1)
    state = federation.begin()
    with pytest.raises(Diverged, match=r"client client-.*not a number"):
        next(federation.rounds(state, lambda event: None))
    assert state.round == 0


@only_on_a_gpu
@pytest.mark.parametrize("name", ["mobilenetv3", "tiny", "darts"])
def test_cut_and_paste_on_the_gpu_are_those_of_the_processor(name: str) -> None:
    from fedtailor.registry import lookup
    from fedtailor.spaces.pasting import paste

    space = lookup("space", name)((3, 32, 32), 10)
    weights = space.new_weights(0)
    there = {n: t.cuda() for n, t in weights.items()}
    rng = np.random.default_rng(0)
    parts, others = [], []
    for mass in (1.0, 3.0):
        arch = space.sample(rng)
        here = space.cut(weights, arch)
        for (n, expected), found in zip(here.items(), space.cut(there, arch).values(), strict=True):
            assert torch.equal(expected, found.cpu()), n
        changed = {n: t + torch.randn_like(t) for n, t in here.items()}
        parts.append((changed, arch, mass))
        others.append(({n: t.cuda() for n, t in changed.items()}, arch, mass))
    for many in (2, 1):  # of one arch that owns all it touches, and of two that share some
        found = paste(space, there, others[:many])
        for n, expected in paste(space, weights, parts[:many]).items():
            assert torch.allclose(expected, found[n].cpu(), atol=1e-5), n


def test_networks_are_used_again_as_soon_as_their_client_is_done() -> None:
    _, federation, _ = run()
    engine, space = federation.engine, federation.job.space
    built = len(engine.slots)  # type: ignore[attr-defined]
    engine.crowd = 3  # type: ignore[attr-defined]
    seen: list[int] = []

    async def use(net: torch.nn.Module | None) -> None:
        own = engine.network(space, space.largest)
        assert own is not net
        seen.append(id(own))

    outside = engine.network(space, space.largest)
    engine.run([(f"client {i}", use(outside)) for i in range(40)])
    assert len(set(seen)) == 1
    assert len(engine.slots) <= built + 2  # type: ignore[attr-defined]


def test_work_is_asked_for_when_its_turn_comes_and_scores_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, federation, _ = run()
    engine, job = federation.engine, federation.job
    engine.crowd = 2  # type: ignore[attr-defined]
    seen: list[str] = []
    real = engine._hits

    def hits(score: Score) -> Tensor:
        seen.append("scores")
        return real(score)

    monkeypatch.setattr(engine, "_hits", hits)

    async def use(i: int) -> float:
        seen.append(f"begins {i}")
        found = await Score(engine.network(job.space, job.space.largest), federation.store.split(i, VAL))
        seen.append(f"ends {i}")
        return found

    found = engine.run((f"client {i}", use(i)) for i in range(3))
    assert seen[:6] == ["begins 0", "scores", "begins 1", "scores", "ends 0", "ends 1"]
    assert seen[6:] == ["begins 2", "scores", "ends 2"]
    assert all(0 <= accuracy <= 1 for accuracy in found)


def test_a_card_too_full_to_score_has_fewer_clients_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    setup = prepare(config_of("fedavg", "", rounds=1))
    federation, _ = setup.federation(device, 1, say=said.append)
    engine, job, calls = federation.engine, federation.job, iter(range(9))
    real_hits, starter = engine._hits, engine._starter  # type: ignore[attr-defined]

    def full(real: Callable[..., Any], times: Container[int]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if next(calls) in times:
                raise torch.OutOfMemoryError
            return real(*args)

        return wrapper

    async def score(i: int) -> float:
        return await Score(engine.network(job.space, job.space.largest), federation.store.split(i, VAL))

    async def train(i: int) -> float:
        client = federation.client(job.seats[i], {}, 1)
        return float(await client.fit(client.build(federation.method.ask(federation.begin().server, client.seat))))

    monkeypatch.setattr(engine, "_hits", full(real_hits, {2, 3}))  # also when there are no captured passes any more
    assert len(engine.run((f"client {i}", score(i)) for i in range(3))) == 3
    assert engine._under_way == 2  # type: ignore[attr-defined]
    assert engine.crowd > 2  # type: ignore[attr-defined]  # the next round trains as many as before
    assert sum("GPU memory is full" in text for text in said) == 2
    monkeypatch.setattr(engine, "_hits", real_hits)
    calls = iter(range(9))
    monkeypatch.setattr(starter, "start", full(starter.start, {0}))  # while another client's score is under way
    assert len(engine.run([("one", score(0)), ("two", train(1))])) == 2


def test_wide_networks_have_their_channels_last(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from fedtailor.engine import outfit
    from fedtailor.evaluate import evaluate

    def trained(precision: str) -> tuple[State, list[Event], Federation]:
        changes = {"net__width": 8, "net__norm": "batch", "local__lr": 0.003, "rounds": 2}
        setup = prepare(config_of("ditto", "", **changes))
        federation, test = setup.federation(device, 1)
        federation.engine.precision = precision  # on a processor nothing else comes of it
        state = federation.begin()
        for _ in federation.rounds(state, lambda event: None):
            pass
        events, kept = evaluate(federation, state, test)
        assert all(t.is_contiguous() for net in kept for t in net.weights.values())
        return state, events, federation

    monkeypatch.setattr(outfit, "WIDE", 8)
    plain, events, _ = trained("fp32")
    wide, same, federation = trained("tf32")
    net = federation.engine.network(federation.job.space, ())
    assert any(not p.is_contiguous() for p in net.parameters())
    assert all(t.is_contiguous() for t in tensors(wide).values())
    assert apart(plain, wide) < (1e-4 if place == "pretence" else 0.05)
    if place == "pretence":
        assert [e.value for e in events] == pytest.approx([e.value for e in same], abs=0.05)
