"""Layers that torch computes everywhere, and kernels of ours on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.kernels.compiling import is_plain, plain
from fedtailor.kernels.depthwise import Depthwise, Shape, depthwise
from fedtailor.kernels.gates import channel_gates
from fedtailor.kernels.norm import ACTS, batch_norm

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
SHAPES = [  # images, channels, height, width, kernel, stride, dilation, filters a channel, ReLU
    (4, 6, 32, 32, 3, 1, 1, 1, False),
    (32, 16, 16, 16, 5, 2, 1, 1, True),
    (3, 8, 8, 8, 5, 1, 2, 3, True),
    (33, 5, 4, 4, 5, 1, 1, 2, False),
    (7, 3, 9, 13, 3, 2, 2, 2, True),
    (2, 2, 40, 40, 7, 1, 1, 1, False),
    (1, 1, 1, 1, 3, 1, 1, 1, False),
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


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compute_what_torch_computes(shape: tuple[int, ...]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    x, weight = problem(shape, "cuda")
    stride, dilation, _, relu = shape[5:]
    ours = depthwise(x, weight, stride, dilation, bool(relu))
    with plain():
        theirs = depthwise(x, weight, stride, dilation, bool(relu))
    assert type(ours.grad_fn) is not type(theirs.grad_fn), "the kernels were not used"
    torch.testing.assert_close(ours, theirs)
    torch.manual_seed(1)
    towards = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(y, (x, weight), towards) for y in (ours, theirs)), strict=True):
        assert float((mine - other).norm()) <= 1e-6 * float(other.norm()) + 1e-6


@needs_gpu
@pytest.mark.gpu
def test_kernels_can_be_differentiated_twice() -> None:
    x, weight = problem((2, 3, 8, 8, 3, 1, 1, 2, True), "cuda")

    def twice() -> tuple[Tensor, ...]:
        once = torch.autograd.grad(depthwise(x, weight, 1, 1, True).square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in once), (x, weight))  # type: ignore[arg-type]

    ours = twice()
    with plain():
        theirs = twice()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


@needs_gpu
@pytest.mark.gpu
def test_not_a_number_stays_one() -> None:
    x = torch.full((1, 2, 8, 8), float("nan"), device="cuda")
    assert depthwise(x, torch.ones(2, 1, 3, 3, device="cuda"), 1, 1, relu=True).isnan().all()


@needs_gpu
@pytest.mark.gpu
def test_large_images_are_left_to_torch() -> None:
    assert not Shape(224, 224, 3, 1, 1, 1, False).small
    x, weight = torch.randn(1, 2, 224, 224, device="cuda"), torch.randn(2, 1, 3, 3, device="cuda")
    torch.testing.assert_close(depthwise(x, weight, 1, 1), F.conv2d(x, weight, padding=1, groups=2))


Parts = dict[str, Tensor]


def normed(x: Tensor, parts: Parts, act: str) -> tuple[Tensor, Parts]:
    """Output, new statistics and gradients of a norm in training."""
    running = {"mean": torch.full_like(parts["weight"], 0.3), "variance": torch.full_like(parts["weight"], 2.0)}
    y = batch_norm(x, parts["weight"], parts["bias"], (running["mean"], running["variance"]), 0.1, 1e-5, act)
    torch.manual_seed(2)
    names, inputs = ("x", *parts), (x, *parts.values())
    return y, running | dict(zip(names, torch.autograd.grad(y, inputs, torch.randn_like(y)), strict=True))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", [(32, 24, 32, 32), (32, 5, 4, 4), (7, 3, 9, 13), (2, 8, 1, 1), (16, 700, 8, 8)])
def test_norms_compute_what_torch_computes(shape: tuple[int, ...], act: str) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device="cuda") + 5).requires_grad_()
    parts = {n: torch.randn(shape[1], device="cuda", requires_grad=True) for n in ("weight", "bias")}
    ours, mine = normed(x, parts, act)
    with plain():
        theirs, others = normed(x, parts, act)
    assert type(ours.grad_fn) is not type(theirs.grad_fn), "the kernels were not used"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for name, other in others.items():
        scale = float(other.norm()) + (1.0 if name == "x" else 0.0)  # of two values, dx is nothing but rounding
        assert float((mine[name] - other).norm()) <= 1e-4 * scale, name


@needs_gpu
@pytest.mark.gpu
def test_norms_without_weights_and_twice_differentiated() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 6, device="cuda", requires_grad=True)

    def twice() -> tuple[Tensor, Tensor]:
        y = batch_norm(x, None, None, (None, None), 0.1, 1e-5, "relu")
        (once,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return y, torch.autograd.grad((once**2).sum(), x)[0]

    ours = twice()
    with plain():
        theirs = twice()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 48, 16, 32, 32), (32, 800, 200, 4, 4), (5, 17, 3, 5, 7), (1, 8, 8, 1, 1)])
def test_gates_compute_what_torch_computes(shape: tuple[int, ...]) -> None:
    images, many, few, height, width = shape
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    x = torch.randn(images, many, height, width, device="cuda", requires_grad=True)
    sizes = [(few, many), (few,), (many, few), (many,)]
    tensors = [x, *(torch.randn(size, device="cuda", requires_grad=True) for size in sizes)]
    tensors[3].data.mul_(0.5)

    def both() -> tuple[Tensor, ...]:
        y = channel_gates(*tensors)
        torch.manual_seed(1)
        return y.detach(), *torch.autograd.grad(y, tensors, torch.randn_like(y))

    ours = both()
    with plain():
        theirs = both()
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).norm()) <= 1e-5 * float(other.norm()) + 1e-6


@needs_gpu
@pytest.mark.gpu
def test_one_value_a_channel_cannot_be_normalised() -> None:
    x = torch.randn(1, 4, 1, 1, device="cuda")
    with pytest.raises(ValueError, match="more than 1 value"):
        batch_norm(x, None, None, (None, None), 0.1, 1e-5)
