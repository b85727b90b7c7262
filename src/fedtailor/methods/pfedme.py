"""pFedMe: Dinh et al., NeurIPS 2020, Algorithm 1. Personal networks are proximal points of the shared one.

theta_i(w) = argmin f_i(theta) + lambda/2 |theta - w|^2   (eq. 2)

Client, for every mini-batch:  K gradient steps of rate p on the inner problem (eq. 7),
                               w_i <- w_i - eta lambda (w_i - theta_i)      (line 8)
Server:                        w <- (1 - beta) w + beta * average of w_i    (line 11)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..engine.client import Client
from ..engine.steps import gradients
from ..errors import UserError
from ..method import Card, Job, Reply, Server, Task
from ..options import AtLeastOne, NonNegative, Positive
from ..parts import choose, learnt
from ..registry import register
from .fedavg import FedAvg


@register("method", "pfedme")
@dataclass(frozen=True)
class PFedMe(FedAvg):
    paper: ClassVar[str] = "Dinh et al., NeurIPS 2020, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "only a round's participants train; in the authors' code all clients do and some are averaged",
        "inner and outer steps are plain: local.momentum, local.weight_decay and local.clip have no part in them",
        "clients are averaged by samples, as in the authors' code",
        "theta_i is not kept between rounds: a client solves for it anew from the last w, for local.epochs",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        personal="whole network",
        policy="proximal point of the shared network, of strength lambda",
        handles=("statistical",),
    )

    lamda: Positive = 15.0  # lambda; the authors' MNIST runs have 15 to 30
    inner_steps: AtLeastOne = 5  # K, on every mini-batch
    personal_lr: NonNegative = 0.0  # p, of the inner steps; 0: local.lr
    lr: NonNegative = 0.0  # eta, of the outer step; 0: local.lr. The authors' 0.005 is for 800 rounds
    beta: Positive = 1.0  # of the server; the authors also take 2

    def check(self, job: Job) -> None:
        p, eta = self.personal_lr or job.local.lr, self.lr or job.local.lr
        if max(p, eta) * self.lamda >= 2:
            raise UserError(
                f"method.lamda = {self.lamda:g}: inner steps of {p:g} (method.personal_lr, or local.lr) or outer ones "
                f"of {eta:g} (method.lr, or local.lr) overshoot from {2 / max(p, eta):g} on. Lower one of them."
            )

    async def work(self, task: Task, client: Client) -> Reply:
        net = client.build(task)  # theta_i, which starts at w
        w = [p.detach().clone() for p in net.parameters()]
        loss = await client.loop(self.step(net, w, client, self.lr or client.lr), [net], passes=self.inner_steps)
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), w, strict=True):
                parameter.copy_(value)
        return Reply(client.take(net), task.arch, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        mean, w = server.paste(replies), choose(server.weights, learnt)
        return server.replace(weights=mean | {n: torch.lerp(t, mean[n], self.beta) for n, t in w.items()})

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)
        w = [p.detach().clone() for p in net.parameters()]
        await client.loop(self.step(net, w, client, 0.0), [net], passes=self.inner_steps)
        return net

    def step(self, net: nn.Module, w: list[Tensor], client: Client, lr: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Lines 7-8 on one mini-batch; where the outer rate is 0, w stays."""
        theta: list[Tensor] = list(net.parameters())
        p = self.personal_lr or client.lr

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = torch.zeros((), device=x.device)
            for _ in range(self.inner_steps):
                loss = client.loss(net, x, y)
                slopes = gradients(loss, theta)
                with torch.no_grad():
                    torch._foreach_add_(slopes, torch._foreach_sub(theta, w), alpha=self.lamda)
                    torch._foreach_add_(theta, slopes, alpha=-p)
            with torch.no_grad():
                torch._foreach_lerp_(w, theta, lr * self.lamda)
            return loss.detach()

        return step
