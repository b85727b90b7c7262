"""The jobs a client hands to the engine by `await`.

A job says what to compute, never how: `Loop` runs a step over batches and returns its mean loss, `Score` returns an
accuracy, `Recalibrate` re-estimates normalisation statistics. The step of a loop is a closure that updates its tensors in
place and returns a loss tensor, so that an engine may run it eagerly or capture it once and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..data.batches import Split

Batch = tuple[Tensor, Tensor]


class Job:
    """Base of all jobs: awaiting one yields it to the engine and returns what the engine sends back."""

    def __await__(self) -> Generator[Job, Any, Any]:
        result = yield self
        return result


@dataclass(frozen=True)
class Stream:
    """Where a loop's batches come from."""

    split: Split
    batch: int
    augment: str
    seed: int


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
class Recalibrate(Job):
    """Re-estimates the normalisation statistics of a network as the mean over `batches` batches."""

    net: nn.Module
    stream: Stream
    batches: int
