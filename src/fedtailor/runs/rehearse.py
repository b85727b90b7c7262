"""A run without a folder that writes down what passes between server and clients, for `explain` and its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..card import Message, unnamed
from ..config import Config
from ..data.federation import stores
from ..data.public import with_public
from ..engine.dry import DryEngine
from ..engine.local import LocalEngine
from ..engine.loop import Event, Federation
from ..evaluate import evaluate
from ..method import Method, Reply, Seat, Server, Task
from ..parts import norms
from ..spaces.base import Space
from ..values import bytes_of
from .execute import prepare


@dataclass
class Seen:
    """The names of everything that was sent in one direction."""

    weights: dict[str, None] = field(default_factory=dict)  # in the order in which they came up
    extra: dict[str, None] = field(default_factory=dict)
    facts: dict[str, None] = field(default_factory=dict)

    def add(self, message: Task | Reply) -> None:
        for seen, names in ((self.weights, message.weights), (self.extra, message.extra), (self.facts, message.facts)):
            seen |= dict.fromkeys(names)


@dataclass
class Rehearsal:
    """What a run sent, kept and held."""

    method: Method
    space: Space
    down: Seen = field(default_factory=Seen)
    up: Seen = field(default_factory=Seen)
    keeps: dict[str, None] = field(default_factory=dict)  # names in clients' memories
    holds: dict[str, None] = field(default_factory=dict)  # names of the server's values
    bytes_down: float = 0.0  # per client and round
    bytes_up: float = 0.0
    flops: float = 0.0  # per client and round
    held: int = 0  # bytes of the server's values after the last round

    def undeclared(self) -> list[str]:
        """What the run did beyond the method's card. Statistics that the policy `local` keeps are the library's."""
        card = self.method.declared
        found = [f"{way}: {name}" for way in ("down", "up") for name in self._beyond(way)]
        found += [f"keeps: {name}" for name in unnamed(self.keeps, card.keeps | {"statistics": ""})]
        return found + [f"holds: {name}" for name in unnamed(self.holds, card.holds)]

    def unused(self) -> list[str]:
        """What the card declares and the run never did."""
        card = self.method.declared
        found: list[str] = []
        for way, message, seen in (("down", card.down, self.down), ("up", card.up, self.up)):
            if message.parts != ("nothing",) and not seen.weights:
                found.append(f"{way}: weights")
            found += [f"{way}: {n}" for n in message.extra if not _covered(n, seen.extra)]
            found += [f"{way}: {n}" for n in message.facts if not _covered(n, seen.facts)]
        found += [f"keeps: {n}" for n in card.keeps if not _covered(n, self.keeps)]
        return found + [f"holds: {n}" for n in card.holds if not _covered(n, self.holds)]

    def _beyond(self, way: str) -> list[str]:
        message: Message = getattr(self.method.declared, way)
        seen: Seen = getattr(self, way)
        found = message.undeclared(seen.weights, seen.extra, seen.facts)
        if "all but norms" in message.parts:  # which layers these are only the space knows
            found += [f"weights: {n}" for n in seen.weights if norms(self.space)(n)]
        return found


def _covered(pattern: str, names: dict[str, None]) -> bool:
    return len(unnamed(names, {pattern: ""})) < len(names)


class _Recorded:
    """A method that notes every message that passes through it."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rehearsal.method, name)

    def ask(self, server: Server, client: Seat) -> Task:
        return self._down(self.rehearsal.method.ask(server, client))

    def offer(self, server: Server, client: Seat) -> Task:
        return self._down(self.rehearsal.method.offer(server, client))

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        for reply in replies:
            self.rehearsal.up.add(reply)
        return self.rehearsal.method.merge(server, replies)

    def _down(self, task: Task) -> Task:
        self.rehearsal.down.add(task)
        return task


def rehearse(config: Config, engine: LocalEngine | None = None) -> Rehearsal:
    """Runs a config and returns what was seen; without an engine nothing is trained."""
    setup, engine = prepare(config), engine or DryEngine()
    found = Rehearsal(setup.method, setup.job.space)
    learn, _ = stores(setup.dataset, setup.partition, engine.device)
    learn = with_public(learn, setup.public)
    method = cast(Method, _Recorded(found))
    federation = Federation(setup.job, method, learn, engine, setup.fleet, config.make_fleet())
    state, events = federation.begin(), list[Event]()
    found.holds |= dict.fromkeys(state.server.values)
    for _ in federation.rounds(state, events.append):
        found.holds |= dict.fromkeys(state.server.values)
        for memory in state.memories.values():
            found.keeps |= dict.fromkeys(memory)
    evaluate(federation, state, None)
    engine.close()
    for metric in ("bytes_down", "bytes_up", "flops"):
        values = [float(e.value) for e in events if e.metric == metric]
        setattr(found, metric, sum(values) / len(values))
    found.held = bytes_of(state.server.values)
    return found
