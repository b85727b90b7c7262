"""A space of 64 small convolutional networks: every arch can be enumerated, and a CPU searches it in seconds.

Two stages, each with a choice of width, kernel and depth. All blocks after a stage's first are residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ..registry import register
from .base import Arch, Block, Dimension, Space, counted
from .layers import Chain, ConvBlock, ConvNorm, HeadBlock, Norm
from .measure import Piece

WIDTHS = ((8, 16), (16, 32))
DIMENSIONS = tuple(
    Dimension(f"stage{s + 1}.{what}", options)
    for s in range(2)
    for what, options in (("width", WIDTHS[s]), ("kernel", (3, 5)), ("depth", (1, 2)))
)


@dataclass(frozen=True)
class Residual(Block):
    """Depthwise convolution and a 1x1 convolution around a shortcut."""

    channels: int
    kernel: int
    norm: Norm

    def build(self) -> nn.Module:
        return _Residual(self.channels, self.kernel, self.norm)


class _Residual(nn.Module):
    def __init__(self, channels: int, kernel: int, norm: Norm) -> None:
        super().__init__()
        self.depthwise = ConvNorm(channels, channels, kernel, groups=channels, norm=norm)
        self.pointwise = ConvNorm(channels, channels, 1, act="", norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pointwise(self.depthwise(x))


@register("space", "tiny")
@dataclass(frozen=True)
class Tiny(Space):
    norm: Norm = "batch"

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return DIMENSIONS

    def blocks(self, arch: Arch) -> Iterator[tuple[str, Block]]:
        cin = self.input[0]
        for s in range(2):
            width, kernel, depth = WIDTHS[s][arch[3 * s]], (3, 5)[arch[3 * s + 1]], (1, 2)[arch[3 * s + 2]]
            yield f"{s}.0", ConvBlock(cin, width, kernel, stride=1 + s, norm=self.norm)
            for i in range(1, depth):
                yield f"{s}.{i}", Residual(width, kernel, self.norm)
            cin = width

    def build(self, arch: Arch) -> nn.Module:
        stages: list[list[nn.Module]] = [[], []]
        for name, block in self.blocks(self.check(arch)):
            stages[int(name[0])].append(block.build())
        return Chain(nn.Sequential(*(nn.Sequential(*s) for s in stages)), WIDTHS[1][arch[3]], self.classes)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        found: dict[str, Piece] = {}
        shape: tuple[int, ...] = self.input
        for name, block in self.blocks(arch):
            found[f"body.{name}"] = piece = counted(block, shape)
            shape = piece.outputs[0]
        found["head"] = counted(HeadBlock(WIDTHS[1][arch[3]], self.classes), shape)
        return found
