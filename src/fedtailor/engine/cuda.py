"""The engine of one GPU: the clients of a round train at once, whatever their architectures.

A training step is captured once as a CUDA graph and replayed; every client's graph runs on a stream of its own, so that
many small kernels of different networks share the card. The captured step of an ordinary fit is kept as a *slot* and
used again by any client with the same arch, step and batch shape: its weights are copied in and out. A slot stays on
its *lane*, the stream that it was captured on, and shares that lane's memory with the others there. Clients with equal
networks and steps run as one stack instead where a trial shows that to be faster. A step of a method's own is captured
for the one job. Batches lie on the device, drawn and augmented before the replays that use them.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..spaces.base import Arch, Space
from ..spaces.measure import Cost
from ..values import sent
from .jobs import Fit, Job, Loop, Recalibrate, Score, Waiting
from .local import LocalEngine, Memory, is_full
from .loops import LoopSlot, OwnStep
from .outfit import fit_out
from .passes import Passes
from .replay import FitSlot, Lane, Replay, Step, no_garbage, on
from .room import Room
from .shelf import Shelf
from .slots import SLACK, Slots, sizes
from .stack import Stacks, equals
from .starting import Starter, wake_libraries
from .steps import Estimate

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # hardware queues; with the default 8, lanes wait in line
T = TypeVar("T")
AHEAD = 128  # steps in the card's queue while a step is captured: a full card does about as many in that time
CROWD = 128  # the most clients whose work is under way at once
MEMORIES = 0.25  # of the card's memory that what clients keep may take
SHARE = 0.4  # of the card's memory that must be free to get ready for the next round
LITTLE = 0.15  # of it that must be free to capture a pass, which keeps no activations and is the first thing to go


class CudaEngine(LocalEngine):
    """Runs client work on one GPU, the training of at most `at_once` clients at a time."""

    captures = True

    def __init__(
        self,
        device: torch.device,
        precision: str = "fp32",
        at_once: int = 32,
        slots: int = 96,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(device, precision=precision)
        self.at_once, self.crowd = at_once, CROWD
        self._under_way = CROWD  # of the crowd, in this run
        self.room = Room(device)
        lanes = [Lane(torch.cuda.Stream(device)) for _ in range(at_once)]
        self.slots = Slots(self._make, lanes, slots, self.precision)
        self._stacks = Stacks(self.slots)
        self._starter = Starter(self.slots, self.precision, self._tell)
        self._passes = Passes(self.slots, lambda: self._free() > LITTLE * self.room.size)
        self._foresee: Callable[[], Sequence[Arch]] | None = None
        self.shelf = Shelf(device, int(MEMORIES * self.room.size))
        self._losses: list[tuple[str, Tensor]] = []  # by label, that nobody has looked at
        self._scores: dict[int, tuple[Tensor, torch.cuda.Stream]] = {}  # begun, by the number of the work that waits
        self._say, self._told = say, set[str]()
        wake_libraries(device)

    def plan(self, largest: Cost, batch: int, clients: int) -> None:
        """Says what the card will hold, and lowers what is under way at once where that would not fit."""
        (each, kept), free = sizes(largest, batch, self.precision), self._free()
        self.at_once, self.crowd = (max(1, min(most, int(free / each))) for most in (self.at_once, self.crowd))
        busy = min(clients, self.at_once)  # lanes, in a round
        self.slots.most = max(self.at_once, min(self.slots.most, busy + int((free - busy * each) / 2 / kept)))
        self._say(
            f"GPU: {free / 2**30:.0f} GiB free; training the largest network takes about {each / 2**30:.2f} GiB, so "
            f"{busy} clients train side by side; up to {self.slots.most} captured steps are kept"
        )

    # networks ---------------------------------------------------------------------------------------------------

    def network(self, space: Space, arch: Arch) -> nn.Module:
        return self.in_room(lambda: self.slots.network(space, arch))

    def in_room(self, make: Callable[[], T]) -> T:
        while True:
            try:
                return make()
            except torch.OutOfMemoryError:
                if not self._keep_less():
                    break
        self.forget()  # recipes' steps and stacks too: nobody could go on with a client that was refused a network
        return make()

    def _fit_out(self, net: nn.Module, space: Space) -> None:
        fit_out(net, space.input, self.precision)

    # memories ---------------------------------------------------------------------------------------------------

    def fetch(self, client: int, memory: Memory) -> Memory:
        return self.in_room(lambda: self.shelf.get(client, memory))

    def expect(self, memories: Mapping[int, Memory]) -> None:
        self.shelf.expect(memories)

    def stow(self, memories: dict[int, Memory]) -> dict[int, Memory]:
        return self.shelf.put(memories)

    # driving clients --------------------------------------------------------------------------------------------

    def run(
        self,
        work: Iterable[tuple[str, Coroutine[Any, Any, T]]],
        foresee: Callable[[], Sequence[Arch]] | None = None,
    ) -> list[T]:
        """Drives labelled coroutines to their end: all to their next job, the jobs together, and again.

        Where there is more work than the card should have under way, the rest is asked for when its turn comes.
        """
        self._foresee, self._under_way = foresee, self.crowd
        with no_garbage():  # what it frees may be a graph, and a graph freed during a capture makes the capture void
            try:
                return self._run(work)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what ended the run is the error to report
                    torch.cuda.synchronize(self.device)  # the card still computes in what is let go now
                self._losses.clear()
                raise

    def _run(self, work: Iterable[tuple[str, Coroutine[Any, Any, T]]]) -> list[T]:
        results: dict[int, T] = {}
        begun: list[tuple[str, Coroutine[Any, Any, T]]] = []
        waiting: list[Waiting] = []

        def advance(number: int, answer: Any) -> None:
            label, coroutine = begun[number]
            self.slots.turn = number
            with self._named(label):
                try:
                    job = coroutine.send(answer)
                except StopIteration as end:
                    results[number] = end.value
                    self.slots.take_back(number)
                    return
            waiting.append((number, label, job))
            if isinstance(job, Score):
                self._begin(number, label, job)

        try:
            queue = iter(work)
            while True:
                while len(waiting) < self._under_way and (labelled := next(queue, None)):
                    begun.append(labelled)
                    advance(len(begun) - 1, None)
                if not waiting:
                    break
                batch, waiting[:] = list(waiting), []
                answers = self._together(batch)
                for number, _, _ in batch:
                    advance(number, answers[number])
        finally:
            for _, coroutine in begun:
                coroutine.close()
            self._scores.clear()
            self.slots.recycle()
        return [results[number] for number in range(len(begun))]

    def _begin(self, number: int, label: str, job: Score) -> None:
        """The card scores while the next clients get ready."""
        while number not in self._scores:
            try:
                self._scores[number] = self._scored(number, label, job)
                break
            except torch.OutOfMemoryError as error:
                if self._keep_less():
                    continue
                busy = sum(lane.held > 0 for lane in self.slots.lanes)
                self._make_room(len(self._scores), label, error)
                if busy:  # else the next round's steps would fill the card again
                    self.at_once = max(1, min(self.at_once, busy // 2))
            self._scores[number] = self._scored(number, label, job)  # now that the error holds nothing of its pass

    def _scored(self, number: int, label: str, job: Score) -> tuple[Tensor, torch.cuda.Stream]:
        """How many answers are right, and the stream that counts them."""
        stream = self._passes.lane(job.net, number).stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._named(label), on(stream):
            return self._hits(job), stream

    def _together(self, batch: list[Waiting]) -> dict[int, Any]:
        training = [w for w in batch if isinstance(w[2], (Fit, Loop)) and w[2].steps]
        answers = self._train(training) | self._estimate(batch)
        for number, label, job in batch:
            if number not in answers and not isinstance(job, Score):
                answers[number] = self.in_room(partial(self._do, label, job))
        sizes = {number: job.split.size for number, _, job in batch if isinstance(job, Score)}
        if sizes:
            self.settle()
            hits, streams = zip(*map(self._scores.pop, sizes), strict=True)
            here = torch.cuda.current_stream(self.device)
            for stream in set(streams):
                here.wait_stream(stream)
            answers |= {n: count / size for (n, size), count in zip(sizes.items(), self._read(hits), strict=True)}
        return answers

    def _estimate(self, batch: list[Waiting]) -> dict[int, Any]:
        """Normalisation statistics, as training that has no loss."""
        jobs = [(number, label, job) for number, label, job in batch if isinstance(job, Recalibrate)]
        estimates = [Estimate(job.net) for _, _, job in jobs]
        try:
            loops = [e.loop(job) for e, (_, _, job) in zip(estimates, jobs, strict=True)]
            return self._train([(number, label, loop) for (number, label, _), loop in zip(jobs, loops, strict=True)])
        finally:
            for estimate in estimates:
                estimate.close()

    # training ---------------------------------------------------------------------------------------------------

    def _train(self, batch: list[Waiting]) -> dict[int, Tensor]:
        """Trains networks side by side, as many at a time as the card has memory for."""
        answers: dict[int, Tensor] = {}
        for group in equals(batch):
            answers |= self._train_stack(group)
        batch = [w for w in batch if w[0] not in answers]
        ran = 0  # side by side
        while batch:
            part = self._train_part(batch[: self.at_once], ran)
            ran, answers = max(ran, len(part)), answers | part
            batch = [w for w in batch if w[0] not in answers]
        return answers

    def _train_stack(self, group: list[Waiting]) -> dict[int, Tensor]:
        """Trains clients with equal networks and steps as one, if that is faster."""
        jobs = [job for _, _, job in group if isinstance(job, Fit)]
        with self._named(f"{group[0][1]} and {len(group) - 1} more"):
            stack = self._stacks.of(jobs)
            if stack is None:
                return {}
            try:
                stack.begin(jobs)
            except torch.OutOfMemoryError:  # nothing has run yet: they train side by side
                self._stacks.forget()
                return {}
            self._queue([stack], stack.steps)
            stack.finish()
            torch.cuda.current_stream(self.device).wait_stream(stack.stream)
        return self._late(group, stack.total.double() / stack.steps)

    def _train_part(self, batch: list[Waiting], ran: int) -> dict[int, Tensor]:
        """Trains as many of these as there is memory for, at least one; so many ran side by side a moment ago."""
        here = torch.cuda.current_stream(self.device)
        replays: list[Replay] = []
        new: set[Step] = set()  # steps used for the first time
        most = 0  # bytes that one of them took
        for _, label, job in batch:
            before = self._free()
            if replays and before < SLACK * most:
                break
            try:
                replay, fresh = self._started(label, job, {replay.lane for replay in replays})
            except torch.OutOfMemoryError as error:  # though nothing was kept: these are as many as fit
                self.forget()
                self._make_room(max(ran, len(replays)) if replays else 0, label, error)
                self.crowd = self._under_way
                self.at_once = min(self.at_once, self.crowd)
                break
            replays.append(replay)
            if fresh and isinstance(replay, FitSlot):
                new.add(replay.key)
            most = max(most, before - self._free())
            self._queue(replays, -(-AHEAD // len(replays)))  # the card works on these while the next one is captured
        if not replays:
            return {}
        for key, lane in zip(self._next(new, replays), cycle(self.slots.lanes[: self.at_once]), strict=False):
            if self._free() < SLACK * most or not self.slots.capture_ahead(key, lane):
                break
            self._queue(replays, -(-AHEAD // len(replays)))
        while any(replay.left for replay in replays):
            self._queue(replays, 1)
        once: list[OwnStep] = []
        for replay in replays:
            replay.finish()
            here.wait_stream(replay.stream)
            if isinstance(replay, FitSlot):
                self.slots.keep(replay)
            elif isinstance(replay, LoopSlot) and not replay.obstacle:
                self.slots.keep_loop(replay)
            elif isinstance(replay, OwnStep):
                once.append(replay)
        if once:
            torch.cuda.synchronize(self.device)
            for replay in once:
                replay.release()
        steps = sent(torch.tensor([replay.steps for replay in replays]), self.device)
        return self._late(batch, torch.stack([replay.total for replay in replays]).double() / steps)

    def _started(self, label: str, job: Job, taken: set[Lane]) -> tuple[Replay, bool]:
        """A job's steps. Where there is no room for them, whatever is kept goes before a client has to wait."""

        def start() -> tuple[Replay, bool]:
            with self._named(label):
                return self._starter.start(label, job, taken, self.at_once)

        return self.in_room(start)  # nothing of this client has run yet

    def _late(self, batch: Sequence[Waiting], losses: Tensor) -> dict[int, Tensor]:
        """Losses as answers that nobody waits for. The card goes on; whoever needs a number reads it."""
        found = list(zip(batch, losses.unbind(), strict=False))
        self._losses += [(label, loss) for (_, label, _), loss in found]
        return {number: loss for (number, _, _), loss in found}

    def settle(self) -> None:
        late, self._losses = self._losses, []
        if late:
            for (label, _), loss in zip(late, self._read([loss for _, loss in late]), strict=True):
                with self._named(label):
                    self._checked(loss)

    @staticmethod
    def _read(numbers: Sequence[Tensor]) -> list[float]:
        """Waits for the card."""
        return torch.stack(list(numbers)).tolist()

    def _free(self) -> int:
        """Bytes that can be had for anything."""
        return self.room.free(self.slots.held)

    def _keep_less(self) -> bool:
        """Lets go of what is quickest made again, and has less of it from now on; False where nothing is left."""
        torch.cuda.synchronize(self.device)  # a graph must not go while it runs
        if not (self._passes.keep_less() or self.slots.keep_less()):
            return False
        torch.cuda.empty_cache()
        self._tell("GPU memory is full: less is kept for later")
        return True

    def _make_room(self, clients: int, label: str, error: Exception) -> None:
        """After the card's memory was found full with so many clients under way."""
        if not clients and not (len(self.slots) or len(self._stacks)):
            raise RuntimeError(f"{label}: the GPU's memory is too small for one client ({error})") from error
        self.forget()
        self._under_way = max(1, clients or self.at_once // 2)
        self._tell(f"GPU memory is full: {self._under_way} clients go on at a time")

    def _queue(self, replays: Sequence[Replay], steps: int) -> None:
        for replay in replays:
            while True:
                try:
                    replay.replay(steps)
                    break
                except RuntimeError as error:  # for the next batches: a captured step itself asks at most the driver
                    if (isinstance(replay, OwnStep) and replay.obstacle) or not (is_full(error) and self._keep_less()):
                        raise

    def _next(self, new: set[Step], replays: Sequence[Replay]) -> Iterator[Step]:
        """The steps that the next round will want and that are not there, if its archs can be foreseen.

        They are this round's new steps with the next round's archs in place of its own.
        """
        patterns = {key._replace(arch=()) for key in new if key.train is None}
        free = self.room.free()  # what lanes hold as well: these steps can have it
        if not patterns or self._foresee is None or free < SHARE * self.room.size:
            return
        (foresee, self._foresee), archs = (self._foresee, None), Counter[Arch]()
        with contextlib.suppress(torch.OutOfMemoryError):  # then nothing is got ready
            archs.update(filter(None, foresee()))
        busy = Counter(replay.key for replay in replays if isinstance(replay, FitSlot))
        yield from self.slots.missing(patterns, archs, busy)

    # scoring ----------------------------------------------------------------------------------------------------

    def _logits(self, net: nn.Module, images: Tensor) -> Tensor:
        return self._passes.logits(net, images)

    def forget(self) -> None:
        """Drops every captured step, and the networks that no client holds."""
        torch.cuda.synchronize(self.device)  # a graph must not go while it runs
        self.slots.forget()
        self._passes.forget()
        self._stacks.forget()
        torch.cuda.empty_cache()

    def close(self) -> None:
        super().close()
        self.forget()

    def _tell(self, text: str) -> None:
        kind = text.split(":", 1)[-1]
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)
