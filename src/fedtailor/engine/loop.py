"""The only round loop. Whatever runs the clients, rounds happen here, in this order, with these seeds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Local
from ..data.federation import Store
from ..data.partition import TRAIN, VAL
from ..fleet.clock import Clock, available, round_seconds
from ..fleet.fleet import Fleet, FleetConfig
from ..method import Job, Method, Seat, Server, Task
from ..parts import choose, learnt
from ..seeds import rng_of
from ..values import bytes_of, on_device
from .client import Client
from .local import LocalEngine

Memory = dict[str, Any]


@dataclass
class State:
    """All that changes during a run: a checkpoint is this and nothing else."""

    server: Server
    memories: dict[int, Memory] = field(default_factory=dict)
    round: int = 0  # rounds finished
    touched: set[int] = field(default_factory=set)  # clients whose memory changed since the last checkpoint


@dataclass(frozen=True)
class Event:
    """One row of the tidy table of a run."""

    round: int
    client: int | None
    split: str
    metric: str
    value: float | str


def participants_of(job: Job, round: int) -> list[int]:
    """Who takes part in a round: the same for every method with the same seed."""
    rng = rng_of(job.seed, "participants", round)
    return sorted(int(i) for i in rng.choice(job.clients, job.participants, replace=False))


def outgoing(task: Task, local: Local) -> Task:
    """A task as a client gets it. Where statistics stay at the clients, the server's are 0 and 1 for ever: not sent."""
    return task if local.bn != "local" else dataclasses.replace(task, weights=choose(task.weights, learnt))


class Federation:
    """A job, a method and the clients' learning data, ready to run rounds."""

    def __init__(
        self, job: Job, method: Method, store: Store, engine: LocalEngine, fleet: Fleet, rules: FleetConfig
    ) -> None:
        self.job, self.method, self.store, self.engine = job, method, store, engine
        self.fleet, self.rules = fleet, rules

    def client(self, seat: Seat, memory: Memory, round: int, keeping: bool = False) -> Client:
        """A client in a round, or, when `keeping`, one that makes its personal network after it."""
        train, val = self.store.split(seat.id, TRAIN), self.store.split(seat.id, VAL)
        return Client(self.job, seat, train, val, memory, round, self.engine, keeping)

    def begin(self) -> State:
        server = self.method.start(self.job)
        return State(server.replace(**on_device(server.values, self.engine.device)))

    def rounds(self, state: State, report: Callable[[Event], None]) -> Iterator[State]:
        """Runs the remaining rounds, yielding the state after each. The state changes only when a round is whole."""
        while state.round < self.job.rounds:
            number = state.round + 1
            began = time.perf_counter()
            present = sorted(available(self.fleet, participants_of(self.job, number), number, self.job.seed))
            events: list[Event] = []
            server, memories = self.exchange(self.method, state.server, state.memories, number, present, events)
            server.round = number
            state.server, state.round = server, number
            state.memories.update(memories)
            state.touched |= memories.keys()
            for event in events:
                report(event)
            report(Event(number, None, "", "measured_seconds", time.perf_counter() - began))
            yield state

    def exchange(
        self,
        method: Method,
        server: Server,
        memories: dict[int, Memory],
        number: int,
        present: Sequence[int],
        events: list[Event],
    ) -> tuple[Server, dict[int, Memory]]:
        """One exchange with some clients: ask, work, merge."""
        seats = [self.job.seats[i] for i in present]
        tasks = [outgoing(method.ask(server, seat), self.job.local) for seat in seats]
        clients = [self.client(seat, memories.get(seat.id, {}), number) for seat in seats]
        replies = self.engine.run(
            [
                (f"round {number}, client {c.name}, arch {task.arch}", method.work(task, c))
                for task, c in zip(tasks, clients, strict=True)
            ]
        )
        times: dict[int, float] = {}
        for seat, task, client, reply in zip(seats, tasks, clients, replies, strict=True):
            down, up = bytes_of([task.weights, task.extra]), bytes_of([reply.weights, reply.extra])
            times[seat.id] = round_seconds(seat.profile, down, up, client.flops)
            rows = {"bytes_down": down, "bytes_up": up, "seconds": times[seat.id], "flops": client.flops}
            events += [Event(number, seat.id, "", metric, value) for metric, value in rows.items()]
            splits = {"loss": "train", "accuracy": "val"}
            facts = {k: v + 0 for k, v in reply.facts.items() if not isinstance(v, str)}  # True is logged as 1
            events += [Event(number, seat.id, splits.get(k, ""), k, v) for k, v in facts.items()]
            if task.arch:
                events.append(Event(number, seat.id, "", "arch", self.job.space.word(task.arch)))
        _, ended = Clock(self.rules.deadline).round(times)
        events.append(Event(number, None, "", "round_seconds", ended.seconds))
        events.append(Event(number, None, "", "late", len(ended.late)))
        arrived = [
            dataclasses.replace(reply, client=seat.id, samples=seat.samples, seconds=times[seat.id])
            for seat, reply in zip(seats, replies, strict=True)
            if seat.id in ended.on_time
        ]
        merged = method.merge(server, arrived) if arrived else server.replace()
        changed = {c.id: c.memory for c in clients if c.memory or c.id in memories}
        return merged, changed
