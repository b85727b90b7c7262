"""Captured training steps.

A replay owns a CUDA graph of one step, the buffers its batches are read from, and a counter that walks through them.
The graph reads nothing that changes on the host, so a step costs one launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..data.batches import Stream
from ..kernels.update import Update
from ..spaces.base import Arch, Space
from ..spaces.layers import seed_dropout
from ..spaces.measure import let_learn, parameters_of, tensors_of
from .halved import Halved
from .jobs import Fit
from .local import Cannot, lowered
from .room import held
from .steps import objective, pull_, push_

if TYPE_CHECKING:
    from ..config import Local

T = TypeVar("T")
CHUNK = 128  # the most steps whose batches are prepared at once
BUFFER = 128 << 20  # bytes that these may take
Draw = Callable[[int, int], tuple[Tensor, Tensor]]  # the batches from a step on, of so many steps


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Holds the garbage collector back."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class on:  # noqa: N801, a context like torch.cuda.stream
    """Work inside goes to the stream. Looking devices up, as torch's own context does, costs more than a launch."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch._C._cuda_getCurrentStream(self.stream.device_index)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        stream, device, kind = self.before
        torch._C._cuda_setStream(stream_id=stream, device_index=device, device_type=kind)


class Lane:
    """A stream, and memory for the steps captured on it. They run one after another, so one's scratch is the next's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self._keeper = stream, keeper(stream)
        self.held = 0  # bytes that were taken for these steps: nobody else can have them as long as one is left

    @contextlib.contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What happens inside on the stream is recorded, with matrix workspaces of its own: lanes run side by side."""
        torch._C._cuda_clearCublasWorkspaces()
        (before, _), kept = held(self.stream.device), self._keeper
        graph.capture_begin(kept.pool(), capture_error_mode="thread_local")
        try:
            yield
            graph.capture_end()
        except Exception as error:
            self._abandon(graph)
            raise refusal(error) from error
        except BaseException:  # somebody stops the run, which has yet to be saved: no capture may be left open
            self._abandon(graph)
            raise
        finally:
            if self._keeper is kept:
                self.held += max(0, held(self.stream.device)[0] - before)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that an error has broken off; that error is the one to report.

        One that found no room, or that somebody stopped, is whole as far as it went: what it took is the lane's, for
        the next one. A void one's memory goes with the last step that has some of it.
        """
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # of one that found no room to begin with
            graph.capture_end()
            return
        # torch before 2.13 would take it for under way and free no memory ever again; before 2.8 this has another name
        with contextlib.suppress(RuntimeError, AttributeError):
            pool = self.stream.device_index, self._keeper.pool()
            torch._C._cuda_endAllocateToPool(*pool)  # refused where the capture's end came that far
            torch._C._cuda_releasePool(*pool)  # a graph does so itself only if its capture came to its end
        # the generator too would believe that it is being captured; a capture that ends, as the keeper's, tells it
        self._keeper = keeper(self.stream)


def keeper(stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph that has memory of its own, as long as it lives; what others there leave stays for the next."""
    graph, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        something.zero_()
        graph.capture_end()
    return graph


@lru_cache(maxsize=64)
def _shared(local: Local) -> Local:
    """Without what may differ from job to job."""
    return dataclasses.replace(local, lr=1.0, epochs=1.0, augment="none", prior=False)


class Step(NamedTuple):
    """What two fits must share to use one captured step."""

    space: Space
    arch: Arch
    train: tuple[str, ...] | None  # the parameters that learn; None: all
    batch: tuple[int, ...]  # shape of its images
    local: Local
    shifted: bool
    anchored: bool
    pushed: bool

    @classmethod
    def of(cls, job: Fit) -> Step:
        space, arch = job.net.space, job.net.arch
        everything = len(job.train) == len(parameters_of(job.net))
        local = _shared(job.local)
        train = None if everything else job.train
        flags = job.shift is not None, bool(job.anchor), bool(job.push)
        return cls(space, arch, train, job.stream.shape, local, *flags)  # type: ignore[arg-type]


def drawn(stream: Stream, steps: int) -> Draw:
    order = stream.order(steps)
    return lambda first, count: stream.batches(order[first : first + count], first)


def ahead(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many steps' batches are prepared at once: the images of large ones would fill the card."""
    return max(1, min(CHUNK, BUFFER // sum(4 * math.prod(shape) for shape in shapes)))


class Replay:
    """A step captured once and replayed `steps` times over the batches of some streams."""

    graph: torch.cuda.CUDAGraph

    def __init__(self, lane: Lane, shapes: Sequence[tuple[int, ...]], precision: str, chunk: int) -> None:
        self.lane, self.stream, self.precision, self.chunk = lane, lane.stream, precision, chunk
        device = self.stream.device
        self.total = torch.zeros((), device=device)
        self.counter = torch.zeros(1, device=device, dtype=torch.int64)
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.draws: Sequence[Draw] = ()
        self.steps = self.done = 0
        for batch in shapes:
            images = torch.empty((chunk, *batch), device=device)
            self.buffers.append((images, torch.empty(images.shape[:-3], device=device, dtype=torch.int64)))

    @property
    def left(self) -> int:
        return self.steps - self.done

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """This step's batches, read at the counter."""
        return [(x.index_select(0, self.counter)[0], y.index_select(0, self.counter)[0]) for x, y in self.buffers]

    def capture(self, step: Callable[[], Tensor]) -> None:
        """Records one step without running it."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), self.lane.recording(self.graph):
            with lowered(self.precision):
                self.total += step()
            self.counter += 1

    def start(self, draws: Sequence[Draw], steps: int) -> None:
        """Sets the walk to its beginning; the stream first waits for what was computed before."""
        self.draws, self.steps, self.done = draws, steps, 0
        self.stream.wait_stream(torch.cuda.current_stream())
        with on(self.stream):
            self.total.zero_()
            self._fill()

    def replay(self, times: int) -> None:
        """Launches up to this many steps."""
        with on(self.stream):
            for _ in range(min(times, self.left)):
                if self.done and self.done % self.chunk == 0:
                    self._fill()
                self.launch()
                self.done += 1

    def launch(self) -> None:
        self.graph.replay()

    def _fill(self) -> None:
        self.counter.zero_()
        for (images, labels), draw in zip(self.buffers, self.draws, strict=True):
            x, y = draw(self.done, min(self.chunk, self.left))
            images[: len(x)].copy_(x)
            labels[: len(y)].copy_(y)

    def blank(self) -> None:
        """Empty batches, for a step that is run for its time only."""
        for images, labels in self.buffers:
            images.zero_()
            labels.zero_()

    def finish(self) -> None:
        """Called when all steps are launched."""


class FitSlot(Replay):
    """The captured step of an ordinary fit. It keeps a network; jobs with another one copy their weights in and out."""

    def __init__(self, key: Step, net: nn.Module, lane: Lane, precision: str) -> None:
        super().__init__(lane, [key.batch], precision, ahead([key.batch]))
        self.key, self.net, self.local = key, net.train(), key.local
        device = self.total.device
        named = parameters_of(net)
        self.train = tuple(named) if key.train is None else key.train
        self.parameters = [named[n] for n in self.train]
        self.tensors = list(tensors_of(net).values())
        self.lr = torch.ones((), device=device)
        self.shift = torch.zeros(key.space.classes, device=device) if key.shifted else None
        self.anchors = [torch.zeros_like(p) for p in self.parameters] if key.anchored else []
        self.pull = torch.zeros((), device=device)
        self.pushes = [torch.zeros_like(p) for p in self.parameters] if key.pushed else []
        self.optimiser = self.local.optimiser(self.parameters, self.lr)
        self.state = start_state(self.optimiser, self.parameters)
        self.update = self._update()
        self.halved = Halved(net) if precision == "bf16" else None
        self.fresh = True  # not used yet
        self.job: Fit | None = None  # under way
        self.stream.wait_stream(torch.cuda.current_stream())  # for the tensors made just now
        learning = set(self.train)
        for name, parameter in named.items():
            parameter.requires_grad_(name in learning)
        try:
            self.capture(self._step)
        finally:
            self.optimiser.zero_grad(set_to_none=True)  # the lane's other steps may have the gradients' memory
            let_learn(net)  # as whoever holds the network expects it
        if self.update is not None:
            with on(self.stream):
                self.update.settle()

    def begin(self, job: Fit) -> None:
        self.job, self.fresh = job, False
        self.start([drawn(job.stream, job.steps)], job.steps)
        with on(self.stream), torch.no_grad():
            seed_dropout(self.net, job.seed)
            self.lr.fill_(job.lr)
            if self.shift is not None and job.shift is not None:
                self.shift.copy_(job.shift)
            if job.anchor:
                torch._foreach_copy_(self.anchors, [job.anchor[n] for n in self.train])
                self.pull.fill_(job.pull)
            if job.push:
                torch._foreach_copy_(self.pushes, [job.push[n] for n in self.train])
            if self.state:
                torch._foreach_zero_(self.state)
            if job.net is not self.net:
                torch._foreach_copy_(self.tensors, list(tensors_of(job.net).values()))

    def _step(self) -> Tensor:
        ((x, y),) = self.batches()
        self.optimiser.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if self.halved is None else self.halved.lent():
            loss = objective(self.net(x), y, self.local.label_smoothing, self.shift)
            loss.backward()
        if self.halved is not None:
            self.halved.hand_over()
        if self.update is None:
            self._change()
        else:
            self.update.step()
        return loss.detach()

    def _update(self) -> Update | None:
        """What ends the step in as few kernels as can be; None where torch's own end it."""
        if self.local.optimizer != "sgd":
            return None
        return Update.of(
            self.parameters,
            self.lr,
            momenta=self.state,
            anchors=self.anchors,
            pull=self.pull,
            pushes=self.pushes,
            clip=self.local.clip,
            momentum=self.local.momentum,
            decay=self.local.weight_decay,
        )

    def _change(self) -> None:
        if self.anchors:
            pull_(self.parameters, self.anchors, self.pull)
        if self.pushes:
            push_(self.parameters, self.pushes)
        if self.local.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.local.clip, foreach=True)
        self.optimiser.step()

    def finish(self) -> None:
        if self.job and self.job.net is not self.net:
            with on(self.stream), torch.no_grad():
                torch._foreach_copy_(list(tensors_of(self.job.net).values()), self.tensors)
        self.job, self.draws = None, ()  # the slot may be kept for long: what clients have must not stay with it


class Forward:
    """A network's captured forward pass on a batch of one size. The weights are read where they lie."""

    def __init__(self, net: nn.Module, images: Tensor, lane: Lane) -> None:
        self.images, self.graph = images.clone(), torch.cuda.CUDAGraph()
        with lane.recording(self.graph):
            self.logits = net(self.images)

    def __call__(self, images: Tensor) -> Tensor:
        self.images.copy_(images)
        self.graph.replay()
        return self.logits


class Forwards:
    """A network's forward passes on one lane, by batch size and precision; captured when they are met a second time."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._by_size: dict[tuple[int, bool], Forward | None] = {}  # True: in bfloat16
        self._refused = False

    def __call__(self, net: nn.Module, images: Tensor, room: Callable[[], bool]) -> Tensor:
        """The network's outputs, on the lane's stream. Nothing is captured where there is no room for it."""
        size = len(images), torch.is_autocast_enabled("cuda")
        if size in self._by_size and self._by_size[size] is None and not self._refused and room():
            try:
                self._by_size[size] = with_all_there_is(lambda: Forward(net, images, self.lane))
            except (Cannot, torch.OutOfMemoryError):  # nor will it be possible the next time
                self._refused = True
        forward = self._by_size.setdefault(size, None)
        return net(images) if forward is None else forward(images)


def with_all_there_is(capture: Callable[[], T]) -> T:
    """A capture can have nothing that torch holds unused: where it finds no room, that is given back first."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return capture()
    torch.cuda.empty_cache()
    return capture()


def refusal(error: Exception) -> Exception:
    """What an error during a capture means: the card is full, or the step cannot be captured."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return torch.OutOfMemoryError(str(error))
    return Cannot((str(error) or type(error).__name__).splitlines()[0])


def start_state(optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """An optimiser's state before its first step, all zeros, so that a captured step can start from it again."""
    made: list[Tensor] = []
    for p in parameters:
        state = optimiser.state[p]
        if isinstance(optimiser, torch.optim.AdamW):
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        made += [t for t in state.values() if isinstance(t, Tensor)]
    return made
