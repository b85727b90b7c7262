"""Batch normalisation where channels lie last: kernels of ours compute what torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cuda_on_cpu
from fedtailor.engine.local import ready
from fedtailor.engine.outfit import fit_out
from fedtailor.kernels import norm_last
from fedtailor.kernels.compiling import plain
from fedtailor.kernels.norm_layer import BatchNorm
from fedtailor.registry import lookup
from fedtailor.spaces.layers import ConvNorm, Norm

SHAPES = [  # images, channels, height, width
    (2, 64, 2, 1),
    (7, 64, 9, 13),
    (3, 128, 7, 5),
    (5, 192, 8, 3),
]
HOW = [("", False), ("relu", False), ("hswish", False), ("relu6", False), ("", True), ("relu", True)]


@pytest.fixture(autouse=True)
def launched(device: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched, one after the other."""
    seen: list[Any] = []
    launch = norm_last.launch
    monkeypatch.setattr(norm_last, "launch", lambda *args: (seen.append(args[1:3]), launch(*args)))
    return seen


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def layer_for(channels: int, device: str, affine: bool = True) -> BatchNorm:
    """A layer that has seen something."""
    layer = BatchNorm(channels, affine=affine).to(device).train()
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.num_batches_tracked = None
    layer.running_mean.fill_(0.3)
    layer.running_var.fill_(2.0)
    torch.manual_seed(5)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def step(x: Tensor, plus: Tensor | None, act: str, affine: bool = True) -> dict[str, Tensor]:
    """Output, gradients and new statistics of a layer in training."""
    layer = layer_for(x.shape[1], x.device.type, affine)
    inputs = {"x": x.detach().requires_grad_()}
    if plus is not None:
        inputs["plus"] = plus.detach().requires_grad_()
    y = layer(inputs["x"], act, inputs.get("plus"))
    torch.manual_seed(6)
    dy = torch.randn(y.shape).bfloat16().to(y)  # lies image by image
    wanted = inputs | dict(layer.named_parameters())
    found = torch.autograd.grad(y, list(wanted.values()), dy)
    return {"y": y.detach()} | dict(zip(wanted, found, strict=True)) | dict(layer.named_buffers())


def require_close(mine: dict[str, Tensor], others: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == others.keys()
    for name, other in others.items():
        scale = float(other.norm()) + (1.0 if name == "x" else 0.0)  # of few values, dx is nothing but rounding
        assert float((mine[name].float() - other).norm()) <= tolerance * scale, name


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("act", "adds"), HOW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_the_one_that_torch_computes(
    shape: tuple[int, ...], act: str, adds: bool, half: bool, device: str, launched: list[Any]
) -> None:
    torch.manual_seed(0)
    x = last(3 * torch.randn(shape) + 5).bfloat16().to(device)  # numbers that both precisions have
    plus = torch.randn(shape).bfloat16().to(device) if adds else None
    wide = (x.float(), None if plus is None else plus.float())
    mine = step(*((x, plus) if half else wide), act)
    assert len(launched) == 4, "the kernels were not used"
    assert mine["y"].is_contiguous(memory_format=torch.channels_last)
    assert mine["y"].dtype == mine["x"].dtype == (torch.bfloat16 if half else torch.float32)
    with plain():
        others = step(*wide, act)
    require_close(mine, others, 4e-3 if half else 1e-4)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_as_on_a_card(half: bool, device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many threads, and so many rows that every thread has several at a time and some have one more."""
    monkeypatch.setattr(norm_last, "THREADS", 512)
    torch.manual_seed(0)
    x = last(torch.randn(3, 64, 23, 29)).bfloat16().to(device)
    monkeypatch.setattr(norm_last, "BLOCKS", 3)
    mine = step(x if half else x.float(), None, "relu")
    assert launched == [((1, 3), 512)] * 4
    with plain():
        require_close(mine, step(x.float(), None, "relu"), 4e-3 if half else 1e-4)


def test_a_large_mean_costs_no_digits(device: str, launched: list[Any]) -> None:
    torch.manual_seed(0)
    x = last(torch.randn(8, 64, 6, 6, dtype=torch.float64) + 1000).float().to(device)
    mine = step(x, None, "")
    assert launched
    mean, variance = x.double().mean((0, 2, 3)), x.double().var((0, 2, 3), correction=1)
    torch.testing.assert_close(mine["running_mean"].double(), 0.9 * 0.3 + 0.1 * mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine["running_var"].double(), 0.9 * 2 + 0.1 * variance, rtol=1e-5, atol=1e-6)


def test_without_weights(device: str, launched: list[Any]) -> None:
    x = last(torch.randn(4, 64, 3, 5)).to(device)
    mine = step(x, None, "relu", affine=False)
    assert len(launched) == 4
    with plain():
        require_close(mine, step(x, None, "relu", affine=False), 1e-4)


@pytest.mark.parametrize("act", ["", "relu"])
def test_not_a_number_stays_one(act: str, device: str, launched: list[Any]) -> None:
    x = last(torch.randn(4, 64, 3, 5)).to(device)
    x[2, 7, 1, 1] = float("nan")
    mine = step(x, x, act)
    assert launched
    assert mine["y"][:, 7].isnan().all()
    assert mine["y"][:, :7].isfinite().all()


@pytest.mark.parametrize(("act", "adds"), [("hswish", False), ("", True), ("relu", True)])
def test_kernels_can_be_differentiated_twice(act: str, adds: bool, device: str, launched: list[Any]) -> None:
    torch.manual_seed(0)
    layer = layer_for(64, device)
    x, plus = (last(torch.randn(4, 64, 3, 3)).to(device).requires_grad_() for _ in range(2))
    inputs = (x, *layer.parameters(), *([plus] if adds else []))

    def twice() -> tuple[Tensor, ...]:
        y = layer(x, act, plus if adds else None)
        once = torch.autograd.grad(((y + 1) ** 3).sum(), inputs, create_graph=True)
        return y, *once, *torch.autograd.grad(sum(g.square().mean() for g in once), inputs)  # type: ignore[arg-type]

    cuda_on_cpu.require_what_torch_computes(twice, rtol=1e-3, atol=2e-3)
    assert launched


@pytest.mark.parametrize(
    ("x", "plus", "act"),
    [
        (last(torch.randn(4, 96, 3, 3)), None, "relu"),
        (last(torch.randn(4, 96, 3, 3)), torch.randn(4, 96, 3, 3), "relu"),
        (last(torch.randn(4, 64, 3, 3)), torch.randn(4, 64, 3, 3), "hswish"),
        (last(torch.randn(4, 64, 3, 3)), torch.randn(4, 64, 1, 1), "relu"),
        (last(torch.randn(4, 64, 3, 3)), torch.randn(4, 64, 3, 3).double(), "relu"),
        (torch.randn(4, 64, 3, 3), torch.randn(4, 64, 3, 3), "relu"),
    ],
    ids=["channels", "channels and sum", "activation", "sum over planes", "precision", "layout"],
)
def test_what_these_kernels_do_not_take_goes_another_way(
    x: Tensor, plus: Tensor | None, act: str, device: str, launched: list[Any]
) -> None:
    x, plus = x.to(device), None if plus is None else plus.to(device)
    mine = step(x, plus, act)
    assert not launched
    with plain():
        require_close(mine, step(x, plus, act), 1e-4)


def test_places_that_are_no_int_are_left_to_torch(
    device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_last, "MOST", 64 * 4 * 9 - 1)
    step(last(torch.randn(4, 64, 3, 3)).to(device), None, "relu")
    assert not launched


def gradient(net: nn.Module, device: str, half: bool = False) -> Tensor:
    """Of all weights, on the same images every time."""
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, 16, 16).to(device), torch.randint(0, 4, (4,)).to(device)
    net.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=False):
        F.cross_entropy(net(last(x)).float(), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def test_a_network_makes_the_step_that_torch_makes(device: str, launched: list[Any]) -> None:
    torch.manual_seed(0)
    net = ready(lookup("net", "resnet18")((3, 16, 16), 4).build(())).to(device).train()
    fit_out(net, (3, 16, 16), "bf16")

    def alike(a: Tensor, b: Tensor) -> float:
        return float(F.cosine_similarity(a, b, 0))

    ours = gradient(net, device)
    assert len(launched) == 4 * 20, "a layer went another way"
    launched.clear()
    halved = gradient(net, device, half=True)
    assert len(launched) == 4 * 20, "a layer went another way"
    with plain():
        theirs, theirs_halved = gradient(net, device), gradient(net, device, half=True)
    assert alike(ours, theirs) > 0.9999
    assert 1 - alike(halved, theirs) < 1.5 * (1 - alike(theirs_halved, theirs)) + 0.01


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("act", ["relu", "gelu", ""])
def test_a_shortcut_is_added_before_the_activation(norm: Norm, act: str, device: str) -> None:
    layer, x, plus = ConvNorm(4, 64, 3, act=act, norm=norm), torch.randn(2, 4, 5, 5), torch.randn(2, 64, 5, 5)
    found = plus + layer.norm(layer.conv(x))  # type: ignore[operator]
    assert torch.equal(layer(x, plus), getattr(F, act)(found) if act else found)
