"""The forward passes of scores on a GPU: which networks' are captured, and on which lanes they run."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .replay import Forwards, Lane
from .slots import Slots

LANES = 8  # that score: what passes over many images need stays with the lane


class Passes:
    """Captured passes by network. Their lanes are on streams of training's, but have memory that can go alone."""

    def __init__(self, slots: Slots, room: Callable[[], bool]) -> None:
        self._slots, self._room = slots, room  # whether there is room to capture one
        self._by_net: WeakKeyDictionary[nn.Module, Forwards] = WeakKeyDictionary()
        self._lanes = slots.new_lanes(LANES)
        self._captures = True

    def lane(self, net: nn.Module, number: int) -> Lane:
        """Where a network is scored; the number of the work tells where, if it was not scored before."""
        if net not in self._by_net:
            self._by_net[net] = Forwards(self._lanes[number % len(self._lanes)])
        return self._by_net[net].lane

    def logits(self, net: nn.Module, images: Tensor) -> Tensor:
        return self._by_net[net](net, images, lambda: self._captures and self._room())

    def keep_less(self) -> bool:
        """Lets go of all passes. From now on one lane scores and none is captured; False: it was so before."""
        was, self._captures = self._captures, False
        self._lanes = self._lanes[:1]
        self.forget()
        return was

    def forget(self) -> None:
        """Lets go of all passes."""
        self._by_net.clear()
        self._lanes = self._slots.new_lanes(len(self._lanes))  # the old ones' memory goes with their last pass
