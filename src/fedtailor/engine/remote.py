"""The server's half of rounds whose clients are elsewhere.

One message per client and round carries everything: the task of the round and, where an evaluation is due, what the
client needs for it, so that the scores of a round travel with the work of the next.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

import torch

from ..errors import UserError
from ..evaluate import Kept, onboard, personal_rows
from ..fleet.clock import round_seconds
from ..fleet.fleet import Fleet, FleetConfig
from ..method import Job, Method, Reply, Seat, Server, Task
from ..values import bytes_of, tensors_in
from .crowd import AGAIN, POLL, Crowd, Waiting, new_number
from .loop import Answer, Event, Memory, Rounds, State
from .wire import Evaluate, Evaluated, Request, Response, Work

TRIES = 20  # answers of a client, none of which can be used, until its round goes by without it
PATIENCE = 90.0  # seconds to wait at the end for clients that are late or lost: a killed one needs a minute to return


class RemoteFederation(Rounds):
    """Rounds with the clients of a crowd. Of a memory the server knows only after which round it was written."""

    def __init__(
        self,
        job: Job,
        method: Method,
        fleet: Fleet,
        rules: FleetConfig,
        crowd: Crowd,
        classes: tuple[str, ...],
        waiting: Waiting,
        keep: int,
        job_for: Callable[[Sequence[int]], Job],
    ) -> None:
        super().__init__(job, method, fleet, rules)
        self.crowd, self.classes, self.waiting, self.keep = crowd, classes, waiting, keep
        self._job_for = job_for  # the job with other numbers of samples
        self._evaluation: dict[int, Evaluate] = {}  # what clients evaluate along with their next work
        self._lost: set[int] = set()  # clients whose memory is gone
        self._useless: set[int] = set()  # clients that have not answered anything of use since they were given up
        self._stale: list[Reply] = []  # late replies that the next merge uses
        self._joining = False
        self.precision = "auto"  # of the clients, each on its device

    def close(self) -> None: ...

    def rounds(  # type: ignore[override]
        self, state: State, report: Callable[[Event], None], due: Callable[[int], bool]
    ) -> Iterator[State]:
        while state.round < self.job.rounds:
            self._gather(state)
            self._evaluation = self._orders(state, last=False) if due(state.round) else {}
            self.round(state, report)
            yield state

    def present(self, number: int) -> list[int]:
        """The round's participants that are ready; one that came in this moment has no seat for its data yet."""
        return [i for i in super().present(number) if self._seated(self.job.seats[i])]

    def _seated(self, seat: Seat) -> bool:
        return self.crowd.ready(seat.name) and self.crowd.members[seat.name].about["samples"] == seat.samples

    def _gather(self, state: State) -> None:
        """Waits while the next round's participants are too few for a quorum. Those that were shut out, or were of no
        use, make none, and nobody waits for them: a round that has no others goes by."""
        out = self.crowd.shut.union(self.job.seats[i].name for i in self._useless)
        names = [seat.name for i in super().present(state.round + 1) if (seat := self.job.seats[i]).name not in out]
        quorum = min(self.waiting.quorum, len(names))
        while True:
            self.crowd.gather(quorum, names)
            self._catch_up(state)
            if sum(self.job.seats[i].name in names for i in self.present(state.round + 1)) >= quorum:
                return
            time.sleep(POLL)

    def work(
        self,
        method: Method,
        seats: Sequence[Seat],
        tasks: Sequence[Task],
        memories: dict[int, Memory],
        number: int,
        events: list[Event],
    ) -> list[Answer | None]:
        evaluation, self._evaluation = self._evaluation, {}
        orders = {
            seat.id: Work(number, task, memories.get(seat.id, {}).get("round", 0), self._joining)
            for seat, task in zip(seats, tasks, strict=True)
        }
        answers: dict[int, Answer] = {}
        reasons: dict[int, str] = {}
        tries, given_up = Counter[int](), set[int]()
        quorum = min(self.waiting.quorum, len(seats))
        while True:
            found, missing = self._ask(orders, evaluation, quorum - len(answers))
            events += self._evaluated(evaluation, found, "personal", number - 1)
            for who, response in found.items():
                if response.worked:
                    memory = {"round": number} if response.worked.remembers else {}
                    answers[who] = Answer(response.worked.reply, memory, response.worked.flops)
            self._lost |= {who for who, why in missing.items() if why == "memory"}
            reasons |= {who: why for who, why in missing.items() if who in orders}
            tries.update(who for who in orders if who not in answers and self._there(who))
            given_up |= {who for who, n in tries.items() if n >= (1 if who in self._useless else TRIES)}
            given_up |= {who for who, why in missing.items() if why == "late"} if self._joining else set()
            # nobody waits for a client that answers nothing of use, as for one that was shut out
            quorum = min(self.waiting.quorum, len(seats) - len(given_up))
            orders = {
                who: dataclasses.replace(order, memory=0) if who in self._lost else order
                for who, order in orders.items()
                if who not in answers and who not in given_up
            }
            if len(answers) >= quorum:
                break
            # too few for the round to count: ask again, those that are back or come back
            self.crowd.say(f"round {number}: {len(answers)} of {quorum} replies that it needs; trying again")
            if not self._wait_for(orders, quorum - len(answers), missing):
                given_up |= orders.keys()
                break
            evaluation = {}
        reasons = {who: why for who, why in reasons.items() if who not in answers}
        events += [Event(number, who, "", f"missing_{why}", 1) for who, why in sorted(reasons.items())]
        self._give_up(number, given_up, answers)
        if not self._joining:
            events += self._take_late(number, answers)
        return [answers.get(seat.id) for seat in seats]

    def _there(self, who: int) -> bool:
        return self.crowd.ready(self.job.seats[who].name)

    def _give_up(self, number: int, given_up: Set[int], answers: Collection[int]) -> None:
        """Notes whose round goes by without them; raises where no client that ever came is of use."""
        for who in sorted(given_up):
            self.crowd.say(f"round {number} goes by without {self.job.seats[who].name}: no answer could be used")
        self._useless = (self._useless | given_up).difference(answers)
        came = {seat.id for seat in self.job.seats[: self.job.clients] if seat.name in self.crowd.members}
        if given_up and not self._joining and self._useless >= came:
            raise UserError(f"round {number}: clients answered {TRIES} times, but nothing that could be used.")

    def _take_late(self, number: int, answers: Mapping[int, Answer]) -> list[Event]:
        """Takes up replies to earlier rounds as far as the method allows. A client counts once, by its newest reply.

        With the method's tolerance b, a reply that is `age` rounds old counts by b / (b + age) of its samples.
        """
        seats, bound = {seat.name: seat for seat in self.job.seats}, self.method.staleness
        taken: dict[int, tuple[int, Reply]] = {}
        for late in sorted(self.crowd.stale, key=lambda late: late.work.round):
            seat, age, reply = seats[late.name], number - late.work.round, late.worked.reply
            if seat.id in answers or age > bound:
                self.crowd.say(f"the reply of {late.name} to round {late.work.round} is not used")
                continue
            down, up = (bytes_of([m.weights, m.extra]) for m in (late.work.task, reply))
            seconds = round_seconds(seat.profile, down, up, late.worked.flops)
            samples = max(1, round(seat.samples * bound / (bound + age)))
            taken[seat.id] = age, dataclasses.replace(reply, client=seat.id, samples=samples, seconds=seconds)
        self.crowd.stale.clear()
        self._stale = [reply for _, reply in taken.values()]
        return [Event(number, who, "", "stale", age) for who, (age, _) in sorted(taken.items())]

    def merge(self, method: Method, server: Server, replies: Sequence[Reply]) -> Server:
        """Merges replies; those that the method cannot use, by themselves or together, are left out."""
        replies, self._stale = sorted([*replies, *self._stale], key=lambda reply: reply.client), []
        try:
            return _merged(method, server, replies)
        except Exception:  # a hostile reply may make a method fail in any way
            merged, why = _reconciled(method, server, replies)
        for client, obstacle in sorted(why.items()):
            self.crowd.say(f"the reply of {self.job.seats[client].name} is refused: {obstacle}")
        return merged

    def finish(self, state: State) -> tuple[list[Event], list[Kept]]:
        """The evaluation at the end. Networks stay with their clients."""
        self.crowd.await_all(PATIENCE)
        self._catch_up(state)
        orders = self._orders(state, last=True)
        events = self._evaluated(orders, self._ask_last(orders), "personal", state.round)
        held_out = [s for s in self.job.seats[self.job.clients :] if self.crowd.ready(s.name)]
        return events + (self.take_in(state, held_out, "new") if held_out else []), []

    def _ask_last(self, orders: Mapping[int, Evaluate]) -> dict[int, Response]:
        """Has clients make the networks that they keep. There is no other time for it: one that is lost meanwhile is
        asked again when it is back, and one that has lost its memory makes its network without."""
        found, missing = self._ask({}, orders)
        ends = time.monotonic() + max(PATIENCE, self.waiting.deadline)
        open_ = dict(orders)
        while time.monotonic() < ends:
            open_ = {
                who: dataclasses.replace(order, memory=0) if missing[who] == "memory" else order
                for who, order in open_.items()
                if missing.get(who) in ("lost", "memory")
            }
            if not open_ or not self._wait_for(open_, 1, missing, ends - time.monotonic()):
                break
            more, missing = self._ask({}, open_)
            found |= more
        without = [self.job.seats[who].name for who in sorted(orders) if who not in found]
        if without:
            self.crowd.say(f"nobody knows whether they have their networks: {', '.join(without)}")
        return found

    def take_in(self, state: State, seats: Sequence[Seat], kind: str, tune: int = 0) -> list[Event]:
        """Lets clients that never trained join in the method's way; their networks and folders are made at theirs."""
        self._joining = True
        server, memories = onboard(self, state, seats)
        orders = {
            s.id: Evaluate(
                state.round,
                self.sent(self.method.offer(server, s)),
                memories.get(s.id, {}).get("round", 0),
                last=True,
                tune=tune,
            )
            for s in seats
            if self.crowd.ready(s.name) and s.id not in self._useless
        }
        return self._evaluated(orders, self._ask_last(orders), kind, state.round)

    # the exchange -----------------------------------------------------------------------------------------------

    def _orders(self, state: State, last: bool) -> dict[int, Evaluate]:
        """An evaluation of every client that trains and is there."""
        shared = self.method.shared(state.server)
        seats = [s for s in self.job.seats[: self.job.clients] if self.crowd.ready(s.name)]
        away = [s.name for s in self.job.seats[: self.job.clients] if s not in seats]
        if away:
            self.crowd.say(f"evaluation after round {state.round} without {', '.join(away)}")
        return {
            seat.id: Evaluate(
                state.round,
                self.sent(self.method.offer(state.server, seat)),
                state.memories.get(seat.id, {}).get("round", 0),
                None if shared is None else self.sent(shared),
                last,
            )
            for seat in seats
        }

    def _ask(
        self, work: Mapping[int, Work], evaluation: Mapping[int, Evaluate], quorum: int = 0
    ) -> tuple[dict[int, Response], dict[int, str]]:
        """Asks those that are there; the deadline holds once a quorum of them has worked. Nobody else waits for
        newcomers, so that for them it holds at once."""
        requests: dict[str, Request] = {}
        missing: dict[int, str] = {}
        for who in sorted(work.keys() | evaluation.keys()):
            seat = self.job.seats[who]
            if not self.crowd.ready(seat.name):
                missing[who] = "lost"
                continue
            requests[seat.name] = Request(
                self.crowd.run,
                new_number(),
                self.crowd.config,
                self.classes,
                seat,
                self.keep,
                evaluation.get(who),
                work.get(who),
            )
        waiting = dataclasses.replace(self.waiting, quorum=0 if self._joining else quorum)
        found, without = self.crowd.ask(requests, waiting)
        ids = {seat.name: seat.id for seat in self.job.seats}
        return {ids[n]: r for n, r in sorted(found.items(), key=lambda pair: ids[pair[0]])}, missing | {
            ids[n]: why for n, why in without.items()
        }

    def _wait_for(self, orders: Collection[int], count: int, missing: Mapping[int, str], seconds: float = 0) -> bool:
        """Waits until so many of these are there, for ever or so many seconds; newcomers, to the deadline at most."""
        if any(why != "memory" and self._there(who) for who, why in missing.items()):
            time.sleep(AGAIN / 10)  # a client that answers, but cannot work, may be helped by its owner
        seconds = seconds or (self.waiting.deadline if self._joining else 0)
        return self.crowd.gather(count, [self.job.seats[who].name for who in orders], seconds)

    def _evaluated(
        self, orders: Mapping[int, Evaluate], found: Mapping[int, Response], kind: str, round: int
    ) -> list[Event]:
        came: list[tuple[int, Evaluated]] = [
            (who, found[who].evaluated)  # type: ignore[misc]
            for who in orders
            if who in found and found[who].evaluated
        ]
        rows = [row for who, e in came for row in personal_rows(round, who, kind, e.personal, e.facts)]
        shared = [(who, split, value) for who, e in came for split, value in e.shared.items()]
        return rows + [Event(round, who, split, "global_accuracy", value) for who, split, value in shared]

    def _catch_up(self, state: State) -> None:
        """Takes in what happened between rounds: memories written late or lost, clients that came with their data."""
        ids = {seat.name: seat.id for seat in self.job.seats}
        self.crowd.look(now=True)
        self.crowd.collect()
        for name, number in self.crowd.late.items():
            state.memories[ids[name]] = {"round": number}
            state.touched.add(ids[name])
        self.crowd.late.clear()
        for who in self._lost:
            self.crowd.say(f"{self.job.seats[who].name} begins without a memory")
            state.memories[who] = {}
            state.touched.add(who)
        self._lost.clear()
        before = [seat.samples for seat in self.job.seats]
        samples = [
            self.crowd.members[s.name].about["samples"] if s.name in self.crowd.members else s.samples
            for s in self.job.seats
        ]
        if samples == before:
            return
        try:
            self.job = self._job_for(samples)
        except UserError as error:  # with that many images no network fits the time that a client has
            changed = [s.name for s, now in zip(self.job.seats, samples, strict=True) if now != s.samples]
            self.crowd.say(f"rounds go on without {', '.join(changed)}: {error}")
            for name in changed:
                self.crowd.members.pop(name, None)
            return
        state.server = Server(self.job, state.server.round, **state.server.values)


def _merged(method: Method, server: Server, replies: Sequence[Reply]) -> Server:
    """The server after a merge that has left its weights numbers: of one that has not, no round recovers."""
    merged = method.merge(server, replies)
    lost = _infinite(merged) - _infinite(server)
    if lost:
        raise ValueError(f"it makes {min(lost)} infinite")
    return merged


def _reconciled(method: Method, server: Server, replies: Sequence[Reply]) -> tuple[Server, dict[int, str]]:
    """The server after a merge of replies that go together, taken up one by one, and why the others are left out.

    Which replies go together depends on which comes first: where no more than half do, one that was left out does.
    """
    found: list[tuple[Server, dict[int, str]]] = []
    firsts = list(replies)
    while firsts and all(2 * len(why) >= len(replies) for _, why in found):
        merged, kept, why = server.replace(), list[Reply](), dict[int, str]()
        for reply in [firsts[0], *(r for r in replies if r is not firsts[0])]:
            together = sorted([*kept, reply], key=lambda r: r.client)
            try:
                merged, kept = _merged(method, server, together), together
            except Exception as error:
                why[reply.client] = f"{type(error).__name__}: {error}"
        found.append((merged, why))
        if not kept:  # every single one was tried by itself
            break
        firsts = [r for r in firsts[1:] if r.client in why]
    return min(found, key=lambda pair: len(pair[1]))


def _infinite(server: Server) -> set[str]:
    """Weights that are no numbers. What is in double precision, rewards and the like, may have places left open."""
    return {
        path.strip("/")
        for path, tensor in tensors_in(server.values)
        if tensor.is_floating_point() and tensor.dtype != torch.float64 and not tensor.isfinite().all()
    }
