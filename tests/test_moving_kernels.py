"""Kernels that move or make numbers: cut and paste in one go, patches of stacked convolutions, random numbers.

Like those of layers (tests/test_kernels.py) they run on a GPU, and their sources on a processor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedtailor.kernels import blocks as blocks_room
from fedtailor.kernels import columns as columns_room
from fedtailor.kernels import random as random_room
from fedtailor.kernels.blocks import Blocks
from fedtailor.kernels.columns import Window, patches
from fedtailor.kernels.random import uniform
from fedtailor.spaces.layers import Dropout

PLACES = [  # a large tensor's shape, and where the part lies in it
    ((6, 5, 3, 3), (slice(0, 4), slice(0, 2))),
    ((6, 1, 5, 5), (slice(0, 6), slice(0, 1), slice(1, 4), slice(1, 4))),
    ((7, 5), (slice(0, 7), slice(0, 3))),
    ((33,), (slice(0, 20),)),
    ((130, 50), ()),
    ((4, 3, 2, 2), ()),
    ((9,), ()),
]


@pytest.fixture
def blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """The places above, some of them too large for one piece."""
    monkeypatch.setattr(blocks_room, "CHUNK", 512)
    return Blocks(PLACES)


def large_ones(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=device) for shape, _ in PLACES]


def test_parts_are_copied_out_in_one_go(blocks: Blocks, device: str) -> None:
    large = large_ones(device)
    found = blocks.take(large)
    assert found is not None, "the kernel was not used"
    for part, tensor, (_, at) in zip(found, large, PLACES, strict=True):
        assert torch.equal(part, tensor[at])
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0


def test_what_learns_or_lies_apart_is_left_to_torch(blocks: Blocks, device: str) -> None:
    large = large_ones(device)
    large[0].requires_grad_()
    assert blocks.take(large) is None
    with torch.no_grad():
        assert blocks.take(large) is not None
    assert blocks.take([t.mT.contiguous().mT if t.dim() > 1 else t for t in large_ones(device)]) is None
    assert blocks.take([t.new_zeros(()) for t in large_ones(device)]) is None  # other tensors of these names


def test_parts_are_added_where_they_lie(blocks: Blocks, device: str) -> None:
    old = large_ones(device)
    change, masses = [torch.full_like(t, -0.0) for t in old], [torch.ones_like(t) for t in old]
    torch.manual_seed(1)
    parts = [torch.randn_like(t[at].contiguous()) for t, (_, at) in zip(old, PLACES, strict=True)]
    assert blocks.add((parts, old, change, masses), 2.0), "the kernel was not used"
    for c, m, t, part, (_, at) in zip(change, masses, old, parts, PLACES, strict=True):
        expected, weighed = torch.full_like(t, -0.0), torch.ones_like(t)
        expected[at] += 2 * (part - t[at])
        weighed[at] += 2
        torch.testing.assert_close(c, expected)
        assert torch.equal(m, weighed)


def test_parts_that_return_what_they_received_change_nothing(blocks: Blocks, device: str) -> None:
    old = large_ones(device)
    old[0].view(-1)[:3] = torch.tensor([0.0, -0.0, 1e-40])
    change, masses = [torch.full_like(t, -0.0) for t in old], [torch.ones_like(t) for t in old]
    assert blocks.add((blocks.take(old) or [], old, change, masses), 3.0)
    assert all(bool(torch.signbit(c).all()) and not c.any() for c in change)
    whole = Blocks([(shape, ()) for shape, _ in PLACES])
    found = whole.average([old, [t.clone() for t in old]], old, [1.0, 2.0])
    assert found is not None
    for mine, other in zip(found, old, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


def test_whole_parts_are_averaged_in_one_go(blocks: Blocks, device: str) -> None:
    old = large_ones(device)
    parts = [[torch.randn_like(t) for t in old] for _ in range(3)]
    found = Blocks([(shape, ()) for shape, _ in PLACES]).average(parts, old, [1.0, 2.0, 5.0])
    assert found is not None, "the kernel was not used"
    for mine, *each in zip(found, *parts, strict=True):
        torch.testing.assert_close(mine, (each[0] + 2 * each[1] + 5 * each[2]) / 8)


@pytest.mark.parametrize(
    ("shape", "window", "last"),
    [
        ((2, 3, 7, 9), Window((3, 3), (1, 1), (1, 1)), False),
        ((3, 4, 6, 6), Window((3, 3), (1, 1), (0, 0)), True),
        ((2, 8, 9, 5), Window((5, 3), (2, 1), (2, 0)), True),
        ((1, 5, 4, 4), Window((1, 1), (3, 2), (0, 0)), True),
    ],
)
def test_patches_are_those_that_torch_unfolds(
    shape: tuple[int, ...], window: Window, last: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    clients = torch.randn(3, *shape, device=device)
    if last:
        clients = clients.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    clients.requires_grad_()

    def both() -> tuple[Tensor, Tensor, Tensor]:
        one, each = patches(clients[0], window), torch.vmap(lambda x: patches(x, window))(clients)
        torch.manual_seed(1)
        return one, each, torch.autograd.grad(each, clients, torch.randn_like(each.contiguous()))[0]

    ours = both()
    monkeypatch.setattr(columns_room, "applies", lambda x: False)
    theirs = both()
    assert "Patches" in type(ours[0].grad_fn).__name__, "the kernels were not used"
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2])


def test_random_numbers_are_those_of_torchs_integers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.tensor([0, 1, -7, 2**62 - 1, 123456789], device=device)

    def draw() -> tuple[Tensor, ...]:
        each = torch.vmap(lambda counter: uniform(counter, 3, 5))(counters)
        return uniform(counters[1], 4, 1), uniform(counters, 300), uniform(counters.view(5, 1), 2), each

    ours = draw()
    monkeypatch.setattr(random_room, "applies", lambda counter: False)
    theirs = draw()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert float(ours[1].min()) >= 0
    assert float(ours[1].max()) < 1
    assert abs(float(ours[1].mean()) - 0.5) < 0.05


def test_dropout_lets_the_gradient_through_where_it_let_the_value_through(device: str) -> None:
    layer, x = Dropout(0.25).to(device), torch.randn(50, 40, device=device, requires_grad=True)
    y = layer(x)
    layer(x)  # moves the counter on
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * gradient)
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.05
