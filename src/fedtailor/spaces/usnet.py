"""Training a supernet at many widths at once: the sandwich rule and in-place distillation.

US-Net (Yu and Huang, "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019), sections 3.2 and
3.3; warm-up of Luo et al. (FedCS). Written for any space: the "widths" are archs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import get_ident

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import UserError
from .base import Arch, Space, Weights
from .layers import seed_dropout
from .mobilenetv2 import MobileNetV2


def sandwich(space: Space, rng: np.random.Generator, n: int = 4) -> tuple[Arch, ...]:
    """The archs of one step (the sandwich rule): the largest, the smallest and n - 2 at random.

    In a slimmable space these are uniform networks, their widths drawn evenly from the range as in US-Net; elsewhere
    they are drawn from all archs.
    """
    if n < 2:
        raise UserError(f"the sandwich rule trains the largest and the smallest network: n = {n} must be at least 2.")
    if isinstance(space, MobileNetV2):
        between = [space.uniform(float(w)) for w in rng.uniform(space.min_width, 1.0, n - 2)]
    else:
        between = [space.sample(rng) for _ in range(n - 2)]
    return space.largest, space.smallest, *between


def usnet_losses(
    space: Space,
    weights: Weights,
    archs: Sequence[Arch],
    x: Tensor,
    y: Tensor,
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """The losses of some archs of one supernet, one by one; their gradients reach the supernet's `weights`.

    The first arch, the largest, learns from the labels. Every other learns from the first one's detached soft targets
    alone, by cross-entropy at temperature 1 (in-place distillation). Norms use the statistics of the batch, and those
    in `weights` stay as they are: no width's statistics serve another, so each network's are re-estimated before use.
    `seed` starts the dropout layers.
    """
    logits = (forward_at(space, weights, arch, x, seed + i) for i, arch in enumerate(archs))
    return distilled(logits, y, label_smoothing)


def distilled(logits: Iterator[Tensor], y: Tensor, label_smoothing: float = 0.0) -> Iterator[Tensor]:
    """The losses of networks by their logits, where the first is taught by the labels and teaches the others.

    A network is not asked for before the last one's loss was used, so its gradient can be taken by then and what its
    pass kept for that is free again.
    """
    teacher = next(logits)
    targets = teacher.detach().softmax(1)
    yield F.cross_entropy(teacher, y, label_smoothing=label_smoothing)
    del teacher
    for answer in logits:
        yield F.cross_entropy(answer, targets)


def forward_at(space: Space, weights: Weights, arch: Arch, x: Tensor, seed: int = 0) -> Tensor:
    """The logits of one arch in training mode, as a differentiable function of the supernet's weights."""
    net = _network(space, arch, x.device, get_ident())
    seed_dropout(net, seed)
    return functional_call(net, space.cut(weights, arch), (x,))


@lru_cache(maxsize=64)
def _network(space: Space, arch: Arch, device: torch.device, thread: int) -> nn.Module:  # noqa: ARG001
    """The arch's structure. Its tensors are never read: `functional_call` puts the cut ones in their place.

    It does so inside the module, for the time of the call, so threads must not share one.
    """
    with torch.device("meta"):
        net = space.build(arch)
    for module in net.modules():  # counters are no weights, and are read
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point():
                setattr(module, name, torch.zeros_like(buffer, device=device))
    return net.train()
