"""The two MobileNet spaces against their papers' tables, and US-Net training against a plain reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtailor.errors import UserError
from fedtailor.seeds import rng_of
from fedtailor.spaces.layers import seed_dropout
from fedtailor.spaces.measure import count, tensors_of
from fedtailor.spaces.mobilenetv2 import MobileNetV2, uniform_counts
from fedtailor.spaces.mobilenetv3 import MobileNetV3
from fedtailor.spaces.tiny import Tiny
from fedtailor.spaces.usnet import distilled, forward_at, sandwich, usnet_losses

CIFAR = (3, 32, 32)


# MobileNetV3 ------------------------------------------------------------------------------------------------------


def test_v3_is_the_space_of_the_paper():
    space = MobileNetV3(CIFAR, 10)
    assert space.size == 8_957_952
    assert len(space.dimensions) == 19
    assert all(len(d.options) > 1 for d in space.dimensions)
    shapes = space.full_shapes
    assert shapes["body.stem.conv.weight"] == (16, 3, 3, 3)
    assert "body.mb1.0.expand.conv.weight" not in shapes  # expansion 1
    assert shapes["body.mb1.1.depthwise.conv.weight"] == (24, 1, 5, 5)
    assert "body.mb2.0.gate.reduce.weight" not in shapes
    assert shapes["body.mb5.3.expand.conv.weight"] == (800, 160, 1, 1)
    assert shapes["body.mb5.3.gate.reduce.weight"] == (200, 800)
    assert shapes["body.last.conv.conv.weight"] == (960, 160, 1, 1)
    assert shapes["head.weight"] == (10, 1280)


def test_v3_structure_does_not_depend_on_widths_being_equal():
    space = MobileNetV3(CIFAR, 10)
    names = {n.rsplit(".", 1)[0] for n in tensors_of(space.build(space.smallest))}
    for stage in range(1, 6):
        assert f"body.mb{stage}.0.side" in names
        assert f"body.mb{stage}.1.side" not in names


def test_v3_starts_as_its_shortcuts():
    space = MobileNetV3((3, 16, 16), 5)
    deep, shallow = (tuple(int(d.name.endswith("depth")) * n for d in space.dimensions) for n in (1, 0))
    weights, x = space.new_weights(0), torch.randn(2, 3, 16, 16)
    outputs = []
    for arch in (deep, shallow):
        net = space.build(arch).eval()
        net.load_state_dict(space.cut(weights, arch), strict=False)
        outputs.append(net(x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("options", "size", "last"),
    [({}, 32, 4), ({"stem": "large"}, 32, 1), ({}, 8, 1), ({}, 5, 1), ({}, 96, 3), ({"resolutions": (224,)}, 32, 7)],
)
def test_v3_strides(options: dict, size: int, last: int):
    space = MobileNetV3((3, size, size), 10, **options)
    pieces = space.pieces(space.smallest)
    assert pieces["body.mb5.0"].outputs == ((96, last, last),)
    assert space.cost(space.smallest) == count(lambda: space.build(space.smallest), [space.input]).cost


def test_v3_resolution_is_a_choice():
    space = MobileNetV3((3, 16, 24), 10, resolutions=(32, 8, 16, 8))
    assert space.dimensions[0].options == (8, 16, 32)
    assert space.sizes == ((8, 12), (16, 24), (32, 48))
    assert space.build(space.largest)(torch.randn(2, 3, 16, 24)).shape == (2, 10)
    small, large = (space.cost((r, *space.smallest[1:])) for r in (0, 2))
    assert small.parameters == large.parameters
    assert small.flops < large.flops / 4
    assert space.describe(space.smallest).startswith("8 px")
    with pytest.raises(UserError, match="resolutions"):
        MobileNetV3(CIFAR, 10, resolutions=(0, 32))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("kind", [MobileNetV2, MobileNetV3])
def test_all_costs_are_those_of_the_whole_network(kind: type, norm: str):
    space = kind((3, 17, 15), 7, norm=norm)
    rng = rng_of("whole")
    for arch in (space.smallest, space.largest, space.sample(rng)):
        whole = count(lambda arch=arch: space.build(arch), [space.input])
        assert space.cost(arch) == whole.cost
        found = {f"{prefix}.{n}": shape for prefix, piece in space.pieces(arch).items() for n, shape in piece.shapes}
        assert found == dict(whole.shapes)


# MobileNetV2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "millions", "mmacs", "mmacs_large"),
    [(1.0, 2.237, 88.0, 6.1), (0.75, 1.368, 59.3, 4.3), (0.5, 0.700, 28.0, 2.0), (0.35, 0.409, 15.6, 1.2)],
)
def test_v2_uniform_networks_are_mobilenetv2(width: float, millions: float, mmacs: float, mmacs_large: float):
    space = MobileNetV2(CIFAR, 10)
    cost = space.cost(space.uniform(width))
    assert round(cost.parameters / 1e6, 3) == millions
    assert round(cost.flops / 2e6, 1) == mmacs
    large = MobileNetV2(CIFAR, 10, stem="large")
    assert round(large.cost(large.uniform(width)).flops / 2e6, 1) == mmacs_large


def test_v2_at_imagenet_size():
    space = MobileNetV2((3, 224, 224), 1000)
    cost = space.cost(space.largest)
    assert cost.parameters == 3_504_872
    assert round(cost.flops / 2e6, 1) == 300.8


def test_v2_dimensions_are_the_free_widths():
    space = MobileNetV2(CIFAR, 10)
    assert len(space.dimensions) == 1 + 7 + 16  # stem, stages, expansions of all blocks but the first
    assert all(n % 8 == 0 for d in space.dimensions for n in d.options)
    assert space.uniform(1.0) == space.largest
    assert space.uniform(0.35) == space.smallest
    assert space.counts(space.uniform(0.5)) == uniform_counts(0.5)
    assert space.groups == tuple(d.name for d in space.dimensions)
    with pytest.raises(UserError, match="width"):
        space.uniform(0.3)
    with pytest.raises(UserError, match="min_width"):
        MobileNetV2(CIFAR, 10, min_width=0.1)


def test_v2_shrink():
    space = MobileNetV2(CIFAR, 10)
    arch = space.largest

    def shrunk(group: str, ratio: float) -> int:
        found = space.shrink(arch, group, ratio)
        assert found is not None
        (i,) = (i for i, (a, b) in enumerate(zip(arch, found, strict=True)) if a != b)
        assert space.dimensions[i].name == group
        return space.counts(found)[i]

    assert shrunk("stage7", 0.25) == 240
    assert shrunk("stage7", 0.1) == 288
    assert shrunk("stage6.expand1", 0.2) == 768
    assert shrunk("stage4", 0.19) == 48  # round(51.84) = 52 lies between 48 and 56: the lower
    assert shrunk("stem", 0.01) == 24  # at least one step
    assert shrunk("stem", 0.9) == 16  # never below the narrowest
    assert space.shrink(space.smallest, "stem", 0.1) is None
    with pytest.raises(UserError, match="stage7"):
        space.shrink(arch, "stage77", 0.1)
    with pytest.raises(UserError, match="between 0 and 1"):
        space.shrink(arch, "stem", 1.0)


def test_v2_greedy_pruning_ends_at_the_smallest():
    space = MobileNetV2(CIFAR, 10)
    arch, costs = space.largest, []
    while True:
        shrunk = [s for g in space.groups if (s := space.shrink(arch, g, 0.25)) is not None]
        if not shrunk:
            break
        arch = min(shrunk, key=lambda a: space.cost(a).flops)
        costs.append(space.cost(arch).flops)
    assert arch == space.smallest
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs)


# US-Net -----------------------------------------------------------------------------------------------------------


def test_the_sandwich_rule():
    space = MobileNetV2(CIFAR, 10)
    archs = sandwich(space, rng_of(0), 6)
    assert archs[:2] == (space.largest, space.smallest)
    assert len(archs) == 6
    widths = {space.uniform(0.35 + 0.0005 * i) for i in range(1301)}
    assert all(arch in widths for arch in archs)
    tiny = Tiny((1, 8, 8), 3)
    assert all(tiny.check(arch) for arch in sandwich(tiny, rng_of(0)))
    with pytest.raises(UserError, match="at least 2"):
        sandwich(space, rng_of(0), 1)


@pytest.mark.parametrize("kind", [Tiny, MobileNetV2])
def test_usnet_loss_and_gradient_are_those_of_the_plain_algorithm(kind: type):
    """One network after another, each with its own copy of its weights, gradients added up by hand."""
    space = kind((1, 8, 8), 3)
    weights = {n: t.double() for n, t in space.new_weights(0).items()}  # batch statistics of few images amplify errors
    rng, gen = rng_of("usnet"), torch.Generator().manual_seed(0)
    for name, t in weights.items():
        if name.endswith("norm.weight"):
            t.copy_(torch.rand(t.shape, generator=gen) + 0.5)
    x, y = torch.randn(6, 1, 8, 8, generator=gen).double(), torch.randint(3, (6,), generator=gen)
    archs = sandwich(space, rng)

    leaves = {n: t.clone().requires_grad_("running" not in n) for n, t in weights.items()}
    loss = 0.0
    for own in usnet_losses(space, leaves, archs, x, y):
        own.backward()
        loss += own.item()

    expected_loss, expected = 0.0, {n: torch.zeros_like(t) for n, t in weights.items()}
    targets = None
    for arch in archs:
        net = space.build(arch).double().train()
        for name, tensor in tensors_of(net).items():
            source = weights[name]
            for axis, n in enumerate(tensor.shape):
                source = source.narrow(axis, (source.shape[axis] - n) // 2 if axis >= 2 else 0, n)
            tensor.data.copy_(source)
        logits = net(x)
        log_p = logits - logits.exp().sum(1, keepdim=True).log()
        if targets is None:
            own = torch.stack([-log_p[i, label] for i, label in enumerate(y)]).mean()
            targets = log_p.exp().detach()
        else:
            own = -(targets * log_p).sum(1).mean()
        own.backward()
        expected_loss += own.item()
        for name, p in net.named_parameters():
            place = tuple(
                slice((w - n) // 2, (w - n) // 2 + n) if axis >= 2 else slice(n)
                for axis, (w, n) in enumerate(zip(weights[name].shape, p.shape, strict=True))
            )
            assert p.grad is not None
            expected[name][place] += p.grad
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert leaf.grad is not None
            assert torch.allclose(leaf.grad, expected[name], rtol=1e-7, atol=1e-9), name
        else:
            assert torch.equal(leaf, weights[name])  # statistics are left alone


def test_a_network_runs_after_the_last_one_s_gradient_was_taken():
    """Then what the last one kept for it is free."""
    order: list[str] = []

    def logits():
        for i in range(3):
            order.append(f"pass {i}")
            yield torch.zeros(2, 3, requires_grad=True)

    for i, loss in enumerate(distilled(logits(), torch.tensor([0, 1]))):
        loss.backward()
        order.append(f"gradient {i}")
    assert order == [f"{what} {i}" for i in range(3) for what in ("pass", "gradient")]


def test_the_largest_network_learns_from_labels_alone():
    space = Tiny((1, 8, 8), 3)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    leaves = {n: t.requires_grad_("running" not in n) for n, t in space.new_weights(0).items()}
    (loss,) = usnet_losses(space, leaves, [space.largest], x, y, label_smoothing=0.1)
    loss.backward()
    net = space.build(space.largest).train()
    net.load_state_dict(leaves, strict=False)
    F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
    assert all(torch.allclose(leaves[n].grad, p.grad, atol=1e-6) for n, p in net.named_parameters())  # type: ignore


def test_threads_do_not_disturb_each_other():
    space, x = Tiny((1, 8, 8), 3), torch.randn(4, 1, 8, 8)
    supernets = [space.new_weights(i) for i in range(40)]
    alone = [forward_at(space, w, space.largest, x) for w in supernets]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda w: forward_at(space, w, space.largest, x), supernets))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_dropout_of_a_step_follows_its_seed():
    space = MobileNetV2((1, 8, 8), 3, dropout=0.5)
    weights, x = space.new_weights(0), torch.randn(4, 1, 8, 8)
    first, again, other = (forward_at(space, weights, space.smallest, x, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    net: nn.Module = space.build(space.smallest).train()
    net.load_state_dict(space.cut(weights, space.smallest), strict=False)
    seed_dropout(net, 1)
    assert torch.equal(net(x), first)
