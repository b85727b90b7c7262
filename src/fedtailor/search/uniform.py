"""Networks that are equally narrow everywhere: what a budget buys when nobody looks at the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..errors import UserError
from ..spaces.base import Arch, Space
from ..spaces.mobilenetv2 import MobileNetV2

STEPS = 20  # widths are multiples of 1/20, so the x.75 and x.5 of Luo et al. are among them


def ordered(space: type[Space]) -> bool:
    """Whether archs of a space can be narrowed."""
    return space.ordered()


def uniform(space: Space, width: float) -> Arch:
    """The arch of a width multiplier, or in a space without one the arch at this share of every dimension's range.

    Where dimensions have few options they would all change at the same widths; so each rounds at a place of its own,
    the first dimensions giving way first.
    """
    if isinstance(space, MobileNetV2):
        return space.uniform(width)
    steps, n = [len(d.options) - 1 for d in space.dimensions], len(space.dimensions)
    return tuple(min(top, int(width * top + (d + 0.5) / n)) for d, top in enumerate(steps))


@lru_cache(maxsize=16)
def ladder(space: Space) -> tuple[Arch, ...]:
    """The uniform archs from the largest to the smallest."""
    least = space.min_width if isinstance(space, MobileNetV2) else 0.0
    widths = [i / STEPS for i in range(STEPS, 0, -1) if i / STEPS > least]
    return tuple(dict.fromkeys(uniform(space, w) for w in (*widths, least)))


def widest(space: Space, fits: Callable[[Arch], bool]) -> Arch:
    """The largest uniform arch that fits."""
    for arch in ladder(space):
        if fits(arch):
            return arch
    raise UserError(f"no arch of '{space.name}' fits: the smallest, {space.smallest}, does not.")
