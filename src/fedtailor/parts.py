"""Which part of a network a tensor belongs to, for every net and space: one way to say body and head.

A part is a test on a tensor's name. Names are paths of layers, so a layer is a prefix that ends at a dot: `head` is
`head.weight` and `head.bias`, and never a layer that is called `overhead` or `head2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import UserError, nearest

if TYPE_CHECKING:
    from .spaces.base import Space

Part = Callable[[str], bool]
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
STATISTICS = ("running_mean", "running_var")


def layers(*names: str) -> Part:
    """The tensors of these layers."""
    return lambda name: any(name == layer or name.startswith(f"{layer}.") for layer in names)


head = layers("head")  # the last linear layer of every net and space


def body(name: str) -> bool:
    return not head(name)


def rest(part: Part) -> Part:
    """Everything that is not in the part."""
    return lambda name: not part(name)


def learnt(name: str) -> bool:
    """Whether a tensor is trained; the others are running means and variances."""
    return not name.endswith(STATISTICS)


@lru_cache(maxsize=16)
def norms(space: Space) -> Part:
    """The tensors of normalisation layers, their statistics too."""
    with torch.device("meta"):
        found = [name for name, layer in space.supernet().named_modules() if isinstance(layer, NORMS)]
    return layers(*found)


def choose(weights: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if part(n)}


def require_layers(space: Space, names: Sequence[str], what: str) -> None:
    """Raises `UserError` where one of the layers is not there, or all of them are nothing or everything."""
    for name in names:
        if not any(map(layers(name), space.full_shapes)):
            known = _known(space)
            raise UserError(
                f"{what}: '{space.name}' has no layer '{name}' with weights.{nearest(name, known)} "
                f"Its layers: {', '.join(known)}."
            )
    require_part(space, layers(*names), what)


def require_part(space: Space, part: Part, what: str) -> None:
    """Raises `UserError` where a part is nothing or everything, which would make a split method another one."""
    names = list(space.full_shapes)
    inside = [n for n in names if part(n)]
    if not inside or len(inside) == len(names):
        found = "nothing" if not inside else "everything"
        raise UserError(f"{what} is {found} of '{space.name}'. Its layers: {', '.join(_known(space))}.")


def _known(space: Space) -> list[str]:
    """The layers of a space that have weights."""
    return list(dict.fromkeys(n.rsplit(".", 1)[0] for n in space.full_shapes))
