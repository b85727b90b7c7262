"""What DARTS networks cost, their randomness, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedtailor.errors import UserError
from fedtailor.registry import lookup
from fedtailor.seeds import torch_seed
from fedtailor.spaces.darts import Network
from fedtailor.spaces.darts_ops import Cell, DropPath, Noise
from fedtailor.spaces.layers import seed_dropout
from fedtailor.spaces.measure import count, tensors_of
from test_darts import DIGITS, VARIANT_NAMES, images, loaded, parameters, random_keep, small

# costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_costs_are_exact(variant):
    odd = {"norm": "group", "input": (3, 13, 16), "cells": 5, "channels": 6} if variant in ("full", "s4") else {}
    space = small(variant, **odd)
    arch = space.sample(np.random.default_rng(11))
    net, cost = space.build(arch), space.cost(arch)
    with FlopCounterMode(display=False) as counter:
        net(images(space, 2))
    assert cost.flops * 2 == counter.get_total_flops()
    assert cost.parameters == parameters(net)
    assert cost.bytes == 4 * sum(t.numel() for t in tensors_of(net).values())
    assert space.index(arch).keys() == tensors_of(net).keys()
    assert cost == sum((p.cost for p in space.pieces(arch).values()), type(cost)())
    assert space.cost(space.smallest).flops <= cost.flops <= space.cost(space.largest).flops
    assert space.cost(space.smallest).parameters <= cost.parameters <= space.cost(space.largest).parameters


def test_kept_activations_are_exact_but_for_states_that_several_pools_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Cell, "_leaving", lambda *_: {})  # else joined filters are kept too, once and not per image
    space = small("s3")
    arch = space.sample(np.random.default_rng(13))
    assert space.cost(arch) == replace(count(lambda: space.build(arch), [space.input]).cost, peak=space.cost(arch).peak)
    space = small("s5")
    assert (
        space.cost(space.smallest).activations > count(lambda: space.build(space.smallest), [DIGITS]).cost.activations
    )


def test_costs_of_kept_and_derived_networks_are_exact():
    space = small()
    keep = random_keep(space, np.random.default_rng(12))
    for affine, net in ((False, space.build_keep(keep)), (True, space.derived(keep))):
        with FlopCounterMode(display=False) as counter:
            net(images(space, 2))
        cost = space.cost_keep(keep, affine)
        assert (2 * cost.flops, cost.parameters) == (counter.get_total_flops(), parameters(net))


# randomness -------------------------------------------------------------------------------------------------------


def test_noise_is_standard_normal_repeatable_and_seeded():
    noise = Noise(stride=2)
    x = torch.zeros(8, 16, 21, 20)
    first, second = noise(x), noise(x)
    assert first.shape == (8, 16, 11, 10)
    assert abs(first.mean()) < 0.03
    assert abs(first.std() - 1) < 0.03
    assert not torch.equal(first, second)
    space = small("s4")
    net = loaded(space.build(space.smallest), space.cut(space.new_weights(0), space.smallest))
    layers = [m for m in net.modules() if isinstance(m, Noise)]
    assert len(layers) == 14 * 3
    assert len({m.salt for m in layers}) == len(layers)
    x = images(space)
    runs = []
    for seed in (1, 1, 2):
        seed_dropout(net, seed)
        runs.append([net(x), net(x)])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[2][0])
    assert not torch.equal(runs[0][0], runs[0][1])
    net.eval()
    assert torch.equal(net(x), net(x))  # evaluation leaves no trace


def test_drop_path():
    space = small("s2", norm="group")
    keep = space.genotype(*space.new_alpha(0))
    net, x = space.derived(keep, drop_path=0.5), images(space)
    assert tensors_of(net).keys() == tensors_of(space.derived(keep)).keys()
    seed_dropout(net, 1)
    first = net(x)
    assert not torch.equal(first, net(x))
    seed_dropout(net, 1)
    assert torch.equal(first, net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
    dropped = DropPath(0.25)(torch.ones(4000, 2, 1, 1))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(dropped[:, 0], dropped[:, 1])
    assert abs(dropped.mean() - 1) < 0.05


# errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "s9"}, "unknown variant of space 'darts' 's9'.*Known: full, s1"),
        ({"norm": "layer"}, "unknown norm"),
        ({"channels": 5}, "channels = 5 must be even"),
        ({"cells": 2}, "from 3 cells on"),
        ({"input": (3, 2, 8)}, "2x8 cannot be halved twice"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        small(**options)


def test_wrong_archs_keeps_and_gates_are_named():
    space = small("s2")
    good = space.full_keep
    with pytest.raises(UserError, match="28 numbers, not 3"):
        space.build((0, 0, 0))
    with pytest.raises(UserError, match=r"reduce.edge0 = 2 is not in 0..1"):
        space.cost((0,) * 14 + (2,) + (0,) * 13)
    with pytest.raises(UserError, match="pair"):
        space.build_keep((good[0], good[1][:3]))
    with pytest.raises(UserError, match=r"normal.edge1 keeps \(2,\)"):
        space.build_keep(((good[0][0], (2,), *good[0][2:]), good[1]))
    with pytest.raises(UserError, match=r"normal.edge0 keeps \(1, 1\)"):
        space.cut_keep({}, (((1, 1), *good[0][1:]), good[1]))
    with pytest.raises(UserError, match="is missing"):
        space.cut_keep({}, good)
    with pytest.raises(UserError, match=r"reduce cell have shape \(14, 3\), not \(14, 2\)"):
        space.supernet()(images(space), (torch.ones(14, 2), torch.ones(14, 3)))


def test_registered_and_immutable():
    space = lookup("space", "darts")(DIGITS, 10, channels=4, cells=3)
    assert space == small()
    assert hash(space) == hash(small())
    assert replace(space, variant="s5").choices == 7
    arch = space.sample(np.random.default_rng(0))
    assert space.from_json(space.to_json(arch)) == arch
    keep = space.keep_of(arch)
    assert space.check_keep([[list(e) for e in kind] for kind in keep]) == keep
    assert isinstance(space.build(arch).head, nn.Linear)


@pytest.mark.parametrize("variant", ["s2", "full"])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("affine", [False, True])
def test_edges_computed_together_give_what_they_give_one_by_one(
    variant: str, norm: str, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = small(variant, norm, input=(1, 9, 9), classes=3)
    with torch_seed("together"):
        together = Network(space, space.full_keep, affine)
        x, y = torch.randn(6, 1, 9, 9), torch.tensor([0, 1, 2, 0, 1, 2])
    apart = copy.deepcopy(together)
    loss = F.cross_entropy(together(x), y)
    loss.backward()
    monkeypatch.setattr(Cell, "_leaving", lambda *_: {})
    expected = F.cross_entropy(apart(x), y)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for (name, ours), theirs in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert torch.allclose(grad_of(ours), grad_of(theirs), rtol=1e-3, atol=1e-5), name
    for (name, ours), theirs in zip(together.named_buffers(), apart.buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
