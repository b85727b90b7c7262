"""HeteroFL: Diao, Ding and Tarokh, ICLR 2021, Algorithm 1. Narrow clients train the first channels of one wide network.

Every client trains the widest uniform sub-network it can afford. An entry of the network becomes the plain mean over
the clients that own it, whatever their samples; the head's row of a class is owned by clients that have the class,
which set the logits of the others to zero. Normalisation has no running statistics while training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..card import LOSS, Message
from ..engine.client import Client, Loss
from ..engine.steps import objective
from ..method import Card, Reply, Seat, Server, Task, head
from ..registry import register
from ..search.partial import learnt
from ..search.rolling import Places, average_at, cut_at, window
from ..spaces.base import Arch, Weights
from .feduniform import FedUniform


@register("method", "heterofl")
@dataclass(frozen=True)
class HeteroFL(FedUniform):
    paper: ClassVar[str] = "Diao et al., ICLR 2021, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "a client's width is the widest that its budget admits, not one of 1, 1/2, 1/4, 1/8 and 1/16",
        "no scaler: a normalisation behind a convolution divides it out; some layers of mobilenetv3 and vit have none",
        "statistics are estimated by each client on its own training images before a network is used, not by all",
    )
    card: ClassVar[Card] = replace(
        FedUniform.card,
        personal="architecture, the weights cut for it, which classes it knows",
        up=Message("learnt sub-network", {"classes": "which classes the client has"}, LOSS),
        keeps={},
    )

    mask: bool = True  # whether a client's absent classes have logits of zero and no part in the head's average

    def places(self, server: Server, arch: Arch) -> Places:
        """Which entries a client's network is made of this round."""
        return window(server.space, arch)

    def ask(self, server: Server, client: Seat) -> Task:
        arch = server.archs[client.id]
        return Task(cut_at(server.weights, self.places(server, arch)), arch)

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)
        owned = self.owned(client)
        loss = await client.fit(net, loss=masked_loss(client, owned))
        return Reply(client.take(net, only=learnt), task.arch, {"classes": owned}, {"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        parts = [owned_part(r.weights, self.places(server, r.arch), r.extra["classes"]) for r in replies]
        return server.replace(weights=average_at(server.weights, [(*part, 1.0) for part in parts]))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)  # without statistics: they are estimated before it is used
        if self.final_epochs:
            await client.fit(net, epochs=self.final_epochs, loss=masked_loss(client, self.owned(client)))
        with torch.no_grad():  # the mask as a part of the network: the logits of absent classes are 0
            for tensor in net.head.parameters():  # type: ignore[union-attr]
                tensor[~self.owned(client)] = 0
        return net

    def owned(self, client: Client) -> Tensor:
        return client.owned if self.mask else torch.ones_like(client.owned)


def masked_loss(client: Client, owned: Tensor) -> Loss:
    """The client's objective with the logits of classes it does not own at zero, where they learn nothing."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return objective(net(x) * owned, y, client.local.label_smoothing, client.log_prior)

    return loss


def owned_part(weights: Weights, places: Places, owned: Tensor) -> tuple[Weights, Places]:
    """A reply's entries and their places, without the head's rows of classes that the client does not own."""
    rows = owned.nonzero().flatten().cpu()
    part = {n: t[rows.to(t.device)] if head(n) else t for n, t in weights.items()}
    return part, {n: (rows, *axes[1:]) if head(n) else axes for n, axes in places.items()}
