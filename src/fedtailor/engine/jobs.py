"""The jobs a client hands to the engine by `await`.

A job says what to compute, never how: `Fit` trains a network the ordinary way and `Loop` runs a step of the method's
own, both over batches and returning the mean loss; `Score` returns an accuracy and `Predict` the outputs themselves;
`Recalibrate` re-estimates normalisation statistics. A loop's step is a closure that updates its tensors in place and
returns a loss tensor, so that an engine may run it eagerly or capture it once and replay it: it must make no choice in
Python that changes from call to call. A fit is plain data, so that an engine may run many of them as one; a loss given
to it obeys the same rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ..data.batches import Split, Stream

if TYPE_CHECKING:
    from ..config import Local

Batch = tuple[Tensor, Tensor]
Value = float | Tensor | None
Measured = float | Tensor  # a loss; as a tensor it is still being computed, and float() waits for it


class Job:
    """Base of all jobs: awaiting one yields it to the engine and returns what the engine sends back."""

    def __await__(self) -> Generator[Job, Any, Any]:
        result = yield self
        return result


@dataclass(frozen=True)
class Fit(Job):
    """Ordinary training: `steps` of the optimiser on the parameters named in `train`."""

    net: nn.Module
    train: tuple[str, ...]
    stream: Stream
    steps: int
    lr: float
    local: Local
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None  # None: cross-entropy
    shift: Tensor | None = None  # added to the logits inside the loss
    anchor: dict[str, Tensor] | None = None  # pulls the parameters towards these values
    pull: float = 0.0  # how strongly: pull * (w - anchor) is added to the gradient
    push: dict[str, Tensor] | None = None  # added to the gradient as it is
    seed: int = 0


class Made(NamedTuple):
    """A step, and the tensors it keeps beside its networks and values, which are zeros at first: optimisers' states."""

    step: Callable[..., Tensor]
    state: Callable[[], Sequence[Tensor]]


class Recipe(ABC):
    """How to make a step of a method's own. An engine may make it once, and use it for every job that is alike.

    A frozen dataclass: its fields, and what the networks and values look like, are all that the step may depend on.
    Values are numbers or tensors that differ from job to job; a step that is used again finds tensors in their place.
    """

    @abstractmethod
    def make(self, nets: Sequence[nn.Module], values: Sequence[Value]) -> Made:
        """The step for these networks and values, which it is to read and change where they lie."""


@dataclass(frozen=True)
class Loop(Job):
    """`steps` calls of `step`, each with one batch of every stream."""

    step: Callable[..., Tensor] | Recipe
    streams: tuple[Stream, ...]
    steps: int
    nets: tuple[nn.Module, ...] = field(default=())  # put into training mode, dropout seeded
    seed: int = 0
    values: tuple[Value, ...] = ()  # for a recipe
    undo: Callable[[], None] | None = None  # makes up for a first step that was broken off; None: nobody can
    ready: bool = False  # all that the step needs is there before the first one, so that no step has to be run for it

    def made(self) -> Callable[..., Tensor]:
        return self.step.make(self.nets, self.values).step if isinstance(self.step, Recipe) else self.step


@dataclass(frozen=True)
class Score(Job):
    """Share of a split's images that the network labels correctly, after adding `shift` to its outputs."""

    net: nn.Module
    split: Split
    shift: Tensor | None = None
    rough: bool = False  # it only ranks networks, so it may be computed as training is


@dataclass(frozen=True)
class Predict(Job):
    """The network's outputs on all images of a split, in their order."""

    net: nn.Module
    split: Split


@dataclass(frozen=True)
class Recalibrate(Job):
    """Re-estimates the normalisation statistics of a network as the mean over `batches` batches."""

    net: nn.Module
    stream: Stream
    batches: int


Waiting = tuple[int, str, Job]  # the number of some work, its label and the job it awaits
