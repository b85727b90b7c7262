"""kNN-Per: Marfoq et al., ICML 2022. FedAvg, then each client mixes the shared network with its own neighbours.

After the rounds client i stores (features, label) of its training images and predicts
p(y | x) = lambda_i * p_knn(y | x) + (1 - lambda_i) * p_w(y | x), with lambda_i chosen on its val images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..engine.client import Client
from ..method import Card, Task, head
from ..nets.base import features, recipe
from ..nets.knn import KNN
from ..options import AtLeastOne, Fraction, Positive
from ..registry import register
from .fedavg import FedAvg


@register("method", "knn-per")
@dataclass(frozen=True)
class KnnPer(FedAvg):
    paper: ClassVar[str] = "Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022"
    deviations: ClassVar[tuple[str, ...]] = (
        *FedAvg.deviations,
        "of several lambda that are equally good on val, the middle one is taken",
        "the kernel has squared distances over the number of features, as in the authors' code",
    )

    card: ClassVar[Card] = replace(
        FedAvg.card,
        personal="a memory of its own examples beside the shared network",
        policy="lambda_i between both predictions, chosen on val",
        handles=("statistical",),
    )

    neighbours: AtLeastOne = 10  # k
    scale: Positive = 1.0  # of the kernel exp(-d^2 / (D * scale)), with D the number of features
    lamda: Fraction | None = None  # lambda_i of every client; None: each chooses its own on val (0.5 where it has none)
    grid: AtLeastOne = 10  # steps from 0 to 1 among which it chooses

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)
        keys = await client.predict(features(net), on="train")
        labels = client.labels("train")
        of = recipe(client.space, task.arch)
        space = KNN(client.space.input, client.space.classes, of, len(keys), self.neighbours, self.scale)
        weights = {n if head(n) else f"body.{n}": t for n, t in client.copy(net).items()}
        store = {"keys": keys, "labels": labels, "lamda": keys.new_tensor(self.lamda or 0.0)}
        kept = client.build(Task(weights | store), space)
        kept.stale = False  # type: ignore[assignment]  # other statistics would make other features than the keys
        if self.lamda is None:
            kept.lamda.fill_(await self._choose(kept, client))  # type: ignore[operator]
        return kept

    async def _choose(self, net: nn.Module, client: Client) -> float:
        """The lambda with the most hits on val, from the predictions of either part alone."""
        if not client.size("val"):
            return 0.5
        parts: list[Tensor] = []
        for alone in (0.0, 1.0):
            net.lamda.fill_(alone)  # type: ignore[operator]
            parts.append(await client.predict(net, on="val"))
        model, neighbours = parts
        if client.shift is not None:
            model = model + client.shift  # as it will be folded into the last layer
        p, q, y = model.softmax(1), neighbours.exp(), client.labels("val")
        steps = torch.arange(self.grid + 1, device=p.device)[:, None, None] / self.grid
        hits = ((steps * q + (1 - steps) * p).argmax(2) == y).sum(1).tolist()
        best = [i for i, h in enumerate(hits) if h == max(hits)]
        return best[len(best) // 2] / self.grid
