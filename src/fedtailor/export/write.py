"""`fedtailor export`: every client's personal network of a run as files that stand alone, checked, with a card."""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .. import __version__
from ..config import Config
from ..config import load as load_config
from ..data.partition import SPLITS, TEST, TRAIN, VAL, Partition
from ..errors import UserError, unknown
from ..evaluate import pictures
from ..fleet import fleet as fleets
from ..method import Seat
from ..runs.execute import Setup, make_seats, open_space, prepare, read_networks
from ..runs.facts import read_facts
from ..runs.results import KINDS, Results
from ..spaces.base import Arch, Space, Weights
from ..values import write_bytes
from . import card as cards
from .graph import Portable, network, require_onnx, to_onnx, to_torch
from .int8 import quantise
from .predict import FORMAT, open_model

Format = Literal["onnx", "torch"]
Say = Callable[[str], None]
TOLERANCE = 1e-4  # of probabilities; a file that differs by more is not written
PREPROCESSING = (
    "Scaling to floats and normalisation happen inside the network, as do batch normalisation and the correction by "
    "the client’s label frequencies where the run used one. Pictures of another size are {fit} first."
)
FIT_WORDS = {"crop": "cropped at the sides and resized", "squash": "resized", "pad": "padded with black and resized"}


@dataclass(frozen=True)
class Exported:
    """One client's files."""

    name: str
    folder: Path
    card: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A finished run, opened for export."""

    run: Path
    config: Config
    facts: dict[str, Any]
    results: Results
    partition: Partition
    seats: tuple[Seat, ...]
    data: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] | None  # pictures and labels by client and split


def export_run(
    run: Path,
    client: str = "all",
    format: Format = "onnx",
    out: Path | None = None,
    int8: bool = True,
    say: Say = print,
) -> list[Exported]:
    """Writes the networks of one client or of all into RUN/export (or `out`), a folder for each client."""
    if format == "onnx":
        require_onnx()
    space = open_space(run)
    networks = read_networks(run, space)
    source = _open(run, space, say)
    names = [str(name) for name in source.facts["client_names"]]
    if client != "all" and client not in names:
        raise unknown("client", client, names)
    chosen = [i for i in networks if client in ("all", names[i])]
    folders = folder_names(names)
    return [
        _export(source, i, names[i], networks[i], (out or run / "export") / folders[i], format, int8, say)
        for i in chosen
    ]


def folder_name(name: str) -> str:
    """A client's name as a folder's."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "client"


def folder_names(names: Sequence[str]) -> list[str]:
    """The clients' names as folders', with their numbers where others' would be the same."""
    found = [folder_name(name) for name in names]
    while len(count := Counter(name.lower() for name in found)) < len(found):  # a number may make it another's name
        found = [f"{name}-{i}" if count[name.lower()] > 1 else name for i, name in enumerate(found)]
    return found


def _open(run: Path, space: Space, say: Say) -> Source:
    config, facts = load_config(run / "config.toml"), read_facts(run)
    partition = Partition.load(run / "partition.npz")
    try:
        setup = prepare(config, run / "partition.npz")
        data = _pictures(setup)
    except UserError as error:
        say(f"The run's data is not at hand ({error}) Files are checked on random pictures, without int8.")
        data = None
    return Source(run, config, facts, Results.read(run), partition, read_seats(config, facts, partition, space), data)


def read_seats(config: Config, facts: dict[str, Any], partition: Partition, space: Space) -> tuple[Seat, ...]:
    """The clients' devices and budgets: as written down for a client that joined later, else from the config."""
    total = partition.clients + partition.new_clients
    if "devices" in facts:
        fleet = tuple(fleets.device_of(table) for table in facts["devices"])
    else:
        fleet = fleets.make(config.make_fleet(), total, config.seed)
    clients = [(name, len(partition.indices(i, TRAIN))) for i, name in enumerate(partition.names)]
    return make_seats(config, space, clients, fleet)


def _pictures(setup: Setup) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    from ..data.federation import stores

    learn, test = stores(setup.dataset, setup.partition, torch.device("cpu"))
    total = setup.partition.clients + setup.partition.new_clients
    return {
        (i, which): pictures(test if which == TEST else learn, i, which)
        for i in range(total)
        for which in (TRAIN, VAL, TEST)
    }


def _export(
    source: Source,
    client: int,
    name: str,
    kept: tuple[Space, Arch, Weights],
    folder: Path,
    format: Format,
    int8: bool,
    say: Say,
) -> Exported:
    space, arch, weights = kept
    shape = space.input
    normalised_as = source.facts.get("normalised_as", source.config.data.name)
    whole = Portable(network(space, arch, weights), normalised_as, shape[0])
    about = _about(source, name, space, arch)
    images, checked_on = _check_images(source, client, shape)
    expected = whole.run(images)
    files: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    if format == "torch":
        data = to_torch(whole, shape, about)
        got = _run_torch(data, images)
        files["network.pt2"] = _file_facts(data, expected, got, source, client)
    else:
        data = to_onnx(whole, shape, about)
        files["network.onnx"] = _onnx_facts(data, images, expected, source, client)
    _require_agreement(name, files)
    contents = {next(iter(files)): data}
    if format == "onnx" and int8 and source.data is not None:
        try:
            small = quantise(data, source.data[client, TRAIN][0], about | {"int8": True})
            files["network-int8.onnx"] = _onnx_facts(small, images, expected, source, client)
            contents["network-int8.onnx"] = small
            notes.append(_int8_note(files))
        except Exception as error:  # of the quantiser; the network itself is sound
            notes.append(f"there is no int8 file: it could not be made ({type(error).__name__}: {error}).")
    for file, content in contents.items():
        write_bytes(folder / file, content)
    card = _card(source, client, name, kept, files, notes, checked_on)
    cards.write_card(folder, card, space.draw(arch))
    first = next(iter(files.values()))
    say(f"{name}: {folder / next(iter(files))}, largest difference to PyTorch {first['max_difference']:.1e}")
    for text in (*card["warnings"], *notes):
        say(f"{name}: {text}")
    return Exported(name, folder, card)


def _about(source: Source, name: str, space: Space, arch: Arch) -> dict[str, Any]:
    """What the file says of itself: enough to use it, and to know where it comes from."""
    return {
        "format": FORMAT,
        "fedtailor": __version__,
        "client": name,
        "input": list(space.input),
        "classes": list(source.facts["classes"]),
        "fit": source.config.data.fit,
        "method": source.config.method["name"],
        "network": f"{space.name} {space.word(arch)}".strip(),
        "data_hash": source.facts["data_hash"],
        "partition_hash": source.facts["partition_hash"],
    }


def _check_images(source: Source, client: int, shape: tuple[int, int, int]) -> tuple[np.ndarray, str]:
    """The client's val and test pictures, in this order; random ones where there are none."""
    if source.data is not None:
        images = np.concatenate([source.data[client, which][0] for which in (VAL, TEST)])
        if len(images):
            return images, f"the client's {len(images)} val and test pictures"
    channels, height, width = shape
    random = np.random.default_rng(0).integers(0, 256, (64, height, width, channels), np.uint8)
    return random, "64 random pictures"


def _onnx_facts(data: bytes, images: np.ndarray, expected: np.ndarray, source: Source, client: int) -> dict[str, Any]:
    model = open_model(data, threads=1)
    got = np.concatenate([model.run(images[i : i + 256]) for i in range(0, len(images), 256)])
    facts = _file_facts(data, expected, got, source, client)
    return facts | {"latency": [cards.latency(model, batch) for batch in (1, 32)]}


def _file_facts(data: bytes, expected: np.ndarray, got: np.ndarray, source: Source, client: int) -> dict[str, Any]:
    found = _accuracies(got, source, client)
    before = _accuracies(expected, source, client)
    test, was = found.get("test"), before.get("test")
    return {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "max_difference": float(np.abs(got - expected).max()),
        "accuracy": found,
        "test_accuracy": test["accuracy"] if test else None,
        "test_change": test["accuracy"] - was["accuracy"] if test and was else None,
        "latency": [],
    }


def _accuracies(probabilities: np.ndarray, source: Source, client: int) -> dict[str, dict[str, float]]:
    if source.data is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    at = 0
    for which in (VAL, TEST):
        labels = source.data[client, which][1]
        hits = int((probabilities[at : at + len(labels)].argmax(1) == labels).sum()) if len(labels) else 0
        at += len(labels)
        told = cards.accuracy(hits, len(labels))
        if told:
            found[SPLITS[which]] = told
    return found


def _run_torch(data: bytes, images: np.ndarray) -> np.ndarray:
    program = torch.export.load(io.BytesIO(data)).module()
    with torch.no_grad():
        parts = [program(torch.from_numpy(images[i : i + 256])) for i in range(0, len(images), 256)]
    return torch.cat(parts).numpy()


def _require_agreement(name: str, files: dict[str, dict[str, Any]]) -> None:
    for file, facts in files.items():
        if not facts["max_difference"] <= TOLERANCE:
            raise UserError(
                f"client '{name}': {file} differs from PyTorch by up to {facts['max_difference']:.1e} in a "
                f"probability, more than {TOLERANCE:g}. It was not written. A network whose forward pass "
                "branches on values cannot be exported; otherwise this is an error of the exporter."
            )


def _int8_note(files: dict[str, dict[str, Any]]) -> str:
    small, full = files["network-int8.onnx"], files["network.onnx"]
    size = f"int8 takes {100 * small['bytes'] / full['bytes']:.0f} % of the bytes"
    if small["bytes"] > full["bytes"]:
        size += " (the network is so small that the scales outweigh what they save)"
    if small["test_change"] is None:
        return f"{size}; its accuracy could not be measured, there are no test pictures."
    return f"{size} and changes test accuracy by {100 * small['test_change']:+.2f} percentage points."


def _card(
    source: Source,
    client: int,
    name: str,
    kept: tuple[Space, Arch, Weights],
    files: dict[str, dict[str, Any]],
    notes: list[str],
    checked_on: str,
) -> dict[str, Any]:
    space, arch, _ = kept
    facts, config, seat = source.facts, source.config, source.seats[client]
    cost = space.cost(arch)
    recorded = _recorded(source, client)
    measured = next(iter(files.values()))["accuracy"]
    counts = source.facts["train_counts"][client]
    warnings = [
        f"the run recorded {split} accuracy {recorded[split]:.4f}, the file gives {told['accuracy']:.4f}: the run was "
        "computed on another device, or its data has changed."
        for split, told in measured.items()
        if split in recorded and abs(recorded[split] - told["accuracy"]) > 1e-9
    ]
    return {
        "format": cards.FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": {"name": name, "number": client, "trained": client < source.partition.clients},
        "method": {"name": config.method["name"], "paper": facts.get("method_paper", "")},
        "network": cards.network_facts(space, arch, cost, config.local.batch),
        "input": list(space.input),
        "classes": list(facts["classes"]),
        "preprocessing": PREPROCESSING.format(fit=FIT_WORDS[config.data.fit]),
        "fit": config.data.fit,
        "prior": config.local.prior,
        "accuracy": measured,
        "in_the_run": recorded,
        "checked_on": checked_on,
        "files": files,
        "notes": notes,
        "warnings": warnings,
        "machine": cards.machine() if "network.onnx" in files else {"onnxruntime": "–", "processor": "–"},
        "budget": cards.budget_facts(seat, cost),
        "data": {
            "name": config.data.name,
            "hash": facts["data_hash"],
            "partition_hash": facts["partition_hash"],
            "pictures": {s: len(source.partition.indices(client, i)) for i, s in enumerate(SPLITS)},
            "train_counts": dict(zip(facts["classes"], counts, strict=True)),
        },
        "run": {
            "name": source.results.name,
            "rounds": facts["rounds_done"],
            "seed": config.seed,
            "created": facts["created"],
        },
        "versions": {"fedtailor": facts["fedtailor"], "torch": facts["torch"], "exported by fedtailor": __version__},
    }


def _recorded(source: Source, client: int) -> dict[str, float]:
    """The accuracies of this network in the run's event table."""
    metric = KINDS["personal" if client < source.partition.clients else "new"]
    found = {split: source.results.per_client(metric, split).get(client) for split in ("val", "test")}
    return {split: value for split, value in found.items() if value is not None}
