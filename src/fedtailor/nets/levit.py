"""LeViT (Graham et al. 2021, "LeViT: a Vision Transformer in ConvNet's Clothing for Faster Inference").

Convolutional stem, three stages of attention and MLP blocks, two attention blocks that halve the map in between. All
normalisation is batch normalisation after a linear map, all activations are hard-swish, positions enter as a learnt
bias per head and absolute offset. Linear maps over channels are written as 1x1 convolutions: the same arithmetic.

The stem for large images is the paper's: four 3x3 convolutions of stride 2, 224 -> 14. For small ones it is the last
two of them, 32 -> 8, and below 24 pixels only the second has stride 2. The second head, for distillation, is left out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import ConvNorm, Norm, Stem, norm_layer
from ..spaces.vit_blocks import relative_bias
from .base import FixedNet
from .blocks import DropPath, check_stem, one_of, rate, small_stem

Size = tuple[int, int]


class Variant(NamedTuple):
    """One column of the paper's table 2, for the three stages."""

    widths: tuple[int, int, int]
    heads: tuple[int, int, int]
    depths: tuple[int, int, int]
    key: int  # channels of a head's queries and keys; values have twice as many, four times where the map is halved
    drop_path: float = 0.0


VARIANTS = {
    "128S": Variant((128, 256, 384), (4, 6, 8), (2, 3, 4), 16),
    "128": Variant((128, 256, 384), (4, 8, 12), (4, 4, 4), 16),
    "192": Variant((192, 288, 384), (3, 5, 6), (4, 4, 4), 32),
    "256": Variant((256, 384, 512), (4, 6, 8), (4, 4, 4), 32),
    "384": Variant((384, 512, 768), (6, 9, 12), (4, 4, 4), 32, 0.1),
}


def _project(cin: int, cout: int, norm: Norm) -> nn.Sequential:
    """Hard-swish, linear map, normalisation: the end of every branch."""
    return nn.Sequential(nn.Hardswish(), ConvNorm(cin, cout, 1, act="", norm=norm))


class _Attention(nn.Module):
    """Attention over a map; with stride 2 the queries are every other position and the map is halved."""

    def __init__(
        self, cin: int, cout: int, heads: int, key: int, ratio: int, size: Size, stride: int, norm: Norm
    ) -> None:
        super().__init__()
        self.heads, self.key, self.stride = heads, key, stride
        self.q = ConvNorm(cin, heads * key, 1, act="", norm=norm)
        self.k = ConvNorm(cin, heads * key, 1, act="", norm=norm)
        self.v = ConvNorm(cin, heads * key * ratio, 1, act="", norm=norm)
        self.bias = nn.Parameter(torch.zeros(heads, *size))  # by absolute offset
        self.project = _project(heads * key * ratio, cout, norm)

    def forward(self, x: Tensor) -> Tensor:
        every, size = self.stride, tuple(self.bias.shape[1:])
        wanted = x[:, :, ::every, ::every]
        q = self.q(wanted).flatten(2).unflatten(1, (self.heads, self.key)).transpose(2, 3)
        k = self.k(x).flatten(2).unflatten(1, (self.heads, self.key))
        v = self.v(x).flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
        table = torch.cat([self.bias.flip(1)[:, :-1], self.bias], 1)
        table = torch.cat([table.flip(2)[:, :, :-1], table], 2)  # absolute offsets, mirrored to signed ones
        bias = relative_bias(table).unflatten(1, size)[:, ::every, ::every].flatten(1, 2)
        scores = (q * self.key**-0.5) @ k + bias
        out = (scores.softmax(-1) @ v).transpose(2, 3).flatten(1, 2)
        return self.project(out.unflatten(2, tuple(wanted.shape[2:])))


class _Residual(nn.Module):
    """A branch around a shortcut. Its last normalisation starts at zero, so the block starts as the identity."""

    def __init__(self, branch: nn.Module, last: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.branch = branch
        self.drop = DropPath(drop_path) if drop_path else nn.Identity()
        assert isinstance(last, ConvNorm)
        nn.init.zeros_(last.get_submodule("norm").get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.branch(x))


class _LeViT(nn.Module):
    def __init__(
        self, shape: tuple[int, int, int], classes: int, variant: Variant, small: bool, drop_path: float, norm: Norm
    ) -> None:
        super().__init__()
        width = variant.widths[0]
        strides = ((2, 2) if min(shape[1:]) >= 24 else (1, 2)) if small else (2, 2, 2, 2)
        outs = [width >> i for i in reversed(range(len(strides)))]
        stem: list[nn.Module] = []
        cin, size = shape[0], (shape[1], shape[2])
        for cout, stride in zip(outs, strides, strict=True):
            stem.append(ConvNorm(cin, cout, 3, stride, act="hswish" if cout < width else "", norm=norm))
            cin, size = cout, (-(-size[0] // stride), -(-size[1] // stride))

        def mlp(channels: int) -> nn.Module:
            end = _project(2 * channels, channels, norm)
            branch = nn.Sequential(ConvNorm(channels, 2 * channels, 1, act="", norm=norm), end)
            return _Residual(branch, end[1], drop_path)

        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*stem))
        for s, (width, heads, depth) in enumerate(zip(*variant[:3], strict=True)):
            if s:
                halve = _Attention(cin, width, cin // variant.key, variant.key, 4, size, 2, norm)
                layers[f"halve{s}"] = nn.Sequential(halve, mlp(width))
                cin, size = width, ((size[0] + 1) // 2, (size[1] + 1) // 2)
            blocks: list[nn.Module] = []
            for _ in range(depth):
                attention = _Attention(cin, cin, heads, variant.key, 2, size, 1, norm)
                blocks += [_Residual(attention, attention.project[1], drop_path), mlp(cin)]
            layers[f"stage{s + 1}"] = nn.Sequential(*blocks)
        self.body = nn.Sequential(layers)
        self.norm = norm_layer(norm, cin)
        self.head = nn.Linear(cin, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3), keepdim=True)).flatten(1))


@register("net", "levit")
@dataclass(frozen=True)
class LeViT(FixedNet):
    variant: Literal["128S", "128", "192", "256", "384"] = "128"
    drop_path: float | None = None  # None: the variant's own
    stem: Stem = "auto"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_stem(self.name, self.stem, self.norm)
        one_of(self.name, "variant", self.variant, VARIANTS)
        rate(self.name, drop_path=self.drop_path or 0.0)

    def module(self) -> nn.Module:
        variant = VARIANTS[self.variant]
        drop_path = variant.drop_path if self.drop_path is None else self.drop_path
        small = small_stem(self.stem, self.input)
        return _LeViT(self.input, self.classes, variant, small, drop_path, self.norm)
