"""ResNet-18 (He et al. 2016, "Deep Residual Learning for Image Recognition", table 1).

The stem for small images is one 3x3 convolution of stride 1 without pooling (11,173,962 parameters for 10 classes of
colour images); for large ones it is the paper's 7x7 convolution of stride 2 and max-pooling. `norm = "group"` is the
ResNet-18-GN of federated work, where batch statistics of unlike clients do not average well (Hsieh et al. 2020).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from ..registry import register
from ..spaces.layers import Chain, ConvNorm, Norm, Stem
from .base import FixedNet
from .blocks import check_stem, he_init, small_stem


class _Basic(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, cin: int, cout: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = ConvNorm(cin, cout, 3, stride, norm=norm)
        self.conv2 = ConvNorm(cout, cout, 3, norm=norm)
        same = stride == 1 and cin == cout
        self.shortcut = nn.Identity() if same else ConvNorm(cin, cout, 1, stride, act="", norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        return self.conv2(self.conv1(x), shortcut)


@register("net", "resnet18")
@dataclass(frozen=True)
class ResNet18(FixedNet):
    stem: Stem = "auto"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_stem(self.name, self.stem, self.norm)

    def module(self) -> nn.Module:
        small = small_stem(self.stem, self.input)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["stem"] = ConvNorm(self.input[0], 64, 3 if small else 7, 1 if small else 2, norm=self.norm)
        if not small:
            layers["pool"] = nn.MaxPool2d(3, 2, 1)
        cin = 64
        for i, width in enumerate((64, 128, 256, 512)):
            first = _Basic(cin, width, 1 if i == 0 else 2, self.norm)
            layers[f"stage{i + 1}"] = nn.Sequential(first, _Basic(width, width, 1, self.norm))
            cin = width
        return he_init(Chain(nn.Sequential(layers), cin, self.classes))
