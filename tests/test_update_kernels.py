"""The end of a training step with SGD as kernels of ours: pull, push, clipping, momentum and weights.

Like those of layers (tests/test_kernels.py) they run on a GPU, and their source on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import needs_gpu
from fedtailor.config import Local
from fedtailor.engine.local import ready
from fedtailor.engine.outfit import fit_out
from fedtailor.engine.replay import FitSlot, Lane, Step
from fedtailor.engine.starting import wake_libraries
from fedtailor.engine.steps import pull_, push_
from fedtailor.kernels import update as update_room
from fedtailor.kernels.compiling import plain
from fedtailor.kernels.update import Update
from fedtailor.registry import lookup
from pretend_cuda import pretend

SHAPES = [(33, 5, 3, 3), (1,), (), (2,), (3,), (0,), (4,), (7, 1), (64, 16), (512,), (513,), (2051,)]
MISSING = (0, 3, 9)
on_a_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])
only_on_a_gpu = pytest.mark.parametrize("device", [on_a_gpu], indirect=True)


@pytest.fixture(autouse=True)
def launched(device: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The blocks of what was launched, one after the other. Pieces are small, so that there are many."""
    seen: list[Any] = []
    launch = update_room.launch
    monkeypatch.setattr(update_room, "launch", lambda *args: (seen.append(args[1]), launch(*args)))
    monkeypatch.setattr(update_room, "CHUNK", 8 * update_room.THREADS)
    return seen


def off_by_one(tensor: Tensor) -> Tensor:
    """The same numbers where no four of them can be read at once."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)


def last(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.channels_last if tensor.dim() == 4 else torch.contiguous_format)


class Problem:
    """Weights with gradients, and all that may be added to these; equal ones for equal options."""

    def __init__(self, device: str, local: Local, shapes: Sequence[tuple[int, ...]] = SHAPES, **how: Any) -> None:
        random = torch.Generator().manual_seed(0)

        def some(lay: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
            return [lay(torch.randn(shape, generator=random).to(device)) for shape in shapes]

        self.local, self.missing, self.lay = local, how.get("missing", ()), how.get("lay", torch.clone)
        lay = how.get("lay_weights", torch.clone)
        self.weights = [nn.Parameter(w) for w in some(lay)]
        self.gradients, anchors, pushes = some(), some(lay), some(lay)
        self.anchors, self.pushes = anchors if how.get("anchored") else [], pushes if how.get("pushed") else []
        self.lr, self.pull = torch.tensor(0.1, device=device), torch.tensor(0.3, device=device)
        self.optimiser = local.optimiser(self.weights, self.lr)
        self.momenta = [torch.zeros_like(w) for w in self.weights] if local.momentum else []
        for weight, momentum in zip(self.weights, self.momenta, strict=False):
            self.optimiser.state[weight]["momentum_buffer"] = momentum

    def ours(self) -> Update | None:
        local = self.local
        numbers = {"clip": local.clip, "momentum": local.momentum, "decay": local.weight_decay}
        tensors = {"momenta": self.momenta, "anchors": self.anchors, "pushes": self.pushes}
        return Update.of(self.weights, self.lr, pull=self.pull, **tensors, **numbers)  # type: ignore[arg-type]

    def theirs(self) -> None:
        if self.anchors:
            pull_(self.weights, self.anchors, self.pull)
        if self.pushes:
            push_(self.weights, self.pushes)
        if self.local.clip:
            nn.utils.clip_grad_norm_(self.weights, self.local.clip)
        for weight in self.weights:  # torch's fused step takes no gradient that lies in another order than its weight
            weight.grad = None if weight.grad is None else torch.empty_like(weight).copy_(weight.grad)
        self.optimiser.step()

    def backward(self, step: int = 0) -> None:
        for i, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            weight.grad = None if i in self.missing else self.lay(gradient * 0.3**step)

    def solve(self, ours: bool = True, steps: int = 3) -> list[Tensor]:
        """The weights and momenta after some steps, in which rate and pull change."""
        update = self.ours()
        assert update is not None, "the kernels were not used"
        for step in range(steps):
            self.backward(step)
            self.lr.fill_(0.1 / (1 + step))
            self.pull.fill_(0.3 / (1 + step))
            update.step() if ours else self.theirs()
        return [*(w.detach() for w in self.weights), *self.momenta]


def require_close(mine: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """A few roundings apart: those of the norm, and of sums in another order."""
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def both(device: str, local: Local, steps: int = 3, **how: Any) -> tuple[Problem, Problem]:
    """A problem solved by ours, and by torch."""
    mine, other = Problem(device, local, **how), Problem(device, local, **how)
    require_close(mine.solve(True, steps), other.solve(False, steps))
    return mine, other


@pytest.mark.parametrize("anchored", [False, True], ids=["free", "anchored"])
@pytest.mark.parametrize("pushed", [False, True], ids=["alone", "pushed"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("clip", "decay"), [(0.0, 5e-4), (1.0, 0.0), (2.5, 0.01), (1e6, 0.01)])
def test_a_step_is_the_one_that_torch_computes(
    clip: float, decay: float, momentum: float, pushed: bool, anchored: bool, device: str, launched: list[Any]
) -> None:
    both(device, Local(clip=clip, momentum=momentum, weight_decay=decay), anchored=anchored, pushed=pushed)
    assert len(launched) == 3 * (2 if clip else 1)


def test_it_is_what_the_formulas_say(device: str) -> None:
    """In double precision, from numbers that nobody else has touched."""
    mine = Problem(device, Local(clip=1.0, momentum=0.9, weight_decay=0.1), anchored=True, pushed=True)
    w, a, p, g = (
        [t.detach().double() for t in some] for some in (mine.weights, mine.anchors, mine.pushes, mine.gradients)
    )
    g = [g + 0.3 * (w - a) + p for w, a, p, g in zip(w, a, p, g, strict=True)]
    norm = torch.cat([t.flatten() for t in g]).norm()
    m = [g / (norm + 1e-6) + 0.1 * w for g, w in zip(g, w, strict=True)]
    expected = [w - 0.1 * m for w, m in zip(w, m, strict=True)]
    require_close(mine.solve(steps=1), [t.float() for t in (*expected, *m)])


@pytest.mark.parametrize("added", [{}, {"anchored": True}, {"pushed": True}], ids=["nothing", "anchor", "push"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_what_has_no_gradient_moves_only_where_something_is_added(
    clip: float, added: dict[str, bool], device: str
) -> None:
    mine, _ = both(device, Local(clip=clip), missing=MISSING, **added)
    before = Problem(device, Local()).weights
    for i in MISSING:
        assert torch.equal(mine.weights[i], before[i]) == (not added)
        assert bool(mine.momenta[i].any()) == bool(added)


def test_no_gradient_at_all_is_no_step(device: str) -> None:
    mine, _ = both(device, Local(clip=1.0), missing=range(len(SHAPES)))
    assert all(map(torch.equal, mine.weights, Problem(device, Local()).weights))


def test_many_tensors_in_few_blocks(device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than parts of the sum of squares, and more of those than threads."""
    monkeypatch.setattr(update_room, "BLOCKS", 300)
    both(device, Local(clip=1.0), 1, shapes=[(1 + 37 * i % 101,) for i in range(700)], anchored=True)
    assert launched == [(300, 1), (700, 1)]


def test_as_on_a_card(device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many threads."""
    monkeypatch.setattr(update_room, "THREADS", 256)
    monkeypatch.setattr(update_room, "CHUNK", 2048)
    both(device, Local(clip=1.0), 2, shapes=[(4096,), (5001,), (12,)], anchored=True, pushed=True)
    assert launched == [(6, 1), (6, 1)] * 2


def test_channels_may_lie_last(device: str) -> None:
    mine, _ = both(device, Local(clip=1.0), lay_weights=last, lay=last, anchored=True)
    assert not mine.weights[0].is_contiguous()


def test_gradients_in_another_order_are_followed(device: str) -> None:
    both(device, Local(clip=1.0), lay_weights=last, anchored=True, pushed=True)
    both(device, Local(clip=1.0), lay=last)


def test_the_same_numbers_give_the_same_bits_wherever_they_lie(device: str) -> None:
    how: dict[str, Any] = {"anchored": True, "pushed": True}
    expected = Problem(device, Local(clip=1.0), **how).solve()
    elsewhere: list[dict[str, Any]] = [{}, {"lay": off_by_one}, {"lay_weights": off_by_one}]
    for where in elsewhere:
        found = Problem(device, Local(clip=1.0), **how, **where).solve()
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_spoils_the_weights_as_it_does_in_torch(bad: float, device: str) -> None:
    found: list[list[Tensor]] = []
    for ours in (True, False):
        problem = Problem(device, Local(clip=1.0))
        problem.gradients[-1][5] = bad
        found.append(problem.solve(ours, 1))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert bool(found[0][len(SHAPES) - 1][5].isnan())


def test_what_the_kernels_do_not_take_is_left_to_torch(device: str) -> None:
    problem = Problem(device, Local())
    assert problem.ours() is not None
    with plain():
        assert problem.ours() is None
    problem.momenta[0] = last(problem.momenta[0])
    assert problem.ours() is None
    wide = Problem(device, Local(), [(4, 6)])
    wide.weights[0].data = torch.zeros(4, 12, device=device)[:, ::2]
    assert wide.ours() is None
    assert Problem(device, Local(), [(0,)]).ours() is None


# a whole captured step -------------------------------------------------------------------------------------------


class Trained:
    """A captured step of a network, on batches and with an anchor that depend on nothing."""

    def __init__(self, device: str, name: str, precision: str, local: Local, train: tuple[str, ...] | None) -> None:
        wake_libraries(torch.device(device))
        torch.manual_seed(0)
        space = lookup("net", name)((3, 16, 16), 4)
        net = ready(space.build(())).to(device)
        fit_out(net, (3, 16, 16), precision)
        key = Step(space, (), train, (8, 3, 16, 16), local, False, True, True)
        self.slot = FitSlot(key, net, Lane(torch.cuda.Stream()), precision)
        torch.manual_seed(1)
        ((images, labels),) = self.slot.buffers
        images.copy_(torch.randn(images.shape))
        labels.copy_(torch.randint(0, 4, labels.shape))
        for tensor in (*self.slot.anchors, *self.slot.pushes):
            tensor.copy_(0.01 * torch.randn(tensor.shape))
        self.slot.pull.fill_(0.1)
        self.slot.lr.fill_(0.05)
        self.before = self.tensors()

    def tensors(self) -> list[Tensor]:
        self.wait()
        return [t.detach().clone() for t in (*self.slot.parameters, *self.slot.state)]

    def changes(self, steps: int) -> list[Tensor]:
        self.wait()
        with torch.cuda.stream(self.slot.stream):
            for _ in range(steps):
                self.slot.launch()
        return [now - then for now, then in zip(self.tensors(), self.before, strict=True)]

    @staticmethod
    def wait() -> None:
        torch.cuda.synchronize()


def apart(mine: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    a, b = (torch.cat([t.double().flatten() for t in some]) for some in (mine, others))
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("train", [None, ("head.weight", "head.bias")], ids=["all", "head"])
def test_a_captured_step_ends_as_torch_ends_it(
    train: tuple[str, ...] | None, momentum: float, device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch)
    local = Local(clip=0.5, momentum=momentum)
    mine = Trained(device, "cnn", "fp32", local, train)
    found = mine.changes(3)
    assert len(launched) == (6 if device == "cpu" else 2)  # a card repeats what was captured
    monkeypatch.setattr(update_room, "takes", lambda *_: False)
    other = Trained(device, "cnn", "fp32", local, train)
    assert mine.slot.update is not None
    assert other.slot.update is None
    assert apart(found, other.changes(3)) < 1e-4


def test_other_optimisers_are_torchs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        pretend(monkeypatch)
    assert Trained(device, "cnn", "fp32", Local(optimizer="adamw"), None).slot.update is None


@only_on_a_gpu
def test_a_wide_network_in_bfloat16_ends_its_step_as_torch_ends_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(clip=0.5)
    mine = Trained(device, "resnet18", "bf16", local, None)
    assert any(not p.is_contiguous() for p in mine.slot.parameters)
    assert mine.slot.update is not None
    monkeypatch.setattr(update_room, "takes", lambda *_: False)
    other = Trained(device, "resnet18", "bf16", local, None)
    assert apart(mine.changes(1), other.changes(1)) < 1e-2  # gradients need not be the same twice


@only_on_a_gpu
def test_a_replay_repeats_bit_for_bit(device: str) -> None:
    problem = Problem(device, Local(clip=1.0), missing=MISSING, anchored=True, pushed=True)
    tensors = [w.detach() for w in problem.weights] + problem.momenta
    start, update = [t.clone() for t in tensors], problem.ours()
    assert update is not None
    problem.backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update.step()
    update.settle()
    found: list[list[Tensor]] = []
    for _ in range(2):
        torch._foreach_copy_(tensors, start)
        for lr in (0.1, 0.02):  # read anew in every replay
            problem.lr.fill_(lr)
            graph.replay()
        found.append([t.clone() for t in tensors])
    assert all(map(torch.equal, *found))
    other = Problem(device, Local(clip=1.0), missing=MISSING, anchored=True, pushed=True)
    for lr in (0.1, 0.02):
        other.backward()
        other.lr.fill_(lr)
        other.theirs()
    require_close(found[0], [*(w.detach() for w in other.weights), *other.momenta])
