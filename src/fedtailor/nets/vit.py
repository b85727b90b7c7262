"""A plain vision transformer (Dosovitskiy et al. 2021), small by default as in FedTP (Li et al. 2023).

FedTP: images of 32 pixels, patches of 4, 128 channels, 6 blocks, 8 heads of 64 channels, MLP of 256, dropout 0.1.
Queries, keys and values have projections of their own, `blocks.<i>.attention.{q,k,v}`, all of one shape: a hypernetwork
can generate them for every block.

ViT-S/16, which Qu et al. (2022) put in place of a CNN, is patch 16, dim 384, depth 12, heads 6, mlp 1536 and qkv_bias
true (without the pre-training that they found it needs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..registry import register
from ..spaces.layers import Dropout, small_strides
from .base import FixedNet
from .blocks import at_least, one_of, rate


def _drop(p: float) -> nn.Module:
    return Dropout(p) if p else nn.Identity()


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int, dropout: float, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, heads * dim_head, bias=qkv_bias)
        self.k = nn.Linear(dim, heads * dim_head, bias=qkv_bias)
        self.v = nn.Linear(dim, heads * dim_head, bias=qkv_bias)
        self.out = nn.Linear(heads * dim_head, dim)
        self.dropout = _drop(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        return self.dropout(self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int, mlp: int, dropout: float, qkv_bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads, dim_head, dropout, qkv_bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp), nn.GELU(), _drop(dropout), nn.Linear(mlp, dim), _drop(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _ViT(nn.Module):
    def __init__(self, net: ViT) -> None:
        super().__init__()
        channels, height, width = net.input
        side = net.side
        self.cls = net.pool == "cls"
        self.patches = nn.Conv2d(channels, net.dim, side, side)
        tokens = (height // side) * (width // side) + self.cls
        if self.cls:
            self.token = nn.Parameter(torch.zeros(1, 1, net.dim))
        self.positions = nn.Parameter(torch.zeros(1, tokens, net.dim))
        self.dropout = _drop(net.dropout)
        self.blocks = nn.Sequential(
            *(_Block(net.dim, net.heads, net.dim_head, net.mlp, net.dropout, net.qkv_bias) for _ in range(net.depth))
        )
        self.norm = nn.LayerNorm(net.dim)
        self.head = nn.Linear(net.dim, net.classes)
        for tensor in (self.positions, *([self.token] if self.cls else [])):
            nn.init.trunc_normal_(tensor, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        if self.cls:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.norm(self.blocks(self.dropout(x + self.positions)))
        return self.head(x[:, 0] if self.cls else x.mean(1))


@register("net", "vit")
@dataclass(frozen=True)
class ViT(FixedNet):
    patch: int | None = None  # None: 4 up to 64 pixels a side, else 16
    dim: int = 128
    depth: int = 6
    heads: int = 8
    dim_head: int = 64
    mlp: int = 256
    dropout: float = 0.1
    pool: Literal["cls", "mean"] = "cls"
    qkv_bias: bool = False

    @property
    def side(self) -> int:
        """The side of a patch."""
        return self.patch if self.patch is not None else 4 if small_strides("auto", self.input[1:]) else 16

    def __post_init__(self) -> None:
        one_of(self.name, "pool", self.pool, ("cls", "mean"))
        rate(self.name, dropout=self.dropout)
        at_least(
            self.name,
            1,
            patch=self.side,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            dim_head=self.dim_head,
            mlp=self.mlp,
        )
        height, width = self.input[1:]
        if height % self.side or width % self.side:
            raise UserError(f"net 'vit': patches of {self.side} do not tile images of {height} x {width}. Set patch.")

    def module(self) -> nn.Module:
        return _ViT(self)
