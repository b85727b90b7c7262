"""What the cells of a search network compute as one: sums weighed by gates, norms that see the same images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cuda_on_cpu import require_what_torch_computes
from fedtailor.kernels.mixing import Term, fanned, mixed
from fedtailor.spaces.abreast import joined, lay, norm_once

SHAPES = [(2, 3, 4, 4), (3, 2, 3, 5), (1, 4, 16, 16)]


def node(shape: tuple[int, ...], device: str) -> tuple[list[list[Term]], Tensor]:
    """Three edges with outputs of all kinds: one of its own, parts of a larger one, one that lies across."""
    torch.manual_seed(0)
    whole = torch.randn(shape[0], 3 * shape[1], *shape[2:], device=device)
    across = torch.randn(*shape[:2], shape[3], shape[2], device=device).mT
    outputs = [torch.randn(shape, device=device), *whole.chunk(3, 1), across]
    terms = [((i // 2, 1 + i % 2), x.detach().requires_grad_()) for i, x in enumerate(outputs)]
    return [terms[:2], terms[2:4], terms[4:]], torch.rand(3, 4, device=device).requires_grad_()


def test_a_node_by_hand() -> None:
    one, two = torch.ones(1, 1, 1, 1), 10 * torch.ones(1, 1, 1, 1)
    gates = torch.tensor([[0.5, 2.0], [3.0, 0.0]])
    assert mixed([[((0, 0), one), ((0, 1), two)], [((1, 0), one)]], gates, one).item() == 0.5 + 20 + 3
    assert mixed([[((0, 0), one), ((0, 1), two)], [((1, 0), one)]], None, one).item() == 12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["gates", "fixed gates", "no gates"])
def test_a_node_is_what_torch_computes(shape: tuple[int, ...], how: str, device: str) -> None:
    edges, gates = node(shape, device)
    if how == "fixed gates":
        gates.requires_grad_(False)
    outputs = [x for edge in edges for _, x in edge]

    def both() -> tuple[Tensor, ...]:
        y = mixed(edges, None if how == "no gates" else gates, outputs[0])
        torch.manual_seed(1)
        dy = torch.randn(shape[0], 2 * shape[1], *shape[2:], device=device)[:, : shape[1]]
        wanted = [*outputs, gates] if how == "gates" else outputs
        return y.detach(), *torch.autograd.grad(y, wanted, dy)

    require_what_torch_computes(both, rtol=1e-5, atol=1e-5)


def test_gates_that_weigh_nothing_have_no_slope(device: str) -> None:
    edges, gates = node((2, 3, 4, 4), device)
    (slope,) = torch.autograd.grad(mixed(edges, gates, gates).sum(), gates)
    used = {place for edge in edges for place, _ in edge}
    for row in range(3):
        for column in range(4):
            assert bool(slope[row, column]) == ((row, column) in used)


def test_a_node_can_be_differentiated_twice(device: str) -> None:
    edges, gates = node((2, 1, 2, 2), device)
    x = edges[0][0][1]

    def curvature() -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad((mixed(edges, gates, x) ** 3).sum(), gates, create_graph=True)
        return torch.autograd.grad((slope**2).sum(), x)

    require_what_torch_computes(curvature, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("laid", [True, False])
def test_norms_of_one_input_move_their_own_statistics(laid: bool, device: str) -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(3, affine=False, track_running_stats=True, device=device) for _ in range(3)]
    apart = [nn.BatchNorm2d(3, affine=False, device=device) for _ in norms]
    for i, (norm, other) in enumerate(zip(norms, apart, strict=True)):
        for layer in (norm, other):
            layer.running_mean.fill_(i)  # type: ignore[union-attr]
    if laid:
        lay(norms)
    x = torch.randn(4, 3, 5, 5, device=device, requires_grad=True)
    y = norm_once(norms, x)
    assert y is not None
    theirs = [norm(x) for norm in apart]
    torch.testing.assert_close(y, theirs[0])
    torch.testing.assert_close(*(torch.autograd.grad(z.pow(3).sum(), x)[0] for z in (y, theirs[0])))
    for norm, other in zip(norms, apart, strict=True):
        torch.testing.assert_close(norm.running_mean, other.running_mean)
        torch.testing.assert_close(norm.running_var, other.running_var)


def test_norms_that_use_their_statistics_are_asked_one_by_one() -> None:
    norms = [nn.BatchNorm2d(3, affine=False).eval() for _ in range(2)]
    assert norm_once(norms, torch.randn(4, 3, 5, 5)) is None
    assert norm_once([nn.BatchNorm2d(3) for _ in range(2)], torch.randn(4, 3, 5, 5)) is None
    assert norm_once([nn.GroupNorm(1, 3, affine=False)], torch.randn(4, 3, 5, 5)) is None


@pytest.mark.parametrize("readers", [0, 1, 2, 5])
def test_readers_gradients_are_added_up(readers: int, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, device=device, requires_grad=True)
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


def test_layers_that_lie_next_to_each_other_need_no_joining() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 1) for _ in range(3)]
    x, wanted = torch.randn(4, 2, 5, 5), [layer.weight.clone() for layer in layers]
    apart = joined([layer.weight for layer in layers])
    before = torch.autograd.grad(nn.functional.conv2d(x, apart).pow(2).sum(), [layer.weight for layer in layers])
    lay(layers)
    whole = joined([layer.weight for layer in layers])
    assert whole.data_ptr() == layers[0].weight.data_ptr()
    assert torch.equal(whole, torch.cat(wanted))
    after = torch.autograd.grad(nn.functional.conv2d(x, whole).pow(2).sum(), [layer.weight for layer in layers])
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        layers[1].weight.zero_()
    assert not whole[3:6].any()
    assert torch.equal(joined([layers[2].weight, layers[0].weight])[3:], wanted[0])  # not in this order: a copy
