"""One step of ordinary training, as a closure that updates the network in place; and one that takes statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..spaces.measure import parameters_of
from .jobs import Fit, Loop, Recalibrate


def objective(logits: Tensor, y: Tensor, smoothing: float, shift: Tensor | None) -> Tensor:
    """Cross-entropy, with the client's log prior added to the logits where there is one."""
    return F.cross_entropy(logits if shift is None else logits + shift, y, label_smoothing=smoothing)


def fit_step(job: Fit) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of a fit: loss, gradient, pull towards the anchor, push, clipping, optimiser."""
    net, local = job.net, job.local
    named = parameters_of(net)
    chosen = set(job.train)
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    parameters = [named[n] for n in job.train]
    optimiser = local.optimiser(parameters, job.lr)
    anchors = [job.anchor[n].to(named[n].device) for n in job.train] if job.anchor else []
    pushes = [job.push[n].to(named[n].device) for n in job.train] if job.push else []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimiser.zero_grad()
        if job.loss is None:
            loss = objective(net(x), y, local.label_smoothing, job.shift)
        else:
            loss = job.loss(net, x, y)
        loss.backward()
        if anchors:
            pull_(parameters, anchors, job.pull)
        if pushes:
            push_(parameters, pushes)
        if local.clip:
            nn.utils.clip_grad_norm_(parameters, local.clip)
        optimiser.step()
        return loss.detach()

    return step


@torch.no_grad()
def pull_(parameters: Sequence[Tensor], anchors: list[Tensor], strength: float | Tensor) -> None:
    """Adds strength * (w - anchor) to the gradients."""
    apart = torch._foreach_sub(list(parameters), anchors)
    torch._foreach_mul_(apart, strength)
    push_(parameters, apart)


@torch.no_grad()
def push_(parameters: Sequence[Tensor], pushes: Sequence[Tensor]) -> None:
    """Adds tensors to the gradients."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_add_(gradients, list(pushes))


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a loss, 0 for parameters that have no part in it."""
    return list(torch.autograd.grad(loss, list(parameters), allow_unused=True, materialize_grads=True))


def states(*optimisers: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that optimisers keep from step to step."""
    kept = [values for optimiser in optimisers for values in optimiser.state.values()]
    return [t for values in kept for t in values.values() if isinstance(t, Tensor)]


def reach(steps: int, momentum: float) -> float:
    """How many times the learning rate SGD moves in so many steps along a gradient that stays 1.

    This is |a|_1 of FedNova: without momentum the number of steps, with it sum over steps of 1 + rho + rho^2 + ...
    """
    if momentum == 1:
        return steps * (steps + 1) / 2
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class Estimate:
    """Normalisation statistics of a network as the mean over batches, in steps that can be captured."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.training = net, net.training
        self.layers = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.momenta = [layer.momentum for layer in self.layers]
        found = [(layer.running_mean, layer.running_var) for layer in self.layers]
        self.running = [t for pair in found for t in pair if t is not None]
        sizes = [t.numel() for t in self.running]
        self.sums = list(self.running[0].new_zeros(sum(sizes)).split(sizes))  # at once: a network has a hundred
        self.count = torch.zeros((), device=self.running[0].device)
        torch._foreach_zero_(self.running)
        net.eval()
        for layer in self.layers:
            layer.train()
            layer.momentum = 1.0  # what they hold after a pass is the batch's own

    def loop(self, job: Recalibrate) -> Loop:
        return Loop(self.step, (job.stream,), job.batches, undo=self.undo, ready=True)

    @torch.no_grad()
    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One batch. Afterwards the network has the mean so far; there is no loss."""
        with torch.autocast(images.device.type, enabled=False):
            self.net(images)
        self.count += 1
        torch._foreach_add_(self.sums, self.running)
        torch._foreach_copy_(self.running, torch._foreach_mul(self.sums, 1 / self.count))
        return torch.zeros((), device=images.device)

    def undo(self) -> None:
        """Begins anew. What a broken-off pass left in the network, the next one overwrites."""
        torch._foreach_zero_([*self.sums, self.count])

    def close(self) -> None:
        """Puts the network back into its mode."""
        for layer, momentum in zip(self.layers, self.momenta, strict=True):
            layer.momentum = momentum
        self.net.train(self.training)
