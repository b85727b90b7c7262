"""The blocks of the `vit` space: inverted residuals, transformer blocks on feature maps, resizing and the last layers.

Every tensor follows the prefix rule of `spaces.base`: heads are the slow axis of the query, key and value projections,
so that fewer heads are fewer leading rows, and the table of position biases has the layout of a depthwise kernel, so
that a smaller feature map takes its centre, which are the offsets that exist on it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Block
from .layers import ConvNorm, InvertedResidual, Norm, activation, divisible

RESIDUAL_SCALE = 0.1  # CaiT (Touvron et al. 2021) for networks of up to 18 blocks; NASViT has 1e-4


def relative_bias(table: Tensor) -> Tensor:
    """The (heads, tokens, tokens) bias of a map of H x W tokens from a (heads, 2H - 1, 2W - 1) table of offsets.

    Entry (query, key) is the table at key - query, offset zero being the table's centre. Shearing by padding instead of
    gathering by index keeps the gradient a plain sum: the same on every run and device, and open to vmap.
    """
    heads, rows, columns = table.shape
    height, width = rows // 2 + 1, columns // 2 + 1
    x = _shear(table)  # heads, rows, query x, key x
    x = _shear(x.permute(0, 2, 3, 1))  # heads, query x, key x, query y, key y
    return x.permute(0, 3, 1, 4, 2).reshape(heads, height * width, height * width)


def _shear(x: Tensor) -> Tensor:
    """Turns the last axis, offsets -(n-1) .. n-1, into two axes (query, key) of n each.

    n copies of the row, each padded by one, read back without the padding's stride: row i is shifted by i.
    """
    length = x.shape[-1]
    n = length // 2 + 1
    rows = F.pad(x.unsqueeze(-2).expand(*x.shape[:-1], n, length), (0, 1))
    rows = rows.flatten(-2)[..., : n * length].unflatten(-1, (n, length))
    return rows[..., n - 1 :]


class MapAttention(nn.Module):
    """Attention between all positions of a feature map, given and returned as tokens (batch, tokens, channels).

    A 3x3 depthwise convolution of the values is added to the attended values: it gives the block the locality that
    small data sets do not teach (NASViT convolves its values too). Keys and queries carry no bias: a key's bias cancels
    in the softmax.
    """

    def __init__(self, channels: int, heads: int, key: int, value: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.q = nn.Linear(channels, heads * key, bias=False)
        self.k = nn.Linear(channels, heads * key, bias=False)
        self.v = nn.Linear(channels, heads * value, bias=False)
        self.local = nn.Conv2d(heads * value, heads * value, 3, padding=1, groups=heads * value)
        self.bias = nn.Parameter(torch.zeros(heads, 1, 2 * size[0] - 1, 2 * size[1] - 1))
        self.act = nn.Hardswish()
        self.out = nn.Linear(heads * value, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        local = self.local(v.transpose(1, 2).unflatten(2, self.size)).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        # plain products rather than a fused kernel: every device and the flop counter see the same operations
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + relative_bias(self.bias.squeeze(1))
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(self.act(attended + local))


class MapTransformer(nn.Module):
    """Pre-norm transformer block on a feature map, with a learnt scale per channel on both branches."""

    def __init__(
        self, channels: int, heads: int, key: int, value: int, hidden: int, size: tuple[int, int], act: str
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = MapAttention(channels, heads, key, value, size)
        self.scale1 = nn.Parameter(torch.full((channels,), RESIDUAL_SCALE))
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), activation(act), nn.Linear(hidden, channels))
        self.scale2 = nn.Parameter(torch.full((channels,), RESIDUAL_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.scale1 * self.attention(self.norm1(tokens))
        tokens = tokens + self.scale2 * self.mlp(self.norm2(tokens))
        return tokens.transpose(1, 2).unflatten(2, tuple(x.shape[2:]))


class Resize(nn.Module):
    """Bicubic resizing to a fixed size, inside the network as in PerFedRLNAS, so that it is part of the choice."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) == self.size:
            return x
        return F.interpolate(x, size=self.size, mode="bicubic", align_corners=False)


@dataclass(frozen=True)
class ResizeBlock(Block):
    size: tuple[int, int]

    def build(self) -> nn.Module:
        return Resize(self.size)


@dataclass(frozen=True)
class MBConv(Block):
    """An inverted residual by description; with a shortcut unless it changes the map."""

    cin: int
    cout: int
    kernel: int
    stride: int
    expand: int
    se: bool
    act: str
    norm: Norm
    shortcut: bool

    def build(self) -> nn.Module:
        hidden = divisible(self.cin * self.expand)
        squeezed = divisible(hidden / 4) if self.se else 0
        return InvertedResidual(
            self.cin, hidden, self.cout, self.kernel, self.stride, self.act, squeezed, self.norm, self.shortcut
        )


@dataclass(frozen=True)
class TransformerBlock(Block):
    """A transformer block by description; `size` is the map it works on."""

    channels: int
    heads: int
    key: int  # channels of a head's queries and keys
    value: int  # channels of a head's values
    ratio: int  # hidden channels of the MLP per channel
    size: tuple[int, int]
    act: str

    def build(self) -> nn.Module:
        return MapTransformer(
            self.channels, self.heads, self.key, self.value, self.ratio * self.channels, self.size, self.act
        )


@dataclass(frozen=True)
class LastBlock(Block):
    """MobileNetV3's last layers: 1x1 convolution to `hidden`, mean over positions, 1x1 convolution to `features`."""

    cin: int
    hidden: int
    features: int
    act: str
    norm: Norm

    def build(self) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv=ConvNorm(self.cin, self.hidden, 1, act=self.act, norm=self.norm),
                pool=nn.AdaptiveAvgPool2d(1),
                features=nn.Conv2d(self.hidden, self.features, 1),
                act=activation(self.act),
            )
        )
