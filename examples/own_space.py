"""A search space of your own: residual perceptrons with a choice of width, depth and inner widths, 243 networks in all.

Your module (`Perceptron`) is ordinary PyTorch. The space says which numbers may be chosen and builds the module from
them. The prefix rule holds because a smaller width takes the first entries of every tensor, and a smaller depth leaves
out the last blocks: every tensor of a small network has the name it has in the largest one.

Look at it:  fedtailor space show examples/own_space.py --input 1,8,8
Run it:  fedtailor run demo --set method.name=perfedrlnas --set space.name=examples/own_space.py
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedtailor.registry import register
from fedtailor.spaces.base import Arch, Dimension, Space


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Perceptron(nn.Module):
    def __init__(self, inputs: int, width: int, inner: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*(Block(width, i) for i in inner))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)  # every network ends in a linear layer called head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x.flatten(1)))))


@register("space", "perceptron")
@dataclass(frozen=True)
class PerceptronSpace(Space):
    widths: tuple[int, int, int] = (16, 32, 64)  # options: smallest first

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        inner = [Dimension(f"block{i}.inner", (16, 32, 64)) for i in (1, 2, 3)]
        return (Dimension("width", self.widths), Dimension("depth", (1, 2, 3)), *inner)

    def build(self, arch: Arch) -> nn.Module:
        width, depth, *inner = self.options(self.check(arch)).values()
        channels, height, wide = self.input
        return Perceptron(channels * height * wide, width, tuple(inner[:depth]), self.classes)
