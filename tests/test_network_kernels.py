"""Whole networks with kernels of ours, planes channel by channel: what torch computes, also in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.engine.local import ready
from fedtailor.engine.outfit import fit_out
from fedtailor.kernels import layout
from fedtailor.kernels.compiling import plain
from fedtailor.registry import lookup
from fedtailor.search.gated import Gated, gated_of, held
from fedtailor.spaces.darts import Darts
from fedtailor.spaces.measure import tensors_of

SPACES: list[tuple[str, dict[str, Any]]] = [
    ("mobilenetv3", {}),
    ("darts", {"channels": 2, "cells": 3, "variant": "s2"}),
    ("darts", {"channels": 2, "cells": 3, "variant": "full"}),
]


@pytest.fixture(params=SPACES, ids=lambda space: "-".join([space[0], *map(str, space[1].values())]))
def network(request: pytest.FixtureRequest, device: str) -> nn.Module:
    name, options = request.param
    space = lookup("space", name)((3, 8, 8), 4, **options)
    arch = space.largest if name == "darts" else (0,) * len(space.dimensions)
    torch.manual_seed(0)
    net = ready(space.build(arch)).to(device).train()
    fit_out(net, (3, 8, 8), "fp32")
    return net


def gradient(net: nn.Module, device: str, half: bool) -> Tensor:
    """Of all weights, on the same images every time."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 3, 8, 8).to(device), torch.randint(0, 4, (8,)).to(device)
    net.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=False):
        F.cross_entropy(net(x).float(), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def alike(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, 0))


def test_a_step_is_the_one_that_torch_computes(
    network: nn.Module, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[bool] = []
    convolve = layout.Pointwise.forward

    def watched(self: layout.Pointwise, input: Tensor) -> Tensor:
        products.append(layout.by_channel(input))
        return convolve(self, input)

    monkeypatch.setattr(layout.Pointwise, "forward", watched)
    ours = gradient(network, device, half=False)
    assert any(products), "planes lie image by image"
    with plain():
        theirs = gradient(network, device, half=False)
        halved = gradient(network, device, half=True)
    assert alike(ours, theirs) > 0.9999
    # rounding to eight bits turns a gradient by some angle: ours by hardly more than torch's own
    assert 1 - alike(gradient(network, device, half=True), theirs) < 1.5 * (1 - alike(halved, theirs)) + 0.01


@pytest.mark.parametrize("half", [False, True])
def test_a_gated_supernet_is_the_cut_network(half: bool, device: str) -> None:
    """Where kernels of ours compute several operations as one, and fewer where some are cut."""
    space = Darts((3, 8, 8), 4, channels=2, cells=3, variant="s2")
    normal, reduce = (tuple(((0,), (1,), (0, 1), ())[(e + kind) % 4] for e in range(14)) for kind in range(2))
    weights, keep, found = space.new_weights(0), (normal, reduce), list[Tensor]()
    whole = held(space, weights, keep, torch.device("cpu"))
    for net, tensors in ((space.build_keep(keep), weights), (gated_of(space).module(), whole)):
        ready(net).load_state_dict({n: tensors[n] for n in tensors_of(net)}, strict=False)
        net.to(device).train()
        fit_out(net, (3, 8, 8), "fp32")
        gradient(net.at(keep) if isinstance(net, Gated) else net, device, half)
        learnt = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        found.append(torch.cat([learnt[n].flatten() for n in space.names_of(keep) if n in learnt]))
    assert alike(*found) > (0.99 if half else 0.99999)
