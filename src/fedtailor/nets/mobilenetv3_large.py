"""MobileNetV3-Large (Howard et al. 2019, table 1).

The stem for small images has stride 1, so that 32 x 32 ends as 2 x 2 instead of one position. Dropout 0.2 before the
head, as in the widely used implementations.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import ConvNorm, Dropout, InvertedResidual, Norm, Stem, divisible
from .base import FixedNet
from .blocks import check_stem, he_init, rate, small_stem

# kernel, expanded channels, channels, gates, activation, stride
ROWS = (
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hswish", 2),
    (3, 200, 80, False, "hswish", 1),
    (3, 184, 80, False, "hswish", 1),
    (3, 184, 80, False, "hswish", 1),
    (3, 480, 112, True, "hswish", 1),
    (3, 672, 112, True, "hswish", 1),
    (5, 672, 160, True, "hswish", 2),
    (5, 960, 160, True, "hswish", 1),
    (5, 960, 160, True, "hswish", 1),
)


class _MobileNetV3(nn.Module):
    def __init__(self, channels: int, classes: int, stride: int, dropout: float, norm: Norm) -> None:
        super().__init__()
        cin = 16
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = ConvNorm(channels, cin, 3, stride, act="hswish", norm=norm)
        for i, (kernel, hidden, cout, gates, act, step) in enumerate(ROWS):
            squeezed = divisible(hidden / 4) if gates else 0
            layers[f"row{i + 1}"] = InvertedResidual(
                cin, hidden, cout, kernel, step, act, squeezed, norm, shortcut=step == 1 and cin == cout
            )
            cin = cout
        layers["last"] = ConvNorm(cin, 960, 1, act="hswish", norm=norm)
        self.body = nn.Sequential(layers)
        self.features = nn.Linear(960, 1280)
        self.act = nn.Hardswish(inplace=True)
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.act(self.features(self.body(x).mean((2, 3))))))


@register("net", "mobilenetv3_large")
@dataclass(frozen=True)
class MobileNetV3Large(FixedNet):
    dropout: float = 0.2
    stem: Stem = "auto"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_stem(self.name, self.stem, self.norm)
        rate(self.name, dropout=self.dropout)

    def module(self) -> nn.Module:
        stride = 1 if small_stem(self.stem, self.input) else 2
        return he_init(_MobileNetV3(self.input[0], self.classes, stride, self.dropout, self.norm))
