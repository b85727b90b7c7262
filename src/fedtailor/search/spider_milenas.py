"""SPIDER's other searcher (appendix C): the local network is a mixture whose α moves by MiLeNAS, step by step with v.

    alpha <- alpha - eta_alpha * (grad F_tr(v, alpha) + lambda_alpha * grad F_val(v, alpha)),   gates = softmax(alpha)
    v     <- v - eta * (grad F_tr(v, alpha) + lambda * (v - w_share))

While the search lasts v carries α under its names in the mixture, and so goes to the client's memory with it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

import torch

from ..engine.client import Client
from ..engine.jobs import Measured
from ..engine.steps import pull_
from ..errors import UserError
from ..method import Job, Task
from ..nets.darts import ALPHA, Mixture, mixture_of
from ..spaces.base import Weights
from ..spaces.darts import Keep
from .milenas import PASSES, milenas_step
from .perturbation import cells_of


def require_relaxable(job: Job, lamda: float, search_rounds: int) -> None:
    """Raises `UserError` where there is no v of the client's own to relax, or no round left after the search."""
    if lamda == math.inf or search_rounds >= job.rounds:
        raise UserError(
            f"method.searcher = 'milenas' needs a finite method.lamda (it is {lamda:g}) and fewer search_rounds (it is "
            f"{search_rounds}) than the run's {job.rounds} rounds."
        )


def over(search_rounds: int, t: int, rounds: int) -> bool:
    """Whether so many rounds of search are done; 0: 400 in 1000."""
    return t >= (search_rounds or Fraction(400, 1000) * rounds)


def is_relaxed(v: Weights) -> bool:
    return ALPHA[0] in v


def relaxed(v: Weights, client: Client) -> Weights:
    """v with an α, a nearly uniform one where it has none yet."""
    device = next(iter(v.values())).device
    alpha = (a.to(device) for a in cells_of(client.space).new_alpha(client.seed, "spider", client.id))
    return dict(zip(ALPHA, alpha, strict=True)) | v


def mixture(v: Weights, client: Client) -> Mixture:
    """The network of a relaxed v."""
    return cast(Mixture, client.build(Task(v), mixture_of(cells_of(client.space))))


def discrete(v: Weights) -> Keep:
    """On every edge the operation with the largest α."""
    normal, reduce = (tuple((i,) for i in v[name].argmax(1).tolist()) for name in ALPHA)
    return normal, reduce


async def train_relaxed(
    net: Mixture, client: Client, anchor: Weights, lamda: float, alpha_lr: float, alpha_val: float
) -> Measured:
    """A round of v and α on the client's train and val."""
    weights = [p for _, p in net.named_parameters()]
    anchors = [anchor[name] for name, _ in net.named_parameters()] if lamda else []
    step = milenas_step(
        lambda x, y: client.loss(net, x, y),
        weights,
        client.local.optimiser(weights, client.lr),
        net.searched().alpha,
        torch.optim.SGD(net.alpha, alpha_lr),  # the appendix writes a plain gradient step; FedNAS uses Adam
        lamda=alpha_val,
        clip=client.local.clip,
        adjust=(lambda: pull_(weights, anchors, lamda)) if lamda else None,
    )
    try:
        return await client.loop(step, [net], over=("train", "val"), passes=PASSES)
    finally:
        net.searched(False)
