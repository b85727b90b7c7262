"""What is special to the `vit` space; tests/test_spaces.py has what holds for every space."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from fedtailor.errors import UserError
from fedtailor.spaces.pasting import paste
from fedtailor.spaces.vit import ViT
from fedtailor.spaces.vit_blocks import MapAttention, MapTransformer, relative_bias

NASVIT = (192, 224, 256, 288)


def small(**options) -> ViT:
    return ViT((1, 8, 8), 4, **options)


def test_relative_bias_is_the_table_at_key_minus_query():
    height, width = 3, 4
    table = torch.randn(2, 2 * height - 1, 2 * width - 1)
    bias = relative_bias(table)
    for query in range(height * width):
        for key in range(height * width):
            dy, dx = key // width - query // width, key % width - query % width
            assert torch.equal(bias[:, query, key], table[:, height - 1 + dy, width - 1 + dx])


def test_relative_bias_of_one_token_is_the_centre():
    table = torch.randn(3, 1, 1)
    assert torch.equal(relative_bias(table), table)


def test_fewer_heads_are_the_network_whose_other_heads_say_nothing():
    """Head-major projections: cutting leading rows equals silencing the other heads' columns of the output."""
    torch.manual_seed(0)
    whole, part = MapAttention(24, 4, 8, 16, (3, 3)), MapAttention(24, 3, 8, 16, (3, 3))
    torch.nn.init.normal_(whole.bias)
    weights = dict(whole.named_parameters())
    cut = {n: weights[n].detach()[tuple(slice(0, s) for s in p.shape)] for n, p in part.named_parameters()}
    part.load_state_dict(cut)
    with torch.no_grad():
        whole.out.weight[:, 3 * 16 :] = 0
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(part(x), whole(x))


def test_a_smaller_map_takes_the_offsets_that_exist_on_it():
    space = small(resolutions=(8, 16))
    smaller = (0, *space.largest[1:])
    name = "body.stage3.1.attention.bias"
    full = space.full_shapes[name]
    part = space.index(smaller)[name]
    weights = space.new_weights(0)
    weights[name] = torch.arange(float(np.prod(full))).reshape(full)
    side = full[-1] // 2 + 1
    half = side // 2
    assert space.cut(weights, smaller)[name].shape[-1] == 2 * half - 1
    assert part[2:] == (slice(side - half, side + half - 1),) * 2
    big, little = relative_bias(weights[name][:, 0]), relative_bias(space.cut(weights, smaller)[name][:, 0])
    corner = torch.cat([torch.arange(half) + row * side for row in range(half)])
    assert torch.equal(big[:, corner][:, :, corner], little)


def test_every_weight_of_the_largest_network_gets_a_gradient():
    space = small()
    net = space.build(space.largest)
    net(torch.randn(4, 1, 8, 8)).square().mean().backward()
    assert not [n for n, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@pytest.mark.parametrize(
    ("shape", "options"),
    [((1, 8, 8), {}), ((3, 32, 32), {"norm": "group"}), ((3, 20, 12), {"resolutions": (16, 24, 32)})],
)
def test_blocks_add_up_to_the_network(shape, options):
    space = ViT(shape, 5, **options)
    rng = np.random.default_rng(0)
    for arch in (space.smallest, space.largest, space.sample(rng)):
        assert space.cost(arch) == space._whole(arch).cost
        assert sum(p.cost.flops for p in space.pieces(arch).values()) == space.cost(arch).flops
        net = space.build(arch).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            out = net(torch.randn(1, *shape))
        assert out.shape == (1, 5)
        assert counter.get_total_flops() == space.cost(arch).flops
        assert sum(p.numel() for p in net.parameters()) == space.cost(arch).parameters


def test_depth_is_the_first_blocks():
    space = small()
    depth = [d.name for d in space.dimensions].index("stage3.depth")
    shallow = list(space.largest)
    shallow[depth] = 0
    names = set(space.index(tuple(shallow)))
    assert "body.stage3.1.attention.q.weight" in names
    assert not any(n.startswith("body.stage3.2.") for n in names)


def test_pasting_what_was_cut_changes_nothing():
    space = small(resolutions=(8, 12))
    weights = space.new_weights(0)
    rng = np.random.default_rng(1)
    archs = [space.sample(rng) for _ in range(3)]
    merged = paste(space, weights, [(space.cut(weights, a), a, 1.0 + i) for i, a in enumerate(archs)])
    assert all(torch.equal(merged[n], weights[n]) for n in weights)


def test_new_weights_do_not_depend_on_what_was_counted_before():
    first, second = small(norm="group"), small(norm="group")
    weights = first.new_weights(7)
    second.cost(second.largest)
    second.cost(second.smallest)
    again = second.new_weights(7)
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[n], again[n]) for n in weights)


def test_large_is_the_table_of_nasvit():
    space = ViT((3, 224, 224), 1000, resolutions=NASVIT)
    assert space.size == 4 * 2 * 2**2 * 2 * (2 * 3 * 2 * 3) * (2 * 4 * 3) ** 2 * (3 * 7 * 3) * (4 * 6) * (3 * 4) * 2
    assert f"{space.size:.1e}" == "4.8e+10"
    assert space.strides == (2, 1, 2, 2, 2, 2, 1, 2)
    shapes = {name: piece.outputs[0] for name, piece in space.pieces(space.largest).items()}
    assert shapes["body.stage4.0"] == (72, 18, 18)  # NASViT's table of position biases is 18 x 18
    assert shapes["body.last"] == (1984, 1, 1)
    assert space.full_shapes["body.stage4.1.attention.bias"] == (9, 1, 35, 35)  # heads of 8 channels
    assert space.full_shapes["body.stage4.1.attention.v.weight"] == (4 * 72, 72)  # values four times as wide
    assert 150e6 < space.cost(space.smallest).flops / 2 < 200e6
    assert space.cost(space.largest).parameters < 20e6


def test_small_sizes():
    space = ViT((3, 32, 32), 10)
    assert 2e5 < space.cost(space.smallest).parameters < 4e5
    assert 1.5e6 < space.cost(space.largest).parameters < 4e6
    assert space.pieces(space.largest)["body.stage4.1"].outputs[0][1:] == (4, 4)


@pytest.mark.parametrize(
    ("side", "options", "strides"),
    [
        (8, {}, (1, 1, 2, 1, 1)),
        (16, {}, (1, 1, 2, 2, 1)),
        (28, {}, (1, 1, 2, 2, 2)),
        (64, {}, (2, 1, 2, 2, 2)),
        (224, {"scale": "small"}, (2, 1, 2, 2, 2)),
        (32, {"resolutions": (8, 64)}, (1, 1, 2, 1, 1)),
        (96, {}, (2, 1, 2, 2, 2, 2, 1, 2)),
        (32, {"scale": "large"}, (2, 1, 2, 2, 2, 1, 1, 1)),
    ],
)
def test_strides_keep_a_map(side, options, strides):
    assert ViT((3, side, side), 10, **options).strides == strides


def test_costs_are_fast_once_blocks_are_known():
    space = ViT((3, 224, 224), 10, scale="large")
    rng = np.random.default_rng(0)
    archs = [space.sample(rng) for _ in range(500)]
    for arch in archs:
        space.cost(arch)
    fastest = min(_seconds(lambda: [space.cost(arch) for arch in archs]) for _ in range(5))
    assert len(archs) / fastest > 5000


def _seconds(job) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def test_group_norm_twin_has_no_statistics():
    space = small(norm="group")
    assert space.cost(space.largest).buffers == 0
    assert not any("running" in n for n in space.full_shapes)
    net = space.build(space.largest)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))  # no image sees another


def test_a_single_resolution_is_no_choice_but_resizes():
    space = small(resolutions=(12,))
    assert space.dimensions == small().dimensions
    assert space.pieces(space.smallest)["body.stem"].outputs[0][1:] == (12, 12)


def test_json_and_words():
    space = small(resolutions=(16, 8, 8))
    assert space.resolutions == (8, 16)
    assert space.dimensions[0].name == "resolution"
    assert space.from_json(space.to_json(space.largest)) == space.largest
    assert space.describe(space.smallest).startswith("8 px, stem 16, stage1 16x1 k3 e1, stage2 32x2 k3 e3, stage3 64x2")


def test_wrong_options_say_what_is_allowed():
    with pytest.raises(UserError, match="auto, large, small"):
        small(scale="medium")
    with pytest.raises(UserError, match="at least 8"):
        small(resolutions=(4, 8))
    with pytest.raises(UserError, match="batch, group"):
        small(norm="layer")


@pytest.mark.filterwarnings("error")
def test_transformer_blocks_train_under_vmap():
    """Many clients' blocks at once give each client its own gradient, without falling back to a loop."""
    torch.manual_seed(0)
    block = MapTransformer(16, 2, 8, 16, 32, (2, 3), "swish")
    one = {n: p.detach() for n, p in block.named_parameters()}
    clients = {n: torch.stack([p, p + 0.1 * torch.randn_like(p)]) for n, p in one.items()}
    x = torch.randn(2, 4, 16, 2, 3)

    def loss(weights, images):
        return functional_call(block, weights, images).square().mean()

    together = vmap(grad(loss))(clients, x)
    for i in range(2):
        alone = grad(loss)({n: p[i] for n, p in clients.items()}, x[i])
        for n, g in alone.items():
            torch.testing.assert_close(together[n][i], g, rtol=1e-4, atol=1e-6)
