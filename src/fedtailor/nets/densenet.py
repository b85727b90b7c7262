"""DenseNet-121 and DenseNet-201 (Huang et al. 2017, table 1), growth 32, bottleneck 4, compression one half.

DenseNet-201 is the 20.01 M parameter baseline of FedNAS. The stem for small images is one 3x3 convolution of stride 1
without pooling; for large ones it is the paper's. Pooling rounds sizes up, so that any input size goes through.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import Chain, Norm, Stem, norm_layer
from .base import FixedNet
from .blocks import check_stem, he_init, one_of, small_stem

DEPTHS = {"121": (6, 12, 24, 16), "201": (6, 12, 48, 32)}
GROWTH = 32
BOTTLENECK = 4
START = 64


class _NormConv(nn.Sequential):
    """Normalisation, ReLU, convolution: the order of DenseNet."""

    def __init__(self, cin: int, cout: int, kernel: int, norm: Norm) -> None:
        conv = nn.Conv2d(cin, cout, kernel, padding=kernel // 2, bias=False)
        super().__init__(OrderedDict(norm=norm_layer(norm, cin), act=nn.ReLU(inplace=True), conv=conv))


class _Dense(nn.Module):
    """Adds `GROWTH` channels computed from all channels so far."""

    def __init__(self, cin: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _NormConv(cin, BOTTLENECK * GROWTH, 1, norm)
        self.conv2 = _NormConv(BOTTLENECK * GROWTH, GROWTH, 3, norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(self.conv1(x))], 1)


@register("net", "densenet")
@dataclass(frozen=True)
class DenseNet(FixedNet):
    depth: Literal["121", "201"] = "121"
    stem: Stem = "auto"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_stem(self.name, self.stem, self.norm)
        one_of(self.name, "depth", self.depth, DEPTHS)

    def module(self) -> nn.Module:
        small = small_stem(self.stem, self.input)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if small:
            layers["stem"] = nn.Conv2d(self.input[0], START, 3, padding=1, bias=False)
        else:
            layers["stem"] = nn.Sequential(
                nn.Conv2d(self.input[0], START, 7, 2, 3, bias=False),
                norm_layer(self.norm, START),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, 2, 1),
            )
        channels = START
        for b, depth in enumerate(DEPTHS[self.depth]):
            if b:
                pool = nn.AvgPool2d(2, ceil_mode=True)
                layers[f"halve{b}"] = nn.Sequential(_NormConv(channels, channels // 2, 1, self.norm), pool)
                channels //= 2
            layers[f"block{b + 1}"] = nn.Sequential(*(_Dense(channels + i * GROWTH, self.norm) for i in range(depth)))
            channels += depth * GROWTH
        layers["last"] = nn.Sequential(norm_layer(self.norm, channels), nn.ReLU(inplace=True))
        return he_init(Chain(nn.Sequential(layers), channels, self.classes))
