"""Moving one client's policy uphill: plain ascent, or Adam with a state per client."""

from __future__ import annotations

import torch
from torch import Tensor

Moments = dict[str, Tensor]
BETA1, BETA2, EPSILON = 0.5, 0.999, 1e-8  # the values in the code of PerFedRLNAS's authors


def no_moments(alpha: Tensor) -> Moments:
    return {
        "first": torch.zeros_like(alpha),
        "second": torch.zeros_like(alpha),
        "steps": torch.zeros(len(alpha), dtype=alpha.dtype),
    }


def ascend(
    alpha: Tensor, moments: Moments, row: int, gradient: Tensor, lr: float, optimizer: str
) -> tuple[Tensor, Moments]:
    """Policies and moments after one step of one row; the inputs are left as they are."""
    alpha = alpha.clone()
    if optimizer == "ascent":
        alpha[row] += lr * gradient
        return alpha, moments
    first, second, steps = (moments[k].clone() for k in ("first", "second", "steps"))
    steps[row] += 1
    first[row] = BETA1 * first[row] + (1 - BETA1) * gradient
    second[row] = BETA2 * second[row] + (1 - BETA2) * gradient**2
    t = int(steps[row])
    step = (first[row] / (1 - BETA1**t)) / ((second[row] / (1 - BETA2**t)).sqrt() + EPSILON)
    alpha[row] += lr * step
    return alpha, {"first": first, "second": second, "steps": steps}
