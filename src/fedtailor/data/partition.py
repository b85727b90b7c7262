"""A partition says which client holds which image, and in which of its splits: a named, disjoint, hashed artefact."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, unknown
from .dataset import Dataset
from .files import arrays_of

TRAIN, VAL, TEST = 0, 1, 2
SPLITS = ("train", "val", "test")
UNUSED = 255  # the split of an image that nobody holds
FORMAT = 1

NAMES = {
    "iid": "images dealt at random, equal shares",
    "dirichlet-class": "each class spread over the clients by Dirichlet(alpha): unequal sizes (FedNAS, SPIDER)",
    "dirichlet-client": "each client draws its class mix from Dirichlet(alpha): equal sizes (PerFedRLNAS, FedorAS)",
    "label-skew": "every client holds exactly `classes` classes, a class shared equally by its holders",
    "natural": "the clients the data itself names (silos, writers, cameras)",
}
EQUAL_SHARE = ("iid", "dirichlet-client", "label-skew")


@dataclass(frozen=True)
class PartitionConfig:
    """Options of the [partition] table."""

    name: str = "dirichlet-client"
    alpha: float = 0.3  # concentration (dirichlet-*): small means few classes per client
    classes: int = 2  # classes per client (label-skew)
    samples: int = 0  # images per client for equal-share rules (0: as many as there are)
    min_samples: int = 10  # smallest number of images a client may hold
    val: float = 0.2  # share of each client's images
    test: float = 0.2
    pool: str = "all"  # "all": official train and test pooled; "train": official train images only
    new_clients: int = 0  # extra clients held out of training, for the `new` accuracy
    file: str = ""  # use this saved partition instead of making one; the options above are then ignored

    @property
    def smallest(self) -> int:
        """The fewest images a client can do with: min_samples, and one in every split that is asked for."""
        return max(self.min_samples, 1 + (self.val > 0) + (self.test > 0))

    def check(self, clients: int) -> None:
        """Raises a UserError that names the key, its value and what is allowed."""
        if self.name not in NAMES:
            raise unknown("partition", self.name, NAMES)
        shares_ok = 0 <= self.val < 1 and 0 <= self.test < 1
        for bad, key, value, allowed in (
            (clients < 1, "clients", clients, "a whole number from 1"),
            (self.new_clients < 0, "partition.new_clients", self.new_clients, "a whole number from 0"),
            (not 0 < self.alpha < math.inf, "partition.alpha", self.alpha, "a number above 0"),
            (self.classes < 1, "partition.classes", self.classes, "a whole number from 1"),
            (self.samples < 0, "partition.samples", self.samples, "a whole number from 0"),
            (self.min_samples < 1, "partition.min_samples", self.min_samples, "a whole number from 1"),
            (not shares_ok, "partition.val and partition.test", (self.val, self.test), "shares from 0 to below 1"),
            (self.pool not in ("all", "train"), "partition.pool", repr(self.pool), "'all' or 'train'"),
        ):
            if bad:
                raise UserError(f"{key} = {value}: allowed is {allowed}.")
        if self.val + self.test >= 1:
            raise UserError(
                f"partition.val = {self.val} and partition.test = {self.test} leave nothing to train on: "
                "together they have to stay below 1."
            )
        if self.samples and self.name not in EQUAL_SHARE:
            raise UserError(
                f"partition.samples = {self.samples}: '{self.name}' has no equal shares. "
                f"Leave it at 0 or use {', '.join(EQUAL_SHARE)}."
            )
        if self.samples and self.samples < self.smallest:
            raise UserError(
                f"partition.samples = {self.samples} is below the {self.smallest} images that every client must hold "
                f"(partition.min_samples = {self.min_samples}, and one image in each split)."
            )


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds what. Clients 0 to clients-1 train; the new_clients that follow are held out."""

    owner: np.ndarray  # int32 [N], -1 where unused
    split: np.ndarray  # uint8 [N]: TRAIN, VAL, TEST, or UNUSED
    clients: int
    new_clients: int
    dataset_hash: str
    recipe: dict[str, Any]  # what made it, including the seed
    names: tuple[str, ...]  # of all clients, the held-out ones last

    @cached_property
    def hash(self) -> str:
        """What is dealt to whom: equal for two partitions exactly when they are the same deal of the same data."""
        digest = hashlib.sha256(f"partition {FORMAT} {self.dataset_hash} {self.clients} {self.new_clients}".encode())
        digest.update(self.owner.astype("<i4").data)
        digest.update(self.split.astype("u1").data)
        return digest.hexdigest()

    def indices(self, client: int, split: int) -> np.ndarray:
        """The images in one split of one client, sorted (int64)."""
        return np.flatnonzero((self.owner == client) & (self.split == split)).astype(np.int64)

    def counts(self, labels: np.ndarray, n_classes: int, split: int | None = None) -> np.ndarray:
        """Images per client (held-out ones last) and class, over all splits or one of them."""
        used = self.owner >= 0 if split is None else (self.owner >= 0) & (self.split == split)
        table = np.zeros((self.clients + self.new_clients, n_classes), np.int64)
        np.add.at(table, (self.owner[used], labels[used]), 1)
        return table

    def sizes(self) -> np.ndarray:
        """Images per client (held-out ones last) and split: train, val, test."""
        table = np.zeros((self.clients + self.new_clients, len(SPLITS)), np.int64)
        used = self.owner >= 0
        np.add.at(table, (self.owner[used], self.split[used]), 1)
        return table

    def require(self, dataset: Dataset) -> None:
        """Raises a UserError unless the partition was made for this very data."""
        if self.dataset_hash != dataset.hash:
            raise UserError(
                f"the data set changed since this partition was made: it deals data {self.dataset_hash[:12]} "
                f"('{self.recipe.get('data', '?')}', {len(self.owner)} images), but '{dataset.name}' is "
                f"{dataset.hash[:12]} ({len(dataset)} images). Make a new partition, or use the data it was made for."
            )

    def save(self, path: Path | str) -> None:
        """Writes one .npz file, whole or not at all."""
        path = Path(path)
        about = {
            "format": FORMAT,
            "hash": self.hash,
            "clients": self.clients,
            "new_clients": self.new_clients,
            "dataset_hash": self.dataset_hash,
            "recipe": self.recipe,
            "names": list(self.names),
        }
        text = json.dumps(about).encode()
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            owner=self.owner,
            split=self.split,
            about=np.frombuffer(text, np.uint8),
            # the hash covers the deal; this covers the description, so that neither can be altered unnoticed
            seal=np.frombuffer(hashlib.sha256(text).digest(), np.uint8),
        )
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(buffer.getvalue())
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise UserError(f"{path}: the partition cannot be written ({error}).") from error

    @staticmethod
    def load(path: Path | str) -> Partition:
        """Reads a saved partition and verifies its hash."""
        path = Path(path)
        arrays = arrays_of(path, ("owner", "split", "about", "seal"), "Make one with 'fedtailor partition make'.")
        try:
            text = arrays["about"].tobytes()
            told = json.loads(text)
            made = Partition(
                owner=arrays["owner"],
                split=arrays["split"],
                clients=int(told["clients"]),
                new_clients=int(told["new_clients"]),
                dataset_hash=told["dataset_hash"],
                recipe=told["recipe"],
                names=tuple(told["names"]),
            )
            whole = hashlib.sha256(text).digest() == arrays["seal"].tobytes() and made.hash == told["hash"]
            version = told["format"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: not a partition, or damaged ({error!r}). Copy it again or make it again."
            ) from error
        if version != FORMAT:
            raise UserError(f"{path}: partition format {version}, this fedtailor reads format {FORMAT}. Make it again.")
        if not whole:
            raise UserError(f"{path}: its hash does not match: damaged or changed after it was saved. Make it again.")
        return made


def make(dataset: Dataset, config: PartitionConfig, clients: int, seed: int) -> Partition:
    """Deals the data set to `clients` clients and config.new_clients held-out ones, or loads config.file."""
    if config.file:
        return _saved(dataset, config, clients)
    config.check(clients)
    from . import rules  # brings torch by way of the seeds; names and saved partitions do without

    pool = np.flatnonzero(~dataset.official_test) if config.pool == "train" else np.arange(len(dataset))
    total = clients + config.new_clients
    if config.name == "natural":
        dealt, names = rules.natural(dataset, pool, config, clients, seed)
    else:
        if config.smallest * total > len(pool):
            raise UserError(
                f"clients = {clients} (and partition.new_clients = {config.new_clients}) need at least "
                f"{config.smallest} images each, but '{dataset.name}' has {len(pool)} to deal: enough for "
                f"{len(pool) // config.smallest} clients. Lower the number of clients or partition.min_samples."
            )
        dealt = rules.deal(dataset, pool, config, total, seed)
        names = tuple(f"client-{client:03d}" for client in range(total))
    _require_enough(dealt, names, config)
    owner = np.full(len(dataset), -1, np.int32)
    owner[pool] = dealt
    split = rules.split(owner, dataset.labels, total, config, seed, dataset.split)
    _require_splits(owner, split, names, config)
    recipe = {"data": dataset.name, **asdict(config), "clients": clients, "seed": seed}
    for option, used_by in (("alpha", "dirichlet"), ("classes", "label-skew")):
        if not config.name.startswith(used_by):
            del recipe[option]
    del recipe["file"]
    return Partition(owner, split, clients, config.new_clients, dataset.hash, recipe, names)


def _saved(dataset: Dataset, config: PartitionConfig, clients: int) -> Partition:
    partition = Partition.load(config.file)
    partition.require(dataset)
    if partition.clients != clients:
        raise UserError(
            f"partition.file = '{config.file}' has {partition.clients} clients, but clients = {clients}. "
            f"Set clients = {partition.clients} or use another partition."
        )
    return partition


def _require_splits(owner: np.ndarray, split: np.ndarray, names: tuple[str, ...], config: PartitionConfig) -> None:
    """A manifest can put so many of a client's images into some splits that nothing is left for another."""
    for which, needed, advice in (
        (TRAIN, True, ""),
        (VAL, config.val > 0, ", or do without: partition.val = 0"),
        (TEST, config.test > 0, ", or do without: partition.test = 0"),
    ):
        lacking = (
            [name for i, name in enumerate(names) if not ((owner == i) & (split == which)).any()] if needed else []
        )
        if lacking:
            raise UserError(
                f"{lacking[0]} has no {SPLITS[which]} images: the splits that the data gives leave none for it. Name "
                f"some of its images {SPLITS[which]}{advice}."
            )


def _require_enough(dealt: np.ndarray, names: tuple[str, ...], config: PartitionConfig) -> None:
    sizes = np.bincount(dealt[dealt >= 0], minlength=len(names))
    if sizes.min() < config.smallest:
        small = int(sizes.argmin())
        raise UserError(
            f"{names[small]} holds {sizes[small]} images, fewer than the {config.smallest} that every client must hold "
            f"(partition.min_samples = {config.min_samples}, and one image in each split). "
            "Lower partition.min_samples or the number of clients."
        )
