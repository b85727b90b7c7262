"""A method's card: what it sends, keeps and learns, as data that `fedtailor explain` prints and tests hold it to.

Nothing that crosses the wire or stays in a client's memory may be missing here: a generic test runs every method and
compares its messages, memories and server state with its card, name by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from .parts import body, head, layers, learnt, rest

Names = dict[str, str]  # name, or a pattern with *, and what it is
Part = Literal["nothing", "network", "sub-network", "supernet", "body", "head", "learnt sub-network", "all but norms"]
Heterogeneity = Literal["statistical", "system", "model"]

PARTS: Mapping[Part, Callable[[str], bool]] = {
    "nothing": lambda _: False,
    "network": lambda _: True,
    "sub-network": lambda _: True,
    "supernet": lambda _: True,
    "body": body,
    "head": head,
    "learnt sub-network": learnt,  # without normalisation statistics
    "all but norms": lambda _: True,  # which layers are norms only the space knows
}


@dataclass(frozen=True)
class Message:
    """What one side sends the other in a round."""

    weights: Part | tuple[Part, ...] = "nothing"  # several where phases differ
    extra: Names = field(default_factory=dict)  # other tensors
    facts: Names = field(default_factory=dict)  # small numbers
    head: tuple[str, ...] = ("head",)  # the layers that "head" means, and "body" not

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.weights if isinstance(self.weights, tuple) else (self.weights,)

    def undeclared(self, weights: Iterable[str], extra: Iterable[str], facts: Iterable[str]) -> list[str]:
        """What a real message holds beyond this."""
        parts = {**PARTS, "head": layers(*self.head), "body": rest(layers(*self.head))}
        found = [f"weights: {n}" for n in weights if not any(parts[part](n) for part in self.parts)]
        found += [f"extra: {n}" for n in unnamed(extra, self.extra)]
        return found + [f"facts: {n}" for n in unnamed(facts, self.facts)]


LOSS: Names = {"loss": "mean training loss"}


@dataclass(frozen=True)
class Card:
    """What a method is, in the columns of the survey's tables."""

    shared: str = ""  # what all clients learn together
    personal: str = "none"  # what is a client's own
    policy: str = "none"  # what decides how much of a client's network is its own
    search: Literal["none", "server", "clients", "server and clients"] = "none"  # where architectures are chosen
    handles: tuple[Heterogeneity, ...] = ("statistical",)  # of labels and images, of devices, of architectures
    down: Message = field(default_factory=Message)
    up: Message = field(default_factory=lambda: Message(facts=LOSS))
    keeps: Names = field(default_factory=dict)  # in a client's memory between rounds
    holds: Names = field(default_factory=dict)  # at the server between rounds

    def split_at(self, head: tuple[str, ...]) -> Card:
        """The card of a method whose head is these layers."""
        return replace(self, down=replace(self.down, head=head), up=replace(self.up, head=head))


def unnamed(names: Iterable[str], declared: Names) -> list[str]:
    """The names that no declared name or pattern covers."""
    return [n for n in names if not any(fnmatchcase(n, pattern) for pattern in declared)]
