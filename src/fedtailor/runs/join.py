"""After a run: a client that was never there joins, or one that was fits its network to new data. No round is run with
the others, and the run's folder is read, never changed. What comes out is a run folder of one client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..config import load as load_config
from ..data import rules
from ..data.dataset import UNSAID, Dataset, fingerprints
from ..data.federation import Store, stores
from ..data.partition import TEST, TRAIN, VAL, Partition, PartitionConfig
from ..data.pixels import Reading, Target
from ..data.public import given_images, require_foreign, with_public
from ..data.sources import load as load_data
from ..engine.loop import Federation, State
from ..errors import UserError, unknown
from ..evaluate import keep_networks, onboard, pictures, tuning
from ..export.graph import Portable, network
from ..fleet import fleet as fleets
from ..method import Job, Method
from ..spaces.base import Space
from ..values import Value
from . import checkpoint
from .alone import Offered, deal_of, part_of, write_alone
from .execute import Say, choose_device, data_of, make_engine, make_seats, open_space, read_networks
from .facts import read_facts


@dataclass(frozen=True)
class Before:
    """A run, as far as a client that comes to it later is concerned."""

    folder: Path
    config: Config
    facts: dict[str, Any]
    partition: Partition
    space: Space
    method: Method
    fleet: fleets.Fleet
    public: np.ndarray | None  # images of its public set

    @staticmethod
    def read(folder: Path) -> Before:
        facts = read_facts(folder)
        if facts.get("served"):
            raise UserError(
                f"{folder} is the run of a server: its clients' data and networks are with them. Newcomers join with "
                f"'fedtailor serve {folder} --onboard 1', and clients fit their networks again in their own folders."
            )
        config, partition = load_config(folder / "config.toml"), Partition.load(folder / "partition.npz")
        if "devices" in facts:
            fleet = tuple(fleets.device_of(table) for table in facts["devices"])
        else:
            fleet = fleets.make(config.make_fleet(), len(partition.names), config.seed)
        public = _public(folder, config, partition)
        return Before(folder, config, facts, partition, open_space(folder), config.make_method(), fleet, public)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Every client's name and number of training images."""
        return [(name, len(self.partition.indices(i, TRAIN))) for i, name in enumerate(self.partition.names)]

    def job(self, clients: Sequence[tuple[str, int]], fleet: fleets.Fleet) -> Job:
        public = 0 if self.public is None else len(self.public)
        return job_of(self.config, self.method, self.space, clients, self.partition.clients, fleet, public)


def job_of(
    config: Config,
    method: Method,
    space: Space,
    clients: Sequence[tuple[str, int]],
    trained: int,
    fleet: fleets.Fleet,
    public: int = 0,
) -> Job:
    """The job of a run with clients of these names and numbers of training images, the first of whom trained."""
    seats = make_seats(config, space, clients, fleet)
    job = Job(space, seats, trained, config.participants, config.rounds, config.seed, config.local, public=public)
    method.check(job)
    return job


def last_state(folder: Path, job: Job, device: torch.device, say: Say) -> State:
    """The run's newest checkpoint."""
    found = checkpoint.load(folder / "checkpoints", job, device, say)
    if found is None:
        raise UserError(f"{folder} has no checkpoint to start from. Run it again, or restore its checkpoints/.")
    if read_facts(folder)["status"] != "done":
        say(f"{folder} is not finished: the client joins after round {found[0].round}.")
    return found[0]


def with_room(state: State, job: Job, method: Method, clients: int) -> State:
    """The state of a run of so many clients with a place for each that the job has beyond them."""
    fresh = method.start(job).values
    state.server = state.server.replace(**_grown(state.server.values, fresh, clients, len(job.seats)))
    return state


@dataclass(frozen=True)
class Visit:
    """A client that comes to a finished run with data of its own."""

    before: Before
    own: Dataset
    deal: Partition  # of its data
    job: Job  # with its seat
    device: fleets.Device
    at: int  # its number
    source: str


def join(
    folder: Path,
    data: str,
    name: str,
    out: Path,
    data_dir: Path | None = None,
    profile: str = "",
    device: str = "auto",
    workers: int = 0,
    say: Say = print,
    tune: int = -1,
) -> Path:
    """A client that was never there gets its network, in its method's way of taking in clients. Returns `out`.

    `tune` is the most epochs of fine-tuning; -1: some, where the method leaves clients nothing of their own.
    """
    before, chosen = Before.read(folder), choose_device(device)
    _require_new(out)
    if name in before.partition.names:
        raise UserError(f"--name {name}: the run has a client of this name. 'fedtailor personalize' fits it again.")
    own = client_data(before, data, name, data_dir, say)
    at = len(before.partition.names)
    deal = _deal(before, own, name, _split(before, own, at))
    extra = fleets.newcomer(before.config.make_fleet(), at, before.config.seed, profile)
    job = before.job([*before.sizes, (name, len(deal.indices(0, TRAIN)))], (*before.fleet, extra))
    state = with_room(last_state(folder, job, chosen, say), job, before.method, at)

    def offered(federation: Federation) -> Offered:
        server, memories = onboard(federation, state, [job.seats[at]])
        offer = federation.sent(before.method.offer(server, job.seats[at]))
        return Offered(offer, memories.get(at, {}), state.round)

    most = tuning(before.method) if tune < 0 else tune
    _finish(Visit(before, own, deal, job, extra, at, data), offered, out, chosen, workers, say, tune=most)
    return out


def refit(
    folder: Path,
    client: str,
    data: str,
    out: Path,
    data_dir: Path | None = None,
    epochs: float = -1.0,
    device: str = "auto",
    workers: int = 0,
    say: Say = print,
) -> tuple[Path, dict[str, tuple[float, float]]]:
    """A client's network made again from the data it has now. Returns `out`, and the accuracies of the old network and
    of the new one on the new splits."""
    before, chosen = Before.read(folder), choose_device(device)
    _require_new(out)
    names = before.partition.names
    if client not in names:
        raise unknown("client", client, names)
    at = names.index(client)
    old = _old_data(before)
    if data or old is None:
        own = client_data(before, data or data_of(folder, before.config), client, data_dir, say)
    else:
        own = part_of(old, np.flatnonzero(before.partition.owner == at))
    known = _known(before, old, at)
    if not known:
        say(
            "The data of the run is not there any more, so pictures it trained on may now be in val or test: the old "
            "network's accuracy is flattered, and the new one's may be."
        )
    deal = _deal(before, own, client, _split(before, own, at, known))
    sizes = [(n, len(deal.indices(0, TRAIN)) if i == at else size) for i, (n, size) in enumerate(before.sizes)]
    job = before.job(sizes, before.fleet)
    seat = job.seats[at]

    def offered(federation: Federation) -> Offered:
        kept = Offered.read(folder, chosen)
        if kept:
            return kept
        state = last_state(folder, job, chosen, say)
        offer = federation.sent(before.method.offer(state.server, seat))
        return Offered(offer, state.memories.get(at, {}), state.round)

    # a newcomer whose method has nothing of its own for it is fine-tuned again, as when it came
    tune = tuning(before.method) if epochs < 0 and before.facts.get("joined") else 0
    more = before.config.local.epochs if epochs < 0 and not tune else max(epochs, 0.0)
    visit = Visit(before, own, deal, job, before.fleet[at], at, data or before.config.data.name)
    _finish(visit, offered, out, chosen, workers, say, more, tune)
    return out, _compared(before, own, deal, at, out)


def client_data(before: Before, source: str, name: str, data_dir: Path | None, say: Say) -> Dataset:
    """One client's images, made into the run's size and numbered by the run's classes."""
    channels, height, width = before.space.input
    reading = Reading(broken=before.config.data.broken, target=Target(height, width, channels, before.config.data.fit))
    folder = data_dir or (Path(before.config.data.dir) if before.config.data.dir else None)
    found = load_data(source, folder, reading, say)
    if found.shape != before.space.input:
        raise UserError(
            f"{source}: images are {list(found.shape)} (channels, height, width), the run's are "
            f"{list(before.space.input)}. Bring them as picture files, which are resized, or resize them."
        )
    if len(found.owners) > 1 and name not in found.owners:
        raise UserError(
            f"{source} holds {len(found.owners)} clients ({', '.join(found.owners[:5])}), none is '{name}'."
        )
    if name in found.owners and found.owner is not None:
        found = part_of(found, np.flatnonzero(found.owner == found.owners.index(name)))
    used = [found.classes[i] for i in np.unique(found.labels)]
    classes = [str(c) for c in before.facts["classes"]]
    strange = [c for c in used if c not in classes]
    if strange:
        raise UserError(
            f"{source} has pictures of '{strange[0]}', which the run does not know. Its classes are "
            f"{', '.join(classes)}. Leave these pictures out, or train a new run with this class."
        )
    if len(used) == 1:
        say(f"'{name}' has pictures of one class only ({used[0]}): its accuracy will say little.")
    renumbered = np.array([classes.index(c) if c in classes else -1 for c in found.classes])[found.labels]
    name_there = _normalised_as(before)
    return Dataset(name_there, found.images, renumbered, tuple(classes), found.official_test, split=found.split)


def _public(folder: Path, config: Config, partition: Partition) -> np.ndarray | None:
    """The public set of the run, from where the run had it."""
    where = Path(config.data.dir) if config.data.dir else None

    def dealt() -> tuple[Dataset, Partition]:
        data = load_data(data_of(folder, config), where, config.data.reading)
        if data.hash != partition.dataset_hash:
            raise UserError(f"{folder}: its public set was the rest of its data, which is not what it was any more.")
        return data, partition

    return given_images(config.public, where, config.data.reading, config.seed, dealt)


def _normalised_as(before: Before) -> str:
    """The data set's name that normalisation goes by."""
    return before.facts.get("normalised_as", before.config.data.name)


def _old_data(before: Before) -> Dataset | None:
    """The run's data, where it is still what it was."""
    told = before.config.data
    try:
        data = load_data(data_of(before.folder, before.config), Path(told.dir) if told.dir else None, told.reading)
    except UserError:
        return None
    return data if data.hash == before.partition.dataset_hash else None


def _known(before: Before, old: Dataset | None, client: int) -> dict[bytes, int]:
    """The split of every picture that the client had in the run, by its fingerprint."""
    path = before.folder / "fingerprints.npy"
    places = np.flatnonzero(before.partition.owner == client)
    if path.is_file():
        prints = np.load(path, allow_pickle=False)[places]
    elif old is not None:
        prints = fingerprints(old.images[places])
    else:
        return {}
    return {p.tobytes(): int(s) for p, s in zip(prints, before.partition.split[places], strict=True)}


def _split(before: Before, own: Dataset, client: int, known: dict[bytes, int] | None = None) -> np.ndarray:
    """Splits of one client's images. Those it had keep theirs, those the data puts into one lie there, others are drawn
    by the run's shares."""
    config = before.config.make_partition()
    said = np.array([(known or {}).get(p.tobytes(), UNSAID) for p in fingerprints(own.images)], np.uint8)
    fresh = np.flatnonzero(said == UNSAID)
    if len(fresh):
        given = None if own.split is None else own.split[fresh]
        classes = len(own.classes)
        said[fresh] = rules.split_of(client, own.labels[fresh], classes, config, before.config.seed, given)
    return said


def _deal(before: Before, own: Dataset, name: str, split: np.ndarray) -> Partition:
    """The partition of one client."""
    config: PartitionConfig = before.config.make_partition()
    if len(own) < config.smallest or not (split == TRAIN).any():
        raise UserError(
            f"'{name}' has {len(own)} pictures, {int((split == TRAIN).sum())} of them for training; the run asks for "
            f"{config.smallest} of each client (partition.min_samples)."
        )
    return deal_of(own, split, before.partition.hash, name)


def _finish(
    visit: Visit,
    offered: Callable[[Federation], Offered],
    out: Path,
    where: torch.device,
    workers: int,
    say: Say,
    epochs: float = 0.0,
    tune: int = 0,
) -> None:
    """Makes the visitor's network and writes its folder."""
    began = time.perf_counter()
    before, job, at = visit.before, visit.job, visit.at
    both = stores(visit.own, visit.deal, where)
    learn, test = (Store({(at, which): split for (_, which), split in s.ranges.items()}) for s in both)
    if before.public is not None:
        require_foreign(before.public, visit.own.images)
        learn = with_public(learn, before.public)
    engine = make_engine(where, workers, "auto", before.config.precision, say)
    federation = Federation(job, before.method, learn, engine, (), before.config.make_fleet())
    seat = job.seats[at]
    try:
        made_from = offered(federation)
        offers, memories = [(seat, made_from.task)], {at: made_from.memory}
        events, (kept,) = keep_networks(federation, made_from.round, offers, memories, test, "personal", epochs, tune)
    finally:
        engine.close()
    facts = {
        "seconds": time.perf_counter() - began,
        "joined": {"run": before.folder.resolve().name, "source": visit.source},
        "normalised_as": _normalised_as(before),
    }
    made = (visit.own, visit.deal, seat, visit.device, made_from, kept, events, where, facts)
    write_alone(out, before.config, before.method, *made, public=before.public)


def _compared(before: Before, own: Dataset, deal: Partition, at: int, out: Path) -> dict[str, tuple[float, float]]:
    """Accuracy of the run's network and of the new one, on the splits of now."""
    learn, test = stores(own, deal, torch.device("cpu"))
    found: dict[str, tuple[float, float]] = {}
    nets = [read_networks(before.folder, before.space)[at], read_networks(out, before.space)[0]]
    for split, which, store in (("val", VAL, learn), ("test", TEST, test)):
        images, labels = pictures(store, 0, which)
        if len(labels):
            wholes = [Portable(network(*net), _normalised_as(before), before.space.input[0]) for net in nets]
            old, new = (float((whole.run(images).argmax(1) == labels).mean()) for whole in wholes)
            found[split] = old, new
    return found


def _require_new(out: Path) -> None:
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is not empty. Choose another --out.")


def _grown(old: Value, fresh: Value, before: int, now: int) -> Value:
    """The server's values with a place for one more client. Whatever has an entry for each client, and in a fresh
    server one more, gets the fresh server's entry for the newcomer; the rest stays."""
    if isinstance(old, Tensor) and isinstance(fresh, Tensor):
        grows = old.ndim == fresh.ndim > 0 and (len(old), len(fresh)) == (before, now)
        return torch.cat([old, fresh[before:].to(old.device)]) if grows else old
    if isinstance(old, dict) and isinstance(fresh, dict):
        return {key: _grown(value, fresh.get(key), before, now) for key, value in old.items()}
    if isinstance(old, (list, tuple)) and isinstance(fresh, (list, tuple)):
        if (len(old), len(fresh)) == (before, now):
            return type(old)([*old, *fresh[before:]])
        if len(old) == len(fresh):
            return type(old)(_grown(o, f, before, now) for o, f in zip(old, fresh, strict=True))
    return old
