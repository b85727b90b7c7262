"""The engine of this machine: clients run in a few threads, each with one compute thread.

Every job's numbers depend on its seeds alone and every operation runs single-threaded, so results do not depend on the
number of workers, bit for bit on a CPU. A client that has a machine to itself may compute in several threads, which
sums in another order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..data.batches import Stream
from ..errors import Diverged, UserError
from ..kernels.compiling import plain
from ..spaces.abreast import SideBySide
from ..spaces.base import Arch, Space, Weights
from ..spaces.copying import move_undrawn, undrawn
from ..spaces.layers import Counted, Dropout, seed_dropout
from ..spaces.measure import Cost, drop_gradients, let_learn, remember_tensors
from ..values import on_device
from .client import SCORE_BATCH
from .jobs import Fit, Job, Loop, Predict, Recalibrate, Score
from .outfit import lay_last
from .steps import fit_step

T = TypeVar("T")
Memory = dict[str, Any]  # what a client keeps
SPARE = 64  # the most networks kept for the next client


class Stopped(Exception):
    """The run was interrupted; the round in flight is given up."""


class Cannot(Exception):
    """A step cannot be captured; the message says why."""


class LocalEngine:
    """Runs client work on one device."""

    captures = False  # steps and passes, to repeat them

    def __init__(self, device: torch.device, workers: int = 0, precision: str = "fp32", threads: int = 1) -> None:
        self.device = device
        self.compute_in(precision)
        self.workers = 1 if device.type != "cpu" else workers or cores()
        self._pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(threads,))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.local()  # `given`: the networks lent to the work that the thread is driving
        self._spare: OrderedDict[tuple[Space, Arch], list[nn.Module]] = OrderedDict()
        self._initial = lru_cache(maxsize=8)(self._make_initial)

    def compute_in(self, precision: str) -> None:
        """Sets the precision of training. 'auto' is tf32 on a GPU, where runs end as they do in fp32, only sooner."""
        on_gpu = self.device.type == "cuda"
        if precision not in ("auto", "fp32") and not on_gpu:
            raise UserError(f"precision = '{precision}' needs a CUDA device; on a CPU runs compute in fp32.")
        self.precision = ("tf32" if on_gpu else "fp32") if precision == "auto" else precision
        if on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision != "fp32"

    def plan(self, largest: Cost, batch: int, clients: int) -> None:
        """Gets ready for rounds of so many clients with networks of at most this cost."""

    def network(self, space: Space, arch: Arch) -> nn.Module:
        """A network of the arch on this engine's device; its weights are to be overwritten."""
        key = (space, arch)
        with self._lock:
            spare = self._spare.get(key)
            net = spare.pop() if spare else self._make(space, arch)
        if (given := getattr(self._thread, "given", None)) is not None:
            given.append((key, net))
        return net

    def in_room(self, make: Callable[[], T]) -> T:
        """What `make` makes, which takes memory; an engine that keeps things for later may let go of them for it."""
        return make()

    def _take_back(self, given: Sequence[tuple[tuple[Space, Arch], nn.Module]]) -> None:
        """Networks that a client's work is through with, for others: building one costs as much as some steps."""
        for _, net in given:
            drop_gradients(net)
        with self._lock:
            for key, net in given:
                self._spare.setdefault(key, []).append(net)
                self._spare.move_to_end(key)
            while sum(map(len, self._spare.values())) > SPARE:
                self._spare.popitem(last=False)

    def _make(self, space: Space, arch: Arch) -> nn.Module:
        """Builds without drawing first weights, which are overwritten anyway."""
        with undrawn(self.device):
            net = space.build(arch)
        ready(net)
        net.space, net.arch = space, arch  # type: ignore[assignment]
        if self.device.type != "cpu":
            move_undrawn(net, self.device)
        self._fit_out(net, space)
        modules = list(net.modules())
        for module in modules:
            if isinstance(module, SideBySide):
                module.lay()
        net.random_layers = [m for m in modules if isinstance(m, Counted)]  # type: ignore[assignment]
        remember_tensors(net)
        return net

    def _fit_out(self, net: nn.Module, space: Space) -> None:
        """What a device wants of a network that has just been built."""
        if self.device.type == "cpu":  # on a GPU the plain path stays plain
            lay_last(net, space.input)

    def initial(self, space: Space, seed: int) -> Weights:
        """The weights every run of this seed starts from."""
        with self._lock:
            return self._initial(space, seed)

    def _make_initial(self, space: Space, seed: int) -> Weights:
        return {n: t.to(self.device) for n, t in space.new_weights(seed).items()}

    def run(
        self,
        work: Iterable[tuple[str, Coroutine[Any, Any, T]]],
        foresee: Callable[[], Sequence[Arch]] | None = None,
    ) -> list[T]:
        """Drives labelled coroutines to their end; results in the given order.

        `foresee` tells the archs that the next round will likely ask for; an engine may get ready for them.
        """
        self._stop.clear()
        work = list(work)
        futures = [self._pool.submit(self._drive, label, coroutine) for label, coroutine in work]
        try:
            return [future.result() for future in futures]
        except BaseException:
            self._stop.set()
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()
            for _, coroutine in work:
                coroutine.close()
            raise

    def fetch(self, client: int, memory: Memory) -> Memory:
        """A client's memory on this engine's device."""
        return memory if self.device.type == "cpu" else on_device(memory, self.device)

    def expect(self, memories: Mapping[int, Memory]) -> None:
        """Told which memories the next round will fetch; an engine may begin."""

    def stow(self, memories: dict[int, Memory]) -> dict[int, Memory]:
        """Memories after their clients' work, each where it will lie until the client is back."""
        return memories

    def settle(self) -> None:
        """Waits for all that was computed; raises where a loss is not a number. Here everything is done at once."""

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _drive(self, label: str, coroutine: Coroutine[Any, Any, T]) -> T:
        with plain() if self.device.type == "cuda" else contextlib.nullcontext():  # there it is what others compare to
            return self._drive_on(label, coroutine)

    def _drive_on(self, label: str, coroutine: Coroutine[Any, Any, T]) -> T:
        result: Any = None
        self._thread.given = given = []
        while True:
            with self._named(label):
                try:
                    job = coroutine.send(result)
                except StopIteration as end:
                    self._thread.given = None
                    self._take_back(given)
                    return end.value
            result = self._do(label, job)

    def _do(self, label: str, job: Job) -> Any:
        with self._named(label):
            if isinstance(job, Fit):
                return self._fit(job)
            if isinstance(job, Loop):
                return self._loop(job)
            if isinstance(job, Score):
                return int(self._hits(job)) / job.split.size
            if isinstance(job, Predict):
                return self._predict(job)
            if isinstance(job, Recalibrate):
                return self._recalibrate(job)
            raise TypeError(f"the client awaited a {type(job).__name__}, which is not a job")

    @staticmethod
    @contextlib.contextmanager
    def _named(label: str) -> Iterator[None]:
        """Errors inside the block say whose work it was."""
        try:
            yield
        except (Stopped, torch.OutOfMemoryError, Cannot):
            raise
        except UserError as error:
            raise type(error)(f"{label}: {error}") from error
        except Exception as error:
            if is_full(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise RuntimeError(f"{label}: {type(error).__name__}: {error}") from error

    def _fit(self, job: Fit) -> float:
        try:
            return self._loop(Loop(fit_step(job), (job.stream,), job.steps, (job.net,), job.seed))
        finally:
            let_learn(job.net)

    def _loop(self, job: Loop) -> float:
        for net in job.nets:
            net.train()
            seed_dropout(net, job.seed)
        step, batches = job.made(), [self._batches(stream, job.steps) for stream in job.streams]
        total = torch.zeros((), device=self.device)
        for i in range(job.steps):
            if self._stop.is_set():
                raise Stopped
            pairs = [draw(i) for draw in batches]
            with lowered(self.precision):
                total += step(*(pairs[0] if len(pairs) == 1 else pairs))
        return self._checked(float(total) / max(1, job.steps))

    @staticmethod
    def _checked(loss: float) -> float:
        if loss != loss:
            raise Diverged("the training loss is not a number: try a smaller local.lr, or local.clip = 5.")
        return loss

    def _batches(self, stream: Stream, steps: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        order = stream.order(steps)

        def draw(i: int) -> tuple[Tensor, Tensor]:
            x, y = stream.batches(order[i : i + 1], i)
            return x[0], y[0]

        return draw

    @torch.no_grad()
    def _hits(self, job: Score) -> Tensor:
        if job.net.training:
            job.net.eval()
        hits = torch.zeros((), device=self.device, dtype=torch.int64)
        for index in job.split.chunks(SCORE_BATCH):
            x, y = job.split.at(index)
            with lowered(self.precision if job.rough else "fp32"):
                logits = self._logits(job.net, x)
            hits += ((logits if job.shift is None else logits + job.shift).argmax(1) == y).sum()
        return hits

    def _logits(self, net: nn.Module, images: Tensor) -> Tensor:
        return net(images)

    @torch.no_grad()
    def _predict(self, job: Predict) -> Tensor:
        job.net.eval()
        return torch.cat([job.net(job.split.at(index)[0]) for index in job.split.chunks(SCORE_BATCH)])

    @torch.no_grad()
    def _recalibrate(self, job: Recalibrate) -> None:
        recalibrate(job.net, self._batches(job.stream, job.batches), job.batches)


def is_full(error: Exception) -> bool:
    """Whether an error says that a card's memory is full: torch has a class for it, the driver only words."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recalibrate(net: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]], batches: int) -> None:
    """Replaces normalisation statistics by their plain mean over some batches."""
    layers = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in layers]
    training = net.training
    net.eval()
    for layer in layers:
        layer.train()
    for i in range(batches):
        for layer in layers:
            layer.momentum = 1 / (i + 1)  # the plain mean of the batches so far
        net(draw(i)[0])
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    net.train(training)


def ready(net: nn.Module) -> nn.Module:
    """Makes a network fit for engines: dropout by counter, so that its numbers do not depend on who runs first, and no
    count of batches in normalisation layers, which nothing reads and every step would pay for."""
    for module in list(net.modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            module.num_batches_tracked = None
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
    return net


def lowered(precision: str) -> contextlib.AbstractContextManager[object]:
    """The block in which a step computes in bfloat16 where that is asked for."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
