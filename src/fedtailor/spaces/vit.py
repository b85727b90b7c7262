"""A space of hybrid networks, convolution stages first and attention stages after, in the spirit of NASViT.

NASViT (Gong et al., ICLR 2022) is the transformer space of PerFedRLNAS. This is our own code, written from the two
papers' tables. Two scales:

- `large`: NASViT's table for images of 224 pixels, 4.8e10 archs with its four resolutions. From the fourth stage on
  only a stage's first block is an inverted residual and the rest are transformer blocks, with heads of 8 channels and
  values four times as wide. 8 to 17 M parameters, 178 to 1706 M multiply-adds (PerFedRLNAS quotes 159 to 1294 M).
- `small`: the same idea for images of 8 to 64 pixels: two convolution and two attention stages. The number of heads and
  the MLP's ratio are choices of their own. No stage shrinks the map below 4 x 4. On 32 x 32, 0.3 to 2.3 M parameters
  and 12 to 90 M multiply-adds.

A stage's choices hold for all its blocks, as in NASViT: width, depth (its first blocks), kernel, expansion of its
inverted residuals, heads and MLP ratio. With `resolutions` the input is resized inside the network, to a size that is
a choice too; the table of position biases then belongs to the largest size, and a smaller one uses its centre.

Where this differs from NASViT:

- LayerNorm is over the channels of each token. NASViT normalises over tokens and channels together, which ties a
  network's statistics to its resolution.
- One MLP of ratio 2 instead of two of ratio 1 (the same weights and products); no talking-heads projections (two more
  products per block over the attention maps, felt most where the maps are small); the 3x3 convolution of the
  values is added to the attended values.
- The residual scales are one number per channel and start at 0.1 instead of 1e-4: the networks are shallower here and
  federated rounds are few.
- The first block of a stage has no shortcut (NASViT pools or projects one): whether two elastic widths are equal should
  not decide it. No drop path; training tricks belong to methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import nn

from ..errors import UserError, unknown
from ..registry import register
from .base import Arch, Block, Dimension, Space, counted
from .layers import Chain, ConvBlock, HeadBlock, Norm
from .measure import Cost, Piece, total
from .vit_blocks import LastBlock, MBConv, ResizeBlock, TransformerBlock

SCALES = ("auto", "small", "large")
NORMS = ("batch", "group")
SMALL_SIDE = 64  # "auto" takes the small scale up to this many pixels a side
ACT = "swish"

Shape = tuple[int, ...]


class Stage(NamedTuple):
    """The options of one stage. A stage with `heads` has transformer blocks after its first block."""

    width: tuple[int, ...]
    depth: tuple[int, ...]
    kernel: tuple[int, ...]
    expand: tuple[int, ...]
    stride: int
    se: bool = False
    heads: tuple[int, ...] = ()  # 0: as many as the width has keys
    mlp: tuple[int, ...] = ()


class Plan(NamedTuple):
    """The options of a whole scale."""

    stem: tuple[int, ...]
    stages: tuple[Stage, ...]
    last: tuple[int, ...]
    widen: int  # the last 1x1 convolution's width per channel before the mean; 0: one layer only
    key: int  # channels of a head's keys
    value: int  # channels of a head's values
    least: int  # strides stop where the map's shorter side would fall below this


PLANS = {
    "small": Plan(
        stem=(16, 24),
        stages=(
            Stage((16, 24), (1, 2), (3, 5), (1,), 1),
            Stage((32, 40, 48), (2, 3, 4), (3, 5), (3, 4, 6), 2, se=True),
            Stage((64, 80, 96), (2, 3, 4), (3, 5), (3, 4, 6), 2, se=True, heads=(4, 6), mlp=(1, 2)),
            Stage((112, 144, 176), (2, 3, 4, 5), (3,), (4, 6), 2, se=True, heads=(6, 8, 10), mlp=(1, 2)),
        ),
        last=(384, 512),
        widen=0,
        key=16,
        value=32,
        least=4,
    ),
    # the table of NASViT, section 4 and its defaults; kernels and expansions with one option are no choices
    "large": Plan(
        stem=(16, 24),
        stages=(
            Stage((16, 24), (1, 2), (3, 5), (1,), 1),
            Stage((24, 32), (3, 4, 5), (3, 5), (4, 5, 6), 2),
            Stage((32, 40), (3, 4, 5, 6), (3,), (4, 5, 6), 2, se=True),
            Stage((64, 72), (3, 4, 5, 6), (3,), (4, 5, 6), 2, heads=(0,), mlp=(2,)),
            Stage((112, 120, 128), tuple(range(3, 10)), (3,), (4, 5, 6), 2, se=True, heads=(0,), mlp=(2,)),
            Stage((160, 168, 176, 184), tuple(range(3, 9)), (3,), (6,), 1, se=True, heads=(0,), mlp=(2,)),
            Stage((208, 216, 224), (3, 4, 5, 6), (3,), (6,), 2, se=True, heads=(0,), mlp=(2,)),
        ),
        last=(1792, 1984),
        widen=6,
        key=8,
        value=32,
        least=2,
    ),
}


class _Part(NamedTuple):
    """A run of blocks under one prefix, and the choices it reads from an arch: arch[start:stop]."""

    name: str
    fields: dict[str, tuple[int, ...]]
    start: int
    stop: int

    def settings(self, arch: Arch) -> dict[str, int]:
        at = iter(arch[self.start : self.stop])
        return {f: options[next(at) if len(options) > 1 else 0] for f, options in self.fields.items()}


class _Counted(NamedTuple):
    """A part of one arch: its blocks, what they cost, and the shape they leave."""

    blocks: dict[str, Block]
    pieces: dict[str, Piece]
    cost: Cost
    shape: Shape


@register("space", "vit")
@dataclass(frozen=True)
class ViT(Space):
    scale: Literal["auto", "small", "large"] = "auto"
    norm: Norm = "batch"  # of the convolutions; transformer blocks have LayerNorm
    resolutions: tuple[int, ...] = ()  # heights to choose from, the width in proportion; empty: the input's own size

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown("scale of space 'vit'", self.scale, SCALES)
        if self.norm not in NORMS:
            raise unknown("norm of space 'vit'", self.norm, NORMS)
        if any(r < 8 for r in self.resolutions):
            raise UserError(f"space 'vit': resolutions must be at least 8 pixels, not {list(self.resolutions)}.")
        object.__setattr__(self, "resolutions", tuple(sorted(set(self.resolutions))))

    # what there is to choose ------------------------------------------------------------------------------------

    def _size(self, resolution: int) -> tuple[int, int]:
        height, width = self.input[1:]
        return resolution, max(1, round(resolution * width / height))

    @cached_property
    def plan(self) -> Plan:
        sizes = [self._size(r) for r in self.resolutions] or [self.input[1:]]
        scale = self.scale if self.scale != "auto" else "small" if min(sizes[-1]) <= SMALL_SIDE else "large"
        return PLANS[scale]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the stem and the stages: the same for every arch, fitted to the smallest resolution."""
        side = min(self._size(self.resolutions[0]) if self.resolutions else self.input[1:])
        wanted = [1 if self.plan is PLANS["small"] and side <= SMALL_SIDE * 3 // 4 else 2]
        wanted += [stage.stride for stage in self.plan.stages]
        found: list[int] = []
        for stride in wanted:
            stride = stride if -(-side // stride) >= self.plan.least else 1
            side = -(-side // stride)
            found.append(stride)
        return tuple(found)

    @cached_property
    def _parts(self) -> tuple[_Part, ...]:
        fields: list[tuple[str, dict[str, tuple[int, ...]]]] = [("stem", {"width": self.plan.stem})]
        if self.resolutions:
            fields.insert(0, ("resolution", {"": self.resolutions}))
        for i, stage in enumerate(self.plan.stages):
            named = ("width", "depth", "kernel", "expand", "heads", "mlp")
            fields.append((f"stage{i + 1}", {f: getattr(stage, f) for f in named if getattr(stage, f)}))
        fields += [("last", {"width": self.plan.last}), ("head", {})]
        parts: list[_Part] = []
        at = 0
        for name, options in fields:
            free = sum(len(o) > 1 for o in options.values())
            parts.append(_Part(name, options, at, at + free))
            at += free
        return tuple(parts)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return self._dimensions

    @cached_property
    def _dimensions(self) -> tuple[Dimension, ...]:
        return tuple(
            Dimension(f"{part.name}.{field}".rstrip("."), options)
            for part in self._parts
            for field, options in part.fields.items()
            if len(options) > 1
        )

    # networks ---------------------------------------------------------------------------------------------------

    def _blocks(self, part: _Part, arch: Arch, shape: Shape) -> Iterator[tuple[str, Block]]:
        """The blocks of one part on an input of this shape, by the names they have in the network."""
        chosen, plan, cin = part.settings(arch), self.plan, shape[0]
        if part.name == "resolution":
            yield "body.resize", ResizeBlock(self._size(chosen[""]))
        elif part.name == "stem":
            yield "body.stem", ConvBlock(cin, chosen["width"], 3, self.strides[0], act=ACT, norm=self.norm)
        elif part.name == "last" and plan.widen:
            yield "body.last", LastBlock(cin, plan.widen * cin, chosen["width"], ACT, self.norm)
        elif part.name == "last":
            yield "body.last", ConvBlock(cin, chosen["width"], 1, act=ACT, norm=self.norm)
        elif part.name == "head":
            yield "head", HeadBlock(cin, self.classes)
        else:
            number = int(part.name.removeprefix("stage"))
            yield from self._stage(number, chosen, shape)

    def _stage(self, number: int, chosen: dict[str, int], shape: Shape) -> Iterator[tuple[str, Block]]:
        plan, stage, stride = self.plan, self.plan.stages[number - 1], self.strides[number]
        width, kernel, expand = chosen["width"], chosen["kernel"], chosen["expand"]
        size = -(-shape[1] // stride), -(-shape[2] // stride)
        yield (
            f"body.stage{number}.0",
            MBConv(shape[0], width, kernel, stride, expand, stage.se, ACT, self.norm, shortcut=False),
        )
        for i in range(1, chosen["depth"]):
            if stage.heads:
                heads = chosen["heads"] or width // plan.key
                block = TransformerBlock(width, heads, plan.key, plan.value, chosen["mlp"], size, ACT)
            else:
                block = MBConv(width, width, kernel, 1, expand, stage.se, ACT, self.norm, shortcut=True)
            yield f"body.stage{number}.{i}", block

    @cached_property
    def _memo(self) -> dict[tuple[int, Arch, Shape], _Counted]:
        return {}  # a few thousand entries at most: one per part, its choices and its input's shape

    def _walk(self, arch: Arch) -> Iterator[_Counted]:
        memo, shape = self._memo, self.input
        for i, part in enumerate(self._parts):
            key = i, arch[part.start : part.stop], shape
            found = memo.get(key)
            if found is None:
                blocks, pieces, out = dict(self._blocks(part, arch, shape)), {}, shape
                for name, block in blocks.items():
                    pieces[name] = piece = counted(block, out)
                    out = piece.outputs[0]
                found = memo[key] = _Counted(blocks, pieces, total(p.cost for p in pieces.values()), out)
            yield found
            shape = found.shape

    def build(self, arch: Arch) -> nn.Module:
        body = nn.Sequential()
        features = 0
        for part in self._walk(self.check(arch)):
            for name, block in part.blocks.items():
                if name == "head":
                    continue
                _, first, *rest = name.split(".")
                if not rest:
                    body.add_module(first, block.build())
                else:
                    if first not in body._modules:
                        body.add_module(first, nn.Sequential())
                    body.get_submodule(first).add_module(rest[0], block.build())
                features = part.shape[0]
        return Chain(body, features, self.classes)

    def pieces(self, arch: Arch) -> dict[str, Piece]:
        found: dict[str, Piece] = {}
        for part in self._walk(arch):
            found |= part.pieces
        return found

    def cost(self, arch: Arch) -> Cost:
        return total(part.cost for part in self._walk(self.check(arch)))

    def describe(self, arch: Arch) -> str:
        """Part by part: width x depth, then kernel, expansion, heads and MLP ratio by their first letters."""
        arch, words = self.check(arch), []
        for part in self._parts:
            chosen = part.settings(arch)
            if part.name == "resolution":
                words.append(f"{chosen['']} px")
            elif "depth" in chosen:
                rest = " ".join(f"{f[0]}{chosen[f]}" for f in ("kernel", "expand", "heads", "mlp") if chosen.get(f))
                words.append(f"{part.name} {chosen['width']}x{chosen['depth']} {rest}")
            elif chosen:
                words.append(f"{part.name} {chosen['width']}")
        return ", ".join(words)
