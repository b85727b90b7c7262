"""MiLeNAS by hand."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.kernels.layout import Pointwise
from fedtailor.nets.darts import mixture_of
from fedtailor.search.milenas import Cosine, alpha_optimiser, milenas_step
from fedtailor.spaces.abreast import SideBySide
from fedtailor.spaces.darts import Darts
from tools import Counted


def toy(**options):
    """L = (w a x - y)^2 / 2 at w = 2, a = 1, plain steps of 0.1 for both: every gradient can be written down."""
    w, a = nn.Parameter(torch.tensor(2.0)), torch.tensor(1.0, requires_grad=True)
    step = milenas_step(
        lambda x, y: 0.5 * (w * a * x - y) ** 2,
        [w],
        torch.optim.SGD([w], 0.1),
        [a],
        torch.optim.SGD([a], 0.1),
        **options,
    )
    train, val = (torch.tensor(1.0), torch.tensor(1.0)), (torch.tensor(0.5), torch.tensor(3.0))
    return step(train, val), w, a


def test_milenas_moves_alpha_on_train_and_val_then_w_at_the_new_alpha() -> None:
    loss, w, a = toy(lamda=0.5)
    # train: (2 - 1) * w x = 2; val: (1 - 3) * w x = -2, weighed by a half: alpha 1 - 0.1 * (2 - 1) = 0.9
    assert a.item() == pytest.approx(0.9)
    # w at alpha = 0.9: (1.8 - 1) * 0.9 = 0.72
    assert w.item() == pytest.approx(2 - 0.1 * 0.72)
    assert loss.item() == pytest.approx(0.5 * 0.8**2)


def test_without_lambda_val_is_not_read() -> None:
    _, _, a = toy(lamda=0.0)
    assert a.item() == pytest.approx(0.8)


def test_clipping_acts_on_w_and_leaves_alpha() -> None:
    _, w, a = toy(lamda=0.5, clip=0.2)
    assert w.item() == pytest.approx(2 - 0.1 * 0.2)  # the gradient 0.72 is cut to norm 0.2
    assert a.item() == pytest.approx(0.9)


def test_the_gradient_of_w_can_be_adjusted_before_it_is_clipped() -> None:
    w, a = nn.Parameter(torch.tensor(2.0)), torch.tensor(1.0, requires_grad=True)

    def pull() -> None:
        assert w.grad is not None
        w.grad += 3.0

    batch = (torch.tensor(0.0), torch.tensor(0.0))
    optimisers = torch.optim.SGD([w], 0.1), torch.optim.SGD([a], 0.1)
    milenas_step(lambda x, y: w * a * x, [w], optimisers[0], [a], optimisers[1], clip=1.0, adjust=pull)(batch, batch)
    assert w.item() == pytest.approx(2 - 0.1)


def test_alpha_moves_by_adam_with_the_papers_betas_and_decay() -> None:
    a = torch.tensor([1.0], requires_grad=True)
    optimiser, first, second, expected = alpha_optimiser([a], 0.1, 0.01), 0.0, 0.0, 1.0
    for t, slope in enumerate((0.5, -2.0), 1):
        a.grad = torch.tensor([slope])
        optimiser.step()
        g = slope + 0.01 * expected
        first, second = 0.5 * first + 0.5 * g, 0.999 * second + 0.001 * g * g
        expected -= 0.1 * (first / (1 - 0.5**t)) / (math.sqrt(second / (1 - 0.999**t)) + 1e-8)
    assert a.item() == pytest.approx(expected)


def test_cosine_restarts_from_the_given_rate() -> None:
    lr = torch.tensor(0.025)
    move, seen = Cosine(lr, 0.025, 0.001, 4), []
    for _ in range(4):
        move()
        seen.append(lr.item())
    assert seen == pytest.approx([0.001 + 0.024 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)])
    assert all(a > b for a, b in pairwise(seen))


def test_filters_in_bfloat16_are_turned_once_for_the_passes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are autocast's, which turns them in every pass."""
    real = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda" or real(kind))
    space = Darts((1, 8, 8), 3, channels=4, cells=3, variant="full")
    torch.manual_seed(0)
    one = mixture_of(space).module()
    other = copy.deepcopy(one)
    batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    losses, many = list[Tensor](), list[int]()
    for mine in (one, other):
        for module in mine.modules():
            if isinstance(module, SideBySide):
                module.lay()
        weights, alpha = list(mine.train().parameters()), mine.searched().alpha
        optimisers = torch.optim.SGD(weights, 0.1, momentum=0.9), alpha_optimiser(alpha, 0.01)
        step = milenas_step(
            lambda x, y, net=mine: F.cross_entropy(net(x), y),
            weights,
            optimisers[0],
            alpha,
            optimisers[1],
            clip=1.0,
            net=mine if mine is one else None,
        )
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for _ in range(2):
                with Counted() as found:
                    losses.append(step(*batches))
                many.append(found.many["_to_copy"])
    assert torch.equal(losses[1], losses[3])
    for mine, theirs in zip((*one.parameters(), *one.alpha), (*other.parameters(), *other.alpha), strict=True):
        assert torch.equal(mine, theirs)
    filters = sum(type(m) in (nn.Conv2d, Pointwise) and m.groups == 1 for m in one.modules())
    assert many[1] < many[3] - filters
