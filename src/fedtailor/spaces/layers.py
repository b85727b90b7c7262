"""Building blocks that several spaces and nets share."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..seeds import hash_bits, uniform
from .base import Block

Norm = Literal["batch", "group"]
ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hswish": nn.Hardswish, "swish": nn.SiLU, "gelu": nn.GELU}


def divisible(value: float, by: int = 8) -> int:
    """The nearest multiple of `by`, never more than 10 % below the value (the MobileNet family's rounding)."""
    rounded = max(by, int(value + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * value else rounded


def norm_layer(kind: Norm, channels: int, affine: bool = True) -> nn.Module:
    """Batch normalisation, or its GroupNorm twin (groups of at most 8 channels that divide them)."""
    if kind == "batch":
        return nn.BatchNorm2d(channels, affine=affine)
    size = next(s for s in (8, 6, 5, 4, 3, 2, 1) if channels % s == 0)
    return nn.GroupNorm(channels // size, channels, affine=affine)


def activation(kind: str) -> nn.Module:
    return ACTIVATIONS[kind]() if kind == "gelu" else ACTIVATIONS[kind](inplace=True)


class Dropout(nn.Module):
    """Dropout whose mask is a function of a counter, so that it is the same on every engine and device.

    The engine writes a seed before a training job; each forward pass moves the counter on by one.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.counter.add_(1)
        keep = uniform(hash_bits(self.counter), *x.shape) >= self.p
        return x * keep / (1 - self.p)


def seed_dropout(module: nn.Module, seed: int) -> None:
    """Starts every dropout layer of the module at its own counter."""
    for i, layer in enumerate(m for m in module.modules() if isinstance(m, Dropout)):
        layer.counter.fill_((seed + (i << 40)) & ((1 << 62) - 1))


class ConvNorm(nn.Sequential):
    """Convolution, normalisation and, unless `act` is empty, an activation. Padding keeps the size at stride 1."""

    def __init__(
        self, cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1, act: str = "relu", norm: Norm = "batch"
    ) -> None:
        layers: list[tuple[str, nn.Module]] = [
            ("conv", nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)),
            ("norm", norm_layer(norm, cout)),
        ]
        if act:
            layers.append(("act", activation(act)))
        super().__init__(OrderedDict(layers))


class Chain(nn.Module):
    """Blocks one after another, then mean over positions and the linear layer `head`."""

    def __init__(self, body: nn.Module, features: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = body
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x).mean((2, 3))))


@dataclass(frozen=True)
class HeadBlock(Block):
    """The linear layer after the mean over positions."""

    features: int
    classes: int

    def build(self) -> nn.Module:
        return _Head(self.features, self.classes)


class _Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mean((2, 3)), self.weight, self.bias)


@dataclass(frozen=True)
class ConvBlock(Block):
    """A `ConvNorm` by description."""

    cin: int
    cout: int
    kernel: int
    stride: int = 1
    groups: int = 1
    act: str = "relu"
    norm: Norm = "batch"

    def build(self) -> nn.Module:
        return ConvNorm(self.cin, self.cout, self.kernel, self.stride, self.groups, self.act, self.norm)
