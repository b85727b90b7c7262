"""The two-convolution network of the first federated-learning papers (McMahan et al. 2017), sized to its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import Dropout, norm_layer
from .base import FixedNet
from .blocks import at_least, one_of, rate

Norm = Literal["none", "batch", "group"]


class _CNN(nn.Module):
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        width: int,
        kernel: int,
        hidden: int,
        dropout: float,
        norm: Norm,
    ) -> None:
        super().__init__()
        channels, height, wide = shape

        def conv(cin: int, cout: int) -> nn.Module:
            layer = nn.Conv2d(cin, cout, kernel, padding=kernel // 2)
            return layer if norm == "none" else nn.Sequential(layer, norm_layer(norm, cout))

        self.body = nn.Sequential(
            conv(channels, width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            conv(width, 2 * width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (height // 4) * (wide // 4), hidden),
            nn.ReLU(inplace=True),
            Dropout(dropout) if dropout else nn.Identity(),
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@register("net", "cnn")
@dataclass(frozen=True)
class CNN(FixedNet):
    width: int = 32  # channels of the first convolution; the second has twice as many
    kernel: int = 3
    hidden: int = 128
    dropout: float = 0.0
    norm: Norm = "none"  # after the convolutions

    def __post_init__(self) -> None:
        one_of(self.name, "norm", self.norm, ("none", "batch", "group"))
        at_least(self.name, 1, width=self.width, kernel=self.kernel, hidden=self.hidden)
        rate(self.name, dropout=self.dropout)

    def module(self) -> nn.Module:
        return _CNN(self.input, self.classes, self.width, self.kernel, self.hidden, self.dropout, self.norm)
