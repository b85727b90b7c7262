"""What a client can ask for: outputs in order, training by steps, batches of the public set."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine import local as engine
from fedtailor.engine.client import Client
from fedtailor.engine.steps import Estimate
from fedtailor.errors import UserError
from fedtailor.method import Task
from fedtailor.methods.fedavg import FedAvg
from fedtailor.nets.base import features
from fedtailor.registry import lookup, names
from fedtailor.spaces.copying import move_undrawn, undrawn
from fedtailor.spaces.measure import tensors_of
from fedtailor.values import on_device, read_value, write_value
from tools import by_hand, numbers, three

PLAIN = Local(epochs=1.0, batch=2, lr=0.2, momentum=0.0, weight_decay=0.0, augment="crop")
DATA = [[(255, 0), (0, 1), (51, 1), (102, 0), (153, 1)]]


def client_of(**options: object) -> tuple[Client, nn.Module, engine.LocalEngine]:
    federation = by_hand(FedAvg(), DATA, PLAIN, **options)  # type: ignore[arg-type]
    client = federation.client(federation.job.seats[0], {}, 1)
    return client, client.build(Task(three(2, 1, 0))), federation.engine


def test_predictions_come_in_order_and_leave_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SCORE_BATCH", 2)  # three pieces
    client, net, runs = client_of()

    async def work() -> tuple[Tensor, Tensor]:
        return await client.predict(net), await client.predict(features(net), on="val")

    logits, found = runs.run([("", work())])[0]
    assert logits[:, 0].tolist() == pytest.approx([2, 0, 0.4, 0.8, 1.2])
    assert found.flatten().tolist() == pytest.approx([2, 0, 0.4, 0.8, 1.2])  # what the head reads: body * pixel
    assert client.labels().tolist() == [0, 1, 1, 0, 1]
    assert not logits.requires_grad
    assert client.flops > 0
    assert isinstance(net.head, nn.Linear)  # a view without the head leaves the network whole


def test_training_by_steps_equals_training_by_epochs() -> None:
    ends = []
    for how in ({"steps": 3}, {"epochs": 1.0}):  # five images in batches of two: three steps
        client, net, runs = client_of()

        async def work(client: Client = client, net: nn.Module = net, how: dict = how) -> float:
            return await client.fit(net, **how)

        runs.run([("", work())])
        ends.append(numbers(client.take(net)))
    assert ends[0] == ends[1]


def test_batches_of_the_public_set_carry_their_numbers() -> None:
    client, net, runs = client_of(public=[255, 0, 51])
    seen: list[tuple[float, int]] = []

    def step(own: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor]) -> Tensor:
        seen.extend(zip(public[0].flatten().tolist(), public[1].tolist(), strict=True))
        return own[0].sum() * 0

    async def work() -> float:
        return await client.loop(step, [net], over=("train", "public"), steps=6)

    runs.run([("", work())])
    pixels = [1.0, 0.0, 0.2]
    assert len(seen) == 12
    assert all(value == pytest.approx(pixels[number]) for value, number in seen)  # never augmented
    assert {number for _, number in seen} == {0, 1, 2}


def test_tensors_read_from_a_file_lie_aligned(tmp_path: Path) -> None:
    value = {"a": torch.ones(3, dtype=torch.int8), "b": torch.rand(7), "c": {"d": torch.rand(5, 3)}}
    write_value(tmp_path / "value", value)
    found = read_value(tmp_path / "value")
    for tensor in (found["a"], found["b"], found["c"]["d"]):
        assert tensor.data_ptr() % 64 == 0  # matrix products round by the address of their operands
    assert torch.equal(found["b"], value["b"])


def test_what_is_in_double_precision_stays_on_the_host() -> None:
    value = {"weights": {"a": torch.ones(3)}, "alpha": torch.ones(3, dtype=torch.float64), "round": 2}
    found = on_device(value, torch.device("meta"))
    assert found["weights"]["a"].is_meta
    assert torch.equal(found["alpha"], value["alpha"])
    assert found["round"] == 2


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="")]),
    ],
)
def test_moving_a_network_built_without_weights_keeps_its_buffers_and_what_it_shares(device: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    first, second, norm = net
    second.weight = first.weight
    norm.running_mean.fill_(3.0)  # type: ignore[operator,union-attr]
    move_undrawn(net, torch.device(device))
    assert all(t.device.type == device for t in (*net.parameters(), *net.buffers()))
    assert norm.running_mean.tolist() == [3, 3]  # type: ignore[operator,union-attr]
    assert second.weight is first.weight
    assert first.weight.requires_grad


def test_a_network_built_without_weights_leaves_other_threads_theirs() -> None:
    drawn: list[Tensor] = []

    def draw() -> None:
        drawn.append(nn.init.ones_(torch.empty(3)))

    with undrawn(torch.device("cpu")):
        mine = nn.init.ones_(torch.full((3,), 7.0))
        other = threading.Thread(target=draw)
        other.start()
        other.join()
    assert mine.tolist() == [7.0] * 3
    assert drawn[0].tolist() == [1.0] * 3
    assert nn.init.ones_(torch.full((3,), 7.0)).tolist() == [1.0] * 3


@pytest.mark.parametrize("name", names("space"))
def test_networks_can_be_made_of_an_arch_that_nobody_has_counted(name: str) -> None:
    space = lookup("space", name)((3, 20, 28), 7)  # a size of its own, so that nothing of it is remembered
    arch = space.sample(np.random.default_rng(1))
    made = engine.LocalEngine(torch.device("cpu"), 1)._make(space, arch)
    assert {n: t.shape for n, t in tensors_of(made).items()} == {
        n: t.shape for n, t in tensors_of(engine.ready(space.build(arch))).items()
    }


@pytest.mark.parametrize("name", names("space"))
def test_networks_made_of_copied_blocks_are_the_ones_that_would_be_built(name: str) -> None:
    space = lookup("space", name)((3, 32, 32), 10)
    arch, runs = space.sample(np.random.default_rng(0)), engine.LocalEngine(torch.device("cpu"), 1)
    built = engine.ready(space.build(arch)).eval()
    engine.lay_last(built, space.input)
    first, second = (runs._make(space, arch).eval() for _ in range(2))
    weights = tensors_of(built)
    images = torch.randn(2, 3, 32, 32)
    for net in (first, second):
        assert [type(m) for m in net.modules()] == [type(m) for m in built.modules()]
        assert {n: t.shape for n, t in tensors_of(net).items()} == {n: t.shape for n, t in weights.items()}
        net.load_state_dict(built.state_dict())
        assert torch.equal(net(images), built(images))
    one, two = ({t.data_ptr() for t in (*net.parameters(), *net.buffers())} for net in (first, second))
    assert not one & two
    second.get_submodule(next(n for n, m in second.named_modules() if isinstance(m, nn.Conv2d))).register_forward_hook(
        lambda *_: torch.full((), float("nan"))
    )
    assert first(images).isfinite().all()


def test_statistics_taken_step_by_step_are_the_mean_over_batches() -> None:
    """What the GPU engine captures, against two batches by hand and against the plain way."""
    nets = [nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    batches = [torch.tensor([0.0, 2.0]).view(2, 1, 1, 1), torch.tensor([1.0, 7.0]).view(2, 1, 1, 1)]
    nets[0].train()
    estimate = Estimate(nets[0])
    for batch in batches:
        estimate.step(batch, torch.zeros(2))
    estimate.close()
    engine.recalibrate(nets[1], lambda i: (batches[i], torch.zeros(2)), 2)
    first = nets[0][0]
    assert isinstance(first, nn.BatchNorm2d)
    found = {n: float(b) for n, b in first.named_buffers()}
    assert found["running_mean"] == 2.5  # of 1 and 4
    assert found["running_var"] == 10.0  # of 2 and 18
    assert first.momentum == 0.1
    assert nets[0].training
    for ours, plain in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, plain)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Leaves torch's switches as they were."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
def test_a_device_computes_in_the_precision_it_has() -> None:
    runs = engine.LocalEngine(torch.device("cpu"), 1, "auto")
    assert runs.precision == "fp32"
    with pytest.raises(UserError, match="precision = 'bf16' needs a CUDA device"):
        runs.compute_in("bf16")
    assert runs.precision == "fp32"
    runs.device = torch.device("cuda")
    runs.compute_in("auto")
    assert (runs.precision, torch.backends.cudnn.allow_tf32) == ("tf32", True)
    runs.compute_in("fp32")
    assert (runs.precision, torch.backends.cudnn.allow_tf32) == ("fp32", False)


def test_a_draw_belongs_to_its_purpose_round_and_client() -> None:
    federation = by_hand(FedAvg(), DATA * 2, PLAIN)
    clients = [federation.client(seat, {}, number) for seat in federation.job.seats for number in (1, 2)]
    draws = [float(client.rng(purpose).random()) for client in clients for purpose in ("a", "b")]
    assert len(set(draws)) == 8
    assert draws[0] == float(federation.client(federation.job.seats[0], {}, 1).rng("a").random())


def test_a_schedule_ends_with_the_rounds_and_leaves_a_tenth_for_what_comes_after() -> None:
    federation = by_hand(FedAvg(), DATA, replace(PLAIN, schedule="cosine"), rounds=4)
    seat = federation.job.seats[0]
    rates = [federation.client(seat, {}, r, keeping=k).lr for r, k in ((1, False), (3, False), (3, True), (5, False))]
    assert rates == pytest.approx([0.2, 0.1, 0.02, 0.02])  # half way down the cosine is half the rate


def test_a_few_images_are_the_clients_own() -> None:
    federation = by_hand(FedAvg(), [[(255, 0)] * 3, [(255, 1)] * 3], PLAIN)
    for seat in federation.job.seats:
        client = federation.client(seat, {}, 1)
        net = client.build(Task(three(1, 0, 1)))  # says label 1 to everything
        assert federation.engine.run([("", client.score(net, images=2))]) == [float(seat.id)]


def test_a_rough_score_is_computed_as_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    client, net, local = client_of()
    asked: list[str] = []

    def lowered(precision: str) -> contextlib.AbstractContextManager[object]:
        asked.append(precision)
        return contextlib.nullcontext()

    monkeypatch.setattr(engine, "lowered", lowered)
    local.precision = "bf16"
    exact, rough = (local.run([("", client.score(net, on="train", rough=how))])[0] for how in (False, True))
    assert asked == ["fp32", "bf16"]
    assert exact == rough
