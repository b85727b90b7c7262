"""How a training job starts on a GPU: on a captured step if there can be one, and what is known where there cannot."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import torch
from torch import nn

from .jobs import Fit, Job, Loop, Recipe
from .local import Cannot
from .loops import FULL, LoopReplay, OwnStep, Recurring
from .replay import FitSlot, Lane, Replay, Step
from .slots import Slots
from .steps import fit_step


class Plain(NamedTuple):
    """What a step of a method's own is known by. Another with the same code may not be the same, but is as hard."""

    code: CodeType
    nets: tuple[type, ...]
    batches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, step: object, job: Loop) -> Plain | None:
        code = getattr(step, "__code__", None)
        shapes = tuple(stream.shape for stream in job.streams)
        return cls(code, tuple(map(type, job.nets)), shapes) if code else None


Kind = Step | Recurring | Plain | tuple[str, Step]  # of steps: a slot's, a recipe's, a method's own, or a fit's alone
TRIES = 2  # at capturing steps of a kind: what was in the way of the first may have been there once only


class Starter:
    """Starts jobs, and remembers which kinds of steps cannot be captured."""

    def __init__(self, slots: Slots, precision: str, tell: Callable[[str], None]) -> None:
        self._slots, self._precision, self._tell = slots, precision, tell
        self._refused: dict[Kind, list[str]] = {}  # why they could not be captured, each time it was tried

    def start(self, label: str, job: Job, taken: set[Lane], own: int) -> tuple[Replay, bool]:
        """A job's steps, on a lane that is not taken if there is one; and whether a captured step is used for the
        first time. Steps of up to so many clients have their `own` network."""
        kind: Kind | None = None
        own_step = job.loss if isinstance(job, Fit) else job.step if isinstance(job, Loop) else None
        if isinstance(job, Fit):
            if job.loss is None:
                key = Step.of(job)
                if found := self._slot(key, job, taken, own):
                    return found
                kind = "by itself", key
            job = Loop(fit_step(job), (job.stream,), job.steps, (job.net,), job.seed)
        assert isinstance(job, Loop)
        if isinstance(job.step, Recipe) and job.steps > 1:  # one step is not worth a network of its own
            kind = Recurring.of(job)
        elif kind is None:
            kind = Plain.of(own_step, job)
        return self._own(label, kind, job, taken), False

    def _slot(self, key: Step, job: Fit, taken: set[Lane], own: int) -> tuple[FitSlot, bool] | None:
        """A slot for an ordinary fit; None where its step cannot be captured."""
        if self._obstacle(key):
            return None
        try:
            slot = self._slots.slot(key, job.net, taken, own)
        except Cannot as reason:
            self._refused.setdefault(key, []).append(str(reason))
            return None
        fresh = slot.fresh
        slot.begin(job)
        return slot, fresh

    def _own(self, label: str, kind: Kind | None, job: Loop, taken: set[Lane]) -> OwnStep:
        """A step of the method's own, or one that no slot can have."""
        known = self._obstacle(kind) if kind else ""
        if isinstance(kind, Recurring) and not known:
            step = self._recurring(job, taken)
        else:
            step = LoopReplay(job, self._slots.idle(taken), self._precision, known)
        if step.obstacle and step.left:
            if kind and not known and step.obstacle != FULL:
                self._refused.setdefault(kind, []).append(step.obstacle)
            self._tell(f"{label}: runs step by step, its step cannot be captured ({step.obstacle})")
        return step

    def _recurring(self, job: Loop, taken: set[Lane]) -> OwnStep:
        slot = self._slots.loop(job, taken)
        made = slot.made is not None
        try:
            slot.begin(job)
        except torch.OutOfMemoryError:
            if made:  # it refers to itself: unless it is let go with the others, it stays
                self._slots.keep_loop(slot)
            raise
        return slot

    def _obstacle(self, kind: Kind) -> str:
        """What keeps steps of a kind from being captured, if that is certain."""
        why = self._refused.get(kind, [])
        return why[-1] if len(why) >= TRIES else ""


def wake_libraries(device: torch.device) -> None:
    """Makes the convolution and matrix libraries' handles of the threads that capture a step; a capture cannot."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2)).to(device)
    net(torch.zeros(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(device)
