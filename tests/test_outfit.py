"""How images lie inside networks: channels last where layers can read that, and the same numbers either way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtailor.engine import local
from fedtailor.engine.outfit import fit_out
from fedtailor.nets.base import OwnNet
from fedtailor.registry import lookup, names
from fedtailor.spaces.base import Space

INPUT = (3, 8, 8)


class Flattening(nn.Module):
    """Wide, so that a GPU would lay it last too, and flattened by `view`, which needs images as they usually lie."""

    def __init__(self, input: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(input[0], 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        self.head = nn.Linear(64 * input[1] * input[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.view(len(x), -1))


def is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def images_inside(net: nn.Module) -> list[Tensor]:
    """What the convolutions of a network put out."""
    seen: list[Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _, __, out: seen.append(out)) for m in net.modules() if isinstance(m, nn.Conv2d)
    ]
    net(torch.randn(4, *INPUT))
    for hook in hooks:
        hook.remove()
    return [x for x in seen if x.shape[2] > 1]


def made(space: Space, weights: dict[str, Tensor]) -> nn.Module:
    net = local.LocalEngine(torch.device("cpu"), 1)._make(space, ())
    net.load_state_dict(weights, strict=False)
    return net


def gradient(net: nn.Module) -> Tensor:
    torch.manual_seed(0)
    images = torch.randn(4, *INPUT, dtype=next(net.parameters()).dtype)
    F.cross_entropy(net(images), torch.arange(4)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["cnn", "mobilenetv3_large", "resnet18", "densenet", "darts-cell"])
def test_on_a_processor_channels_lie_last_and_the_gradient_is_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = lookup("net", name)
    space = net(INPUT, 4, **({"dropout": 0.0} if hasattr(net, "dropout") else {}))
    weights = space.new_weights(0)
    last = made(space, weights)
    assert sum(map(is_last, images_inside(last))) > 0
    assert last.training
    monkeypatch.setattr(local, "lay_last", lambda net, input: None)
    usual = made(space, weights)
    assert not any(map(is_last, images_inside(usual)))
    for net in (last, usual):
        net.load_state_dict(weights, strict=False)  # statistics as they were
    ours, theirs = gradient(last.double()), gradient(usual.double())
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_a_network_that_flattens_by_view_keeps_images_as_they_usually_lie() -> None:
    space = OwnNet(INPUT, 4, make=Flattening)
    net = made(space, space.new_weights(0))
    assert net.training
    assert not any(map(is_last, images_inside(net)))
    assert gradient(net).isfinite().all()


def test_so_does_it_where_a_gpu_would_have_channels_last() -> None:
    net = Flattening(INPUT, 4)
    fit_out(net, INPUT, "tf32")
    assert not any(map(is_last, images_inside(net)))
    assert all(p.is_contiguous() for p in net.parameters())


@pytest.mark.parametrize("name", names("net"))
def test_no_shipped_network_refuses(name: str) -> None:
    net = local.LocalEngine(torch.device("cpu"), 1)._make(lookup("net", name)(INPUT, 4), ())
    wide = [m for m in net.modules() if isinstance(m, nn.Conv2d) and min(m.weight.shape[1:]) > 1]
    assert all(is_last(m.weight) for m in wide)
