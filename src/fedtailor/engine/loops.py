"""Captured steps of methods' own: those of one job, and those that a recipe makes for all jobs that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..spaces.base import Arch, Space
from ..spaces.layers import seed_dropout
from ..spaces.measure import let_learn, tensors_of
from .jobs import Loop, Made, Recipe
from .local import Cannot, is_full, lowered
from .replay import Lane, Replay, ahead, drawn, on, with_all_there_is

HALF_WAY = (
    "the GPU's memory is full, half way through a step that cannot be begun again. Resume the run, which then has "
    "the whole card; if that does not help, try a smaller local.batch."
)
FULL = "the GPU's memory is full"  # an obstacle that need not be there the next time


class OwnStep(Replay):
    """A method's own step: the first one is run, unless all is ready for a capture, and the rest replayed."""

    nets: tuple[nn.Module, ...]

    def _begin(self, own: Callable[..., Tensor], obstacle: str = "", ready: bool = False) -> None:
        """Runs the first step, unless all is ready, and captures the others, unless there is a known obstacle."""

        def step() -> Tensor:
            pairs = self.batches()
            return own(*(pairs[0] if len(pairs) == 1 else pairs))

        self.step, self.obstacle = step, obstacle if self.steps > 1 else "one step"
        if ready and not self.obstacle:
            self._record()
            if not self.obstacle:
                return
        with torch.cuda.stream(self.stream):  # optimiser states and workspaces are made outside the capture
            with lowered(self.precision):
                self.total += step()
            self.counter += 1
        self.done = 1
        if not self.obstacle:
            self._record()

    def _record(self) -> None:
        """Captures a step, or says what is in the way."""
        gradients = [(p, p.grad) for net in self.nets for p in net.parameters()]
        try:
            with_all_there_is(lambda: self.capture(self.step))
            return
        except Cannot as reason:
            self.obstacle = str(reason)
        except torch.OutOfMemoryError:
            if not self.done:  # whoever began it may make room and begin again
                raise
            self.obstacle = FULL  # the first step is done and cannot be done again
            del self.graph
        for parameter, gradient in gradients:  # those of the capture were never computed
            parameter.grad = gradient

    def launch(self) -> None:
        if self.obstacle:
            with lowered(self.precision):
                self.total += self.step()
            self.counter += 1
        else:
            super().launch()

    def release(self) -> None:
        """Lets go of the graph and of what its step holds, which refers back to this object."""
        del self.step
        if not self.obstacle:
            del self.graph


class LoopReplay(OwnStep):
    """The step of one job, on the job's networks."""

    def __init__(self, job: Loop, lane: Lane, precision: str, obstacle: str = "") -> None:
        shapes = [s.shape for s in job.streams]
        super().__init__(lane, shapes, precision, min(ahead(shapes), job.steps))
        self.nets, own = job.nets, job.made()
        for net in job.nets:
            net.train()
            seed_dropout(net, job.seed)
        self.start([drawn(stream, job.steps) for stream in job.streams], job.steps)
        try:
            self._begin(own, obstacle, job.ready)
        except Exception as error:
            if not is_full(error):
                raise
            if job.undo is None:  # the networks are the client's own, and half changed
                raise UserError(HALF_WAY) from error
            with on(self.stream):
                job.undo()
            raise torch.OutOfMemoryError(str(error)) from error

    def finish(self) -> None:
        for net in self.nets:
            let_learn(net)


class Recurring(NamedTuple):
    """What two loops must share to use one captured step."""

    recipe: Recipe
    nets: tuple[tuple[Space, Arch], ...]
    batches: tuple[tuple[int, ...], ...]  # shapes of their images
    values: tuple[object, ...]  # what they look like

    @classmethod
    def of(cls, job: Loop) -> Recurring:
        assert isinstance(job.step, Recipe)
        nets = tuple((net.space, net.arch) for net in job.nets)
        values = tuple(v.shape if isinstance(v, Tensor) else type(v) for v in job.values)
        return cls(job.step, nets, tuple(stream.shape for stream in job.streams), values)  # type: ignore[arg-type]


class LoopSlot(OwnStep):
    """The captured step of a recipe, with networks and values of its own, into which a job's are copied, and back."""

    def __init__(self, key: Recurring, nets: Sequence[nn.Module], steps: int, lane: Lane, precision: str) -> None:
        super().__init__(lane, key.batches, precision, min(ahead(key.batches), steps))
        self.key, self.nets = key, tuple(net.train() for net in nets)
        self.values = [None if v is type(None) else _blank(v, lane.stream.device) for v in key.values]
        self.tensors = [t for net in nets for t in tensors_of(net).values()]
        self.made: Made | None = None
        self.job: Loop | None = None  # under way
        self.obstacle = ""

    def begin(self, job: Loop) -> None:
        self.job = job
        self.start([drawn(stream, job.steps) for stream in job.streams], job.steps)
        with on(self.stream), torch.no_grad():
            for net in self.nets:
                seed_dropout(net, job.seed)
            torch._foreach_copy_(self.tensors, _tensors_of(job))
            for own, value in zip(self.values, job.values, strict=True):
                if own is not None and value is not None:
                    own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)
            if self.made is not None and (state := list(self.made.state())):
                torch._foreach_zero_(state)
        if self.made is None:
            self._first(job)

    def _first(self, job: Loop) -> None:
        assert isinstance(job.step, Recipe)
        with torch.cuda.stream(self.stream):
            self.made = job.step.make(self.nets, self.values)
        self._begin(self.made.step)
        for tensor in self.tensors:
            tensor.grad = None  # the lane's other steps may have its memory

    def finish(self) -> None:
        assert self.job
        with on(self.stream), torch.no_grad():
            torch._foreach_copy_(_tensors_of(self.job), self.tensors)
        self.job, self.draws = None, ()  # as a fit's slot


def _tensors_of(job: Loop) -> list[Tensor]:
    return [t for net in job.nets for t in tensors_of(net).values()]


def _blank(like: object, device: torch.device) -> Tensor:
    return torch.zeros(like if isinstance(like, torch.Size) else (), device=device)
