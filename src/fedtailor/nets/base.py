"""A fixed network as the space with one point."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..errors import UserError
from ..options import table_of
from ..spaces.base import Arch, Dimension, Space


@dataclass(frozen=True)
class FixedNet(Space):
    """A network without choices. Its only arch is the empty tuple."""

    fixed: ClassVar[bool] = True

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return ()

    def build(self, arch: Arch) -> nn.Module:
        self.check(arch)
        net = self.module()
        if not isinstance(getattr(net, "head", None), nn.Linear):
            raise UserError(f"net '{self.name}': its last layer must be a linear layer with the attribute name 'head'.")
        return net

    @abstractmethod
    def module(self) -> nn.Module:
        """The network; its last layer is the linear layer `head`."""


@dataclass(frozen=True)
class OwnNet(FixedNet):
    """A user's own module, made by a callable that takes `input` (channels, height, width) and `classes`."""

    make: Callable[..., nn.Module] | None = None

    def module(self) -> nn.Module:
        assert self.make is not None
        return self.make(input=self.input, classes=self.classes)


def table_for(space: Space) -> dict[str, Any]:
    """The [net] table that makes a fixed network again."""
    options = {} if isinstance(space, OwnNet) else table_of(space, hidden=("input", "classes"))
    return {"name": space.name, **options}


def net_of(table: Mapping[str, Any], input: tuple[int, int, int], classes: int) -> Space:
    """The fixed network of a [net] table."""
    from ..config import Config

    return Config(net=dict(table)).make_space(input, classes)


def features(net: nn.Module) -> nn.Module:
    """The network without its head, on the same tensors: what the last layer reads."""
    view = copy.copy(net)
    view._modules = net._modules | {"head": nn.Identity()}
    return view
