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
from ..spaces.layers import Chain
from ..spaces.measure import Cost
from ..spaces.slim import Slim, choosers, slimmable
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
    score: Callable[[Arch, Arch], Awaitable[float]],
) -> Arch:
    """The arch left of the largest when the group whose cut costs least accuracy is cut until it fits.

    `score` is told the cut arch, and the arch that it is a cut of.

    Accuracies on a client's few images tie often. Of equal ones the cut that leaves the smallest `need` wins, the
    first dimension of those.
    """
    arch = space.largest
    while not fits(arch):  # line 14
        tries = [t for d in range(len(arch)) if (t := shrink(space, arch, d, ratio)) is not None]  # lines 15-16
        if not tries:
            raise UserError(f"no arch of '{space.name}' fits: the smallest, {space.smallest}, does not.")
        found = [(await score(t, arch), -need(t)) for t in tries]  # line 17: the smallest drop is the highest accuracy
        arch = tries[found.index(max(found))]  # lines 19-20
    return arch


def candidates(space: Space, weights: Weights, captures: bool) -> Callable[[Arch, Arch], nn.Module]:
    """Archs of a supernet, each a cut of another one, as networks to be looked at, one at a time.

    Norms use the statistics of the images that they are given, so they are right for the arch without a pass of their
    own; the supernet's would belong to another network.
    """
    if captures and slimmable(space):
        return Slimmed(space, weights).at
    return lambda arch, _: Candidate(space, weights, arch)


class Candidate(nn.Module):
    """An arch that is looked at once: entries are lent to its structure, which has no tensors of its own."""

    def __init__(self, space: Space, weights: Weights, arch: Arch) -> None:
        super().__init__()
        self.net, self.cost = _structure(space, arch, weights), space.cost(arch)
        self._weights = part_of(space, weights, arch)

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.net, self._weights, (x,))


class Slimmed:
    """The supernet with the channels of one arch, then of another: a GPU captures its passes once for all of them.

    A cut changes nothing before the first layer that it narrows. What the arch that is being cut computes there is
    kept, and its cuts begin where they differ. All of them are to be looked at on the same images.
    """

    def __init__(self, space: Space, weights: Weights) -> None:
        self.space, self._whole = space, ()
        parts = Parts(space, weights)
        self._archs = torch.zeros(2, len(space.dimensions), device=parts.device)  # the arch, and what it is a cut of
        self._anew, *self._later = (Look(parts, self._archs, begin) for begin in (-1, *range(len(parts.parts))))

    def at(self, arch: Arch, whole: Arch) -> nn.Module:
        """The network of an arch that is a cut of the other."""
        parts = self._anew.parts
        begin = min((parts.first[d] for d, (a, b) in enumerate(zip(arch, whole, strict=True)) if a != b), default=0)
        look = self._later[begin] if whole == self._whole else self._anew
        look.cost, self._whole = self.space.cost(arch), whole
        both = torch.tensor([arch, whole], dtype=torch.float32, pin_memory=self._archs.is_cuda)
        self._archs.copy_(both, non_blocking=True)
        return look


class Look(nn.Module):
    """A pass of an arch from one part on, on what is kept there; or of the arch that it is a cut of, and all of it."""

    cost: Cost

    def __init__(self, parts: Parts, archs: Tensor, begin: int) -> None:
        super().__init__()
        self.parts, self._archs, self._begin = parts, archs, begin

    def forward(self, x: Tensor) -> Tensor:
        arch, whole = self._archs
        if self._begin < 0:
            self.parts.keep(whole, x)
        return self.parts.outputs(arch, x, max(0, self._begin))[-1]


class Parts:
    """A slimmable supernet in parts that follow each other, and what goes into each of them."""

    def __init__(self, space: Space, weights: Weights) -> None:
        net, self.device = _structure(space, space.largest, weights).eval(), next(iter(weights.values())).device
        assert isinstance(net, Chain)
        assert isinstance(net.body, nn.Sequential)
        *body, _ = names = [f"body.{name}." for name, _ in net.body.named_children()]
        rest = Chain(net.body[-1:], net.head.in_features, 1)
        rest.head, rest.dropout = net.head, net.dropout
        self.parts = [*zip(body, net.body, strict=False), ("", rest)]
        self.owned = [[n for n, _ in part.named_parameters()] for _, part in self.parts]
        self.first = dict[int, int]()  # of each dimension: the part with the first norm that it narrows
        for norm, d in choosers(space).items():
            place = next(i for i, name in enumerate(names) if norm.startswith(name))
            self.first[d] = min(place, self.first.get(d, place))
        self._weights, self._slim, self._kept = weights, Slim(space, self.device), list[Tensor]()

    def outputs(self, arch: Tensor, x: Tensor, begin: int = 0) -> list[Tensor]:
        """What comes out of each part from one on; x are the images, which only the first part reads."""
        weights, found = self._weights | self._slim.lend(self._weights, arch), list[Tensor]()
        x = self._kept[begin - 1] if begin else x
        for (prefix, part), names in zip(self.parts[begin:], self.owned[begin:], strict=True):
            x = functional_call(part, {name: weights[prefix + name] for name in names}, (x,))
            found.append(x)
        return found

    def keep(self, arch: Tensor, x: Tensor) -> None:
        """Keeps what goes into the parts, always in the same place: captured passes read it there."""
        *found, _ = self.outputs(arch, x)
        if not self._kept:
            self._kept = [t.clone() for t in found]
        torch._foreach_copy_(self._kept, found)


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
