"""Slimmable MobileNetV2 (Sandler et al., CVPR 2018): every width that can be chosen freely is a choice.

The space of Luo et al. (FedCS and FedPA), whose supernet is trained as a universally slimmable network (US-Net, Yu and
Huang, ICCV 2019; see `usnet.py`). A network is its channel counts: the stem's, each stage's (one number, because
shortcuts add the blocks of a stage), and the expansion of each block. The 1280 features before the head are
never slimmed, as in MobileNetV2 itself for widths up to 1.

Decisions of ours:

- Counts are multiples of 8 between those of the uniform networks of width `min_width` and 1, so the smallest and the
  largest arch are these two networks. 0.35 is the least width of MobileNetV2's own table and of US-Net's.
- The first block of a stage never has a shortcut, even where the counts before and after happen to be equal:
  structure is the same for all archs. In MobileNetV2 itself the two are never equal at stride 1.
- The first stage's block has no expansion (t = 1): its depthwise convolution is as wide as the stem.
- Convolutions start as in He et al. (2015) by their outputs, and the last norm of blocks with a shortcut at zero (Goyal
  et al., 2017): without the two this deep network hardly starts to learn on small images, with GroupNorm not at all.
- `stem = "small"` leaves the stem and the 24-channel stage at stride 1, as is the custom for CIFAR (factor 8 instead of
  32); Luo et al. do not say.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import nn

from ..errors import UserError, unknown
from ..registry import register
from .base import Arch, Block, Dimension, Space, counted
from .layers import Chain, ConvBlock, HeadBlock, InvertedResidual, Norm, Stem, divisible, small_strides
from .measure import FLOAT_BYTES, Cost, Piece, total

ACT = "relu6"
STEM, FEATURES, EXPAND = 32, 1280, 6
STAGES = ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))  # width, blocks, stride
LEAST_WIDTH = 0.25  # far below it an expansion could be as narrow as its input, and then means a block without one


@dataclass(frozen=True)
class WidthBlock(Block):
    """An inverted residual by its channel counts."""

    cin: int
    hidden: int
    cout: int
    stride: int
    norm: Norm
    shortcut: bool

    def build(self) -> nn.Module:
        made = InvertedResidual(
            self.cin, self.hidden, self.cout, 3, self.stride, ACT, norm=self.norm, shortcut=self.shortcut
        )
        if self.shortcut:
            nn.init.zeros_(made.project.norm.weight)  # type: ignore[arg-type]
        return made


class Row(NamedTuple):
    """One block by its channel counts."""

    stage: int
    block: int
    cin: int
    hidden: int
    cout: int
    stride: int


def uniform_counts(width: float) -> tuple[int, ...]:
    """The channel counts of MobileNetV2 with a width multiplier, in the order of the dimensions."""
    cin = divisible(STEM * width)
    counts = [cin]
    for s, (channels, blocks, _) in enumerate(STAGES):
        cout = divisible(channels * width)
        counts.append(cout)
        if s:
            counts += [EXPAND * cin] + [EXPAND * cout] * (blocks - 1)
        cin = cout
    return tuple(counts)


@register("space", "mobilenetv2")
@dataclass(frozen=True)
class MobileNetV2(Space):
    stem: Stem = "auto"
    min_width: float = 0.35
    norm: Norm = "batch"
    dropout: float = 0.0  # before the head

    def __post_init__(self) -> None:
        if not LEAST_WIDTH <= self.min_width < 1:
            raise UserError(f"space 'mobilenetv2': min_width = {self.min_width} must be in [{LEAST_WIDTH}, 1).")
        if not 0 <= self.dropout < 1:
            raise UserError(f"space 'mobilenetv2': dropout = {self.dropout} must be in [0, 1).")

    # widths -----------------------------------------------------------------------------------------------------

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return self._dimensions

    @cached_property
    def _dimensions(self) -> tuple[Dimension, ...]:
        names = ["stem"]
        for s, (_, blocks, _) in enumerate(STAGES, 1):
            names.append(f"stage{s}")
            names += [f"stage{s}.expand{i}" for i in range(blocks) if s > 1]
        ends = zip(names, uniform_counts(self.min_width), uniform_counts(1.0), strict=True)
        return tuple(Dimension(name, tuple(range(low, high + 1, 8))) for name, low, high in ends)

    @property
    def groups(self) -> tuple[str, ...]:
        """The layers that can be pruned on their own, as names of dimensions: all of them."""
        return tuple(d.name for d in self.dimensions)

    def counts(self, arch: Arch) -> tuple[int, ...]:
        """The channel counts θ of an arch."""
        return tuple(d.options[0] + 8 * i for d, i in zip(self.dimensions, arch, strict=True))  # type: ignore[operator]

    def uniform(self, width: float) -> Arch:
        """MobileNetV2 with a width multiplier."""
        if not self.min_width <= width <= 1:
            raise UserError(f"space 'mobilenetv2': width {width} is not in [{self.min_width}, 1].")
        return tuple(
            (n - low) // 8 for n, low in zip(uniform_counts(width), uniform_counts(self.min_width), strict=True)
        )

    def shrink(self, arch: Arch, group: str, ratio: float) -> Arch | None:
        """The arch with one group pruned from θ to about round(θ(1 - ratio)) channels, or None at its narrowest.

        The count is the nearest allowed one, the lower of two, and always at least one step narrower (Luo et al.,
        Algorithm 1). The old arch is still the caller's: nothing has to be restored by an inverse.
        """
        if group not in self.groups:
            raise unknown("group of space 'mobilenetv2'", group, self.groups)
        if not 0 < ratio < 1:
            raise UserError(f"the share of channels to prune is between 0 and 1, not {ratio}.")
        arch, i = self.check(arch), self.groups.index(group)
        if arch[i] == 0:
            return None
        low = uniform_counts(self.min_width)[i]
        wanted = round((low + 8 * arch[i]) * (1 - ratio))
        nearest = max(0, (wanted - low + 3) // 8)
        return (*arch[:i], min(nearest, arch[i] - 1), *arch[i + 1 :])

    # networks ---------------------------------------------------------------------------------------------------

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the stem and the stages."""
        small = small_strides(self.stem, (self.input[1], self.input[2]))
        return (1 if small else 2, *(1 if small and s == 1 else stride for s, (_, _, stride) in enumerate(STAGES)))

    def _rows(self, arch: Arch) -> Iterator[Row]:
        counts = iter(self.counts(arch))
        cin = next(counts)
        for s, (_, blocks, _) in enumerate(STAGES):
            cout = next(counts)
            for i in range(blocks):
                yield Row(s + 1, i, cin, next(counts) if s else cin, cout, 1 if i else self.strides[s + 1])
                cin = cout

    def _stem(self, arch: Arch) -> ConvBlock:
        return ConvBlock(self.input[0], self.counts(arch)[0], 3, self.strides[0], act=ACT, norm=self.norm)

    def _last(self, cin: int) -> ConvBlock:
        return ConvBlock(cin, FEATURES, 1, act=ACT, norm=self.norm)

    def build(self, arch: Arch) -> nn.Module:
        body: OrderedDict[str, nn.Module] = OrderedDict(stem=self._stem(self.check(arch)).build())
        cin = 0
        for row in self._rows(arch):
            block = WidthBlock(row.cin, row.hidden, row.cout, row.stride, self.norm, shortcut=row.block > 0)
            body.setdefault(f"stage{row.stage}", nn.Sequential()).add_module(str(row.block), block.build())
            cin = row.cout
        body["last"] = self._last(cin).build()
        for layer in (m for part in body.values() for m in part.modules() if isinstance(m, nn.Conv2d)):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2 / layer.groups
            nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
        return Chain(nn.Sequential(body), FEATURES, self.classes, self.dropout)

    # costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def _memo(self) -> dict[tuple[str, int, int, int, tuple[int, ...]], Piece]:
        return {}  # at most about 8,000 layers

    def _layer(self, kind: str, cin: int, cout: int, stride: int, shape: tuple[int, ...]) -> Piece:
        """One convolution with its norm and activation, from the counts of its four narrowest forms.

        All it costs, but for the peak, is linear in each of its widths, so the counts at 8 and 16 channels on both
        sides give every other exactly (tested). Counting each of the thousands of layers would take a minute.
        """
        key = kind, cin, cout, stride, shape
        found = self._memo.get(key)
        if found is None:
            low, down, up, high = (self._corner(kind, i, j, stride, shape) for i in (8, 16) for j in (8, 16))
            x, y = cin // 8 - 1, cout // 8 - 1
            if kind == "depthwise":  # one width
                up, y = high, 0

            def at_widths(field: str) -> int:
                a, b, c, d = (getattr(piece.cost, field) for piece in (low, down, up, high))
                return a + x * (c - a) + y * (b - a) + x * y * (d - c - b + a)

            size = low.outputs[0][1:]
            inside, outside = cin * shape[1] * shape[2], cout * size[0] * size[1]
            cost = Cost(
                at_widths("parameters"),
                at_widths("buffers"),
                at_widths("flops"),
                at_widths("activations"),
                FLOAT_BYTES * (outside + max(inside, outside)),  # of the convolution, or of its norm
            )
            shapes = tuple(
                (name, (cout, form[1] if kind == "depthwise" else cin, *form[2:]) if len(form) == 4 else (cout,))
                for name, form in low.shapes
            )
            found = self._memo[key] = Piece(cost, shapes, ((cout, *size),))
        return found

    def _corner(self, kind: str, cin: int, cout: int, stride: int, shape: tuple[int, ...]) -> Piece:
        depthwise, act = kind == "depthwise", "" if kind == "project" else ACT
        cin, groups = (cout, cout) if depthwise else (cin, 1)
        return counted(ConvBlock(cin, cout, 3 if depthwise else 1, stride, groups, act, self.norm), (cin, *shape[1:]))

    def _layers(self, arch: Arch) -> Iterator[tuple[str, Piece]]:
        """The counted layers. Not whole blocks: with three widths each these would be hundreds of thousands."""
        piece = counted(self._stem(arch), self.input)
        yield "body.stem", piece
        for stage, i, cin, hidden, cout, stride in self._rows(arch):
            if stage > 1:
                piece = self._layer("expand", cin, hidden, 1, piece.outputs[0])
                yield f"body.stage{stage}.{i}.expand", piece
            piece = self._layer("depthwise", hidden, hidden, stride, piece.outputs[0])
            yield f"body.stage{stage}.{i}.depthwise", piece
            piece = self._layer("project", hidden, cout, 1, piece.outputs[0])
            yield f"body.stage{stage}.{i}.project", piece
        piece = counted(self._last(piece.outputs[0][0]), piece.outputs[0])
        yield "body.last", piece
        yield "head", counted(HeadBlock(FEATURES, self.classes), piece.outputs[0])

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        return dict(self._layers(self.check(arch)))

    def cost(self, arch: Arch) -> Cost:
        return total(piece.cost for _, piece in self._layers(self.check(arch)))

    def describe(self, arch: Arch) -> str:
        """The stem, then stage by stage its width and, in brackets, its blocks' expansions."""
        words = [f"stem {self.counts(self.check(arch))[0]}"]
        for row in self._rows(arch):
            if row.block == 0:
                words.append(f"{row.cout} ({row.hidden})")
            else:
                words[-1] = f"{words[-1][:-1]} {row.hidden})"
        return ", ".join(words)
