"""What the cells of a search network compute as one: norms that see the same images, operations side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_on_cpu import require_what_torch_computes
from fedtailor.engine.local import ready
from fedtailor.engine.outfit import fit_out
from fedtailor.kernels.compiling import is_plain, plain
from fedtailor.kernels.halving import halves, shifted
from fedtailor.kernels.layout import AvgPool, MaxPool, by_channel, laid_by_channel
from fedtailor.kernels.norm import Rule, batch_norm_apart
from fedtailor.spaces.abreast import SideBySide, abreast, joined, lay, norm_once
from fedtailor.spaces.darts import Darts, Keep
from fedtailor.spaces.darts_ops import EDGES, FULL, Cell, Convolutions, DropPath, Halve

LAYOUTS = pytest.mark.parametrize("lay_out", [torch.clone, laid_by_channel], ids=["by image", "by channel"])
Lay = Callable[[Tensor], Tensor]


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


# planes channel by channel ----------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("parts", [1, 3])
def test_norms_hand_their_output_out_in_parts(parts: int, lay_out: Lay, device: str) -> None:
    torch.manual_seed(0)
    x = lay_out(torch.randn(4, 6, 3, 5, device=device)).requires_grad_()
    weight, bias = torch.randn(2, 6, device=device).unbind()
    inputs = (x, weight.requires_grad_(), bias.requires_grad_())

    def both() -> tuple[Tensor, ...]:
        found = batch_norm_apart(*inputs, Rule((None, None), 0.1, 1e-5, "relu"), parts)
        assert len(found) == parts
        torch.manual_seed(1)
        towards = [torch.randn(y.shape).to(y) for y in found]
        once = torch.autograd.grad(found, inputs, towards, retain_graph=True)
        again = torch.autograd.grad(found, inputs, towards, create_graph=True)
        (twice,) = torch.autograd.grad(again[0].pow(2).sum(), x)
        return *(y.detach() for y in found), *once, *(g.detach() for g in again), twice

    require_what_torch_computes(both, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (4, 3), (1, 2)])
def test_halves_are_every_second_pixel_of_every_second_row(size: tuple[int, int], device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, *size, device=device, requires_grad=True)

    def both() -> tuple[Tensor, ...]:
        y = halves(x)
        once = torch.autograd.grad((y**3).sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return y.detach(), *once, again.detach(), *torch.autograd.grad(again.sum(), x)

    require_what_torch_computes(both, rtol=1e-5, atol=1e-5)
    y = halves(x)
    assert "Halves" in type(y.grad_fn).__name__, "the kernels were not used"
    assert torch.equal(y[0], x.clamp(min=0)[..., ::2, ::2])
    assert torch.equal(y[1], shifted(x.clamp(min=0))[..., ::2, ::2])


@pytest.mark.parametrize("pool", [MaxPool(3, 2, 1), AvgPool(3, 1, 1, count_include_pad=False)])
def test_pools_keep_the_layout(pool: nn.Module, device: str) -> None:
    x = torch.randn(3, 2, 5, 5, device=device)
    assert by_channel(pool(laid_by_channel(x)))
    torch.testing.assert_close(pool(laid_by_channel(x)), pool(x))


def outcome(net: nn.Module, *inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output, gradients of all that learns and of the inputs, and what norms remember, from the same start."""
    before = {n: b.clone() for n, b in net.named_buffers()}
    y = net(*inputs)
    torch.manual_seed(1)
    flat = [t for x in inputs for t in (x if isinstance(x, tuple) else (x,))]
    wanted = [t for t in (*flat, *net.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(y, wanted, torch.randn(y.shape).to(y), materialize_grads=True)
    after = [b.clone() for b in net.buffers() if b.is_floating_point()]
    with torch.no_grad():
        for name, b in net.named_buffers():
            b.copy_(before[name])
    return y.detach(), *grads, *after


def prepared(net: nn.Module, device: str) -> nn.Module:
    """As an engine has it on a GPU."""
    ready(net.to(device))
    fit_out(net, (3, 8, 8), "fp32")
    for module in list(net.modules()):
        if isinstance(module, SideBySide):
            module.lay()
    return net


def image(*shape: int, device: str) -> Tensor:
    torch.manual_seed(2)
    return laid_by_channel(torch.randn(shape, device=device)).requires_grad_()


class Abreast(nn.ModuleList):
    """Operations on one input, computed as one; all that they put out side by side."""

    def forward(self, x: Tensor) -> Tensor:
        operations = list(self)
        if is_plain():
            return torch.cat([op(x) for op in operations], 1)
        found = Halve.abreast(operations, x) if isinstance(self[0], Halve) else abreast(operations, x)  # type: ignore
        assert all(by_channel(y) for y in found)
        return torch.cat(found, 1)


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["chain", "even side", "odd side"])
def test_operations_abreast_are_what_torch_computes(kind: str, affine: bool, many: int, device: str) -> None:
    torch.manual_seed(0)
    build = (lambda: Convolutions(2, 3, (2, 1), 1, "batch", affine)) if kind == "chain" else None
    operations = [build() if build else Halve(2, 6, "batch", affine) for _ in range(many)]
    net = prepared(Abreast(operations), device)
    x = image(3, 2, *((5, 7) if kind == "odd side" else (4, 4)), device=device)
    assert by_channel(net[0](x))  # type: ignore[operator]
    require_what_torch_computes(lambda: outcome(net, x), rtol=1e-3, atol=1e-4)


def keep_of(most: str, **others: Sequence[int]) -> Keep:
    """One operation on every edge: some on several edges that leave one state, others alone."""
    names = {e: name for name, edges in others.items() for e in edges}
    kept = tuple((FULL.index(names.get(e, most)),) for e in range(len(EDGES)))
    return kept, kept


CHAINS = keep_of("skip_connect", sep_conv_3x3=(0, 2, 13))
POOLS = keep_of("skip_connect", max_pool_3x3=(1, 3, 4), avg_pool_3x3=(7, 11), dil_conv_3x3=(9,))
NOTHING = keep_of("none", max_pool_3x3=(2, 4, 13))  # two nodes have no edges


def watched(net: nn.Module) -> list[bool]:
    """Whether what operations and cells put out lies channel by channel."""
    seen: list[bool] = []
    for module in net.modules():
        if isinstance(module, (Cell, Convolutions, Halve, MaxPool, AvgPool, DropPath)):
            module.register_forward_hook(lambda module, args, y: seen.append(by_channel(y)))
    return seen


def require_the_same(net: nn.Module, compute: Callable[[], Sequence[Tensor]]) -> None:
    with plain():
        theirs = compute()
    seen = watched(net)
    ours = compute()
    assert seen
    assert all(seen)
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).norm()) <= 1e-3 * float(other.norm()) + 1e-4


@pytest.mark.parametrize(("keep", "side"), [(CHAINS, 9), (POOLS, 8), (NOTHING, 8)], ids=["chains", "pools", "nothing"])
def test_a_search_network_is_what_torch_computes(keep: Keep, side: int, device: str) -> None:
    torch.manual_seed(0)
    space = Darts(input=(3, side, side), classes=3, channels=2, cells=3)
    net = prepared(space.build_keep(keep), device)
    gates = torch.rand(2, len(EDGES), len(FULL), device=device).requires_grad_()
    x = torch.randn(3, 3, side, side, device=device)
    require_the_same(net, lambda: outcome(net, x, tuple(gates.unbind())))


class Copies(TorchDispatchMode):
    """What torch is asked to copy, to put together or to sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("clone", "copy_", "cat", "stack", "sum"):
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("keep", "side"), [(CHAINS, 9), (POOLS, 8)], ids=["chains", "pools"])
def test_a_cell_copies_nothing(keep: Keep, side: int, device: str) -> None:
    torch.manual_seed(0)
    net = prepared(Darts(input=(3, side, side), classes=3, channels=2, cells=3).build_keep(keep), device)
    cell, gates = net.cells[0], torch.rand(len(EDGES), len(FULL), device=device).requires_grad_()  # type: ignore[index]
    x = image(3, 6, side, side, device=device)
    with Copies() as copies:
        y = cell(x, x, gates)
        grads = torch.autograd.grad(y, (x, gates, *cell.parameters()), torch.ones_like(y), materialize_grads=True)
    assert not copies.seen
    assert by_channel(y)
    assert by_channel(grads[0])


@pytest.mark.parametrize("keep", [CHAINS, POOLS], ids=["chains", "pools"])
def test_a_derived_network_is_what_torch_computes(keep: Keep, device: str) -> None:
    torch.manual_seed(0)
    net = prepared(Darts(input=(3, 8, 8), classes=3, channels=2, cells=3).derived(keep, drop_path=0.3), device)
    x = torch.randn(4, 3, 8, 8, device=device)
    require_the_same(net, lambda: outcome(net, x))


def test_noise_is_the_same_in_both_layouts(device: str) -> None:
    torch.manual_seed(0)
    space = Darts(input=(3, 8, 8), classes=3, channels=2, cells=3, variant="s4")
    net = prepared(space.build(tuple(int(e % len(EDGES) == 1) for e in range(2 * len(EDGES)))), device)
    x = torch.randn(3, 3, 8, 8, device=device)
    require_the_same(net, lambda: outcome(net, x))


def test_a_search_network_can_be_differentiated_twice(device: str) -> None:
    torch.manual_seed(0)
    net = prepared(Darts(input=(3, 9, 9), classes=3, channels=2, cells=3).build_keep(CHAINS), device)
    gates = torch.rand(2, len(EDGES), len(FULL), device=device).requires_grad_()
    x, weights = torch.randn(3, 3, 9, 9, device=device), list(net.parameters())

    def curvature() -> Sequence[Tensor]:
        loss = net(x, tuple(gates.unbind())).pow(2).sum()
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), (gates, *weights))  # type: ignore[arg-type]

    require_the_same(net, curvature)


@pytest.mark.parametrize("how", ["evaluated", "recalibrated"])
def test_what_does_not_train_lies_image_by_image(how: str, device: str) -> None:
    torch.manual_seed(0)
    net = prepared(Darts(input=(3, 8, 8), classes=3, channels=2, cells=3).build_keep(POOLS), device).eval()
    for module in net.modules():
        if how == "recalibrated" and isinstance(module, nn.BatchNorm2d):
            module.train()
    x = torch.randn(3, 3, 8, 8, device=device)
    with plain():
        theirs = outcome(net, x)
    seen = watched(net)
    for mine, other in zip(outcome(net, x), theirs, strict=True):
        assert float((mine - other).norm()) <= 1e-3 * float(other.norm()) + 1e-4
    assert not any(seen)
