"""Training a supernet one random path at a time (FedorAS): what clients send of it, and how the server averages it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..engine.client import Client
from ..engine.jobs import Measured
from ..errors import UserError
from ..method import Reply, Seat, Server, Task
from ..spaces.base import Arch, Space, Weights

Options = tuple[tuple[int, ...], ...]  # by dimension, the options that may be drawn
Path = tuple[Arch, float]  # an arch and the number of examples that were trained on it


@torch.no_grad()
def op_aware(space: Space, weights: Weights, parts: Sequence[tuple[Weights, Sequence[Path]]]) -> Weights:
    """OPA: every entry is averaged with the examples that it saw on each client as masses.

    Entries of an operation that no path of a client ran count nothing there, and what nobody ran keeps every bit.
    Layers that are in all paths weigh by all examples.
    """
    change: Weights = {}
    mass: Weights = {}
    for part, paths in parts:
        seen: Weights = {}
        for arch, examples in paths:
            for name, at in space.index(arch).items():
                if name in part:
                    if name not in seen:
                        seen[name] = torch.zeros_like(weights[name])
                    seen[name][at] += examples
        for name, m in seen.items():
            step = m * (part[name] - weights[name])
            change[name] = change[name] + step if name in change else step
            mass[name] = mass[name] + m if name in mass else m
    tiny = torch.finfo(torch.float32).tiny
    merged = {
        n: torch.where(mass[n] > 0, weights[n] + c / mass[n].clamp_min(tiny), weights[n]) for n, c in change.items()
    }
    return weights | merged


def merge_paths(server: Server, replies: Sequence[Reply]) -> Weights:
    """The supernet after a round of paths."""
    space, seats = server.space, server.job.seats
    parts = [(r.weights, unpack_paths(space, r.extra, seats[r.client])) for r in replies]
    return op_aware(space, server.weights, parts)


@torch.no_grad()
def average(old: Weights, parts: Sequence[tuple[Weights, float]]) -> Weights:
    """FedAvg of networks of one shape, from (weights, samples); what nobody sent stays."""
    total = sum(mass for _, mass in parts)
    names = parts[0][0] if parts else ()
    return old | {n: old[n] + sum(mass / total * (part[n] - old[n]) for part, mass in parts) for n in names}


async def score_paths(weights: Weights, client: Client, archs: Sequence[Arch]) -> list[float]:
    """Accuracies on val of single paths, with the supernet's weights as they are."""
    nets = (client.build(Task(client.space.cut(weights, arch), arch)) for arch in archs)
    return [await client.score(net) for net in nets]


async def train_paths(
    weights: Weights, client: Client, draw: Callable[[int], Arch], draw_every: int, lr: float
) -> tuple[Weights, list[Path], Measured]:
    """Trains single paths one after another, each put back before the next is cut.

    Returns the tensors that were in some path, the paths, and the mean loss. `draw(i)` is the path from batch i on.
    """
    space, steps, total = client.space, client.steps(), 0.0
    weights = {n: t.clone() for n, t in weights.items()}
    paths: list[Path] = []
    for first in range(0, steps, draw_every):
        length, arch = min(draw_every, steps - first), draw(first)
        net = client.build(Task(space.cut(weights, arch), arch))
        total += length * await client.fit(net, steps=length, lr=lr)
        index = space.index(arch)
        for name, tensor in client.take(net).items():
            weights[name][index[name]] = tensor
        paths.append((arch, float(length * min(client.local.batch, client.samples))))
    ran = {name for arch, _ in paths for name in space.index(arch)}
    return {n: t for n, t in weights.items() if n in ran}, paths, total / steps


def pack_paths(paths: Sequence[Path]) -> dict[str, Tensor]:
    archs, examples = zip(*paths, strict=True)
    return {"paths": torch.tensor(archs), "examples": torch.tensor(examples)}


def unpack_paths(space: Space, extra: dict[str, Tensor], client: Seat) -> list[Path]:
    """A client's paths, no more of them than it took steps. Their examples are masses of a mean: none is below one."""
    archs, examples = extra["paths"], extra["examples"]
    steps = client.images // min(client.batch, client.samples)
    if archs.shape != (len(examples), len(space.dimensions)) or examples.ndim != 1 or len(examples) > steps:
        raise ValueError(f"{tuple(archs.shape)} paths and {tuple(examples.shape)} examples of {steps} steps")
    if not bool((examples >= 1).all()) or float(examples.double().sum()) > client.images:
        raise ValueError(f"its paths saw other numbers of examples than {client.images} images allow")
    return [(space.check(arch), seen) for arch, seen in zip(archs.tolist(), examples.tolist(), strict=True)]


def pack_options(space: Space, options: Options) -> Tensor:
    """1 or 0 for every option of every dimension, side by side."""
    rows = ((i in o for i in range(len(d.options))) for d, o in zip(space.dimensions, options, strict=True))
    return torch.tensor([x for row in rows for x in row])


def unpack_options(space: Space, mask: Tensor) -> Options:
    rows = mask.split([len(d.options) for d in space.dimensions])
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in rows)


def every_option(space: Space) -> Options:
    return tuple(tuple(range(len(d.options))) for d in space.dimensions)


def some_options(space: Space, limit: int, rng: np.random.Generator) -> Options:
    """Options left when random ones are taken out until the tensors of what remains have at most `limit` entries.

    The first option of a dimension, the smallest, always stays.
    """
    options = [list(o) for o in every_option(space)]
    while entries(space, tensors_for(space, options)) > limit and any(len(o) > 1 for o in options):
        d = int(rng.choice([d for d, o in enumerate(options) if len(o) > 1]))
        options[d].pop(int(rng.integers(1, len(options[d]))))
    return tuple(map(tuple, options))


def sent_part(
    space: Space, weights: Weights, limit: int, rng: np.random.Generator
) -> tuple[Weights, dict[str, Tensor]]:
    """What clients are sent of the supernet: all of it or a random part below the limit; and its options, packed."""
    if not limit:
        return weights, {"options": pack_options(space, every_option(space))}
    options = some_options(space, limit, rng)
    return {n: weights[n] for n in tensors_for(space, options)}, {"options": pack_options(space, options)}


def require_limit(space: Space, limit: int, key: str) -> None:
    """Raises `UserError` where not even the smallest arch's tensors are below the limit."""
    least = entries(space, list(space.index(space.smallest))) if limit else 0
    if least > limit:
        raise UserError(f"{key} = {limit}: the smallest arch's tensors have {least}.")


def tensors_for(space: Space, options: Sequence[Sequence[int]]) -> list[str]:
    """The supernet's tensors that some arch of these options uses."""
    uses, depends = _uses(space)
    allowed = [set().union(*(uses[d][i] for i in o)) for d, o in enumerate(options)]
    return [name for name, dimensions in depends.items() if all(name in allowed[d] for d in dimensions)]


def entries(space: Space, names: Sequence[str]) -> int:
    return sum(math.prod(space.full_shapes[n]) for n in names)


@lru_cache(maxsize=4)
def _uses(space: Space) -> tuple[list[list[set[str]]], dict[str, list[int]]]:
    """The tensors of each option of each dimension, all else being largest; and the dimensions a tensor depends on."""
    base = space.largest
    uses = [
        [set(space.index((*base[:d], i, *base[d + 1 :]))) for i in range(len(dimension.options))]
        for d, dimension in enumerate(space.dimensions)
    ]
    loose = [set.union(*of) - set.intersection(*of) for of in uses]
    return uses, {name: [d for d, names in enumerate(loose) if name in names] for name in space.full_shapes}
