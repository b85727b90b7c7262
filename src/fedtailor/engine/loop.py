"""The only round loop. Whatever runs the clients, rounds happen here, in this order, with these seeds."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..data.federation import Store
from ..data.partition import TRAIN, VAL
from ..errors import UserError
from ..fleet.clock import Clock, available, round_seconds
from ..fleet.fleet import Fleet, FleetConfig
from ..method import Job, Method, Reply, Seat, Server, Task, returned
from ..parts import choose, learnt
from ..seeds import rng_of
from ..spaces.base import Arch
from ..values import bytes_of, on_device
from .client import Client
from .local import LocalEngine, Memory


@dataclass
class State:
    """All that changes during a run: a checkpoint is this and nothing else."""

    server: Server
    memories: dict[int, Memory] = field(default_factory=dict)
    round: int = 0  # rounds finished
    touched: set[int] = field(default_factory=set)  # clients whose memory changed since the last checkpoint


@dataclass(frozen=True)
class Answer:
    """What came of one client's work."""

    reply: Reply
    memory: Memory
    flops: int


@dataclass(frozen=True)
class Event:
    """One row of the tidy table of a run."""

    round: int
    client: int | None
    split: str
    metric: str
    value: float | str | Tensor


def numbers(events: Sequence[Event]) -> Iterator[Event]:
    """The events with tensors read, all at once, and truths as 1 and 0."""
    late = [event.value for event in events if isinstance(event.value, Tensor)]
    read = iter(torch.stack(late).tolist() if late else ())
    for event in events:
        value = next(read) if isinstance(event.value, Tensor) else event.value
        value = value if isinstance(value, str) else value + 0
        yield Event(event.round, event.client, event.split, event.metric, value)


def participants_of(job: Job, round: int) -> list[int]:
    """Who takes part in a round: the same for every method with the same seed."""
    rng = rng_of(job.seed, "participants", round)
    return sorted(int(i) for i in rng.choice(job.clients, job.participants, replace=False))


class Rounds(ABC):
    """The server's half of every round; who does the clients' half is for `work` to say."""

    def __init__(self, job: Job, method: Method, fleet: Fleet, rules: FleetConfig) -> None:
        self.job, self.method, self.fleet, self.rules = job, method, fleet, rules
        self._began: Callable[[int, Sequence[int]], None] | None = None

    def begin(self) -> State:
        return State(returned(self.method.start(self.job), Server, self.method, "start"))

    def follow(self, told: Callable[[int, Sequence[int]], None]) -> None:
        """Has every round that begins told, with its clients."""
        self._began = told

    def present(self, number: int) -> list[int]:
        """Who is asked in a round: its participants, as far as they can be reached."""
        return sorted(available(self.fleet, participants_of(self.job, number), number, self.job.seed))

    @abstractmethod
    def work(
        self,
        method: Method,
        seats: Sequence[Seat],
        tasks: Sequence[Task],
        memories: dict[int, Memory],
        number: int,
        events: list[Event],
    ) -> list[Answer | None]:
        """What clients make of their tasks, in their order; None for one that gave no answer."""

    def merge(self, method: Method, server: Server, replies: Sequence[Reply]) -> Server:
        return returned(method.merge(server, replies), Server, method, "merge")

    def stow(self, memories: dict[int, Memory]) -> dict[int, Memory]:
        """Memories after a round, where they lie until their clients are back."""
        return memories

    def rounds(self, state: State, report: Callable[[Event], None]) -> Iterator[State]:
        """Runs the remaining rounds, yielding the state after each."""
        while state.round < self.job.rounds:
            self.round(state, report)
            yield state

    def round(self, state: State, report: Callable[[Event], None]) -> None:
        """Runs the next round. The state changes only when the round is whole."""
        number = state.round + 1
        began = time.perf_counter()
        events: list[Event] = []
        present = self.present(number)
        if self._began:
            self._began(number, present)
        server, memories = self.exchange(self.method, state.server, state.memories, number, present, events)
        server.round = number
        state.server, state.round = server, number
        state.memories.update(memories)
        state.touched |= memories.keys()
        for event in numbers(events):
            report(event)
        report(Event(number, None, "", "measured_seconds", time.perf_counter() - began))

    def sent(self, task: Task) -> Task:
        """A task as a client gets it. Where statistics stay at the clients, the server's are 0 and 1 for ever."""
        if self.job.local.bn != "local":
            return task
        return dataclasses.replace(task, weights=choose(task.weights, learnt))

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
        tasks = [self.sent(returned(method.ask(server, seat), Task, method, "ask")) for seat in seats]
        answers = self.work(method, seats, tasks, memories, number, events)
        came = [(s, t, a) for s, t, a in zip(seats, tasks, answers, strict=True) if a is not None]
        times: dict[int, float] = {}
        for seat, task, answer in came:
            reply = answer.reply
            down, up = bytes_of([task.weights, task.extra]), bytes_of([reply.weights, reply.extra])
            times[seat.id] = round_seconds(seat.profile, down, up, answer.flops)
            rows = {"bytes_down": down, "bytes_up": up, "seconds": times[seat.id], "flops": answer.flops}
            events += [Event(number, seat.id, "", metric, value) for metric, value in rows.items()]
            splits = {"loss": "train", "accuracy": "val"}
            facts = {k: v for k, v in reply.facts.items() if not isinstance(v, str)}
            events += [Event(number, seat.id, splits.get(k, ""), k, v) for k, v in facts.items()]
            if task.arch:
                events.append(Event(number, seat.id, "", "arch", self.job.space.word(task.arch)))
        _, ended = Clock(self.rules.deadline).round(times)
        events.append(Event(number, None, "", "round_seconds", ended.seconds))
        events.append(Event(number, None, "", "late", len(ended.late)))
        arrived = [
            dataclasses.replace(answer.reply, client=seat.id, samples=seat.samples, seconds=times[seat.id])
            for seat, _, answer in came
            if seat.id in ended.on_time
        ]
        merged = self.merge(method, server, arrived) if arrived else server.replace()
        changed = {seat.id: answer.memory for seat, _, answer in came if answer.memory or seat.id in memories}
        return merged, self.stow(changed)


class Federation(Rounds):
    """A federation whose clients are all on this machine: their learning data and the engine that runs them."""

    def __init__(
        self, job: Job, method: Method, store: Store, engine: LocalEngine, fleet: Fleet, rules: FleetConfig
    ) -> None:
        super().__init__(job, method, fleet, rules)
        self.store, self.engine = store, engine
        self._ahead: Callable[[], list[Arch]] | None = None  # the next round's archs, for the engine to get ready

    def round(self, state: State, report: Callable[[Event], None]) -> None:
        self._ahead = partial(self.foresee, state.server)
        others = set(self.present(state.round + 2)).difference(self.present(state.round + 1))
        self.engine.expect({i: state.memories[i] for i in others if i in state.memories})
        super().round(state, report)

    def foresee(self, server: Server) -> list[Arch]:
        """The archs of the round after the server's next one, if that one should change nothing that decides them."""
        number = server.round + 2
        if number > self.job.rounds:
            return []
        later = server.replace()
        later.round += 1
        return [self.method.ask(later, self.job.seats[i]).arch for i in self.present(number)]

    def client(self, seat: Seat, memory: Memory, round: int, keeping: bool = False) -> Client:
        """A client in a round, or, when `keeping`, one that makes its personal network after it."""
        train, val = self.store.split(seat.id, TRAIN), self.store.split(seat.id, VAL)
        return Client(self.job, seat, train, val, memory, round, self.engine, keeping, self.store.public)

    def begin(self) -> State:
        server = super().begin().server
        return State(server.replace(**on_device(server.values, self.engine.device)))

    def work(
        self,
        method: Method,
        seats: Sequence[Seat],
        tasks: Sequence[Task],
        memories: dict[int, Memory],
        number: int,
        events: list[Event],
    ) -> list[Answer | None]:
        clients = [self.client(seat, memories.get(seat.id, {}), number) for seat in seats]
        ahead, self._ahead = self._ahead, None
        replies = self.engine.run(
            [
                (f"{place}, arch {task.arch}" if task.arch else place, _worked(method, task, c))
                for task, c in zip(tasks, clients, strict=True)
                for place in [f"round {number}, client {c.name}"]
            ],
            ahead,
        )
        return [Answer(reply, c.memory, c.flops) for reply, c in zip(replies, clients, strict=True)]

    def merge(self, method: Method, server: Server, replies: Sequence[Reply]) -> Server:
        merged = super().merge(method, server, replies)
        self.engine.settle()  # not earlier: merging needs no number that is still being computed
        return merged

    def stow(self, memories: dict[int, Memory]) -> dict[int, Memory]:
        return self.engine.stow(memories)


async def _worked(method: Method, task: Task, client: Client) -> Reply:
    """A client's work, with the two slips told that Python explains badly: a forgotten `async`, a forgotten `await`."""
    work = method.work(task, client)
    if not isinstance(work, Awaitable):
        raise UserError(f"{type(method).__name__}.work is no coroutine: write 'async def work', and await its jobs.")
    reply = returned(await work, Reply, method, "work")
    for name, fact in reply.facts.items():
        if isinstance(fact, Coroutine):
            fact.close()
            raise UserError(f"{type(method).__name__}.work: '{name}' was never computed: write 'await' before its job.")
    return reply
