"""The partition rules. Each decides how many images of each class each client gets; dealing them out is common to all.

Every draw has its own key, so a client's class mix or split does not depend on how many other clients there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from ..seeds import rng_of
from .dataset import Dataset
from .partition import TEST, TRAIN, UNUSED, VAL, PartitionConfig

TRIES = 1000  # draws of dirichlet-class before giving up on min_samples


@dataclass(frozen=True)
class Deal:
    """What a rule sees: how many images of each class there are, and who wants some."""

    labels: np.ndarray  # of the pool
    supply: np.ndarray  # [classes]: images in the pool
    classes: tuple[str, ...]
    clients: int  # held-out ones included
    config: PartitionConfig
    seed: int

    def rng(self, *key: int | str) -> np.random.Generator:
        return rng_of(self.seed, "partition", self.config.name, *key)

    def share(self) -> int:
        """Images per client where all get the same number."""
        most = len(self.labels) // self.clients
        if self.config.samples > most:
            raise UserError(
                f"partition.samples = {self.config.samples}: {len(self.labels)} images give {self.clients} clients at "
                f"most {most} each. Lower it (0: as many as there are) or the number of clients."
            )
        return self.config.samples or most


def deal(dataset: Dataset, pool: np.ndarray, config: PartitionConfig, clients: int, seed: int) -> np.ndarray:
    """The client of each image of the pool, -1 where nobody gets it."""
    labels = dataset.labels[pool]
    supply = np.bincount(labels, minlength=len(dataset.classes))
    task = Deal(labels, supply, dataset.classes, clients, config, seed)
    counts = RULES[config.name](task)
    owner = np.full(len(pool), -1, np.int32)
    for label in range(len(supply)):
        images = task.rng("deal", label).permutation(np.flatnonzero(labels == label))
        holders = np.repeat(np.arange(clients), counts[:, label])
        owner[images[: len(holders)]] = holders
    return owner


def iid(task: Deal) -> np.ndarray:
    """Random equal shares; without `samples` the remainder is dealt too, one image each."""
    order = task.rng("order").permutation(task.labels)
    parts = np.array_split(order, task.clients)
    if task.config.samples:
        parts = np.split(order[: task.share() * task.clients], task.clients)
    return np.stack([np.bincount(part, minlength=len(task.supply)) for part in parts])


def dirichlet_class(task: Deal) -> np.ndarray:
    """Rule A: q_k ~ Dir(alpha) over clients for every class k; who already holds N/K or more gets nothing of it.

    Drawn anew until every client holds enough.
    """
    rng = task.rng("shares")
    fair = len(task.labels) / task.clients
    for _ in range(TRIES):
        counts = np.zeros((task.clients, len(task.supply)), np.int64)
        held = np.zeros(task.clients, np.int64)
        for label, images in enumerate(task.supply):
            hungry = held < fair
            shares = rng.dirichlet(np.full(task.clients, task.config.alpha)) * hungry
            if not shares.sum() > 0:  # a tiny alpha can put all the weight on clients that are full
                shares = np.zeros(task.clients)
                shares[rng.choice(np.flatnonzero(hungry))] = 1
            cuts = np.cumsum(shares)
            # divided first: the last cut is then exactly the number of images
            edges = np.floor(cuts / cuts[-1] * images).astype(np.int64)
            counts[:, label] = np.diff(edges, prepend=0)
            held += counts[:, label]
        if held.min() >= task.config.smallest:
            return counts
    raise UserError(
        f"partition.name = 'dirichlet-class': in {TRIES} draws with partition.alpha = {task.config.alpha} some of the "
        f"{task.clients} clients always held fewer than {task.config.smallest} of {len(task.labels)} images. Raise "
        "partition.alpha, lower partition.min_samples or the number of clients, or use 'dirichlet-client'."
    )


def dirichlet_client(task: Deal) -> np.ndarray:
    """Rule B: p_i ~ Dir(alpha) over classes for every client i, which draws an equal share without replacement.

    All clients ask at once. Where they ask for more of a class than there is, chance decides who gets it, and the
    others ask again with their remaining class weights. So no client is the last one that has to take what is left.
    """
    mix = np.stack(
        [
            task.rng("mix", client).dirichlet(np.full(len(task.supply), task.config.alpha))
            for client in range(task.clients)
        ]
    )
    rng = task.rng("draw")
    left = task.supply.copy()
    counts = np.zeros_like(mix, dtype=np.int64)
    missing = np.full(task.clients, task.share())
    while missing.any():  # every turn that leaves somebody short exhausts a class
        weights = mix * (left > 0)
        dry = ~(weights.sum(1) > 0)
        weights[dry] = left
        asked = rng.multinomial(missing, weights / weights.sum(1, keepdims=True))
        for label in np.flatnonzero(asked.sum(0) > left):
            asked[:, label] = rng.multivariate_hypergeometric(asked[:, label], left[label])
        counts += asked
        left -= asked.sum(0)
        missing -= asked.sum(1)
    return counts


def label_skew(task: Deal) -> np.ndarray:
    """Exactly k classes per client (FedNAS: 5 of 10); all classes have equally many holders, give or take one."""
    k = task.config.classes
    present = np.flatnonzero(task.supply)
    if k > len(present):
        raise UserError(
            f"partition.classes = {k}: the data has {len(present)} classes. Allowed are 1 to {len(present)}."
        )
    slots = task.clients * k
    if slots < len(present):
        raise UserError(
            f"partition.classes = {k}: {task.clients} clients cover only {slots} of {len(present)} classes. Raise it "
            f"to {-(-len(present) // task.clients)} or have at least {-(-len(present) // k)} clients."
        )
    rng = task.rng("holders")
    quota = np.full(len(present), slots // len(present))
    quota[rng.permutation(len(present))[: slots % len(present)]] += 1
    holds = np.zeros((task.clients, len(present)), bool)
    for client in range(task.clients):
        ahead = task.clients - client
        # a class with as many open places as there are clients ahead has to go to each of them
        forced = np.flatnonzero(quota == ahead)
        holds[client, forced] = True
        if len(forced) < k:
            open_places = np.where(quota < ahead, quota, 0)
            chance = open_places / open_places.sum()
            holds[client, rng.choice(len(present), k - len(forced), replace=False, p=chance)] = True
        quota -= holds[client]
    counts = np.zeros((task.clients, len(task.supply)), np.int64)
    counts[:, present] = _fill(task, holds, present)
    return counts


def _fill(task: Deal, holds: np.ndarray, present: np.ndarray) -> np.ndarray:
    holders, supply = holds.sum(0), task.supply[present]
    scarce = int(np.argmin(supply // holders))
    most = int(supply[scarce] // holders[scarce])
    if most == 0:
        raise UserError(
            f"class '{task.classes[present[scarce]]}' has {supply[scarce]} images for {holders[scarce]} clients. "
            "Lower partition.classes or the number of clients."
        )
    k, samples = task.config.classes, task.config.samples
    rank = np.cumsum(holds, axis=0) - 1  # place of a client among the holders of a class
    if not samples:
        return holds * (supply // holders + (rank < supply % holders))
    if samples > most * k:
        raise UserError(
            f"partition.samples = {samples}: class '{task.classes[present[scarce]]}' has {most} images for each of its "
            f"{holders[scarce]} holders, so at most {most * k} per client. Lower it (0: as many as there are)."
        )
    order = np.cumsum(holds, axis=1) - 1  # place of a class among those of a client
    return holds * (samples // k + (order < samples % k))


def natural(
    dataset: Dataset, pool: np.ndarray, config: PartitionConfig, clients: int, seed: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The data's own clients and their names; chance decides which of them are held out."""
    if dataset.owner is None:
        raise UserError(
            f"partition.name = 'natural': '{dataset.name}' names no clients of its own. Use another rule, or data with "
            "clients (npz with `client`, DIR/client/class/*.png)."
        )
    total = len(dataset.owners)
    if clients + config.new_clients != total:
        raise UserError(
            f"clients = {clients} and partition.new_clients = {config.new_clients}: '{dataset.name}' has {total} "
            f"natural clients, so both together have to be {total}."
        )
    order = rng_of(seed, "partition", "natural", "held out").permutation(total)
    order = np.concatenate([np.sort(order[:clients]), np.sort(order[clients:])])
    return np.argsort(order)[dataset.owner[pool]].astype(np.int32), tuple(dataset.owners[i] for i in order)


def split(
    owner: np.ndarray,
    labels: np.ndarray,
    clients: int,
    config: PartitionConfig,
    seed: int,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """Train, val and test of every client, each with the client's own label mix as nearly as whole images allow.

    Images that the data itself puts into a split stay there. Of the kinds of split that it gives a client no image of,
    the client's share is drawn from its other images: those said to be for training, and those of which nothing is
    said.
    """
    out = np.full(len(owner), UNUSED, np.uint8)
    classes = int(labels.max()) + 1
    for client in range(clients):
        images = np.flatnonzero(owner == client)
        said = None if given is None else given[images]
        out[images] = split_of(client, labels[images], classes, config, seed, said)
    return out


def split_of(
    client: int,
    labels: np.ndarray,
    classes: int,
    config: PartitionConfig,
    seed: int,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """Train, val or test for each of one client's images; those that are given as val or test are that."""
    rng = rng_of(seed, "partition", "split", client)
    out = np.full(len(labels), TRAIN, np.uint8)
    said = set() if given is None else set(given.tolist()) & {VAL, TEST}
    if given is not None:
        fixed = np.isin(given, (VAL, TEST))
        out[fixed] = given[fixed]
    images = rng.permutation(np.flatnonzero(out == TRAIN))
    # classes in random order, so that none is always the one that rounding favours
    rank = rng.permutation(classes)
    images = images[np.argsort(rank[labels[images]], kind="stable")]
    if not len(images):
        return out
    n_val, n_test = split_sizes(len(images), config)
    for kind, wanted in ((TEST, n_test), (VAL, n_val)):
        if kind in said:
            continue
        # evenly spaced places in a list sorted by class: each class gives its share, give or take one
        at = np.floor((np.arange(wanted) + rng.random()) * (len(images) / max(wanted, 1))).astype(np.int64)
        at = np.minimum(at, len(images) - 1)  # in case of rounding up to the very end
        out[images[at]] = kind
        images = np.delete(images, at)
    return out


def split_sizes(n: int, config: PartitionConfig) -> tuple[int, int]:
    """How many of a client's images are for val and for test."""
    n_val, n_test = (max(1, round(n * share)) if share else 0 for share in (config.val, config.test))
    while n_val + n_test >= n:  # rounding up took it all; train needs one
        n_val, n_test = (n_val - 1, n_test) if n_val > n_test else (n_val, n_test - 1)
    return n_val, n_test


RULES: dict[str, Callable[[Deal], np.ndarray]] = {
    "iid": iid,
    "dirichlet-class": dirichlet_class,
    "dirichlet-client": dirichlet_client,
    "label-skew": label_skew,
}
