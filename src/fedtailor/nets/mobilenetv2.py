"""MobileNetV2 (Sandler et al. 2018, table 2) with its width multiplier.

With the stem for small images the first convolution and the stage of 24 channels have stride 1, the usual change for
32 x 32 (32 -> 16 -> 8 -> 4). Widths are rounded to multiples of 8 and the last convolution is never thinner than 1280.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from ..registry import register
from ..spaces.layers import Chain, ConvNorm, InvertedResidual, Norm, Stem, divisible
from .base import FixedNet
from .blocks import at_least, check_stem, he_init, rate, small_stem

# expansion, channels, blocks, stride
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@register("net", "mobilenetv2")
@dataclass(frozen=True)
class MobileNetV2(FixedNet):
    width: float = 1.0  # multiplies all channels
    dropout: float = 0.2  # before the head
    stem: Stem = "auto"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_stem(self.name, self.stem, self.norm)
        at_least(self.name, 0.05, width=self.width)
        rate(self.name, dropout=self.dropout)

    def module(self) -> nn.Module:
        small = small_stem(self.stem, self.input)
        cin = divisible(32 * self.width)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = ConvNorm(self.input[0], cin, 3, 1 if small else 2, act="relu6", norm=self.norm)
        for s, (expand, channels, depth, stride) in enumerate(STAGES):
            cout = divisible(channels * self.width)
            blocks: list[nn.Module] = []
            for i in range(depth):
                step = stride if i == 0 and not (small and channels == 24) else 1
                blocks.append(
                    InvertedResidual(
                        cin, cin * expand, cout, 3, step, norm=self.norm, shortcut=step == 1 and cin == cout
                    )
                )
                cin = cout
            layers[f"stage{s + 1}"] = nn.Sequential(*blocks)
        last = divisible(1280 * max(1.0, self.width))
        layers["last"] = ConvNorm(cin, last, 1, act="relu6", norm=self.norm)
        return he_init(Chain(nn.Sequential(layers), last, self.classes, self.dropout))
