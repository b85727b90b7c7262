"""Depthwise convolutions: by torch everywhere, by kernels of ours on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.spaces.depthwise import Depthwise, Shape, depthwise, is_plain, plain

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
