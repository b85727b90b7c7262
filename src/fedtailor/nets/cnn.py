"""The two-convolution network of the first federated-learning papers (McMahan et al. 2017), sized to its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import Dropout
from .base import FixedNet


class _CNN(nn.Module):
    def __init__(self, shape: tuple[int, int, int], classes: int, width: int, kernel: int, hidden: int, dropout: float):
        super().__init__()
        channels, height, wide = shape
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, kernel, padding=kernel // 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel, padding=kernel // 2),
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

    def module(self) -> nn.Module:
        return _CNN(self.input, self.classes, self.width, self.kernel, self.hidden, self.dropout)
