"""Averaging sub-networks back into the supernet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import UserError
from .base import Arch, Index, Space, Weights, shape_at, tensor_at

_add, _add_, _sub, _div_ = torch._foreach_add, torch._foreach_add_, torch._foreach_sub, torch._foreach_div_  # type: ignore


class Part(NamedTuple):
    """What one client owns of the supernet."""

    weights: Weights
    arch: Arch
    mass: float
    places: dict[str, Index]  # of the tensors that count


@torch.no_grad()
def paste(
    space: Space, weights: Weights, parts: Sequence[tuple[Weights, Arch, float]], keys: Sequence[str] | None = None
) -> Weights:
    """Averages parts into the supernet, entry by entry, over the parts that own the entry.

    `parts` are (weights, arch, mass) with the mass usually the client's number of samples. An entry that nobody owns
    keeps its value bit for bit, and parts that return what they received change nothing: the average is taken over
    differences, new = old + sum(mass * (part - old)) / sum(mass). A part may leave out tensors (`keys` limits them
    too), and then does not own them.
    """
    owned = [_checked(space, weights, *part, keys) for part in parts]
    touched = {name: weights[name] for part in owned for name in part.places}
    if not touched:
        return dict(weights)
    if (found := _average(space, touched, owned)) is not None:
        return weights | found
    # -0.0 leaves every number as it is when it is added, where +0.0 would turn -0.0 into itself; tiny is a divisor for
    # entries that nobody owns and is lost when a mass is added to it
    change = _filled(touched, -0.0)
    masses = _filled(touched, torch.finfo(next(iter(touched.values())).dtype).tiny)
    for part in owned:
        _add_part(space, touched, part, change, masses)
    _div_(list(change.values()), list(masses.values()))
    return weights | dict(zip(touched, _add(list(touched.values()), list(change.values())), strict=True))


def _checked(
    space: Space, weights: Weights, part: Weights, arch: Arch, mass: float, keys: Sequence[str] | None
) -> Part:
    index, wanted = space.index(arch), None if keys is None else set(keys)
    for name, tensor in part.items():
        if name not in index:
            raise UserError(f"a part of '{space.name}' with arch {arch} has no tensor '{name}'.")
        shape = shape_at(weights[name].shape, index[name])
        if tensor.shape != shape:
            raise UserError(f"a part of '{space.name}': '{name}' has shape {tuple(tensor.shape)}, not {shape}.")
    return Part(part, arch, float(mass), {n: index[n] for n in part if wanted is None or n in wanted})


def _average(space: Space, touched: Weights, owned: Sequence[Part]) -> Weights | None:
    """The average of parts that own all that is touched, where a GPU has a kernel for it."""
    first, names = owned[0], tuple(touched)
    if not touched[names[0]].is_cuda or any(part.places.keys() != touched.keys() for part in owned):
        return None
    if any(at for part in owned for at in part.places.values()):
        return None
    tensors = [[part.weights[n] for n in names] for part in owned]
    found = space.layout(first.arch, names).average(tensors, list(touched.values()), [part.mass for part in owned])
    return None if found is None else dict(zip(names, found, strict=True))


def _add_part(space: Space, touched: Weights, part: Part, change: Weights, masses: Weights) -> None:
    """Adds mass * (part - touched) to `change` and the mass to `masses`."""
    own, names = part.weights, tuple(part.places)
    if not names:
        return
    if touched[names[0]].is_cuda:
        tensors = tuple([some[n] for n in names] for some in (own, touched, change, masses))
        if space.layout(part.arch, names).add(tensors, part.mass):
            return
    views = {name: tensor_at(touched[name], at) for name, at in part.places.items()}
    for dense in (True, False):  # on a GPU, what lies in one piece of memory takes one kernel for all tensors
        some = [(name, at) for name, at in part.places.items() if views[name].is_contiguous() == dense]
        if some:
            # old - part times -mass, not part - old times mass: where they are equal this is -0.0 again
            moved = _sub([views[name] for name, _ in some], [own[name] for name, _ in some])
            _add_([tensor_at(change[name], at) for name, at in some], moved, alpha=-part.mass)
            _add_([tensor_at(masses[name], at) for name, at in some], part.mass)


def _filled(like: Weights, value: float) -> Weights:
    """Tensors of these shapes full of one value, made in one go where they are all of a kind."""
    first = next(iter(like.values()))
    if any(t.dtype != first.dtype or t.device != first.device for t in like.values()):
        return {name: torch.full_like(t, value) for name, t in like.items()}
    sizes = [t.numel() for t in like.values()]
    flat = torch.full((sum(sizes),), value, dtype=first.dtype, device=first.device).split(sizes)
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), flat, strict=True)}
