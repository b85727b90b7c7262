"""Networks and captured steps on a GPU, for whoever needs one next: lent, taken back, kept, dropped."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..spaces.base import Arch, Space
from ..spaces.measure import Cost, drop_gradients
from .jobs import Loop
from .local import Cannot
from .loops import LoopSlot, Recurring
from .replay import BUFFER, FitSlot, Lane, Step, with_all_there_is

Kind = tuple[Space, Arch]
SLACK = 1.3  # the most that a network's training memory may be underestimated by
WORKSPACE = 64 << 20  # bytes that the matrix and convolution libraries take for a captured step
NOBODY = -1  # asks before any work has begun; what is given then is taken back when all of it is over


class Slots:
    """Captured steps by what they do, and networks by what they are, the longest unused first.

    Whoever's turn it is gets what is asked for, and has it until it is taken back.
    """

    def __init__(
        self, make: Callable[[Space, Arch], nn.Module], lanes: Sequence[Lane], most: int, precision: str
    ) -> None:
        self.make, self.lanes, self.most, self.precision = make, lanes, most, precision
        self._every = WeakSet(lanes)  # those too that were replaced and have steps yet
        self.turn = NOBODY  # the number of the work that asks
        self.free: OrderedDict[Step, list[FitSlot]] = OrderedDict()  # no client holds their networks
        self.lent: dict[nn.Module, FitSlot] = {}  # by the network that a client holds
        self.loops: OrderedDict[Recurring, list[LoopSlot]] = OrderedDict()
        self._networks: OrderedDict[Kind, list[nn.Module]] = OrderedDict()  # free ones that have no captured step
        self._given: dict[nn.Module, Kind] = {}  # such ones that clients hold
        self._used = WeakSet[FitSlot]()  # in this round
        self._needed = 0  # the most that were used in one round
        self._held: dict[int, list[nn.Module]] = {}  # all that clients hold, by the work's number

    def __len__(self) -> int:
        return len(self.lent) + sum(map(_count, (self.free, self.loops, self._networks)))

    @property
    def held(self) -> int:
        """Bytes that nothing but captured steps can have."""
        return sum(lane.held for lane in self._every)

    def new_lanes(self, many: int) -> list[Lane]:
        """Lanes on streams of ours, with memory of their own."""
        lanes = [Lane(lane.stream) for lane in self.lanes[:many]]
        self._every.update(lanes)
        return lanes

    def network(self, space: Space, arch: Arch) -> nn.Module:
        """A network of the arch: one whose step was captured ahead, or a free one."""
        kind = (space, arch)
        for step, slots in self.free.items():
            if step[:2] == kind and slots and slots[-1].fresh:
                slot = slots.pop()
                self.lent[slot.net] = slot
                return self._hand(slot.net)
        free = self._networks.get(kind)
        net = free.pop(0) if free else self.make(space, arch)  # who asks in turn gets the one whose passes fit
        self._given[net] = kind
        return self._hand(net)

    def _hand(self, net: nn.Module) -> nn.Module:
        self._held.setdefault(self.turn, []).append(net)
        return net

    def slot(self, key: Step, net: nn.Module, taken: set[Lane], own: int) -> FitSlot:
        """A captured step, for a job."""
        slot = self._slot(key, net, taken, own)
        self._used.add(slot)
        self._needed = max(self._needed, len(self._used))
        return slot

    def _slot(self, key: Step, net: nn.Module, taken: set[Lane], own: int) -> FitSlot:
        """A captured step: the one that has the client's own network, a free one, or a new one.

        At most so many clients have steps with their `own` network, the others' weights are copied. Two that share a
        lane take turns, which costs less than to capture another one.
        """
        lent = self.lent.get(net)
        if lent and lent.key == key:
            return lent
        if free := self.free.get(key):
            return free.pop(next((i for i, slot in enumerate(free) if slot.lane not in taken), -1))
        if net not in self._given or len(self.lent) >= own:
            return self.captured(key, self.idle(taken))
        slot = self.lent[net] = self._fit(key, net, self.idle(taken))
        del self._given[net]
        return slot

    def captured(self, key: Step, lane: Lane) -> FitSlot:
        """A new step with a network of its own."""
        return self._fit(key, self.make(key.space, key.arch), lane)

    def missing(self, patterns: Iterable[Step], archs: Counter[Arch], busy: Counter[Step]) -> Iterator[Step]:
        """What free and busy steps are short of where so many clients have these archs."""
        for arch, wanted in archs.items():
            for key in (pattern._replace(arch=arch) for pattern in patterns):
                for _ in range(wanted - busy[key] - len(self.free.get(key, ()))):
                    yield key

    def capture_ahead(self, key: Step, lane: Lane) -> bool:
        """Gets a step ready, if it can be; if not, whoever wants it captures their own."""
        with contextlib.suppress(Cannot, torch.OutOfMemoryError):
            self.keep(self.captured(key, lane))
            return True
        return False

    def _fit(self, key: Step, net: nn.Module, lane: Lane) -> FitSlot:
        return with_all_there_is(lambda: FitSlot(key, net, lane, self.precision))

    def idle(self, taken: set[Lane]) -> Lane:
        """A lane that is not taken and, if there is one, that no client's own step will want."""
        lent = {slot.lane for slot in self.lent.values()}
        idle = [lane for lane in self.lanes if lane not in taken]
        return next((lane for lane in idle if lane not in lent), idle[0])

    def keep(self, slot: FitSlot) -> None:
        """For the next job of its kind, unless a client still holds its network."""
        if slot.net not in self.lent and slot.net not in self._given:
            self.free.setdefault(slot.key, []).append(slot)
            self.free.move_to_end(slot.key)

    def loop(self, job: Loop, taken: set[Lane]) -> LoopSlot:
        """The captured step of a recipe: one on a lane that is free, or a new one with networks of its own."""
        key = Recurring.of(job)
        kept = self.loops.get(key, [])
        found = next((slot for slot in kept if slot.lane not in taken), None)
        if found is None:
            nets = [self.make(space, arch) for space, arch in key.nets]
            return LoopSlot(key, nets, job.steps, self.idle(taken), self.precision)
        kept.remove(found)
        return found

    def keep_loop(self, slot: LoopSlot) -> None:
        """For the next job of its kind; at most one for every lane."""
        self.loops.setdefault(slot.key, []).append(slot)
        self.loops.move_to_end(slot.key)

    def take_back(self, number: int) -> None:
        """Takes back what some work held, which is over."""
        for net in self._held.pop(number, ()):
            if slot := self.lent.pop(net, None):
                self.keep(slot)
            else:
                kind = self._given.pop(net)
                drop_gradients(net)
                self._networks.setdefault(kind, []).append(net)
                self._networks.move_to_end(kind)
        while len(self._networks) > 4 * self.most:
            self._networks.popitem(last=False)

    def recycle(self) -> None:
        """Takes everything back, and drops what was used longest ago."""
        self.turn = NOBODY
        self._used.clear()
        for number in list(self._held):
            self.take_back(number)
        if _count(self.free) > self.most or _count(self.loops) > len(self.lanes):
            torch.cuda.synchronize(self.lanes[0].stream.device)  # a graph must not go while it runs
        self._drop(_count(self.free) - self.most)
        while _count(self.loops) > len(self.lanes):
            for slot in self.loops.popitem(last=False)[1]:
                slot.release()

    def _drop(self, many: int) -> None:
        """Lets go of so many captured fits, of those unused for longest."""
        for _ in range(many):
            key, slots = next((key, slots) for key, slots in self.free.items() if slots)
            self._used.discard(slots.pop(0))
            if not slots:
                del self.free[key]

    def keep_less(self) -> bool:
        """Lets go of free networks and of half of the captured fits; False: of nothing.

        No more fits are kept from now on, unless one round needs more: they would all be captured anew each time.
        """
        fits, networks = _count(self.free), len(self._networks)
        self._drop(fits - fits // 2)
        if fits:
            free = {slot for kept in self.free.values() for slot in kept}
            self.most = min(self.most, max(self._needed, len(free.union(self.lent.values(), self._used))))
        self._networks.clear()
        return fits + networks > 0

    def forget(self) -> None:
        """Drops every captured step, and the networks that no client holds."""
        self.free.clear()
        self._given |= {net: slot.key[:2] for net, slot in self.lent.items()}
        self.lent.clear()
        self._used.clear()
        for slot in (slot for kept in self.loops.values() for slot in kept):
            slot.release()
        self.loops.clear()
        self._networks.clear()
        self.lanes = self.new_lanes(len(self.lanes))  # the old ones' memory goes with their last step


def sizes(network: Cost, batch: int, precision: str) -> tuple[float, float]:
    """Bytes that a captured step takes, and another one of its lane: activations are the lane's, for all its steps."""
    images = math.ceil(batch / 2) if precision == "bf16" else batch  # whose activations take half the room
    return SLACK * network.training_memory(images) + WORKSPACE, SLACK * network.training_memory(0) + BUFFER + WORKSPACE


def _count(kept: Mapping[Any, Sequence[object]]) -> int:
    return sum(map(len, kept.values()))
