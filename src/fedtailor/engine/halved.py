"""Filters in bfloat16 for a captured step, turned all at once.

Autocast turns every layer's filters by themselves and their gradients back: two tiny kernels for each of a hundred
layers, which is a fifth of a small network's step. Here a step turns them together, and together the gradients back.
The numbers are the same; of filters that a network reads more than once, gradients are added up in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..kernels.layout import Pointwise


class Halved:
    """A network's filters in bfloat16, which lie as the filters do, those that are neighbours too."""

    def __init__(self, net: nn.Module) -> None:
        plain = [m for m in net.modules() if type(m) in (nn.Conv2d, Pointwise) and m.groups == 1]
        self.layers = [m for m in plain if m._parameters.get("weight") is not None]  # not computed by somebody else
        read = [cast(nn.Parameter, layer.weight) for layer in self.layers]
        self.whole = list(dict.fromkeys(read))  # layers may share one
        blocks = {_block(w): _flat(w) for w in self.whole}
        halved = {block: torch.empty_like(flat, dtype=torch.bfloat16) for block, flat in blocks.items()}
        self._from, self._to = list(blocks.values()), list(halved.values())
        places = ((w.shape, w.stride(), w.storage_offset()) for w in self.whole)
        views = (halved[_block(w)].as_strided(*place) for w, place in zip(self.whole, places, strict=True))
        self.halves = [nn.Parameter(view) for view in views]
        half_of = dict(zip(self.whole, self.halves, strict=True))
        self._read, self._read_halved = read, [half_of[w] for w in read]  # by layer

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the network reads them, as the filters are at the beginning, and they have the gradients."""
        with torch.no_grad():
            torch._foreach_copy_(self._to, self._from)
        for whole, half in zip(self.whole, self.halves, strict=True):
            half.requires_grad_(whole.requires_grad).grad = None
        self._place(self._read_halved)
        try:
            yield
        finally:
            self._place(self._read)

    def _place(self, weights: Sequence[nn.Parameter]) -> None:
        for layer, weight in zip(self.layers, weights, strict=True):
            layer._parameters["weight"] = weight

    def hand_over(self) -> None:
        """Gives the filters the gradients, beside those of what else has read them."""
        halves, turned = list[Tensor](), list[Tensor]()
        for whole, half in zip(self.whole, self.halves, strict=True):
            if half.grad is not None and whole.grad is not None:
                whole.grad += half.grad
            elif half.grad is not None:
                whole.grad = torch.empty_like(half.grad, dtype=whole.dtype)
                halves.append(half.grad)
                turned.append(whole.grad)
            half.grad = None
        if turned:
            torch._foreach_copy_(turned, halves)


@contextlib.contextmanager
def lending(net: nn.Module) -> Iterator[Halved | None]:
    """Filters that are turned once for all that a step of a method's own reads of them; None: it does not turn any."""
    if not torch.is_autocast_enabled("cuda"):
        yield None
        return
    halved = Halved(net)
    with halved.lent():
        yield halved


def _block(tensor: Tensor) -> int:
    """Where the memory begins that a tensor lies in, alone or with neighbours."""
    return tensor.untyped_storage().data_ptr()


def _flat(tensor: Tensor) -> Tensor:
    """All of that memory."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
