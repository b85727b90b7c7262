"""Building blocks that several spaces and nets share."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.compiling import takes
from ..kernels.depthwise import Depthwise
from ..kernels.gates import channel_gates
from ..kernels.layout import Pointwise, laid_by_channel
from ..kernels.norm import ACTS, small
from ..kernels.norm_layer import BatchNorm
from ..kernels.random import uniform
from .base import Block

Norm = Literal["batch", "group"]
Stem = Literal["auto", "small", "large"]  # strides for small images, for large ones, or by the size of the input
ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hswish": nn.Hardswish, "swish": nn.SiLU, "gelu": nn.GELU}


def divisible(value: float, by: int = 8) -> int:
    """The nearest multiple of `by`, never more than 10 % below the value (the MobileNet family's rounding)."""
    rounded = max(by, int(value + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * value else rounded


def small_strides(stem: Stem, size: tuple[int, int]) -> bool:
    """Whether the first strides are left out, as is the custom for CIFAR: "auto" does so up to 64 pixels a side."""
    return stem == "small" or (stem == "auto" and min(size) <= 64)


def norm_layer(kind: Norm, channels: int, affine: bool = True) -> nn.Module:
    """Batch normalisation, or its GroupNorm twin (groups of at most 8 channels that divide them)."""
    if kind == "batch":
        return BatchNorm(channels, affine=affine)
    size = next(s for s in (8, 6, 5, 4, 3, 2, 1) if channels % s == 0)
    return nn.GroupNorm(channels // size, channels, affine=affine)


def activation(kind: str) -> nn.Module:
    # in place where the backward pass reads the result; of the others torch would keep a copy
    return ACTIVATIONS[kind](inplace=True) if kind in ("relu", "relu6") else ACTIVATIONS[kind]()


class Counted(nn.Module):
    """A layer whose random numbers are a function of a counter, the same on every engine and device.

    The engine writes a seed before a training job; each training pass moves the counter on by one.
    """

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64), persistent=False)


class Dropout(Counted):
    """Dropout whose mask is a function of a counter."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.counter.add_(1)
        keep = uniform(self.counter, *x.shape) >= self.p
        return x * keep / (1 - self.p)


def seed_dropout(module: nn.Module, seed: int) -> None:
    """Starts every random layer of the module (dropout, drop-path, noise) at its own counter.

    An engine's networks have a list of them; looking through hundreds of modules takes longer.
    """
    known = module.__dict__.get("random_layers")
    layers = [m for m in module.modules() if isinstance(m, Counted)] if known is None else known
    for i, layer in enumerate(layers):
        layer.counter.fill_(counter_start(seed, i))


def counter_start(seed: int, layer: int) -> int:
    """Where a network's so many-th random layer starts to count."""
    return (seed + (layer << 40)) & ((1 << 62) - 1)


class ConvNorm(nn.Sequential):
    """Convolution, normalisation and, unless `act` is empty, an activation. Padding keeps the size at stride 1."""

    def __init__(
        self,
        cin: int,
        cout: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        act: str = "relu",
        norm: Norm = "batch",
    ) -> None:
        if groups == cin == cout:
            conv = Depthwise(cin, kernel, stride)
        elif kernel == stride == groups == 1:
            conv = Pointwise(cin, cout)
        else:
            conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)
        layers: list[tuple[str, nn.Module]] = [("conv", conv), ("norm", norm_layer(norm, cout))]
        if act:
            layers.append(("act", activation(act)))
        super().__init__(OrderedDict(layers))
        self.kind = act

    def forward(self, input: Tensor, plus: Tensor | None = None) -> Tensor:
        """What is given as `plus`, a shortcut, is added before the activation."""
        conv, norm, *act = self
        y = conv(input)
        if isinstance(norm, BatchNorm) and self.kind in ACTS and takes(y):
            return norm(y, self.kind, plus)
        y = norm(y) if plus is None else plus + norm(y)
        return act[0](y) if act else y


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
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.mean((2, 3)), self.weight, self.bias)


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


class SqueezeExcite(nn.Module):
    """Channel gates from the mean over positions, with a hard sigmoid (Howard et al. 2019, MobileNetV3)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, squeezed)
        self.expand = nn.Linear(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        return channel_gates(x, self.reduce.weight, self.reduce.bias, self.expand.weight, self.expand.bias)


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, gates, 1x1 projection (Sandler et al. 2018; gates: Howard et al. 2019).

    `hidden` equal to `cin` leaves the expansion out, as both papers do; `squeezed` = 0 leaves the gates out. The
    shortcut is the caller's to ask for: in a space it must not depend on whether two elastic widths happen to be equal.
    """

    def __init__(
        self,
        cin: int,
        hidden: int,
        cout: int,
        kernel: int,
        stride: int = 1,
        act: str = "relu6",
        squeezed: int = 0,
        norm: Norm = "batch",
        shortcut: bool = False,
    ) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.expand = ConvNorm(cin, hidden, 1, act=act, norm=norm) if hidden != cin else nn.Identity()
        self.depthwise = ConvNorm(hidden, hidden, kernel, stride, groups=hidden, act=act, norm=norm)
        self.gate = SqueezeExcite(hidden, squeezed) if squeezed else nn.Identity()
        self.project = ConvNorm(hidden, cout, 1, act="", norm=norm)

    def laid(self, x: Tensor) -> Tensor:
        """The input as its kernels want it in training: planes channel by channel."""
        return laid_by_channel(x) if self.training and isinstance(self.project.norm, BatchNorm) and small(x) else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.laid(x)
        out = self.project(self.gate(self.depthwise(self.expand(x))))
        return x + out if self.shortcut else out
