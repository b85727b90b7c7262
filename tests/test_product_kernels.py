"""Products of small matrices with long ones: 1x1 convolutions of few channels in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedtailor.kernels import products
from fedtailor.kernels.compiling import plain
from fedtailor.kernels.layout import Pointwise, by_channel, laid_by_channel
from fedtailor.kernels.products import product


def inputs(many: int, out: int, into: int, long: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Filters, positions, and a gradient of what comes out."""
    torch.manual_seed(0)
    shapes = (many, out, into), (many, into, long), (many, out, long)
    w, x, dy = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    return w.requires_grad_(), x.requires_grad_(), dy


def require_close(found: Tensor, wanted: Tensor) -> None:
    """A bfloat16 has eight digits; sums are in single precision."""
    apart = (found.double() - wanted).norm() / wanted.norm()
    assert found.dtype == torch.bfloat16
    assert apart < 4e-3, f"{apart:.1e}"


@pytest.mark.parametrize(
    ("out", "into"), [(16, 16), (8, 8), (64, 64), (16, 24), (24, 8), (96, 16), (40, 72), (24, 144)]
)
@pytest.mark.parametrize("many", [1, 3])
def test_products_and_their_gradients(many: int, out: int, into: int, device: str) -> None:
    w, x, dy = inputs(many, out, into, 6 * products.THREADS, device)
    y = product(w, x)
    assert type(y.grad_fn).__name__ == "_ProductBackward"
    dw, dx = torch.autograd.grad(y, (w, x), dy)
    wide = [t.detach().double() for t in (w, x, dy)]
    require_close(y, wide[0] @ wide[1])
    require_close(dx, wide[0].mT @ wide[2])
    require_close(dw, wide[2] @ wide[1].mT)


def test_a_gradient_may_be_asked_for_again_and_in_one_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, dy = inputs(2, 16, 16, 4 * products.THREADS, device)
    y = product(w, x)
    first, again = (torch.autograd.grad(y, w, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    monkeypatch.setattr(products, "BLOCKS", 1)
    require_close(torch.autograd.grad(product(w, x), w, dy)[0], first.double())


def test_a_gradient_may_be_differentiated_again(device: str) -> None:
    w, x, dy = inputs(1, 16, 16, products.THREADS, device)
    (dx,) = torch.autograd.grad(product(w, x), x, dy, create_graph=True)
    (dw,) = torch.autograd.grad(dx, w, torch.ones_like(dx))
    require_close(dw, dy.double() @ torch.ones_like(dx).double().mT)


@pytest.mark.parametrize(("out", "into"), [(8, 8), (16, 16), (24, 16)])
def test_many_blocks_add_up_in_groups(out: int, into: int, device: str) -> None:
    w, x, dy = inputs(2, out, into, 32 * products.THREADS, device)
    dw = [torch.autograd.grad(product(w, x), w, dy)[0] for _ in range(2)]
    require_close(dw[0], dy.double() @ x.detach().double().mT)
    assert torch.equal(*dw)


def test_only_what_is_wanted_is_computed(device: str) -> None:
    w, x, dy = inputs(1, 16, 24, products.THREADS, device)
    (dx,) = torch.autograd.grad(product(w.detach(), x), x, dy)
    (dw,) = torch.autograd.grad(product(w, x.detach()), w, dy)
    require_close(dx, w.detach().double().mT @ dy.double())
    require_close(dw, dy.double() @ x.detach().double().mT)


@pytest.mark.parametrize(
    ("out", "into", "long", "kind"),
    [
        (12, 16, 128, torch.bfloat16),  # no multiple of 8
        (16, 16, 100, torch.bfloat16),  # no whole blocks of positions
        (128, 64, 128, torch.bfloat16),  # too large
        (16, 16, 128, torch.float32),
    ],
)
def test_other_sizes_are_the_librarys(out: int, into: int, long: int, kind: torch.dtype, device: str) -> None:
    w, x, _ = inputs(1, out, into, long, device)
    y = product(w.to(kind), x.to(kind))
    assert type(y.grad_fn).__name__ != "_ProductBackward"


def test_a_convolution_is_a_product_where_planes_lie_channel_by_channel(device: str) -> None:
    torch.manual_seed(0)
    layer = Pointwise(16, 24).to(device, torch.bfloat16)
    x = laid_by_channel(torch.randn(8, 16, 8, 8, device=device).bfloat16())
    y = layer(x)
    assert by_channel(y)
    with plain():
        require_close(y, layer(x).double())
