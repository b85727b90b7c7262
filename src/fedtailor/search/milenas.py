"""MiLeNAS (He et al., CVPR 2020), first order: the local search of FedNAS (eq. 4) and of one of SPIDER's searchers.

A step sees a batch of train and a batch of val:

    alpha <- alpha - eta_alpha * (grad_alpha L_tr(w, alpha) + lambda * grad_alpha L_val(w, alpha))    by Adam
    w     <- w - eta_w * grad_w L_tr(w, alpha)                                                       by SGD, clipped

in this order, w at the new alpha, as in the authors' code; FedNAS's Algorithm 1 lists w first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..engine.halved import lending

Batch = tuple[Tensor, Tensor]

PASSES = 7 / 3
"""A step's arithmetic in ordinary training steps: one for w, and two for alpha, which need no gradients of weights."""


def alpha_optimiser(alpha: Sequence[Tensor], lr: float, decay: float = 0.0) -> torch.optim.Optimizer:
    """Adam with the betas (0.5, 0.999) that DARTS, MiLeNAS and DSNAS give architecture parameters."""
    cuda = alpha[0].is_cuda
    return torch.optim.Adam(alpha, lr, betas=(0.5, 0.999), weight_decay=decay, fused=cuda, capturable=cuda)


def milenas_step(
    loss: Callable[[Tensor, Tensor], Tensor],
    weights: Sequence[nn.Parameter],
    weights_optimiser: torch.optim.Optimizer,
    alpha: Sequence[Tensor],
    alpha_optimiser: torch.optim.Optimizer,
    *,
    lamda: float = 1.0,
    clip: float = 0.0,
    before: Callable[[], None] | None = None,
    adjust: Callable[[], None] | None = None,
    net: nn.Module | None = None,
) -> Callable[[Batch, Batch], Tensor]:
    """The step, for `client.loop(step, nets, over=("train", "val"), passes=PASSES)`; it returns the loss on train.

    `loss(x, y)` is the objective on a batch, a function of the weights and of alpha (leaf tensors that require
    gradients): with a network that takes gates, `lambda x, y: client.loss(net, x, y, gates_of(alpha))`. `clip` bounds
    the norm of the gradient of w, not of alpha as in the public code. `before` is called first in every step, `adjust`
    when the gradients of w are there, before they are clipped (SPIDER adds its pull towards the shared weights). Of a
    `net` whose parameters are w, the three passes of a step share filters in bfloat16, where it computes in that.
    """
    weights, alpha = list(weights), list(alpha)

    def step(train: Batch, val: Batch) -> Tensor:
        if before is not None:
            before()
        with contextlib.nullcontext() if net is None else lending(net) as halved:
            read = weights if net is None else list(net.parameters())
            with closed(read):
                slopes = torch.autograd.grad(loss(*train), alpha, materialize_grads=True)
                if lamda:
                    more = torch.autograd.grad(loss(*val), alpha, materialize_grads=True)
                    slopes = [g + lamda * h for g, h in zip(slopes, more, strict=True)]
            for a, slope in zip(alpha, slopes, strict=True):
                a.grad = slope
            alpha_optimiser.step()
            weights_optimiser.zero_grad()
            with closed(alpha):
                value = loss(*train)
            value.backward(inputs=read)
        if halved is not None:
            halved.hand_over()
        if adjust is not None:
            adjust()
        if clip:
            nn.utils.clip_grad_norm_(weights, clip)
        weights_optimiser.step()
        return value.detach()

    return step


@contextlib.contextmanager
def closed(tensors: Sequence[Tensor]) -> Iterator[None]:
    """What is computed inside needs no gradients of these: kernels of ours do not see what torch is asked for."""
    tensors = [t for t in tensors if t.is_cuda]
    was = [t.requires_grad for t in tensors]
    for t in tensors:
        t.requires_grad_(False)
    try:
        yield
    finally:
        for t, before in zip(tensors, was, strict=True):
            t.requires_grad_(before)


class Cosine:
    """Moves `lr` in place from `start` towards `end`, one call per step: FedNAS's schedule of a round."""

    def __init__(self, lr: Tensor, start: float, end: float, steps: int) -> None:
        self.lr, self.start, self.end, self.steps = lr, start, end, steps
        self.done = torch.zeros_like(lr)

    def __call__(self) -> None:
        turn = torch.cos(self.done * (math.pi / self.steps))
        self.lr.copy_(self.end + (self.start - self.end) * 0.5 * (1 + turn))
        self.done.add_(1)
