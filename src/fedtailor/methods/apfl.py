"""APFL, adaptive personalized federated learning: Deng et al., arXiv:2003.13461, Algorithm 1. Mixed weights.

A client's network has the weights vbar = alpha v + (1 - alpha) w. In every step, on one mini-batch,

    w     <- w - eta grad f(w)
    v     <- v - eta alpha grad f(vbar)
    alpha <- alpha - eta <v - w, grad f(vbar)>, held in [0, 1]

and the server averages the w. The architecture personalisation of Luo et al., also called APFL, is `fedcs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..engine.client import Client
from ..engine.steps import objective
from ..method import Card, Reply, Task
from ..options import Fraction, NonNegative
from ..registry import register
from .fedavg import FedAvg


@register("method", "apfl")
@dataclass(frozen=True)
class APFL(FedAvg):
    paper: ClassVar[str] = "Deng et al., arXiv:2003.13461, Algorithm 1 with eq. 10 for alpha"
    deviations: ClassVar[tuple[str, ...]] = (
        "v and w move by the run's local optimiser, alpha by plain gradient steps",
        "w is averaged by samples; the paper's mean is plain",
        "v starts at the first w that the client receives; a client never called trains once at the end",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        personal="whole network, mixed with the shared one",
        policy="a share alpha per client, learnt by gradient descent",
        handles=("statistical",),
        keeps={"v": "the client's part v_i", "alpha": "its share alpha_i"},
    )

    alpha: Fraction = 0.5  # alpha at the start
    adapt: bool = True  # whether alpha is learnt
    alpha_lr: NonNegative = 0.0  # eta of alpha; 0: as that of the weights

    async def work(self, task: Task, client: Client) -> Reply:
        shared, own, alpha = client.build(task), self._own(task, client), self._alpha(client)
        loss = await client.loop(self.step(shared, own, alpha, client), [shared, own])
        reply = Reply(client.take(shared), task.arch, facts={"loss": loss})
        client.memory |= {"v": client.copy(own), "alpha": alpha.detach().clone()}
        return reply

    async def personal(self, task: Task, client: Client) -> nn.Module:
        own, alpha = self._own(task, client), self._alpha(client)
        if "v" not in client.memory:
            shared = client.build(task)
            await client.loop(self.step(shared, own, alpha, client), [shared, own])
        with torch.no_grad():
            for name, v in own.named_parameters():
                v.lerp_(task.weights[name], 1 - alpha)
        return own

    def step(self, shared: nn.Module, own: nn.Module, alpha: Tensor, client: Client) -> Callable[..., Tensor]:
        w, v, local = dict(shared.named_parameters()), dict(own.named_parameters()), client.local
        everything = [*w.values(), *v.values()]
        optimiser = local.optimiser(everything, client.lr)
        rate = self.alpha_lr or client.lr

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimiser.zero_grad()
            alpha.grad = None
            client.loss(shared, x, y).backward()
            mixed = {n: w[n].detach() + alpha * (v[n] - w[n].detach()) for n in v}  # vbar, of which v and alpha learn
            loss = objective(functional_call(own, mixed, (x,)), y, local.label_smoothing, client.log_prior)
            loss.backward()
            if local.clip:
                nn.utils.clip_grad_norm_(w.values(), local.clip)
                nn.utils.clip_grad_norm_(v.values(), local.clip)
            optimiser.step()
            if self.adapt and alpha.grad is not None:
                with torch.no_grad():
                    alpha.sub_(rate * alpha.grad).clamp_(0, 1)
            return loss.detach()

        return step

    def _own(self, task: Task, client: Client) -> nn.Module:
        return client.build(Task(client.memory.get("v", task.weights), task.arch))

    def _alpha(self, client: Client) -> Tensor:
        kept = client.memory.get("alpha")
        first = torch.full((), self.alpha, device=client.device) if kept is None else kept.clone()
        return first.requires_grad_()
