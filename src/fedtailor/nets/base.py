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
    """The [net] or [space] table that makes a fixed network or a space again."""
    options = {} if isinstance(space, OwnNet) else table_of(space, hidden=("input", "classes"))
    return {"name": space.called or space.name, **options}


def net_of(table: Mapping[str, Any], input: tuple[int, int, int], classes: int) -> Space:
    """The fixed network of a [net] table."""
    from ..config import Config

    return Config(net=dict(table)).make_space(input, classes)


def recipe(space: Space, arch: Arch) -> dict[str, Any]:
    """A network as a table that a config can hold: a [net], or a [space] with an arch."""
    return {"net": table_for(space)} if space.fixed else {"space": table_for(space), "arch": list(arch)}


def cook(made_of: Mapping[str, Any], input: tuple[int, int, int], classes: int) -> nn.Module:
    """The network of a recipe, with fresh weights."""
    from ..config import Config

    if "net" in made_of:
        return net_of(made_of["net"], input, classes).build(())
    return Config(space=made_of["space"]).make_space(input, classes).build(tuple(made_of["arch"]))


def features(net: nn.Module) -> nn.Module:
    """The network without its head, on the same tensors: what the last layer reads."""
    view = copy.copy(net)
    view._modules = net._modules | {"head": nn.Identity()}
    return view
