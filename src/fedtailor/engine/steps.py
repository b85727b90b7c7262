"""One step of ordinary training, as a closure that updates the network in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .jobs import Fit


def objective(logits: Tensor, y: Tensor, smoothing: float, shift: Tensor | None) -> Tensor:
    """Cross-entropy, with the client's log prior added to the logits where there is one."""
    return F.cross_entropy(logits if shift is None else logits + shift, y, label_smoothing=smoothing)


def fit_step(job: Fit) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of a fit: loss, gradient, pull towards the anchor, clipping, optimiser."""
    net, local = job.net, job.local
    named = dict(net.named_parameters())
    chosen = set(job.train)
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    parameters = [named[n] for n in job.train]
    optimiser = local.optimiser(parameters, job.lr)
    anchors = [job.anchor[n].to(named[n].device) for n in job.train] if job.anchor else []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimiser.zero_grad()
        if job.loss is None:
            loss = objective(net(x), y, local.label_smoothing, job.shift)
        else:
            loss = job.loss(net, x, y)
        loss.backward()
        if anchors:
            pull_(parameters, anchors, job.pull)
        if local.clip:
            nn.utils.clip_grad_norm_(parameters, local.clip)
        optimiser.step()
        return loss.detach()

    return step


@torch.no_grad()
def pull_(parameters: Sequence[Tensor], anchors: list[Tensor], strength: float | Tensor) -> None:
    """Adds strength * (w - anchor) to the gradients."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    apart = torch._foreach_sub(list(parameters), anchors)
    torch._foreach_mul_(apart, strength)
    torch._foreach_add_(gradients, apart)
