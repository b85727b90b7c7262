"""Per-FedAvg: Fallah et al., NeurIPS 2020, Algorithm 1. A shared start from which one gradient step makes a network.

F_i(w) = f_i(w - alpha grad f_i(w)). A local step draws batches D, D' and D'' of its own:

    v = w - alpha grad f(w; D),   w <- w - beta (I - alpha H(w; D'')) grad f(v; D')

First order drops the Hessian H. Hessian-free takes its product with g = grad f(v; D') as a difference of gradients:
(grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..engine.client import Client
from ..engine.jobs import Batch
from ..engine.steps import gradients
from ..method import Card, Reply, Task
from ..options import AtLeastOne, Count, Positive
from ..registry import register
from .fedavg import FedAvg

PASSES = {"fo": 2, "hf": 4}  # gradients in a step


@register("method", "per-fedavg")
@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020, Algorithm 1 (FO and HF)"
    deviations: ClassVar[tuple[str, ...]] = (
        "the outer step is one of the run's local optimiser, whose rate is beta; the inner step is a plain one",
        "clients are averaged by samples; the paper's are equally large",
        "delta is a fraction of |w| / |g|, so that one value serves networks of any size",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        shared="a start to adapt from",
        personal="whole network, a step away from it",
        policy="meta-learning of the start",
        handles=("statistical",),
    )

    alpha: Positive = 0.01  # alpha, of the inner step
    variant: Literal["fo", "hf"] = "fo"  # first order, or Hessian-free, which wants a smaller local.lr
    delta: Positive = 1e-3  # of the difference in "hf"
    tau: Count = 0  # tau, local steps in a round; 0: local.epochs
    adapt_steps: AtLeastOne = 1  # inner steps with which a client makes its network, on its training images

    async def work(self, task: Task, client: Client) -> Reply:
        net, draws = client.build(task), 2 if self.variant == "fo" else 3
        over, steps, passes = ("train",) * draws, self.tau or None, PASSES[self.variant]
        loss = await client.loop(self.step(net, client), [net], over=over, steps=steps, passes=passes)
        return Reply(client.take(net), task.arch, facts={"loss": loss})

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)
        weights: list[Tensor] = list(net.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = client.loss(net, x, y)
            add_(weights, gradients(loss, weights), -self.alpha)
            return loss.detach()

        await client.loop(step, [net], steps=self.adapt_steps)
        return net

    def step(self, net: nn.Module, client: Client) -> Callable[..., Tensor]:
        w: list[Tensor] = list(net.parameters())
        local, optimiser = client.local, client.local.optimiser(list(net.parameters()), client.lr)

        def slope(batch: Batch) -> tuple[Tensor, list[Tensor]]:
            loss = client.loss(net, *batch)
            return loss.detach(), gradients(loss, w)

        def step(first: Batch, second: Batch, *third: Batch) -> Tensor:
            start = [p.detach().clone() for p in w]
            add_(w, slope(first)[1], -self.alpha)  # v
            loss, g = slope(second)
            if third:
                small = self.delta * norm(start) / norm(g).clamp_min(1e-12)
                away = torch._foreach_mul(g, small)
                set_(w, torch._foreach_add(start, away))
                ahead = slope(third[0])[1]
                set_(w, torch._foreach_sub(start, away))
                bend = torch._foreach_sub(ahead, slope(third[0])[1])  # 2 small H g
                torch._foreach_mul_(bend, self.alpha / (2 * small))
                torch._foreach_sub_(g, bend)
            set_(w, start)
            for p, slope_of_p in zip(w, g, strict=True):
                p.grad = slope_of_p
            if local.clip:
                nn.utils.clip_grad_norm_(w, local.clip)
            optimiser.step()
            return loss

        return step


@torch.no_grad()
def set_(weights: list[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(weights, list(values))


@torch.no_grad()
def add_(weights: list[Tensor], slopes: list[Tensor], rate: float) -> None:
    torch._foreach_add_(weights, slopes, alpha=rate)


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all entries together."""
    return torch.stack(torch._foreach_norm(tensors)).norm()
