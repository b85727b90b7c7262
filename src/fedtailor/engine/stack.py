"""Many clients with equal networks as one: their tensors lie side by side and every operation runs once for all.

A small network leaves a GPU idle between its small kernels, however many streams there are; fifty of them stacked are
one network of ordinary size. The stacked step is the ordinary one, vectorised over clients: convolutions become
matrix products, matrix products batched ones. Clients never mix, so the gradient of the sum of their losses is theirs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..data.batches import joint_batches, joint_order
from ..kernels.columns import Window, patches
from ..kernels.compiling import plain
from ..kernels.layout import Pointwise
from ..kernels.norm import ACTS_OF_TORCH
from ..spaces.layers import Counted, counter_start
from ..spaces.measure import tensors_of
from .jobs import Fit, Waiting
from .local import Cannot
from .replay import CHUNK, FitSlot, Lane, Replay, Step, on, start_state
from .slots import Slots
from .steps import objective, pull_, push_

FEWEST = 4  # clients that are worth a stack
BUFFER = 512 << 20  # bytes that batches prepared ahead may take
MOST = 8  # stacks that are kept
TRIAL = 4  # steps to tell which way is faster
BEGIN = 4e-4  # seconds that Python takes to begin and end a job that runs by itself
COLUMNS = 2 << 30  # bytes that the columns of one convolution may take


class Stacked:
    """The networks of several clients side by side, and one step of all of them."""

    def __init__(self, key: Step, net: nn.Module, places: int) -> None:
        self.key, self.net, self.places, self.local = key, net.train(), places, key.local
        for module in net.modules():
            if type(module) in (nn.Conv2d, Pointwise) and module.groups == 1 and module.padding_mode == "zeros":
                module.forward = partial(convolve, module, places)  # type: ignore[assignment]
            elif isinstance(module, nn.BatchNorm2d) and module.momentum is not None:
                module.forward = partial(normalise, module)  # type: ignore[assignment]
        named = dict(net.named_parameters())
        self.train = tuple(named) if key.train is None else key.train
        device = next(net.parameters()).device

        def side_by_side(tensor: Tensor) -> Tensor:
            return tensor.detach().expand(places, *tensor.shape).clone()

        self.learnt = {n: nn.Parameter(side_by_side(named[n])) for n in self.train}
        self.rest = {n: side_by_side(p) for n, p in named.items() if n not in self.learnt}
        self.rest |= {n: side_by_side(b) for n, b in net.named_buffers()}
        self.counted = [n for n, m in net.named_modules() if isinstance(m, Counted)]
        self.parameters = list(self.learnt.values())
        everything = self.learnt | self.rest
        with torch.no_grad():  # every client's own part of what lies side by side
            self.parts = [[everything[n][i] for n in tensors_of(net)] for i in range(places)]
        self.lr = torch.ones((), device=device)
        self.shift = torch.zeros(places, key.space.classes, device=device) if key.shifted else None
        self.anchors = [torch.zeros_like(p) for p in self.parameters] if key.anchored else []
        self.pull = torch.zeros((), device=device)
        self.pushes = [torch.zeros_like(p) for p in self.parameters] if key.pushed else []
        self.optimiser = self.local.optimiser(self.parameters, self.lr)
        self.state = start_state(self.optimiser, self.parameters)

    @torch.no_grad()
    def load(self, jobs: Sequence[Fit]) -> None:
        """Takes over the networks of jobs that share the step, the learning rate and the pull."""
        theirs = [t for job in jobs for t in tensors_of(job.net).values()]
        torch._foreach_copy_(list(chain(*self.parts[: len(jobs)])), theirs)
        for i, name in enumerate(self.counted):
            starts = torch.tensor([counter_start(job.seed, i) for job in jobs])
            self.rest[f"{name}.counter"][: len(jobs)].copy_(starts)
        self.lr.fill_(jobs[0].lr)
        if self.shift is not None:
            self._fill([self.shift], [[job.shift] for job in jobs if job.shift is not None])
        if self.anchors:
            self._fill(self.anchors, [[job.anchor[n] for n in self.train] for job in jobs if job.anchor])
            self.pull.fill_(jobs[0].pull)
        if self.pushes:
            self._fill(self.pushes, [[job.push[n] for n in self.train] for job in jobs if job.push])
        if self.state:
            torch._foreach_zero_(self.state)

    @staticmethod
    def _fill(stacked: Sequence[Tensor], each: Sequence[Sequence[Tensor]]) -> None:
        targets = [t[i] for i in range(len(each)) for t in stacked]
        torch._foreach_copy_(targets, [t for tensors in each for t in tensors])

    @torch.no_grad()
    def unload(self, jobs: Sequence[Fit]) -> None:
        """Gives the networks back."""
        theirs = [t for job in jobs for t in tensors_of(job.net).values()]
        torch._foreach_copy_(theirs, list(chain(*self.parts[: len(jobs)])))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of every client on its batch, [places, batch, ...]; every client's loss."""

        def loss_of(tensors: dict[str, Tensor], x: Tensor, y: Tensor, shift: Tensor | None) -> Tensor:
            return objective(functional_call(self.net, tensors, (x,)), y, self.local.label_smoothing, shift)

        self.optimiser.zero_grad(set_to_none=True)
        along = (0, 0, 0, None if self.shift is None else 0)
        with plain():  # what computes several layers as one is not made to be vectorised
            losses = vmap(loss_of, in_dims=along)(self.learnt | self.rest, x, y, self.shift)
        losses.sum().backward()
        if self.anchors:
            pull_(self.parameters, self.anchors, self.pull)
        if self.pushes:
            push_(self.parameters, self.pushes)
        if self.local.clip:
            clip_each_([p.grad for p in self.parameters if p.grad is not None], self.local.clip)
        self.optimiser.step()
        return losses.detach()


def convolve(layer: nn.Conv2d, places: int, x: Tensor) -> Tensor:
    """A convolution as a matrix product, which is faster for many clients than one with a group for each of them."""
    assert not isinstance(layer.padding, str)
    window = Window(layer.kernel_size, layer.stride, layer.padding)  # type: ignore[arg-type]
    rows, columns = window.out(x)
    if layer.dilation != (1, 1) or 4 * places * len(x) * rows * columns * layer.weight[0].numel() > COLUMNS:
        return layer._conv_forward(x, layer.weight, layer.bias)
    flat = patches(x, window).reshape(len(x) * rows * columns, -1)  # channels last: they lie together
    found = flat @ layer.weight.permute(0, 2, 3, 1).flatten(1).t()
    if layer.bias is not None:
        found = found + layer.bias
    return found.view(len(x), rows, columns, -1).permute(0, 3, 1, 2)


def normalise(layer: nn.BatchNorm2d, x: Tensor, act: str = "") -> Tensor:
    """Batch normalisation and an activation in operations that can be vectorised; torch's own cannot be on a GPU."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    if layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None:
        count, kept = x.numel() // x.shape[1], 1 - layer.momentum
        layer.running_mean.mul_(kept).add_(mean.detach(), alpha=layer.momentum)
        layer.running_var.mul_(kept).add_(variance.detach(), alpha=layer.momentum * count / (count - 1))
    scale = (variance + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    y = (wide - mean[:, None, None]) * scale[:, None, None]
    if layer.bias is not None:
        y = y + layer.bias[:, None, None]
    return ACTS_OF_TORCH[act](y.to(x.dtype))


def clip_each_(gradients: Sequence[Tensor], most: float) -> None:
    """Scales every client's gradient down to a norm of at most this."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    scale = (most / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.reshape(-1, *[1] * (gradient.dim() - 1)))


class StackSlot(Replay):
    """The captured step of a stack. Places that a round leaves empty compute on what was there before."""

    def __init__(self, key: Step, net: nn.Module, places: int, steps: int, lane: Lane, precision: str) -> None:
        self.stacked, batch = Stacked(key, net, places), (places, *key.batch)
        chunk = max(1, min(CHUNK, steps, BUFFER // (4 * int(torch.Size(batch).numel()))))
        super().__init__(lane, [batch], precision, chunk)
        self.key, self.places = key, places
        self.jobs: Sequence[Fit] = ()
        self.total = torch.zeros(places, device=self.total.device)
        self.blank()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.capture(lambda: self.stacked.step(*self.batches()[0]))

    def begin(self, jobs: Sequence[Fit]) -> None:
        streams, steps = [job.stream for job in jobs], jobs[0].steps
        order = joint_order(streams, steps)
        self.jobs = jobs

        def draw(first: int, count: int) -> tuple[Tensor, Tensor]:
            return joint_batches(streams, order[first : first + count], first)

        self.start([draw], steps)
        with on(self.stream):
            self.stacked.load(jobs)

    def _fill(self) -> None:
        self.counter.zero_()
        ((images, labels),), (draw,) = self.buffers, self.draws
        x, y = draw(self.done, min(self.chunk, self.left))
        images[: len(x), : x.shape[1]].copy_(x)
        labels[: len(y), : y.shape[1]].copy_(y)

    def finish(self) -> None:
        with on(self.stream):
            self.stacked.unload(self.jobs)
        self.jobs, self.draws = (), ()  # the stack may be kept for long: what clients have must not stay with it


def stacking_pays(stack: StackSlot, trial: Sequence[FitSlot], clients: int, steps: int) -> bool:
    """Whether a stack takes less time for a job of so many steps than so many clients on lanes of their own."""

    def seconds(slots: Sequence[Replay]) -> float:
        took = 0.0
        for _ in range(2):  # the first time warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for slot in slots:
                with on(slot.stream):
                    for _ in range(TRIAL):
                        slot.counter.zero_()
                        slot.graph.replay()
            torch.cuda.synchronize()
            took = time.perf_counter() - began
        return took * steps / TRIAL

    for slot in trial:
        slot.blank()
    side_by_side = seconds(trial) / len(trial) + BEGIN
    return seconds([stack]) < side_by_side * clients


class Stacks:
    """Stacks by their step, and steps of which it is known that stacking them does not pay."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._kept: OrderedDict[Step, StackSlot | None] = OrderedDict()  # None: not worth it

    def __len__(self) -> int:
        return sum(stack is not None for stack in self._kept.values())

    def of(self, jobs: Sequence[Fit]) -> StackSlot | None:
        """The stack for these jobs; None where it would not be faster than side by side, or cannot be."""
        key, clients, slots = Step.of(jobs[0]), len(jobs), self._slots
        found = self._kept.get(key)
        if key in self._kept and (found is None or found.places >= clients):
            self._kept.move_to_end(key)
            return found
        self._kept[key] = None
        try:
            first, *others = slots.lanes[: 1 + min(clients, 2 * FEWEST)]
            net = slots.make(key.space, key.arch)
            stack = StackSlot(key, net, clients, jobs[0].steps, first, slots.precision)
            trial = [slots.captured(key, lane) for lane in others]
        except (Cannot, torch.OutOfMemoryError):
            torch.cuda.synchronize()  # lanes still copy into what the steps captured for the trial have let go
            return None
        if stacking_pays(stack, trial, clients, jobs[0].steps):
            self._kept[key] = stack
        else:
            for slot in trial:
                slots.keep(slot)
        while len(self._kept) > MOST:
            self._kept.popitem(last=False)
        return self._kept[key]

    def forget(self) -> None:
        """Lets go of all stacks. What is short of memory should not stack again."""
        torch.cuda.synchronize()  # a graph must not go while it runs
        self._kept = OrderedDict.fromkeys(self._kept)


def equals(batch: Sequence[Waiting]) -> list[list[Waiting]]:
    """The fits among these that differ in nothing but weights and batches, where there are enough to be stacked."""
    groups: dict[Hashable, list[Waiting]] = {}
    for waiting in batch:
        job = waiting[2]
        if isinstance(job, Fit) and job.loss is None:
            stream = job.stream
            same = (job.net.space, job.net.arch, job.train, job.local, stream.augment, stream.shape, job.steps)
            kind = (job.lr, job.pull, job.shift is None, bool(job.anchor), bool(job.push), id(stream.split.images))
            groups.setdefault((*same, *kind), []).append(waiting)
    return [group for group in groups.values() if len(group) >= FEWEST]
