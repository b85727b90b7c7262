"""Equal chains of convolutions on one input, computed as one.

A cell's edges often start at the same state with the same operation. Each is a few tiny layers, and what tiny layers
cost is their number. With the chains' filters side by side in one grouped convolution, and their norms side by side in
one norm, every layer runs once for all of them. The numbers are those of the chains one by one, up to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.depthwise import Depthwise, depthwise
from ..kernels.layout import apart, by_channel
from ..kernels.norm import Rule, batch_norm, batch_norm_apart
from ..kernels.products import product

Chain = nn.Sequential  # of ReLU, always before Depthwise, Conv2d without bias, BatchNorm2d and GroupNorm, which is last


class SideBySide(nn.Module, ABC):
    """A module that computes several of its layers as one."""

    @abstractmethod
    def lay(self) -> None:
        """Called when the module is at its place, on its device."""


def abreast(chains: Sequence[Chain], x: Tensor) -> list[Tensor]:
    """The outputs of chains that are alike in all but their weights."""
    relu = False  # that is still to be done
    *inner, norms = zip(*chains, strict=True)
    for layers in inner:
        first = layers[0]
        if isinstance(first, nn.ReLU):
            relu = True
        elif isinstance(first, Depthwise):  # the first one reads each channel once for every chain
            weights = joined([cast(nn.Conv2d, layer).weight for layer in layers])
            x, relu = depthwise(x, weights, first.stride[0], first.dilation[0], relu), False
        elif isinstance(first, nn.Conv2d):
            x = _convolve(layers, first, x)
        else:
            x = norm_abreast(layers, x)
    return norm_apart(norms, x)


def _convolve(layers: Sequence[nn.Module], first: nn.Conv2d, x: Tensor) -> Tensor:
    """Equal convolutions, each on its share of the channels."""
    weights = [cast(nn.Conv2d, layer).weight for layer in layers]
    turned = by_channel(x)
    if (x.is_cuda or turned) and first.kernel_size == (1, 1) and first.stride == (1, 1):
        # a product of matrices: the grouped kernels of CUDA's library transpose all they read and write
        each = joined(weights).unflatten(0, (len(layers), -1)).flatten(2)
        if turned:  # one for every layer
            planes = x.transpose(0, 1)
            shares = planes.unflatten(0, (len(layers), -1)).flatten(2)
            return product(each, shares).view(-1, *planes.shape[1:]).transpose(0, 1)
        shares = x.unflatten(1, (len(layers), -1)).flatten(3)
        return (each @ shares).flatten(1, 2).unflatten(2, x.shape[2:])
    groups = first.groups * len(layers)
    return F.conv2d(x, joined(weights), None, first.stride, first.padding, first.dilation, groups)


def norm_abreast(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Equal norms, each on its share of the channels."""
    return _normed(layers, x, 1)[0]


def norm_apart(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The same, with a tensor for the output of each."""
    return list(_normed(layers, x, len(layers)))


def _normed(layers: Sequence[nn.Module], x: Tensor, parts: int) -> Sequence[Tensor]:
    first = layers[0]
    weight, bias = _all(layers, "weight"), _all(layers, "bias")
    if isinstance(first, nn.GroupNorm):
        return apart(F.group_norm(x, first.num_groups * len(layers), weight, bias, first.eps), parts)
    assert isinstance(first, nn.BatchNorm2d)
    assert first.momentum is not None
    mean, variance = _all(layers, "running_mean"), _all(layers, "running_var")
    if not first.training:
        return apart(F.batch_norm(x, mean, variance, weight, bias, mean is None, 0.0, first.eps), parts)
    y = batch_norm_apart(x, weight, bias, Rule((mean, variance), first.momentum, first.eps), parts)
    if first.momentum and mean is not None and variance is not None:
        _give_back(layers, "running_mean", mean)
        _give_back(layers, "running_var", variance)
    return y


def norm_once(layers: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """What equal norms without weights make of one input in training; None if they have to be asked one by one."""
    first = layers[0]
    if not isinstance(first, nn.BatchNorm2d) or not first.training or isinstance(first.weight, nn.Parameter):
        return None
    mean, variance = _all(layers, "running_mean"), _all(layers, "running_var")
    if first.momentum is None or mean is None or variance is None:
        return None
    y = batch_norm(x, first.weight, first.bias, Rule((mean, variance), first.momentum, first.eps))
    _give_back(layers, "running_mean", mean)
    _give_back(layers, "running_var", variance)
    return y


def lay(layers: Sequence[nn.Module]) -> None:
    """Puts what equal layers hold next to each other, so that nobody has to join it every time."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensors = [t for layer in layers if isinstance(t := getattr(layer, name, None), Tensor)]
        if len(tensors) == len(layers):
            places = torch.cat([t.detach() for t in tensors]).chunk(len(tensors))
            for tensor, place in zip(tensors, places, strict=True):
                tensor.data = place


class _Joined(torch.autograd.Function):
    """Tensors that lie next to each other, seen as one."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.many, first = len(tensors), tensors[0].detach()
        return first.as_strided((len(tensors) * len(first), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0].contiguous().chunk(ctx.many)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Equal tensors, one after another along their first axis."""
    return _Joined.apply(*tensors) if _laid(tensors) else torch.cat(list(tensors))  # type: ignore[return-value]


def _all(layers: Sequence[nn.Module], name: str) -> Tensor | None:
    found = [getattr(layer, name) for layer in layers]
    return None if found[0] is None else joined(found)


def _laid(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie next to each other, in this order."""
    first = tensors[0]
    start, size = first.data_ptr(), first.nbytes
    block = first.untyped_storage().data_ptr()
    return first.is_contiguous() and all(
        t.data_ptr() == start + i * size and t.untyped_storage().data_ptr() == block for i, t in enumerate(tensors)
    )


def _give_back(layers: Sequence[nn.Module], name: str, joined: Tensor) -> None:
    own = [getattr(layer, name) for layer in layers]
    if own[0].data_ptr() != joined.data_ptr():
        torch._foreach_copy_(own, list(joined.chunk(len(own))))
