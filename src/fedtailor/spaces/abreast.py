"""Equal chains of convolutions on one input, computed as one.

A cell's edges often start at the same state with the same operation. Each is a few tiny layers, and what tiny layers
cost is their number. With the chains' filters side by side in one grouped convolution, and their norms side by side in
one norm, every layer runs once for all of them. The numbers are those of the chains one by one, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Chain = nn.Sequential  # of ReLU, Conv2d without bias, BatchNorm2d and GroupNorm


def abreast(chains: Sequence[Chain], x: Tensor) -> list[Tensor]:
    """The outputs of chains that are alike in all but their weights."""
    x = x.repeat(1, len(chains), 1, 1)
    for layers in zip(*chains, strict=True):
        first = layers[0]
        if isinstance(first, nn.ReLU):
            x = F.relu(x, inplace=True)  # of the copy, or of a norm's output, which nobody else reads
        elif isinstance(first, nn.Conv2d):
            x = _convolve(layers, first, x)
        else:
            x = norm_abreast(layers, x)
    return list(x.chunk(len(chains), 1))


def _convolve(layers: Sequence[nn.Module], first: nn.Conv2d, x: Tensor) -> Tensor:
    """Equal convolutions, each on its share of the channels."""
    weights = [cast(nn.Conv2d, layer).weight for layer in layers]
    if x.is_cuda and first.kernel_size == (1, 1) and first.stride == (1, 1):
        # a product of matrices: the grouped kernels of CUDA's library transpose all they read and write
        shares = x.unflatten(1, (len(layers), -1)).flatten(3)
        return (torch.stack(weights).flatten(2) @ shares).flatten(1, 2).unflatten(2, x.shape[2:])
    groups = first.groups * len(layers)
    return F.conv2d(x, torch.cat(weights), None, first.stride, first.padding, first.dilation, groups)


def norm_abreast(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Equal norms, each on its share of the channels."""
    first = layers[0]
    weight, bias = _joined(layers, "weight"), _joined(layers, "bias")
    if isinstance(first, nn.GroupNorm):
        return F.group_norm(x, first.num_groups * len(layers), weight, bias, first.eps)
    assert isinstance(first, nn.BatchNorm2d)
    assert first.momentum is not None
    mean, variance = _joined(layers, "running_mean"), _joined(layers, "running_var")
    y = F.batch_norm(x, mean, variance, weight, bias, first.training, first.momentum, first.eps)
    if first.training and first.momentum and mean is not None and variance is not None:
        own = [getattr(layer, name) for name in ("running_mean", "running_var") for layer in layers]
        torch._foreach_copy_(own, [*mean.chunk(len(layers)), *variance.chunk(len(layers))])
    return y


def _joined(layers: Sequence[nn.Module], name: str) -> Tensor | None:
    found = [getattr(layer, name) for layer in layers]
    return None if found[0] is None else torch.cat(found)
