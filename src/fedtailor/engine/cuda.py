"""The engine of one GPU: the clients of a round train at once, whatever their architectures.

A training step is captured once as a CUDA graph and replayed; every client's graph runs on a stream of its own, so that
many small kernels of different networks share the card. The captured step of an ordinary fit is kept as a *slot* and
used again by any client with the same arch, step and batch shape: its weights are copied in and out. A step of a
method's own is captured for the one job. Batches lie on the device, drawn and augmented before the replays that use
them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..spaces.base import Arch, Space
from .jobs import Fit, Job, Loop, Score
from .local import Cannot, LocalEngine, ready
from .replay import FitSlot, LoopReplay, Replay
from .steps import fit_step

T = TypeVar("T")
AHEAD = 32  # steps in the card's queue while a step is captured, which takes as long
Waiting = tuple[int, str, Job]  # a coroutine's number, its label and the job it awaits


class CudaEngine(LocalEngine):
    """Runs client work on one GPU, as many clients at a time as `lanes`."""

    def __init__(
        self,
        device: torch.device,
        precision: str = "fp32",
        lanes: int = 16,
        slots: int = 48,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(device, precision=precision)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
        self.lanes = lanes
        self.most_slots = slots
        self._streams = [torch.cuda.Stream(device) for _ in range(lanes)]
        self._slots: OrderedDict[Hashable, list[FitSlot]] = OrderedDict()
        self._free: OrderedDict[Hashable, list[nn.Module]] = OrderedDict()
        self._given: list[tuple[Hashable, nn.Module]] = []
        self._say, self._told = say, set[str]()
        _wake_libraries(device)

    # networks ---------------------------------------------------------------------------------------------------

    def network(self, space: Space, arch: Arch) -> nn.Module:
        """A network of the arch, from the pool where one is free. It goes back when the clients' work is over."""
        key = (space, arch)
        free = self._free.get(key)
        net = free.pop() if free else self._make(space, arch)
        self._given.append((key, net))
        return net

    def _make(self, space: Space, arch: Arch) -> nn.Module:
        """Builds without drawing initial weights, unless the network computes other buffers when it is made."""
        with torch.device("meta"):
            net = space.build(arch)
        saved = net.state_dict().keys()
        if any(n not in saved and not n.endswith("counter") for n, _ in net.named_buffers()):
            return super()._make(space, arch)
        net = net.to_empty(device=self.device)
        for name, buffer in net.named_buffers():
            if name.endswith(("num_batches_tracked", "counter")):
                buffer.zero_()
        ready(net)
        net.space, net.arch = space, arch  # type: ignore[assignment]
        return net.to(self.device)

    def _recycle(self) -> None:
        for key, net in self._given:
            net.zero_grad(set_to_none=True)
            self._free.setdefault(key, []).append(net)
            self._free.move_to_end(key)
        self._given.clear()
        while len(self._free) > self.most_slots:
            self._free.popitem(last=False)

    # driving clients --------------------------------------------------------------------------------------------

    def run(self, work: Sequence[tuple[str, Coroutine[Any, Any, T]]]) -> list[T]:
        """Drives labelled coroutines to their end: all to their next job, the jobs together, and again."""
        results: list[Any] = [None] * len(work)
        queue = list(range(len(work)))[::-1]
        waiting: list[Waiting] = []

        def advance(number: int, answer: Any) -> None:
            label, coroutine = work[number]
            with self._named(label):
                try:
                    waiting.append((number, label, coroutine.send(answer)))
                except StopIteration as end:
                    results[number] = end.value

        try:
            while queue or waiting:
                while queue and len(waiting) < self.lanes:
                    advance(queue.pop(), None)
                batch, waiting[:] = list(waiting), []
                answers = self._together(batch)
                for number, _, _ in batch:
                    advance(number, answers[number])
        finally:
            for _, coroutine in work:
                coroutine.close()
            self._recycle()
        return results

    def _together(self, batch: list[Waiting]) -> dict[int, Any]:
        training = [w for w in batch if isinstance(w[2], (Fit, Loop)) and w[2].steps]
        answers = self._train(training)
        hits: list[tuple[int, Tensor, int]] = []
        for number, label, job in batch:
            if isinstance(job, Score):
                with self._named(label):
                    hits.append((number, self._hits(job), job.split.size))
            elif number not in answers:
                answers[number] = self._do(label, job)
        if hits:
            counts = torch.stack([count for _, count, _ in hits]).tolist()
            answers |= {number: count / size for (number, _, size), count in zip(hits, counts, strict=True)}
        return answers

    # training ---------------------------------------------------------------------------------------------------

    def _train(self, batch: list[Waiting]) -> dict[int, float]:
        """Trains networks side by side, halving how many when the card is full."""
        answers: dict[int, float] = {}
        while batch:
            part, rest = batch[: self.lanes], batch[self.lanes :]
            try:
                answers |= self._train_part(part)
                batch = rest
            except torch.OutOfMemoryError as error:
                restart = all(isinstance(job, Fit) and job.loss is None for _, _, job in part)
                if self.lanes == 1 or not restart:  # a step of the method's own has changed its tensors already
                    raise RuntimeError(
                        f"{part[0][1]}: the GPU's memory is too small for one client ({error})"
                    ) from error
                self.forget()
                self.lanes = max(1, self.lanes // 2)
                self._tell(f"GPU memory is full: from now on {self.lanes} clients train at a time")
        return answers

    def _train_part(self, batch: list[Waiting]) -> dict[int, float]:
        here = torch.cuda.current_stream(self.device)
        replays: list[Replay] = []
        for lane, (_, label, job) in zip(self._streams, batch, strict=False):
            replays.append(self._prepare(lane, label, job))
            for replay in replays:  # the card works on these while the next one is built and captured
                replay.replay(-(-AHEAD // len(replays)))
        while any(replay.left for replay in replays):
            for replay in replays:
                replay.replay(1)
        for replay in replays:
            replay.finish()
            here.wait_stream(replay.stream)
            if isinstance(replay, FitSlot):
                self._slots.setdefault(replay.key, []).append(replay)
                self._slots.move_to_end(replay.key)
        while sum(map(len, self._slots.values())) > self.most_slots:
            self._slots.popitem(last=False)
        losses = torch.stack([replay.total for replay in replays]).tolist()
        return {
            number: self._checked(loss / replay.steps)
            for (number, _, _), replay, loss in zip(batch, replays, losses, strict=True)
        }

    def _prepare(self, lane: torch.cuda.Stream, label: str, job: Job) -> Replay:
        with self._named(label):
            if isinstance(job, Fit) and job.loss is None:
                key = FitSlot.key_of(job)
                free = self._slots.get(key)
                slot = free.pop() if free else FitSlot(job, key, self.precision, self._own(job.net))
                with contextlib.suppress(Cannot):  # if it cannot be captured, it is run as a step of its own below
                    slot.begin(job, lane)
                    return slot
            if isinstance(job, Fit):
                job = Loop(fit_step(job), (job.stream,), job.steps, (job.net,), job.seed)
            assert isinstance(job, Loop)
            replay = LoopReplay(job, lane, self.precision)
            if replay.obstacle:
                self._tell(f"{label}: runs step by step, its step cannot be captured ({replay.obstacle})")
            return replay

    def _own(self, net: nn.Module) -> nn.Module:
        """A network for a new slot to keep: the client's own, unless another slot has it already."""
        rest = [(key, given) for key, given in self._given if given is not net]
        if len(rest) == len(self._given):
            return self._make(net.space, net.arch)  # type: ignore[arg-type]
        self._given = rest  # it does not go back to the pool
        return net

    def forget(self) -> None:
        """Drops every captured step and spare network."""
        self._slots.clear()
        self._free.clear()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _tell(self, text: str) -> None:
        kind = text.split(":", 1)[-1]
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)


def _wake_libraries(device: torch.device) -> None:
    """Makes the convolution and matrix libraries' handles of the threads that capture a step; a capture cannot."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2)).to(device)
    net(torch.zeros(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(device)
