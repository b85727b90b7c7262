"""What every search space promises, checked on every registered one: a new space is picked up by its name."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fedtailor import registry
from fedtailor.errors import UserError
from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch, Dimension, Space, Weights
from fedtailor.spaces.layers import seed_dropout
from fedtailor.spaces.measure import tensors_of
from fedtailor.spaces.pasting import paste

NAMES = registry.names("space")
SIZES = ((3, 16, 16), (1, 8, 8))
OPTIONS = {"darts": {"channels": 4, "cells": 4}}  # the same structure, less of it
MASKABLE = {"tiny", "mobilenetv2", "mobilenetv3"}  # a sub-network is the supernet with all other entries at zero
CLASSES = 5

every_space = pytest.mark.parametrize("space", [pytest.param((n, SIZES[0]), id=n) for n in NAMES], indirect=True)
every_space_and_size = pytest.mark.parametrize(
    "space", [pytest.param((n, s), id=f"{n}-{s[1]}x{s[2]}x{s[0]}") for n in NAMES for s in SIZES], indirect=True
)


@lru_cache
def make(name: str, size: tuple[int, int, int] = SIZES[0], norm: str = "") -> Space:
    options = OPTIONS.get(name, {}) | ({"norm": norm} if norm else {})
    return registry.lookup("space", name)(input=size, classes=CLASSES, **options)


@pytest.fixture
def space(request: pytest.FixtureRequest) -> Space:
    return make(*request.param)


def some_archs(space: Space, n: int = 2) -> list[Arch]:
    """The two ends of the space and n archs at random."""
    rng = rng_of("archs", space.name)
    return [space.smallest, space.largest, *(space.sample(rng) for _ in range(n))]


@lru_cache
def lively_weights(space: Space) -> Weights:
    """Supernet weights in which nothing is zero: fresh norms and scales would hide mistakes behind zeros and ones."""
    weights = space.new_weights("tests")
    gen = torch.Generator().manual_seed(0)
    for name, t in weights.items():
        if name.endswith(("running_var", "norm.weight")):
            t.copy_(torch.rand(t.shape, generator=gen) + 0.5)
        elif t.dim() < 2 or not t.any():
            t.copy_(0.1 * torch.randn(t.shape, generator=gen))
    return weights


def batch(space: Space, n: int = 4) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(n, *space.input, generator=gen), torch.randint(CLASSES, (n,), generator=gen)


def network(space: Space, arch: Arch, weights: Weights) -> nn.Module:
    """The arch's network, with its weights loaded strictly: every tensor, no other, in its shape."""
    net = space.build(arch)
    steps = {n: t for n, t in net.state_dict().items() if n.endswith("num_batches_tracked")}
    net.load_state_dict(weights | steps, strict=True)
    return net


def same_bits(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)


def noisy(weights: Weights, seed: int) -> Weights:
    """What a client might send back."""
    gen = torch.Generator().manual_seed(seed)
    return {n: t + 0.1 * torch.randn(t.shape, generator=gen) for n, t in weights.items()}


# networks ---------------------------------------------------------------------------------------------------------


@every_space_and_size
def test_a_network_holds_what_was_cut_for_it_and_is_independent(space: Space):
    weights = lively_weights(space)
    x, _ = batch(space)
    for arch in some_archs(space):
        part = space.cut(weights, arch)
        net = network(space, arch, part).eval()
        assert isinstance(net.head, nn.Linear)
        out = net(x)
        assert out.shape == (len(x), CLASSES)
        assert torch.allclose(out, functional_call(net, part, (x,)), atol=1e-5)
        before = {n: t.clone() for n, t in weights.items()}
        for tensor in (*part.values(), *net.parameters()):
            tensor.data.add_(1)
        assert same_bits(before, weights)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", [n for n in NAMES if n in MASKABLE])
def test_a_network_is_the_supernet_with_the_rest_at_zero(name: str, norm: str):
    space = make(name, norm=norm)
    weights = lively_weights(space)
    x, _ = batch(space)
    for arch in some_archs(space, 3):
        part = space.cut(weights, arch)
        masked = {n: torch.zeros_like(t) for n, t in weights.items()}
        for n, at in space.index(arch).items():
            masked[n][at] = part[n]
        small = network(space, arch, part).eval()(x)
        large = network(space, space.largest, masked).eval()(x)
        assert small.abs().max() > 1e-3
        assert torch.allclose(small, large, atol=1e-5, rtol=1e-5), (small - large).abs().max()


@pytest.mark.parametrize("name", [n for n in NAMES if any(f.name == "norm" for f in dataclasses.fields(make(n)))])
def test_the_group_norm_twin_trains(name: str):
    space = make(name, norm="group")
    net = network(space, space.largest, space.cut(space.new_weights(0), space.largest)).train()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    x, y = batch(space, 8)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(net(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


@every_space
def test_new_weights_depend_on_their_key_alone(space: Space):
    state = torch.random.get_rng_state()
    first = space.new_weights(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(5)
    again = space.new_weights(3)
    assert same_bits(first, again)
    assert not same_bits(first, space.new_weights(4))
    torch.random.set_rng_state(state)
    assert {n: tuple(t.shape) for n, t in first.items()} == space.full_shapes


# cut and paste ----------------------------------------------------------------------------------------------------


@every_space_and_size
def test_pasting_what_was_cut_changes_no_bit(space: Space):
    weights = {n: t.clone() for n, t in lively_weights(space).items()}
    for t in weights.values():
        t.flatten()[::3] = -0.0  # which equals 0.0 but has other bits
    archs = some_archs(space, 3)
    parts = [(space.cut(weights, arch), arch, 1.0 + 10 * i) for i, arch in enumerate(archs)]
    assert same_bits(paste(space, weights, parts), weights)
    assert same_bits(paste(space, weights, parts[:1]), weights)
    assert same_bits(paste(space, weights, []), weights)


def slow_paste(old: np.ndarray, parts: list[tuple[np.ndarray, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The mass-weighted mean over the parts that own an entry, and by how many each entry is owned."""
    total, mass, owned = np.zeros(old.shape), np.zeros(old.shape), np.zeros(old.shape, int)
    for part, weight in parts:
        places = [
            range((w - p) // 2, (w - p) // 2 + p) if axis >= 2 else range(p)
            for axis, (w, p) in enumerate(zip(old.shape, part.shape, strict=True))
        ]
        at = np.ix_(*places)
        total[at] += weight * part
        mass[at] += weight
        owned[at] += 1
    return np.where(owned > 0, total / np.where(owned > 0, mass, 1), old), owned


@every_space
def test_paste_is_the_mean_over_owners(space: Space):
    weights = lively_weights(space)
    rng = rng_of("paste", space.name)
    archs = [space.smallest, *(space.sample(rng) for _ in range(3))]
    masses = (30.0, 500.0, 7.0, 90.0)
    parts = [(noisy(space.cut(weights, a), i), a, masses[i]) for i, a in enumerate(archs)]
    parts[1][0].pop("head.bias")  # a part owns only what it sends
    found = paste(space, weights, parts)
    assert found.keys() == weights.keys()
    for name, old in weights.items():
        sent = [(part[name].numpy().astype(float), mass) for part, _, mass in parts if name in part]
        expected, owned = slow_paste(old.numpy(), sent)
        assert np.allclose(found[name].numpy(), expected, atol=1e-6, rtol=1e-5), name
        assert np.array_equal(found[name].numpy()[owned == 0], old.numpy()[owned == 0]), name
    only = paste(space, weights, parts, keys=["head.weight"])
    assert torch.equal(only["head.weight"], found["head.weight"])
    assert same_bits(only | {"head.weight": weights["head.weight"]}, weights)


def test_paste_entry_by_entry_on_tiny():
    """The same again with nothing but loops and counts."""
    space = make("tiny")
    weights = lively_weights(space)
    archs = [(0, 0, 1, 0, 1, 0), (1, 0, 0, 0, 0, 1), (0, 1, 0, 1, 0, 0)]
    parts = [(noisy(space.cut(weights, arch), i), arch, 2.0 + i) for i, arch in enumerate(archs)]
    found = paste(space, weights, parts)
    for name, old in weights.items():
        if old.numel() > 1000:
            continue
        for place in np.ndindex(*old.shape):
            total, mass = 0.0, 0.0
            for part, _, weight in parts:
                if name not in part:
                    continue
                inside = []
                for axis, i in enumerate(place):
                    shift = (old.shape[axis] - part[name].shape[axis]) // 2 if axis >= 2 else 0
                    inside.append(i - shift)
                if all(0 <= i < n for i, n in zip(inside, part[name].shape, strict=True)):
                    total, mass = total + weight * part[name][tuple(inside)].item(), mass + weight
            expected = total / mass if mass else old[place].item()
            assert found[name][place].item() == pytest.approx(expected, rel=1e-5, abs=1e-7), (name, place)


@every_space
def test_a_step_on_the_cut_is_a_step_on_the_supernet(space: Space):
    weights = lively_weights(space)
    arch = some_archs(space)[-1]
    x, y = batch(space)
    net = network(space, arch, space.cut(weights, arch)).train()
    seed_dropout(net, 7)
    F.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        if p.grad is not None:
            p.data -= 0.1 * p.grad
    stepped = {n: p.detach() for n, p in net.named_parameters()}
    pasted = paste(space, weights, [(stepped, arch, 500.0)])

    leaves = {n: t.clone().requires_grad_() if n in stepped else t for n, t in weights.items()}
    again = space.build(arch).train()
    seed_dropout(again, 7)
    F.cross_entropy(functional_call(again, space.cut(leaves, arch), (x,)), y).backward()
    for name, leaf in leaves.items():
        expected = leaf.detach() - 0.1 * leaf.grad if leaf.grad is not None else leaf.detach()
        assert torch.allclose(pasted[name], expected, atol=1e-6), name


# costs ------------------------------------------------------------------------------------------------------------


@every_space_and_size
def test_costs_are_those_of_the_network(space: Space):
    x, _ = batch(space, 1)
    for arch in some_archs(space):
        net, cost = space.build(arch).eval(), space.cost(arch)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net(x)
        assert cost.flops == counter.get_total_flops()
        assert cost.parameters == sum(p.numel() for p in net.parameters())
        assert cost.parameters + cost.buffers == sum(t.numel() for t in tensors_of(net).values())
        pieces = [p.cost for p in space.pieces(arch).values()]
        for field in ("parameters", "buffers", "flops", "activations"):
            assert getattr(cost, field) == sum(getattr(p, field) for p in pieces)
        assert cost.peak == max(p.peak for p in pieces)


@every_space
def test_the_ends_of_the_space_bound_its_parameters(space: Space):
    rng = rng_of("ends", space.name)
    low, high = space.cost(space.smallest).parameters, space.cost(space.largest).parameters
    assert all(low <= space.cost(space.sample(rng)).parameters <= high for _ in range(50))


# archs ------------------------------------------------------------------------------------------------------------


@every_space
def test_archs_as_json(space: Space):
    for arch in some_archs(space, 5):
        text = space.to_json(arch)
        assert space.from_json(text) == arch
        assert json.loads(text)["options"].keys() == {d.name for d in space.dimensions}
        assert "\n" not in space.describe(arch)


@every_space
def test_bad_archs_and_weights_are_named(space: Space):
    arch = space.smallest
    with pytest.raises(UserError, match=r"has \d+ numbers"):
        space.build((*arch, 0))
    for wrong in (-1, len(space.dimensions[0].options)):
        with pytest.raises(UserError, match=space.dimensions[0].name):
            space.cost((wrong, *arch[1:]))
    with pytest.raises(UserError, match="belongs to space 'other'"):
        space.from_json(json.dumps({"space": "other", "arch": list(arch)}))
    with pytest.raises(UserError, match="not an arch"):
        space.from_json("{")
    other = make("tiny" if space.name != "tiny" else "mobilenetv2")
    with pytest.raises(UserError, match=f"not weights of '{space.name}'"):
        space.cut(lively_weights(other), arch)
    with pytest.raises(UserError, match="has shape"):
        space.cut(lively_weights(make(space.name, SIZES[1])) | {"head.weight": torch.zeros(1, 1)}, arch)
    weights = lively_weights(space)
    part = space.cut(weights, arch)
    with pytest.raises(UserError, match="'nothing'"):
        paste(space, weights, [(part | {"nothing": torch.zeros(1)}, arch, 1.0)])
    with pytest.raises(UserError, match=r"'head\.bias' has shape"):
        paste(space, weights, [(part | {"head.bias": torch.zeros(1)}, arch, 1.0)])


@every_space
@pytest.mark.parametrize(("share", "draws"), [(0.5, 60), (0.05, 3)])
def test_sampling_keeps_to_the_limit(space: Space, share: float, draws: int):
    low, high = space.cost(space.smallest), space.cost(space.largest)
    limit = low.parameters + share * (high.parameters - low.parameters)
    rng = rng_of("limit", space.name)
    found = [space.sample(rng, fits=lambda arch: space.cost(arch).parameters <= limit) for _ in range(draws)]
    assert all(space.cost(arch).parameters <= limit for arch in found)
    assert len(set(found)) > 1
    with pytest.raises(UserError, match="no arch of"):
        space.sample(rng, fits=lambda arch: False)


@pytest.mark.parametrize("refused", [0, 300], ids=["by rejection", "by Gibbs sweeps"])
def test_sampling_follows_the_conditional_distribution(refused: int):
    """Refusing its first 300 draws makes `sample` sweep; both ways must draw from the same distribution."""
    space = make("tiny")
    cost = {arch: space.cost(arch).parameters for arch in space.archs()}
    limit = np.quantile(list(cost.values()), 0.4)
    p = [np.array([0.3, 0.7]) if i % 2 else np.array([0.6, 0.4]) for i in range(6)]
    draws, rng = 1000, rng_of("conditional")
    weight = {arch: np.prod([p[i][k] for i, k in enumerate(arch)]) for arch, c in cost.items() if c <= limit}
    counts = dict.fromkeys(weight, 0)
    for _ in range(draws):
        calls = iter(range(10**6))
        counts[space.sample(rng, p, lambda arch: next(calls) >= refused and cost[arch] <= limit)] += 1  # noqa: B023
    expected = {arch: draws * w / sum(weight.values()) for arch, w in weight.items()}
    chi_square = sum((counts[arch] - e) ** 2 / e for arch, e in expected.items())
    free = len(expected) - 1
    assert chi_square < free + 4 * (2 * free) ** 0.5


@dataclasses.dataclass(frozen=True)
class Line(Space):
    """One dimension of four options; nothing is ever built."""

    name = "line"

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return (Dimension("n", (1, 2, 3, 4)),)

    def build(self, arch: Arch) -> nn.Module:
        raise NotImplementedError


def test_options_that_are_refused_leave_the_others_their_weights():
    """Almost all draws are refused, so sweeps decide, and in them the choice among the options that fit."""
    space, rng, draws = Line(SIZES[0], CLASSES), rng_of("line"), 400
    p = [np.array([2.0, 1e7, 5.0, 3.0])]
    found = [space.sample(rng, p, lambda arch: arch != (1,))[0] for _ in range(draws)]
    counts = np.bincount(found, minlength=4)
    expected = draws * np.array([0.2, 0.0, 0.5, 0.3])
    assert counts[1] == 0
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(draws * 0.25))
    even = [space.sample(rng, [np.zeros(4)])[0] for _ in range(draws)]  # no weight at all is the same for each
    assert np.all(np.abs(np.bincount(even, minlength=4) - draws / 4) < 5 * np.sqrt(draws * 0.25))
