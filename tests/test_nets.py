"""The fixed networks: exact parameter counts, costs, small and large images, twins, options."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedtailor.errors import UserError
from fedtailor.nets.base import FixedNet, OwnNet
from fedtailor.nets.blocks import DropPath
from fedtailor.registry import lookup, names
from fedtailor.spaces.layers import Dropout, seed_dropout
from fedtailor.spaces.pasting import paste

CIFAR, IMAGENET, DIGITS = (3, 32, 32), (3, 224, 224), (1, 8, 8)
NETS = ("cnn", "densenet", "levit", "mobilenetv2", "mobilenetv3_large", "resnet18", "vit")
STEMS = ("densenet", "levit", "mobilenetv2", "mobilenetv3_large", "resnet18")
VIT_S = {"patch": 16, "dim": 384, "depth": 12, "heads": 6, "mlp": 1536, "qkv_bias": True}


@functools.cache  # a net remembers its cost
def net(name: str, shape: tuple[int, int, int] = CIFAR, classes: int = 10, **options) -> FixedNet:
    return lookup("net", name)(shape, classes, **options)


def test_every_net_has_its_name():
    assert set(NETS) <= set(names("net"))


@pytest.mark.parametrize(
    ("name", "options", "parameters", "macs"),
    [
        ("resnet18", {}, 11_689_512, 1814),
        ("mobilenetv2", {}, 3_504_872, 301),
        ("mobilenetv3_large", {}, 5_483_032, 217),
        ("densenet", {}, 7_978_856, 2834),
        ("densenet", {"depth": "201"}, 20_013_928, 4291),
        ("vit", VIT_S, 22_050_664, 4599),
    ],
)
def test_sizes_on_imagenet_are_those_of_the_known_implementations(name, options, parameters, macs):
    """torchvision's and timm's published parameters; millions of multiply-adds tell the strides apart."""
    found = net(name, IMAGENET, 1000, **options)
    assert found.cost(()).parameters == parameters
    assert round(found.cost(()).flops / 2e6) == macs
    assert found.pieces(())[""].outputs == ((1000,),)


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("resnet18", 11_173_962, 555),
        ("mobilenetv2", 2_236_682, 88),
        ("mobilenetv3_large", 4_214_842, 20),
        ("densenet", 6_956_298, 888),
        ("levit", 8_419_850, 106),
        ("vit", 1_988_490, 154),
    ],
)
def test_sizes_on_cifar(name, parameters, macs):
    assert net(name).cost(()).parameters == parameters
    assert round(net(name).cost(()).flops / 2e6) == macs


@pytest.mark.parametrize(
    ("variant", "millions", "macs"),
    [("128S", 7.8, 305), ("128", 9.2, 406), ("192", 10.9, 658), ("256", 18.9, 1120), ("384", 39.1, 2353)],
)
def test_levit_has_the_sizes_of_its_paper(variant, millions, macs):
    """Graham et al. 2021, table 3. The paper counts a second head for distillation: norm and linear layer."""
    cost = net("levit", IMAGENET, 1000, variant=variant).cost(())
    features = {"256": 512, "384": 768}.get(variant, 384)
    assert abs((cost.parameters + 2 * features + 1000 * (features + 1)) / 1e6 - millions) < 0.051
    assert abs(cost.flops / 2e6 / macs - 1) < 0.01


def test_mobilenetv2_width_multiplies_channels():
    assert net("mobilenetv2", IMAGENET, 1000, width=0.5).cost(()).parameters == 1_968_680
    assert net("mobilenetv2", width=1.4).build(()).head.in_features == 1792
    assert net("mobilenetv2", width=0.25).build(()).head.in_features == 1280


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shape", [CIFAR, DIGITS], ids=["32", "8"])
def test_forward_backward_and_flops(name, shape):
    found = net(name, shape)
    module = found.build(())
    out = module(torch.randn(2, *shape))
    assert out.shape == (2, 10)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(torch.randn(1, *shape))
    cost = found.cost(())
    assert counter.get_total_flops() == cost.flops
    assert sum(p.numel() for p in module.parameters()) == cost.parameters
    assert isinstance(module.head, nn.Linear)
    assert list(module.state_dict())[-2:] == ["head.weight", "head.bias"]  # the last layer, by name and in order


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 16, 24), (3, 224, 192)], ids=["28", "16x24", "224x192"])
def test_other_sizes(name, shape):
    with torch.device("meta"):
        assert net(name, shape, 7).build(())(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", STEMS)
def test_the_small_stem_keeps_more_positions(name):
    assert net(name, stem="large").cost(()).flops < net(name).cost(()).flops / 2


@pytest.mark.parametrize("name", STEMS)
def test_group_norm_twins(name):
    batch, group = net(name, DIGITS), net(name, DIGITS, norm="group")
    assert group.cost(()).buffers == 0 < batch.cost(()).buffers
    assert group.cost(()).parameters == batch.cost(()).parameters
    assert group.cost(()).flops == batch.cost(()).flops
    module = group.build(())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    seed_dropout(module, 1)
    assert module(torch.randn(1, *DIGITS)).shape == (1, 10)  # one image is enough to train


@pytest.mark.parametrize("name", NETS)
def test_first_predictions_are_near_uniform(name):
    """Loss of a fresh network in training mode near that of guessing: nothing explodes, nothing is dead."""
    torch.manual_seed(0)
    module = net(name, DIGITS).build(())
    loss = nn.functional.cross_entropy(module(torch.randn(16, *DIGITS)), torch.arange(16) % 10)
    assert 1.8 < loss.item() < 3.2


def test_a_net_is_the_space_with_one_point():
    found = net("cnn", DIGITS)
    weights = found.new_weights(0)
    assert found.fixed
    assert found.size == 1
    assert list(found.archs()) == [()]
    mine = {n: t + 1 for n, t in found.cut(weights, ()).items()}
    merged = paste(found, weights, [(found.cut(weights, ()), (), 1.0), (mine, (), 3.0)])
    assert all(torch.allclose(merged[n], weights[n] + 0.75) for n in weights)


def test_attention_projections_of_vit_are_addressable_and_alike():
    shapes = net("vit").full_shapes
    wanted = {f"blocks.{i}.attention.{w}.weight" for i in range(6) for w in "qkv"}
    assert wanted <= shapes.keys()
    assert {shapes[n] for n in wanted} == {(512, 128)}
    assert not any(n.endswith(("q.bias", "k.bias", "v.bias")) for n in shapes)


def test_vit_patches_follow_the_image():
    assert net("vit").full_shapes["positions"] == (1, 65, 128)
    assert net("vit", IMAGENET).full_shapes["positions"] == (1, 197, 128)
    assert net("vit", pool="mean").full_shapes["positions"] == (1, 64, 128)


def test_dropout_follows_its_seed_only():
    module = net("mobilenetv3_large", DIGITS, norm="group").build(())
    x = torch.randn(2, *DIGITS)
    first, again, other = (_seeded(module, x, s) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(module.eval()(x), module(x))


def _seeded(module: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    seed_dropout(module, seed)
    with torch.no_grad():
        return module.train()(x)


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    layer = DropPath(0.25)
    seed_dropout(layer, 0)
    out = layer(torch.ones(4000, 3, 2, 2)).flatten(1)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out.amin(1), out.amax(1))
    assert abs(out.mean().item() - 1) < 0.05
    assert torch.equal(layer.eval()(out), out)


def test_levit_drop_path_is_the_variants_own_unless_set():
    def rates(**options) -> set[float]:
        with torch.device("meta"):
            return {m.p for m in net("levit", **options).build(()).modules() if isinstance(m, DropPath)}

    assert rates() == set()
    assert rates(variant="384") == {0.1}
    assert rates(variant="384", drop_path=0.0) == set()
    assert rates(variant="128S", drop_path=0.3) == {0.3}


def test_dropout_layers_are_the_counter_based_ones():
    for name in NETS:
        with torch.device("meta"):
            module = net(name).build(())
        assert not any(isinstance(m, nn.Dropout) for m in module.modules())
    assert sum(isinstance(m, Dropout) for m in net("vit").build(()).modules()) == 1 + 6 * 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"stem": "medium"}, "auto, large, small"),
        ("resnet18", {"norm": "layer"}, "batch, group"),
        ("densenet", {"depth": "169"}, "121, 201"),
        ("levit", {"variant": "128s"}, "128S"),
        ("levit", {"drop_path": 1.0}, r"drop_path = 1.0 is not in \[0, 1\)"),
        ("darts-cell", {"drop_path": 1.0}, r"drop_path = 1.0 is not in \[0, 1\)"),
        ("mobilenetv2", {"width": 0.0}, "width = 0.0"),
        ("mobilenetv2", {"dropout": -0.1}, "dropout = -0.1"),
        ("mobilenetv3_large", {"dropout": 1.5}, "dropout = 1.5"),
        ("vit", {"patch": 5}, "patches of 5 do not tile images of 32 x 32"),
        ("vit", {"patch": 0}, "patch = 0"),
        ("vit", {"heads": 0}, "heads = 0"),
        ("vit", {"pool": "max"}, "cls, mean"),
        ("cnn", {"width": 0}, "width = 0"),
        ("cnn", {"kernel": 0}, "kernel = 0"),
        ("cnn", {"hidden": -1}, "hidden = -1"),
        ("cnn", {"dropout": -1.0}, "dropout = -1.0"),
        ("modular", {"width": -1}, "width = -1"),
    ],
)
def test_wrong_options_say_what_is_allowed(name, options, message):
    with pytest.raises(UserError, match=message):
        net(name, **options)


OWN = """
from torch import nn


class Mine(nn.Module):
    def __init__(self, input, classes, last="head"):
        super().__init__()
        self.flat = nn.Flatten()
        setattr(self, last, nn.Linear(input[0] * input[1] * input[2], classes))

    def forward(self, x):
        return self.head(self.flat(x))


def headless(input, classes):
    return Mine(input, classes, last="tail")
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_net.py"
    path.write_text(OWN)
    return path


def test_own_module_by_path(own):
    found = OwnNet(DIGITS, 3, make=lookup("net", f"{own}:Mine"))
    assert found.cost(()).parameters == 64 * 3 + 3
    assert found.new_weights(1).keys() == {"head.weight", "head.bias"}
    assert found.build(())(torch.zeros(2, *DIGITS)).shape == (2, 3)


def test_own_module_without_a_head_is_told_the_rule(own):
    kind = type("Named", (OwnNet,), {"name": "own_net.py:headless"})
    with pytest.raises(UserError, match="linear layer with the attribute name 'head'"):
        kind(DIGITS, 3, make=lookup("net", f"{own}:headless")).build(())
