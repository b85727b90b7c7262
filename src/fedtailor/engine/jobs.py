"""The jobs a client hands to the engine by `await`.

A job says what to compute, never how: `Fit` trains a network the ordinary way and `Loop` runs a step of the method's
own, both over batches and returning the mean loss; `Score` returns an accuracy and `Predict` the outputs themselves;
`Recalibrate` re-estimates normalisation statistics. A loop's step is a closure that updates its tensors in place and
returns a loss tensor, so that an engine may run it eagerly or capture it once and replay it: it must make no choice in
Python that changes from call to call. A fit is plain data, so that an engine may run many of them as one; a loss given
to it obeys the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..data.batches import Split, Stream

if TYPE_CHECKING:
    from ..config import Local

Batch = tuple[Tensor, Tensor]
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


@dataclass(frozen=True)
class Loop(Job):
    """`steps` calls of `step`, each with one batch of every stream."""

    step: Callable[..., Tensor]
    streams: tuple[Stream, ...]
    steps: int
    nets: tuple[nn.Module, ...] = field(default=())  # put into training mode, dropout seeded
    seed: int = 0


@dataclass(frozen=True)
class Score(Job):
    """Share of a split's images that the network labels correctly, after adding `shift` to its outputs."""

    net: nn.Module
    split: Split
    shift: Tensor | None = None


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
