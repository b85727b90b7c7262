"""A fixed network of your own, in the two ways there are.

1. A function that returns a module: nothing but PyTorch.
2. A class with options, which can then be set from the config, are written into config.toml and checked.

Run them:  fedtailor run demo --set net.name=examples/own_net.py:small
           fedtailor run demo --set net.name=examples/own_net.py:Strip --set net.width=24
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedtailor.nets.base import FixedNet
from fedtailor.options import AtLeastOne


class _Strip(nn.Module):
    """Three convolutions, the mean over all positions, and a linear layer."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for cin, stride in ((channels, 1), (width, 2), (width, 2)):
            layers += [nn.Conv2d(cin, width, 3, stride, 1), nn.GroupNorm(4, width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)  # every network ends in a linear layer called head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def small(input: tuple[int, int, int], classes: int) -> nn.Module:
    """Called with the images' shape (channels, height, width) and the number of classes."""
    return _Strip(input[0], 16, classes)


@dataclass(frozen=True)
class Strip(FixedNet):
    name: ClassVar[str] = "strip"

    width: AtLeastOne = 16  # channels of every convolution; a multiple of 4

    def module(self) -> nn.Module:
        return _Strip(self.input[0], self.width, self.classes)
