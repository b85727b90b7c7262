"""What a run's networks and data say: devices and budgets, drawings, shared weights, confusion, a few pictures.

Asked for one at a time, because it needs torch, the run's space and sometimes its data. Code that a run names by a path
or a module is never loaded: looking at a folder runs nothing but this package.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..registry import KINDS, code_in
from ..runs.results import Results
from .numbers import number, numbers
from .searches import Choices, choices
from .views import clients, count

SHOWN = 8  # right and wrong pictures of a client
NEIGHBOURS = 12  # clients that one is compared with, weight by weight


def _require_named_ours(run: Results) -> None:
    _require_ours([run.config.get(kind) for kind in KINDS])


def _require_ours(tables: object) -> None:
    """Raises where something that came with a run names code of its own: a method, a space, a net, a reward."""
    if any(code_in(tables)):
        raise UserError("this run uses code of its own, which the page does not load.")


@lru_cache(maxsize=8)
def _opened(folder: Path, stamp: int) -> tuple[Any, Any]:  # noqa: ARG001
    """Config and space of a run; opened again where the stamp is another."""
    from ..config import load
    from ..runs.execute import open_space

    return load(folder / "config.toml"), open_space(folder)


def opened(run: Results) -> tuple[Any, Any]:
    _require_named_ours(run)
    return _opened(run.folder, (run.folder / "config.toml").stat().st_mtime_ns)


def arch_of(found: Choices) -> Any:
    """Choices as the space takes them: one option each, or a sub-network with several."""
    if all(len(kept) == 1 for kept in found):
        return tuple(kept[0] for kept in found)
    half = len(found) // 2
    return tuple(tuple(kept) for kept in found[:half]), tuple(tuple(kept) for kept in found[half:])


def _archs(run: Results, space: Any) -> dict[int, Any]:
    sizes = [len(d.options) for d in space.dimensions]
    texts = clients(run)["arch"] or []
    found = {c: choices(text, sizes) for c, text in enumerate(texts) if text}
    return {c: arch_of(chosen) for c, chosen in found.items() if chosen is not None}


def devices(run: Results) -> dict[str, Any]:
    """Every client's device, its limits and how much of them its network takes; and what it kept of every layer."""
    from ..fleet import fleet as fleets
    from ..fleet.budget import need

    config, space = opened(run)
    n = count(run)
    fleet = fleets.make(config.make_fleet(), n, config.seed)
    batch, largest = config.local.batch, space.cost(space.largest)
    counts = run.facts.get("train_counts") or []
    samples = [sum(row) for row in counts] or list(run.facts.get("samples") or [])
    archs = _archs(run, space) if not space.fixed else dict.fromkeys(range(n), space.largest)
    cost = lru_cache(maxsize=None)(space.cost)
    limit: dict[str, list[float | None]] = {}
    used: dict[str, list[float | None]] = {}
    for c, device in enumerate(fleet):
        images = int((samples[c] if c < len(samples) else 0) * config.local.epochs)
        budget = device.budget.absolute(largest, batch, device.profile, images)
        for q, value in budget.limits.items():
            limit.setdefault(q, [None] * n)[c] = number(value)
            if c in archs:
                used.setdefault(q, [None] * n)[c] = number(need(q, cost(archs[c]), batch, device.profile, images))
    memory = [cost(archs[c]).training_memory(batch) if c in archs else None for c in range(n)]
    return {
        "device": [d.profile.name for d in fleet],
        "budget": [str(d.budget) for d in fleet],
        "limits": limit,
        "used": used,
        "memory": numbers(memory),
        "hard": config.make_fleet().hard,
        "shrink": shrink(run),
    }


def shrink(run: Results) -> dict[str, Any] | None:
    """FedCS's picture: what share of the largest option of every dimension clients kept, by budget."""
    from ..report.shrink import read_shrinkage

    try:
        found = read_shrinkage(run)
    except UserError:
        return None
    return {
        "dimensions": found.dimensions,
        "clients": found.clients,
        "shares": [numbers(row, 4) for row in found.shares],
        "groups": [
            {"budget": group, "rows": rows, "distance": number(found.distance(group), 4)}
            for group, rows in found.groups.items()
        ],
    }


def drawing(run: Results, client: int) -> dict[str, Any]:
    """A client's network drawn with its sizes and costs, and those who share most of it."""
    _, space = opened(run)
    archs = _archs(run, space) if not space.fixed else {client: space.largest}
    if client not in archs:
        raise UserError("this client has no architecture yet.")
    arch = archs[client]
    cost = space.cost(arch)
    return {
        "svg": space.draw(arch),
        "words": space.describe(arch) if not space.fixed else space.name,
        "parameters": cost.parameters,
        "flops": cost.flops,
        "shares": shared(space, archs, client),
    }


def shared(space: Any, archs: dict[int, Any], client: int) -> list[dict[str, Any]]:
    """The clients whose networks have most weights in common with this one's: entries of the supernet both own."""
    if space.fixed:
        return []
    mine = archs[client]
    parts = {name: _sides(space, mine, name) for name in space.index(mine)}
    own = sum(map(_volume, parts.values())) or 1
    same = {c: _same(arch, mine) for c, arch in archs.items() if c != client}
    alike = sorted(same, key=lambda c: (-same[c], c))
    found = []
    for c in alike[:NEIGHBOURS]:
        index = space.index(archs[c])
        both = sum(
            _volume([min(a, b) for a, b in zip(sides, _sides(space, archs[c], name), strict=True)])
            for name, sides in parts.items()
            if name in index
        )
        found.append({"client": c, "same": same[c], "share": number(both / own, 4)})
    return sorted(found, key=lambda f: (-f["share"], f["client"]))


def _same(a: Any, b: Any) -> int:
    """In how many dimensions two archs agree."""
    if a and isinstance(a[0], tuple) and isinstance(b[0], tuple):  # sub-networks: both cells, edge by edge
        return sum(_same(x, y) for x, y in zip(a, b, strict=True))
    return sum(x == y for x, y in zip(a, b, strict=False))


def _sides(space: Any, arch: Any, name: str) -> list[int]:
    """The lengths of a tensor's axes: leading and central parts of the supernet's lie within one another."""
    at, full = space.index(arch)[name], space.full_shapes[name]
    return [len(range(*at[i].indices(side))) if i < len(at) else side for i, side in enumerate(full)]


def _volume(sides: Sequence[int]) -> int:
    return int(np.prod(sides)) if len(sides) else 1


# ---- what the networks say of the pictures


@lru_cache(maxsize=2)
def _stores(folder: Path, stamp: int) -> tuple[Any, Any]:  # noqa: ARG001
    """Names of the classes and the stores of a run's data."""
    import torch

    from ..config import load
    from ..data.federation import stores
    from ..data.partition import Partition
    from ..data.sources import load as load_data
    from ..runs.execute import data_of

    config, partition = load(folder / "config.toml"), Partition.load(folder / "partition.npz")
    dataset = load_data(data_of(folder, config), config.data.dir or None, config.data.reading)
    partition.require(dataset)
    return dataset.classes, stores(dataset, partition, torch.device("cpu"))


def look(run: Results, client: int) -> dict[str, Any]:
    """A client's confusion matrix and a few pictures that its network gets right and wrong.

    Of its test images where the run is over, which is after everything that could be chosen by them.
    """
    import torch

    from ..data.partition import TEST, VAL
    from ..evaluate import pictures
    from ..nets.base import net_of
    from ..values import read_value

    _require_named_ours(run)
    if run.facts.get("served"):
        raise UserError("the clients of this run are elsewhere, and so is their data.")
    if run.facts.get("joined"):
        raise UserError("this folder belongs to a client that joined later; its data is not with it.")
    if not run.finished:
        raise UserError("networks are saved when a run ends.")
    path = run.folder / "nets" / f"{client:06d}.safetensors"
    if not path.is_file():
        raise UserError("the run's folder has no network of this client.")
    _, space = opened(run)
    names, (learn, test) = _stores(run.folder, (run.folder / "partition.npz").stat().st_mtime_ns)
    split, store, which = ("test", test, TEST) if test.split(client, TEST).size else ("val", learn, VAL)
    value = read_value(path)
    _require_ours(value.get("net"))
    own = net_of(value["net"], space.input, space.classes) if "net" in value else space
    net = own.build(_tuples(value["arch"]))
    net.load_state_dict(value["weights"], strict=False)
    net.eval()
    images, labels = pictures(store, client, which)
    part = store.split(client, which)
    with torch.no_grad():
        said = torch.cat([net(part.at(at)[0]).argmax(1) for at in part.chunks(128)]).numpy()
    k = len(names)
    matrix = np.bincount(labels * k + said, minlength=k * k).reshape(k, k)
    right, wrong = np.flatnonzero(said == labels), np.flatnonzero(said != labels)
    show = lambda at: {"png": _png(images[at]), "label": str(names[labels[at]]), "said": str(names[said[at]])}  # noqa: E731
    return {
        "client": client,
        "split": split,
        "classes": [str(name) for name in names],
        "matrix": matrix.tolist(),
        "accuracy": number(float((said == labels).mean())) if len(labels) else None,
        "right": [show(i) for i in _spread(right)],
        "wrong": [show(i) for i in _spread(wrong)],
    }


def _tuples(arch: Any) -> Any:
    return tuple(_tuples(part) for part in arch) if isinstance(arch, (list, tuple)) else arch


def _spread(found: np.ndarray) -> list[int]:
    """A few of them, evenly spread: nobody picks."""
    return (
        found[np.unique(np.linspace(0, len(found) - 1, min(SHOWN, len(found))).round().astype(int))].tolist()
        if len(found)
        else []
    )


def _png(image: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
