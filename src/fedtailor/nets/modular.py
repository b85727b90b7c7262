"""A network of exchangeable modules (FedMN: Wang et al. 2022): a layer has several, and a routing opens some of them.

Two convolutions as in `cnn`, then modular layers: the output of a layer is the mean over its open modules. Module u of
layer l is open where its routing logit is not negative, and a layer's best module always is. In training a logit gets
logistic noise and the choice passes gradients like its relaxation (straight-through binary Gumbel-softmax):

    open = [logit + noise >= 0],    gradient of sigmoid((logit + noise) / temperature)
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.random import uniform
from ..registry import register
from ..spaces.layers import Counted
from .base import FixedNet
from .blocks import at_least

UNIT = re.compile(r"layers\.(\d+)\.(\d+)\.")
ROUTING = "routing"


class Routing(Counted):
    """Which modules are open."""

    temperature: Tensor

    def __init__(self, layers: int, units: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(layers, units))
        self.register_buffer("temperature", torch.ones(()))

    def forward(self) -> Tensor:
        """Gates [layers, units]: 1 for an open module, 0 for a closed one."""
        logits = self.logits
        if self.training:
            self.counter.add_(1)
            u = uniform(self.counter, *logits.shape).clamp(1e-6, 1 - 1e-6)
            logits = logits + u.log() - (1 - u).log()
        opened = (logits >= 0) | (logits == logits.amax(1, keepdim=True))
        soft = torch.sigmoid(logits / self.temperature)
        return opened + (soft - soft.detach())


class _Modular(nn.Module):
    def __init__(self, net: Modular) -> None:
        super().__init__()
        channels, height, wide = net.input
        body: list[nn.Module] = []
        if net.width:
            for cin, cout in ((channels, net.width), (net.width, 2 * net.width)):
                body += [nn.Conv2d(cin, cout, net.kernel, padding=net.kernel // 2), nn.ReLU(inplace=True)]
                body += [nn.MaxPool2d(2)]
            channels, height, wide = 2 * net.width, height // 4, wide // 4
        self.body = nn.Sequential(*body, nn.Flatten())
        sizes = (channels * height * wide, *net.hidden)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(cin, cout), nn.ReLU()) for _ in range(net.units))
            for cin, cout in itertools.pairwise(sizes)
        )
        self.routing = Routing(len(net.hidden), net.units)
        self.head = nn.Linear(sizes[-1], net.classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        for units, gates in zip(self.layers, self.routing(), strict=True):
            outputs = torch.stack([unit(h) for unit in units], -1)  # type: ignore[union-attr]
            h = (outputs * gates).sum(-1) / gates.sum()
        return self.head(h)


@register("net", "modular")
@dataclass(frozen=True)
class Modular(FixedNet):
    width: int = 32  # channels of the first convolution, the second has twice as many; 0: no convolutions
    kernel: int = 3
    hidden: tuple[int, ...] = (512, 256, 256)  # outputs of each modular layer
    units: int = 2  # modules of a layer

    def __post_init__(self) -> None:
        at_least(self.name, 0, width=self.width)
        at_least(self.name, 1, units=self.units, kernel=self.kernel, hidden=min(self.hidden, default=0))

    def module(self) -> nn.Module:
        return _Modular(self)
