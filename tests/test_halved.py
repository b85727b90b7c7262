"""Filters in bfloat16, turned all at once: the numbers are autocast's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from conftest import needs_gpu
from fedtailor.config import Local
from fedtailor.engine import replay
from fedtailor.engine.halved import Halved
from fedtailor.engine.local import ready
from fedtailor.engine.outfit import fit_out
from fedtailor.engine.replay import FitSlot, Lane, Step
from fedtailor.engine.starting import wake_libraries
from fedtailor.engine.steps import objective
from fedtailor.registry import lookup
from fedtailor.spaces.abreast import SideBySide
from fedtailor.spaces.base import Space

INPUT = 3, 16, 16
SPACES: dict[str, tuple[str, dict[str, Any]]] = {  # with filters side by side, with channels last, with depthwise ones
    "darts": ("space", {"variant": "s2", "channels": 4, "cells": 3}),
    "resnet18": ("net", {}),
    "mobilenetv2": ("net", {}),
    "cnn": ("net", {}),
}


def space_of(name: str) -> Space:
    kind, options = SPACES[name]
    return lookup(kind, name)(INPUT, 4, **options)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    space = space_of(name)
    net = ready(space.build(space.largest))
    for module in net.modules():
        if isinstance(module, SideBySide):
            module.lay()
    return net.to(memory_format=torch.channels_last) if name == "resnet18" else net  # type: ignore[call-overload]


def gradients(net: nn.Module, halved: Halved | None) -> list[Tensor | None]:
    torch.manual_seed(1)
    x, y = torch.randn(4, *INPUT), torch.tensor([0, 1, 2, 3])
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        if halved is None:
            objective(net(x), y, 0.0, None).backward()
        else:
            with halved.lent():
                objective(net(x), y, 0.0, None).backward()
            halved.hand_over()
    return [p.grad for p in net.parameters()]


def require_equal(mine: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
    for a, b in zip(mine, others, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype == torch.float32
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", SPACES)
def test_gradients_are_those_of_autocast_to_the_bit(name: str) -> None:
    mine = network(name)
    other, halved = copy.deepcopy(mine), Halved(mine)
    assert len(halved.whole) > (1 if name == "cnn" else 10)
    require_equal(gradients(mine, halved), gradients(other, None))
    with torch.no_grad():
        for net in (mine, other):
            for p in net.parameters():
                p.mul_(0.9)  # a step; the next one reads the filters as they are then
    require_equal(gradients(mine, halved), gradients(other, None))
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_filters_side_by_side_are_turned_as_one() -> None:
    halved = Halved(network("darts"))
    assert 2 * len(halved._from) < len(halved.whole)


def test_filters_that_do_not_learn_have_no_gradient() -> None:
    net = network("cnn")
    frozen = next(m for m in net.modules() if isinstance(m, nn.Conv2d)).weight.requires_grad_(False)
    found = gradients(net, Halved(net))
    assert frozen.grad is None
    assert sum(g is None for g in found) == 1


class Tied(nn.Module):
    """Two layers with one filter, which the sum of its entries reads as well; and one whose filter is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False)
        self.second.weight = self.again = self.first.weight
        self.normed = weight_norm(nn.Conv2d(3, 4, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.second(self.first(x))).mean((2, 3)) * self.again.sum()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_filters_that_several_read_get_all_their_gradients() -> None:
    mine, other = Tied(), Tied()
    with torch.no_grad():
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            a.copy_(b)
    halved = Halved(mine)
    assert halved.whole == [mine.first.weight]
    names = [name for name, _ in mine.named_parameters()]
    for a, b in zip(gradients(mine, halved), gradients(other, None), strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))  # added up in bfloat16
    assert [name for name, _ in mine.named_parameters()] == names
    assert mine.second.weight is mine.first.weight


def test_a_network_has_its_own_filters_again_after_an_error() -> None:
    net = network("cnn")
    before, halved = list(net.parameters()), Halved(net)
    with pytest.raises(RuntimeError, match="input to conv2d"), halved.lent():
        net(torch.zeros(1))
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("name", SPACES)
def test_a_captured_step_takes_fewer_kernels_for_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_libraries(torch.device("cuda"))

    def trained() -> tuple[FitSlot, list[Tensor], int]:
        net = network(name).cuda()
        fit_out(net, INPUT, "bf16")
        space = space_of(name)
        key = Step(space, space.largest, None, (8, *INPUT), Local(clip=0.5), False, False, False)
        slot = FitSlot(key, net, Lane(torch.cuda.Stream()), "bf16")
        torch.manual_seed(1)
        ((images, labels),) = slot.buffers
        images.copy_(torch.randn(images.shape))
        labels.copy_(torch.randint(0, 4, labels.shape))
        slot.lr.fill_(0.05)
        before = [p.detach().clone() for p in slot.parameters]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.cuda.stream(slot.stream):
                slot.launch()
            torch.cuda.synchronize()
        many = sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events() or ())
        return slot, [p.detach() - then for p, then in zip(slot.parameters, before, strict=True)], many

    slot, mine, few = trained()
    assert slot.halved is not None
    monkeypatch.setattr(replay, "Halved", lambda net: None)
    slot, other, many = trained()
    assert slot.halved is None
    assert few < many - len(Halved(slot.net)._from)
    a, b = (torch.cat([t.flatten() for t in some]) for some in (mine, other))
    assert float(b.norm()) > 0
    assert float((a - b).norm() / b.norm()) < 0.02  # a card need not compute the same twice
