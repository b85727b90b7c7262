"""What several fixed networks share. Registers nothing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..errors import UserError, unknown
from ..spaces.layers import Dropout, Norm, Stem, small_strides


def small_stem(stem: Stem, shape: tuple[int, int, int]) -> bool:
    """Whether the stem is the one for small images, which keeps more of their few pixels."""
    return small_strides(stem, shape[1:])


def check_stem(net: str, stem: Stem, norm: Norm) -> None:
    """Raises unless the two options that most nets have are right."""
    one_of(net, "stem", stem, ("auto", "small", "large"))
    one_of(net, "norm", norm, ("batch", "group"))


def one_of(net: str, option: str, value: str, known: Iterable[str]) -> None:
    """Raises unless an option has one of its known values."""
    if value not in known:
        raise unknown(f"{option} of net '{net}'", value, known)


def at_least(net: str, least: float, **options: float) -> None:
    """Raises unless all these options are at least `least`."""
    for name, value in options.items():
        if value < least:
            raise UserError(f"net '{net}': {name} = {value} is too small, it must be at least {least}.")


def rate(net: str, **options: float) -> None:
    """Raises unless all these options are probabilities below one."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise UserError(f"net '{net}': {name} = {value} is not in [0, 1).")


def he_init(net: nn.Module) -> nn.Module:
    """He et al. 2015 for convolutions (by their outputs, as all the convolutional nets here were trained) and a small
    last layer (standard deviation 0.01), so that the first predictions are near uniform."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net


class DropPath(Dropout):
    """Stochastic depth (Huang et al. 2016): drops a residual branch for whole images. Counter-based like `Dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * super().forward(x.new_ones(x.shape[0], *(1,) * (x.dim() - 1)))
