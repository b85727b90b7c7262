"""How the planes of a batch lie in memory: image by image, as torch has them, or channel by channel.

A plane is one channel of one image. Where all planes of a channel lie together, a 1x1 convolution is one matrix product
over all positions of all images, and the statistics of a channel are those of one stretch of memory. Tensors keep
torch's shape, [images, channels, height, width]; the layout is a matter of strides, and a sum of two such keeps it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .compiling import takes
from .products import product


def by_channel(x: Tensor) -> bool:
    """Whether the planes lie channel by channel, and not image by image as well."""
    return x.dim() == 4 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def laid_by_channel(x: Tensor) -> Tensor:
    """The same values, channel by channel."""
    return x if by_channel(x) else x.transpose(0, 1).contiguous().transpose(0, 1)


def laid_like(x: Tensor, other: Tensor) -> Tensor:
    """The same values in the other's layout, one of the two."""
    return laid_by_channel(x) if by_channel(other) else x.contiguous()


def empty_like_laid(other: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Room for planes of another number and size, in a tensor's layout."""
    images = len(other)
    if by_channel(other):
        return other.new_empty((channels, images, height, width)).transpose(0, 1)
    return other.new_empty((images, channels, height, width))


def pooled(pool: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A pool works on planes, whatever they are planes of; torch's would turn the layout round."""
    return pool(x.transpose(0, 1)).transpose(0, 1) if by_channel(x) else pool(x)


def apart(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """So many tensors with an equal share of the channels each."""
    return x.chunk(parts, 1) if parts > 1 else (x,)


class MaxPool(nn.MaxPool2d):
    """torch's pool in both layouts."""

    def forward(self, input: Tensor) -> Tensor:
        return pooled(super().forward, input)  # type: ignore[arg-type]


class AvgPool(nn.AvgPool2d):
    """torch's pool in both layouts."""

    def forward(self, input: Tensor) -> Tensor:
        return pooled(super().forward, input)


class Pointwise(nn.Conv2d):
    """A 1x1 convolution without bias; one matrix product where planes lie channel by channel."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(cin, cout, 1, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if not by_channel(input) or not takes(input):
            return super().forward(input)
        planes = input.transpose(0, 1)
        found = product(self.weight.flatten(1)[None], planes.flatten(1)[None])
        return found.view(-1, *planes.shape[1:]).transpose(0, 1)
