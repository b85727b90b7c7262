"""Layers that torch computes everywhere, and kernels of ours on a GPU.

The kernels' sources also run on a processor, thread by thread, so that what they compute is known without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_on_cpu
from fedtailor.kernels import compiling
from fedtailor.kernels.compiling import is_plain, plain
from fedtailor.kernels.depthwise import Depthwise, Shape, depthwise
from fedtailor.kernels.gates import channel_gates
from fedtailor.kernels.layout import Pointwise, by_channel, laid_by_channel, pooled
from fedtailor.kernels.norm import Rule, batch_norm

SHAPES = [  # images, channels, height, width, kernel, stride, dilation, filters a channel, ReLU
    (2, 3, 32, 32, 3, 1, 1, 1, False),
    (5, 3, 16, 16, 5, 2, 1, 1, True),
    (3, 8, 8, 8, 5, 1, 2, 3, True),
    (33, 2, 4, 4, 5, 1, 1, 2, False),
    (7, 3, 9, 13, 3, 2, 2, 2, True),
    (2, 2, 40, 40, 7, 1, 1, 1, False),
    (1, 1, 1, 1, 3, 1, 1, 1, False),
    (3, 1, 32, 32, 3, 2, 1, 1, True),  # a block's planes are two, and the last block's but one
    (9, 5, 8, 8, 3, 2, 1, 2, False),
    (3, 47, 4, 4, 3, 1, 1, 1, True),
    (130, 1, 2, 2, 3, 1, 1, 1, False),
    (5, 3, 6, 14, 5, 2, 1, 1, True),
    (2, 2, 7, 12, 3, 3, 1, 2, False),
    (2, 1, 64, 48, 3, 1, 1, 2, True),  # a thread has several patches
]


def by_hand(x: Tensor, weight: Tensor, stride: int, dilation: int, relu: bool) -> Tensor:
    """Filter m * C + c on channel c."""
    x = x.clamp(min=0) if relu else x
    channels, padding = x.shape[1], dilation * (weight.shape[-1] // 2)
    each = [
        F.conv2d(x[:, i % channels, None], weight[i, None], None, stride, padding, dilation) for i in range(len(weight))
    ]
    return torch.cat(each, dim=1)


def problem(shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor]:
    images, channels, height, width, kernel, _, _, filters, _ = shape
    torch.manual_seed(0)
    x = torch.randn(images, channels, height, width, device=device, requires_grad=True)
    return x, torch.randn(channels * filters, 1, kernel, kernel, device=device, requires_grad=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_filter_reads_its_channel(shape: tuple[int, ...]) -> None:
    x, weight = problem(shape)
    stride, dilation, _, relu = shape[5:]
    ours = depthwise(x, weight, stride, dilation, bool(relu))
    torch.testing.assert_close(ours, by_hand(x, weight, stride, dilation, bool(relu)))


def test_the_layer_is_a_convolution_by_name_and_weights() -> None:
    layer, like = Depthwise(6, 5, 2), torch.nn.Conv2d(6, 6, 5, 2, 2, groups=6, bias=False)
    like.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 11, 11)
    torch.testing.assert_close(layer(x), like(x))


def test_plain_ends_with_its_block() -> None:
    assert not is_plain()
    with plain():
        with plain():
            pass
        assert is_plain()
    assert not is_plain()


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(compiling, "_compile", lambda source, names, device: made.append(source) or {})
    compiled = compiling.compiled.__wrapped__  # without what it remembers
    assert compiled("random", ("uniforms",), torch.device("cpu"), T=1) is not None
    monkeypatch.setenv("FEDTAILOR_KERNELS", "off")
    assert compiled("random", ("uniforms",), torch.device("cpu"), T=1) is None
    assert len(made) == 1


def test_a_full_card_does_not_switch_kernels_off_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor quietly: whoever wants them is told, and can make room."""
    refused = iter([RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA error: no such file")])

    def load(code: bytes, names: list[str]) -> dict[str, str]:
        if error := next(refused, None):
            raise error
        return dict.fromkeys(names, "kernel")

    monkeypatch.setattr("torch.cuda._utils._cuda_load_module", load)
    monkeypatch.setattr(compiling, "_binary", lambda source, name, device: b"code")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    asked = partial(compiling.compiled, "random", ("uniforms",), torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        asked(T=71)
    with pytest.warns(UserWarning, match="no such file"):
        assert asked(T=72) is None
    assert asked(T=71) == {"uniforms": "kernel"}
    assert asked(T=72) is None


LAYOUTS = pytest.mark.parametrize("lay", [torch.clone, laid_by_channel], ids=["by image", "by channel"])
Lay = Callable[[Tensor], Tensor]


def test_what_the_compiler_made_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("torch.cuda._utils._nvrtc_compile", lambda source, _: (made.append(source) or b"code", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    there = torch.device("cuda", 0)
    assert [compiling._binary(source, "forward", there) for source in ("a", "b", "a")] == [b"code"] * 3
    assert made == ["a", "b"]
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:-1])  # damaged
    assert compiling._binary("a", "forward", there) == b"code"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))  # another card
    compiling._binary("a", "forward", there)
    monkeypatch.setenv("FEDTAILOR_CACHE", "off")
    compiling._binary("a", "forward", there)
    assert made == ["a", "b", "a", "a", "a"]


@LAYOUTS
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compute_what_torch_computes(shape: tuple[int, ...], lay: Lay, device: str) -> None:
    x, weight = problem(shape, device)
    stride, dilation, _, relu = shape[5:]
    ours = depthwise(lay(x), weight, stride, dilation, bool(relu))
    assert by_channel(ours) == by_channel(lay(x))
    with plain():
        theirs = depthwise(x, weight, stride, dilation, bool(relu))
    assert type(ours.grad_fn) is not type(theirs.grad_fn), "the kernels were not used"
    torch.testing.assert_close(ours, theirs)
    torch.manual_seed(1)
    towards = torch.randn(ours.shape).to(ours)
    torch.autograd.grad(ours, (x, weight), towards, retain_graph=True)  # what it leaves behind is of no importance
    for mine, other in zip(*(torch.autograd.grad(y, (x, weight), towards) for y in (ours, theirs)), strict=True):
        assert float((mine - other).norm()) <= 5e-6 * float(other.norm()) + 1e-6


@pytest.mark.parametrize(("side", "stride"), [(2, 1), (4, 2), (9, 2)])
def test_what_lies_beside_an_image_is_used_nowhere(side: int, stride: int, device: str) -> None:
    """Shared memory still holds what others left there, so first somebody leaves something that is no number."""
    dirt, filters = torch.full((2, 8, 32, 32), float("nan"), device=device), torch.ones(8, 1, 5, 5, device=device)
    images = Shape(side, side, 5, stride, 1, 1, False).planes  # so that a block's last place is taken
    x, weight = problem((images, 2, side, side, 5, stride, 1, 1, False), device)
    depthwise(dirt, filters, 1, 1)
    y = depthwise(x, weight, stride, 1)
    depthwise(dirt, filters, 1, 1)
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert all(bool(t.isfinite().all()) for t in (y, *grads))


def test_kernels_can_be_differentiated_twice(device: str) -> None:
    x, weight = problem((2, 3, 8, 8, 3, 1, 1, 2, True), device)

    def twice() -> tuple[Tensor, ...]:
        once = torch.autograd.grad(depthwise(x, weight, 1, 1, True).square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in once), (x, weight))  # type: ignore[arg-type]

    cuda_on_cpu.require_what_torch_computes(twice, rtol=1e-4, atol=1e-3)


def test_not_a_number_stays_one(device: str) -> None:
    x = torch.full((1, 2, 8, 8), float("nan"), device=device)
    assert depthwise(x, torch.ones(2, 1, 3, 3, device=device), 1, 1, relu=True).isnan().all()


def test_large_images_are_left_to_torch(device: str) -> None:
    assert not Shape(224, 224, 3, 1, 1, 1, False).small
    x, weight = torch.randn(1, 2, 224, 224, device=device), torch.randn(2, 1, 3, 3, device=device)
    torch.testing.assert_close(depthwise(x, weight, 1, 1), F.conv2d(x, weight, padding=1, groups=2))


Parts = dict[str, Tensor]


def normed(x: Tensor, parts: Parts, act: str, lay: Lay = torch.clone) -> tuple[Tensor, Parts]:
    """Output, new statistics and gradients of a norm in training."""
    running = {"mean": torch.full_like(parts["weight"], 0.3), "variance": torch.full_like(parts["weight"], 2.0)}
    y = batch_norm(lay(x), parts["weight"], parts["bias"], Rule((running["mean"], running["variance"]), 0.1, 1e-5, act))
    torch.manual_seed(2)
    names, inputs = ("x", *parts), (x, *parts.values())
    return y, running | dict(zip(names, torch.autograd.grad(y, inputs, torch.randn(y.shape).to(y)), strict=True))


@LAYOUTS
@pytest.mark.parametrize(
    ("shape", "act"),
    [
        ((8, 3, 32, 32), "hswish"),
        ((32, 5, 4, 4), "relu"),
        ((32, 5, 4, 4), ""),
        ((7, 3, 9, 13), "relu6"),
        ((7, 3, 9, 13), "hswish"),
        ((2, 8, 1, 1), ""),
        ((32, 6, 2, 2), "hswish"),
        ((16, 3, 8, 8), ""),
        ((32, 2, 8, 8), "relu"),
        ((3, 2, 32, 32), "relu6"),  # of a thread's two steps the second is the last of some
        ((20, 1, 32, 32), "relu"),  # more than there is room for of two tensors, and below of one
        ((36, 1, 32, 32), "hswish"),
    ],
)
def test_norms_compute_what_torch_computes(shape: tuple[int, ...], act: str, lay: Lay, device: str) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device=device) + 5).requires_grad_()
    parts = {n: torch.randn(shape[1], device=device, requires_grad=True) for n in ("weight", "bias")}
    ours, mine = normed(x, parts, act, lay)
    with plain():
        theirs, others = normed(x, parts, act)
    assert type(ours.grad_fn) is not type(theirs.grad_fn), "the kernels were not used"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for name, other in others.items():
        scale = float(other.norm()) + (1.0 if name == "x" else 0.0)  # of two values, dx is nothing but rounding
        assert float((mine[name] - other).norm()) <= 1e-4 * scale, name


def test_norms_without_weights_and_twice_differentiated(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 6, device=device, requires_grad=True)

    def twice() -> tuple[Tensor, Tensor]:
        y = batch_norm(x, None, None, Rule((None, None), 0.1, 1e-5, "relu"))
        (once,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return y, torch.autograd.grad((once**2).sum(), x)[0]

    ours = twice()
    with plain():
        theirs = twice()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


GATES = [(3, 12, 4, 16, 16), (4, 40, 12, 4, 4), (5, 17, 3, 5, 7), (1, 8, 8, 1, 1), (2, 200, 48, 2, 2)]
GATES += [(1, 1031, 5, 1, 1)]  # more columns than threads, and one image a block


@LAYOUTS
@pytest.mark.parametrize("shape", GATES)
def test_gates_compute_what_torch_computes(shape: tuple[int, ...], lay: Lay, device: str) -> None:
    images, many, few, height, width = shape
    torch.manual_seed(0)
    x = torch.randn(images, many, height, width, device=device, requires_grad=True)
    sizes = [(few, many), (few,), (many, few), (many,)]
    tensors = [x, *(torch.randn(size, device=device, requires_grad=True) for size in sizes)]
    tensors[3].data.mul_(0.5)

    def both() -> tuple[Tensor, ...]:
        y = channel_gates(lay(x), *tensors[1:])
        torch.manual_seed(1)
        return y.detach(), *torch.autograd.grad(y, tensors, torch.randn(y.shape).to(y))

    ours = both()
    with plain():
        theirs = both()
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).norm()) <= 1e-5 * float(other.norm()) + 1e-6


def halved(compute: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> None:
    """Whether what is computed of images in bfloat16 is what is computed of the same numbers in single precision."""
    torch.manual_seed(3)
    inputs = [x.detach().bfloat16().requires_grad_(), x.detach().bfloat16().float().requires_grad_()]
    towards = torch.randn(compute(inputs[1]).shape).to(x.device).bfloat16()
    found = []
    for images in inputs:
        y = compute(images)
        assert y.dtype == images.dtype
        found.append((y.detach(), *torch.autograd.grad(y, (images, *weights), towards.to(y.dtype))))
    for mine, other in zip(*found, strict=True):
        assert float((mine.float() - other).norm()) <= 4e-3 * float(other.norm()) + 1e-3


@LAYOUTS
def test_images_may_be_in_bfloat16(lay: Lay, device: str) -> None:
    for shape in (*SHAPES[1:4], *SHAPES[7:11]):
        x, weight = problem(shape, device)
        stride, dilation, _, relu = shape[5:]
        halved(lambda x, w=weight, s=stride, d=dilation, r=relu: depthwise(lay(x), w, s, d, bool(r)), x, [weight])
    for size, act in (((8, 3, 4, 4), "hswish"), ((7, 5, 3, 5), "relu"), ((6, 4, 2, 2), ""), ((65, 1, 32, 32), "relu6")):
        weight, bias = (torch.randn(size[1], device=device, requires_grad=True) for _ in range(2))
        rule = Rule((None, None), 0.1, 1e-5, act)
        x = torch.randn(size, device=device) + 2
        halved(lambda x, w=weight, b=bias, rule=rule: batch_norm(lay(x), w, b, rule), x, [weight, bias])
    for images, many, few, height, width in GATES[:3]:
        sizes = [(few, many), (few,), (many, few), (many,)]
        weights = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
        x = torch.randn(images, many, height, width, device=device)
        halved(lambda x, w=tuple(weights): channel_gates(lay(x), *w), x, weights)


def test_layouts_say_how_planes_lie() -> None:
    x = torch.randn(3, 4, 2, 5)
    assert not by_channel(x)
    laid = laid_by_channel(x)
    assert by_channel(laid)
    assert torch.equal(laid, x)
    assert by_channel(laid + laid)
    assert not by_channel(x.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    pool = torch.nn.AvgPool2d(2, ceil_mode=True)
    assert by_channel(pooled(pool, laid))
    torch.testing.assert_close(pooled(pool, laid), pool(x))


@LAYOUTS
def test_pointwise_convolutions_compute_what_torch_computes(lay: Lay, device: str) -> None:
    torch.manual_seed(0)
    layer, x = Pointwise(5, 7).to(device), torch.randn(3, 5, 4, 6, device=device, requires_grad=True)
    like = torch.nn.Conv2d(5, 7, 1, bias=False).to(device)
    like.load_state_dict(layer.state_dict())

    def both(convolve: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = convolve(x)
        torch.manual_seed(1)
        inputs = (x, *convolve.parameters())
        return y, *torch.autograd.grad(y, inputs, torch.randn(y.shape).to(y))

    ours, theirs = both(layer, lay(x)), both(like, x)
    assert by_channel(ours[0]) == by_channel(lay(x))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_one_value_a_channel_cannot_be_normalised(device: str) -> None:
    x = torch.randn(1, 4, 1, 1, device=device)
    with pytest.raises(ValueError, match="more than 1 value"):
        batch_norm(x, None, None, Rule((None, None), 0.1, 1e-5))
