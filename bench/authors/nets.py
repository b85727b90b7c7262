"""The networks of the authors' own experiments, where the package has none like them."""

from __future__ import annotations

from torch import Tensor, nn


class _Net(nn.Module):
    def __init__(self, body: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _lenet(input: tuple[int, int, int], channels: tuple[int, int], units: tuple[int, int], classes: int) -> nn.Module:
    """Two convolutions of 5 x 5 with pooling, two layers, no normalisation."""
    _, height, width = input
    size = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    body = nn.Sequential(
        nn.Conv2d(input[0], channels[0], 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels[0], channels[1], 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels[1] * size, units[0]),
        nn.ReLU(),
        nn.Linear(units[0], units[1]),
        nn.ReLU(),
    )
    return _Net(body, units[1], classes)


def fedrep(input: tuple[int, int, int], classes: int) -> nn.Module:
    """FedRep's network for CIFAR-10: two convolutions of 64 channels, layers of 120 and 64 units."""
    return _lenet(input, (64, 64), (120, 64), classes)


def pfedhn(input: tuple[int, int, int], classes: int) -> nn.Module:
    """pFedHN's network for CIFAR-10: convolutions of 16 and 32 channels, layers of 120 and 84 units."""
    return _lenet(input, (16, 32), (120, 84), classes)


def four_conv(input: tuple[int, int, int], classes: int) -> nn.Module:
    """FedBABU's small network: four blocks of convolution, batch normalisation and pooling with 64 channels each."""
    channels, height, width = input
    blocks: list[nn.Module] = []
    for cin in (channels, 64, 64, 64):
        blocks += [nn.Conv2d(cin, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return _Net(nn.Sequential(*blocks, nn.Flatten()), 64 * (height // 16) * (width // 16), classes)


def two_layers(input: tuple[int, int, int], classes: int) -> nn.Module:
    """Per-FedAvg's network: hidden layers of 80 and 60 units with ELU."""
    channels, height, width = input
    body = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 80), nn.ELU(), nn.Linear(80, 60), nn.ELU())
    return _Net(body, 60, classes)
