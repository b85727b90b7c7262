"""Greedy pruning of a supernet to a budget, without back-propagation (Luo et al., FedCS, Algorithm 1, lines 13-21).

An arch is a value, so a tentative cut is another arch and nothing has to be restored: the paper's inverse
floor(theta / (1 - R)) misses the old count after rounding. One dimension of a space is one group of tied layers, which
are cut together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import UserError
from ..spaces.base import Arch, Space, Weights
from ..spaces.copying import undrawn
from ..spaces.slim import Slim, slimmable
from .partial import part_of


def shrink(space: Space, arch: Arch, dimension: int, ratio: float) -> Arch | None:
    """The arch with one dimension cut from theta to about theta (1 - R), or None where it is at its smallest.

    The option is the one nearest to round(theta (1 - R)), the lower of two, and always at least one step below. An
    option that is no number goes one step down.
    """
    options, chosen = space.dimensions[dimension].options, arch[dimension]
    if chosen == 0:
        return None
    below, numbers = range(chosen), [o for o in options if isinstance(o, int | float)]
    picked = chosen - 1
    if len(numbers) == len(options):
        wanted = numbers[chosen] * (1 - ratio)
        wanted = round(wanted) if isinstance(numbers[chosen], int) else wanted
        picked = min(below, key=lambda i: (abs(numbers[i] - wanted), i))
    return (*arch[:dimension], picked, *arch[dimension + 1 :])


async def prune(
    space: Space,
    ratio: float,
    fits: Callable[[Arch], bool],
    need: Callable[[Arch], float],
    score: Callable[[Arch], Awaitable[float]],
) -> Arch:
    """The arch left of the largest when the group whose cut costs least accuracy is cut until it fits.

    Accuracies on a client's few images tie often. Of equal ones the cut that leaves the smallest `need` wins, the
    first dimension of those.
    """
    arch = space.largest
    while not fits(arch):  # line 14
        tries = [t for d in range(len(arch)) if (t := shrink(space, arch, d, ratio)) is not None]  # lines 15-16
        if not tries:
            raise UserError(f"no arch of '{space.name}' fits: the smallest, {space.smallest}, does not.")
        found = [(await score(t), -need(t)) for t in tries]  # line 17: the smallest drop is the highest accuracy
        arch = tries[found.index(max(found))]  # lines 19-20
    return arch


def candidates(space: Space, weights: Weights, captures: bool) -> Callable[[Arch], nn.Module]:
    """Archs of a supernet as networks to be looked at, one at a time.

    Norms use the statistics of the images that they are given, so they are right for the arch without a pass of their
    own; the supernet's would belong to another network.
    """
    if captures and slimmable(space):
        return Slimmed(space, weights).at
    return lambda arch: Candidate(space, weights, arch)


class Candidate(nn.Module):
    """An arch that is looked at once: entries are lent to its structure, which has no tensors of its own."""

    def __init__(self, space: Space, weights: Weights, arch: Arch) -> None:
        super().__init__()
        self.net, self.cost = _structure(space, arch, weights), space.cost(arch)
        self._weights = part_of(space, weights, arch)

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.net, self._weights, (x,))


class Slimmed(nn.Module):
    """The supernet with the channels of one arch, then of another: a GPU captures its pass once for all of them."""

    def __init__(self, space: Space, weights: Weights) -> None:
        super().__init__()
        self.net, self.space = _structure(space, space.largest, weights), space
        self._weights, device = weights, next(iter(weights.values())).device
        self._slim, self._arch = Slim(space, device), torch.zeros(len(space.dimensions), device=device)

    def at(self, arch: Arch) -> Slimmed:
        self.cost = self.space.cost(arch)
        self._arch.copy_(torch.tensor(arch, dtype=torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.net, self._weights | self._slim.lend(self._weights, self._arch), (x,))


def _structure(space: Space, arch: Arch, weights: Weights) -> nn.Module:
    """A network without tensors, but for buffers that it computes when it is made, and without statistics."""
    with undrawn(torch.device("meta")):
        net = space.build(arch)
    if _computes_buffers(net):
        net = space.build(arch).to(next(iter(weights.values())).device)
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return net


def _computes_buffers(net: nn.Module) -> bool:
    """Whether a network fills buffers when it is made that no weights bring."""
    saved = net.state_dict().keys()
    return any(n not in saved and not n.endswith("counter") for n, _ in net.named_buffers())
