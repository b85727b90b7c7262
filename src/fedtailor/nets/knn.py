"""A network with a memory of examples (kNN-Per: Marfoq et al. 2022): its prediction is mixed with its neighbours'.

    p(y | x) = lambda * p_knn(y | x) + (1 - lambda) * p_net(y | x)
    p_knn(y | x) ~ sum over the k nearest keys of exp(-d^2 / (D * scale)) where their label is y

Keys are the features that the last layer reads, D is their number and d their Euclidean distance. Keys, labels and
lambda are buffers, so the network is complete as it is. Its outputs are log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..registry import register
from .base import FixedNet, cook
from .blocks import at_least


class _KNN(nn.Module):
    keys: Tensor
    labels: Tensor
    lamda: Tensor

    def __init__(self, net: nn.Module, size: int, neighbours: int, scale: float) -> None:
        super().__init__()
        self.head = net.head
        net.head = nn.Identity()
        self.body = net
        self.neighbours, self.scale = min(neighbours, size), scale
        self.register_buffer("keys", torch.zeros(size, self.head.in_features))  # type: ignore[arg-type]
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("lamda", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        logits: Tensor = self.head(found)  # type: ignore[operator]
        apart = (found**2).sum(1, keepdim=True) + (self.keys**2).sum(1) - 2 * found @ self.keys.T
        near, which = apart.clamp_min(0).topk(self.neighbours, largest=False)
        votes = (-near / (found.shape[1] * self.scale)).softmax(1)
        ballots = self.labels[which][..., None] == torch.arange(logits.shape[1], device=x.device)
        neighbours = (votes[..., None] * ballots).sum(1)
        mixed = self.lamda * neighbours + (1 - self.lamda) * logits.softmax(1)
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()


@register("net", "knn")
@dataclass(frozen=True)
class KNN(FixedNet):
    """Any network with a memory of examples beside it: what kNN-Per's clients keep"""

    of: dict[str, Any] = field(
        default_factory=lambda: {"net": {"name": "cnn"}}, hash=False
    )  # the network, see `recipe`
    examples: int = 100  # examples in the memory
    neighbours: int = 10  # k
    scale: float = 1.0

    def __post_init__(self) -> None:
        at_least(self.name, 1, examples=self.examples, neighbours=self.neighbours)

    def module(self) -> nn.Module:
        return _KNN(cook(self.of, self.input, self.classes), self.examples, self.neighbours, self.scale)
