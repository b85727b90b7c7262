"""The MobileNetV3 space of PerFedRLNAS: 8,957,952 networks of inverted residuals at every resolution.

Blocks are those of MobileNetV3 (Howard et al., ICCV 2019): h-swish, channel gates with a hard sigmoid. The table of
stages is the one PerFedRLNAS (Yao and Li, AAAI 2024) searches. Kernel, expansion and depth are chosen per stage, and a
sub-network takes the first channels, the first blocks and the centre of the kernels, as Once-for-All does. Every block
has a shortcut, and its last norm starts at zero, so a fresh network is its shortcuts and depth costs no trainability.

Decisions of ours:

- The shortcut of a stage's first block averages where the stride is 2 and then always has its 1x1 convolution. The
  papers' code has it only where the two widths differ, so that mb1, mb2 and mb3 would have it in some archs and not in
  others (24 to 24 channels, 40 to 40); here the structure is the same for all archs, and a network is
  the supernet with the other entries at zero.
- `stem = "small"` leaves the stem and mb1 at stride 1: a factor of 8 in all instead of 32, so that 32 pixels end as
  4x4. "auto" means small up to 64 pixels a side.
- Dimensions with one option are left out: PerFedRLNAS' 23 groups become 19.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, nn

from ..errors import UserError
from ..kernels.layout import Pointwise, pooled
from ..registry import register
from .base import Arch, Block, Dimension, Space, counted
from .layers import Chain, ConvBlock, HeadBlock, InvertedResidual, Norm, Stem, divisible, small_strides
from .measure import Cost, Piece, total
from .vit_blocks import LastBlock, ResizeBlock

ACT = "hswish"
STEM, WIDEN, FEATURES = 16, 6, 1280  # stem channels; the last convolution's width per channel; features of the head
Shape = tuple[int, ...]


class Stage(NamedTuple):
    """The options of one stage."""

    width: tuple[int, ...]
    depth: tuple[int, ...]
    kernel: tuple[int, ...]
    expand: tuple[int, ...]
    stride: int
    se: bool


STAGES = (
    Stage((16, 24), (1, 2), (3, 5), (1,), 2, True),
    Stage((24, 40), (1, 2), (3, 5), (3, 4, 5), 2, False),
    Stage((40, 80), (2, 3, 4), (3, 5), (3, 4, 5), 2, True),
    Stage((48, 112), (2, 3, 4), (3, 5), (3, 4, 5), 1, True),
    Stage((96, 160), (2, 3, 4), (3, 5), (3, 4, 5), 2, True),
)
CHOICES = ("width", "depth", "kernel", "expand")


@dataclass(frozen=True)
class ShortcutBlock(Block):
    """An inverted residual with its shortcut. `first` in its stage: the shortcut changes the channels and the size."""

    cin: int
    cout: int
    kernel: int
    expand: int
    stride: int
    se: bool
    first: bool
    norm: Norm

    def build(self) -> nn.Module:
        return _Shortcut(self)


class _Shortcut(InvertedResidual):
    def __init__(self, b: ShortcutBlock) -> None:
        hidden = divisible(b.cin * b.expand)
        squeezed = divisible(hidden // 4) if b.se else 0
        super().__init__(b.cin, hidden, b.cout, b.kernel, b.stride, ACT, squeezed, b.norm)
        nn.init.zeros_(self.project.norm.weight)  # type: ignore[arg-type]
        # rounding up keeps odd sizes in step with the padded convolution, down to a map of 1x1
        self.pool = nn.AvgPool2d(2, ceil_mode=True) if b.stride == 2 else None
        self.side = Pointwise(b.cin, b.cout) if b.first else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.laid(x)
        side = x if self.pool is None else pooled(self.pool, x)
        return (side if self.side is None else self.side(side)) + super().forward(x)


class _Counted(NamedTuple):
    """A run of blocks on an input of one shape: what is known of them, their sum, and the shape they leave."""

    pieces: dict[str, Piece]
    cost: Cost
    shape: Shape


@register("space", "mobilenetv3")
@dataclass(frozen=True)
class MobileNetV3(Space):
    stem: Stem = "auto"
    resolutions: tuple[int, ...] = ()  # heights to choose from, the width in proportion; empty: the input's own size
    norm: Norm = "batch"
    dropout: float = 0.0  # before the head

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolutions", tuple(sorted(set(self.resolutions))))
        if any(r < 1 for r in self.resolutions):
            raise UserError(f"space 'mobilenetv3': resolutions must be positive, not {list(self.resolutions)}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"space 'mobilenetv3': dropout = {self.dropout} must be in [0, 1).")

    # what there is to choose ------------------------------------------------------------------------------------

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return self._dimensions

    @cached_property
    def _dimensions(self) -> tuple[Dimension, ...]:
        return (
            *([Dimension("resolution", self.resolutions)] if len(self.resolutions) > 1 else []),
            *(
                Dimension(f"mb{s}.{what}", getattr(stage, what))
                for s, stage in enumerate(STAGES, 1)
                for what in CHOICES
                if len(getattr(stage, what)) > 1
            ),
        )

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width the network works at, by resolution."""
        height, width = self.input[1:]
        return tuple((r, max(1, round(r * width / height))) for r in self.resolutions) or ((height, width),)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the stem and the stages, the same for every arch."""
        small = small_strides(self.stem, self.sizes[-1])
        return (1, 1, *(s.stride for s in STAGES[1:])) if small else (2, *(s.stride for s in STAGES))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where in an arch the choices of each part end: the stem's (the resolution), the stages', the last layers'."""
        ends = [int(len(self.resolutions) > 1)]
        for stage in STAGES:
            ends.append(ends[-1] + sum(len(getattr(stage, what)) > 1 for what in CHOICES))
        return (*ends, ends[-1])

    # networks ---------------------------------------------------------------------------------------------------

    def _part(self, part: int, cin: int, picks: Arch) -> Iterator[tuple[str, Block]]:
        """The blocks of part 0 (the stem), 1 to 5 (the stages) or 6 (the last layers), by the options picked in it."""
        if part == 0:
            if self.resolutions:
                yield "body.resize", ResizeBlock(self.sizes[picks[0] if picks else 0])
            yield "body.stem", ConvBlock(cin, STEM, 3, self.strides[0], act=ACT, norm=self.norm)
        elif part <= len(STAGES):
            stage, picked = STAGES[part - 1], iter(picks)
            options = (getattr(stage, what) for what in CHOICES)
            width, depth, kernel, expand = (o[next(picked)] if len(o) > 1 else o[0] for o in options)
            for i in range(depth):
                stride = 1 if i else self.strides[part]
                block = ShortcutBlock(cin, width, kernel, expand, stride, stage.se, i == 0, self.norm)
                yield f"body.mb{part}.{i}", block
                cin = width
        else:
            yield "body.last", LastBlock(cin, WIDEN * cin, FEATURES, ACT, self.norm)
            yield "head", HeadBlock(FEATURES, self.classes)

    def build(self, arch: Arch) -> nn.Module:
        body: OrderedDict[str, nn.Module] = OrderedDict()
        arch, cin, start = self.check(arch), self.input[0], 0
        for part, end in enumerate(self._ends):
            for name, block in self._part(part, cin, arch[start:end]):
                _, first, rest = (*name.split("."), "", "")[:3]
                if rest:
                    body.setdefault(first, nn.Sequential()).add_module(rest, block.build())
                elif first:
                    body[first] = block.build()
                if isinstance(block, ConvBlock | ShortcutBlock):
                    cin = block.cout
            start = end
        return Chain(nn.Sequential(body), FEATURES, self.classes, self.dropout)

    # costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def _memo(self) -> dict[tuple[int, Arch, Shape], _Counted]:
        return {}  # at most 72 entries for a stage and resolution

    def _walk(self, arch: Arch) -> Iterator[_Counted]:
        """The counted parts of an arch, each remembered by its own choices and its input."""
        memo, shape, start = self._memo, self.input, 0
        for part, end in enumerate(self._ends):
            key = part, arch[start:end], shape
            found = memo.get(key)
            if found is None:
                found = memo[key] = _count(self._part(part, shape[0], arch[start:end]), shape)
            yield found
            shape, start = found.shape, end

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        found: dict[str, Piece] = {}
        for part in self._walk(self.check(arch)):
            found |= part.pieces
        return found

    def cost(self, arch: Arch) -> Cost:
        """The sum of the pieces, from sums over stages that are made once."""
        return total(part.cost for part in self._walk(self.check(arch)))

    def describe(self, arch: Arch) -> str:
        """Stage by stage: width x depth, kernel and expansion."""
        chosen = self.options(self.check(arch))
        words = [f"{chosen['resolution']} px"] if "resolution" in chosen else []
        for s, stage in enumerate(STAGES, 1):
            width, depth, kernel, expand = (chosen.get(f"mb{s}.{what}", getattr(stage, what)[0]) for what in CHOICES)
            words.append(f"mb{s} {width}x{depth} k{kernel} e{expand}")
        return ", ".join(words)


def _count(blocks: Iterator[tuple[str, Block]], shape: Shape) -> _Counted:
    pieces: dict[str, Piece] = {}
    for name, block in blocks:
        pieces[name] = piece = counted(block, shape)
        shape = piece.outputs[0]
    return _Counted(pieces, total(p.cost for p in pieces.values()), shape)
