"""Nodes of a search network's cells: sums of what edges bring, weighed by gates, and gradients of who reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cuda_on_cpu import require_what_torch_computes
from fedtailor.kernels.compiling import is_plain
from fedtailor.kernels.layout import by_channel, laid_by_channel
from fedtailor.kernels.mixing import Term, fanned, mixed
from fedtailor.spaces.abreast import joined

SHAPES = [(2, 3, 4, 4), (3, 2, 3, 5), (1, 4, 16, 16)]
LAYOUTS = pytest.mark.parametrize("lay_out", [torch.clone, laid_by_channel], ids=["by image", "by channel"])
Lay = Callable[[Tensor], Tensor]


def node(shape: tuple[int, ...], device: str, lay_out: Lay = torch.clone) -> tuple[list[list[Term]], Tensor]:
    """Three edges with outputs of all kinds: one of its own, parts of a larger one, one that lies across."""
    torch.manual_seed(0)
    whole = lay_out(torch.randn(shape[0], 3 * shape[1], *shape[2:], device=device))
    across = torch.randn(*shape[:2], shape[3], shape[2], device=device).mT
    outputs = [lay_out(torch.randn(shape, device=device)), *whole.chunk(3, 1), across]
    terms = [((i // 2, 1 + i % 2), x.detach().requires_grad_()) for i, x in enumerate(outputs)]
    return [terms[:2], terms[2:4], terms[4:]], torch.rand(3, 4, device=device).requires_grad_()


def test_a_node_by_hand() -> None:
    one, two = torch.ones(1, 1, 1, 1), 10 * torch.ones(1, 1, 1, 1)
    gates = torch.tensor([[0.5, 2.0], [3.0, 0.0]])
    assert mixed([[((0, 0), one), ((0, 1), two)], [((1, 0), one)]], gates, one).item() == 0.5 + 20 + 3
    assert mixed([[((0, 0), one), ((0, 1), two)], [((1, 0), one)]], None, one).item() == 12


@LAYOUTS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["gates", "fixed gates", "no gates"])
def test_a_node_is_what_torch_computes(shape: tuple[int, ...], how: str, lay_out: Lay, device: str) -> None:
    edges, gates = node(shape, device, lay_out)
    if how == "fixed gates":
        gates.requires_grad_(False)
    outputs = [x for edge in edges for _, x in edge]

    def both() -> tuple[Tensor, ...]:
        y = mixed(edges, None if how == "no gates" else gates, outputs[0])
        assert is_plain() or by_channel(y) == by_channel(outputs[0])
        torch.manual_seed(1)
        dy = torch.randn(shape[0], 2 * shape[1], *shape[2:], device=device)[:, : shape[1]]
        wanted = [*outputs, gates] if how == "gates" else outputs
        return y.detach(), *torch.autograd.grad(y, wanted, dy)

    require_what_torch_computes(both, rtol=1e-5, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("gated", [0, 2, 4])
def test_some_of_a_nodes_terms_may_have_no_gate(learnt: bool, gated: int, lay_out: Lay, device: str) -> None:
    edges, gates = node((2, 3, 4, 4), device, lay_out)
    gates.requires_grad_(learnt)
    some = [[(place if place and place[0] * 2 + place[1] <= gated else None, x) for place, x in e] for e in edges]
    outputs, whole = [x for edge in edges for _, x in edge], torch.ones_like(gates)

    def both() -> tuple[Tensor, ...]:
        y = mixed(some, gates, outputs[0])
        wanted = [*outputs, gates] if learnt and gated else outputs
        return y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y).cos())

    require_what_torch_computes(both, rtol=1e-5, atol=1e-5)
    if not gated:
        torch.testing.assert_close(mixed(some, gates, outputs[0]), mixed(edges, whole, outputs[0]))


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_nodes_are_put_where_they_will_lie_side_by_side(terms: int, device: str) -> None:
    edges, gates = node((3, 2, 4, 4), device, laid_by_channel)
    edges = [[term for edge in edges for term in edge][:terms]]
    rooms = torch.full((3 * 2, 3, 4, 4), torch.nan, device=device).chunk(3)
    y = [mixed(edges, gates, gates, room.transpose(0, 1)).transpose(0, 1) for room in rooms]
    whole = joined(y)
    assert whole.data_ptr() == rooms[0].data_ptr()
    wanted = mixed(edges, gates, gates)
    torch.testing.assert_close(whole, torch.cat([wanted.transpose(0, 1)] * 3))
    towards = torch.randn_like(whole)
    inputs = [gates, *(x for _, x in edges[0])]
    mine = torch.autograd.grad(whole, inputs, towards)
    theirs = torch.autograd.grad(wanted, inputs, sum(towards.chunk(3)).transpose(0, 1))  # type: ignore[union-attr]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_gates_that_weigh_nothing_have_no_slope(device: str) -> None:
    edges, gates = node((2, 3, 4, 4), device)
    (slope,) = torch.autograd.grad(mixed(edges, gates, gates).sum(), gates)
    used = {place for edge in edges for place, _ in edge}
    for row in range(3):
        for column in range(4):
            assert bool(slope[row, column]) == ((row, column) in used)


@LAYOUTS
def test_a_node_can_be_differentiated_twice(lay_out: Lay, device: str) -> None:
    edges, gates = node((2, 2, 2, 2), device, lay_out)
    x = edges[0][0][1]

    def curvature() -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad((mixed(edges, gates, x) ** 3).sum(), gates, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), x)

    require_what_torch_computes(curvature, rtol=1e-4, atol=1e-4)


@LAYOUTS
@pytest.mark.parametrize("readers", [0, 1, 2, 5])
def test_readers_gradients_are_added_up(readers: int, lay_out: Lay, device: str) -> None:
    torch.manual_seed(0)
    x = lay_out(torch.randn(2, 3, 4, 4, device=device)).requires_grad_()
    scales = torch.arange(1.0, readers + 1, device=device)
    copies = fanned(x, 7)  # some are there for nobody
    assert all(torch.equal(copy, x) for copy in copies)
    parts = [(scale * copy**2).sum() for scale, copy in zip(scales, copies, strict=False)]
    total = torch.stack([*parts, (0 * x).sum()]).sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    torch.testing.assert_close(slope, 2 * scales.sum() * x)
    if readers:
        (again,) = torch.autograd.grad(slope.sum(), x)
        torch.testing.assert_close(again, 2 * scales.sum().expand_as(x))
    (slope,) = torch.autograd.grad(total.detach() + sum((3 * c).sum() for c in fanned(x, 4)), x)
    torch.testing.assert_close(slope, torch.full_like(x, 12.0))
