"""Deals of images that the package's partition rules do not know."""

from __future__ import annotations

import numpy as np

from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import TEST, TRAIN, UNUSED, VAL, Partition
from fedtailor.seeds import rng_of

USERS, A = 50, 68
NODES, VAL_IMAGES = 50, 10_000
OWNERS, SHARDS, KEPT_FOR_VAL = 100, 2, 50


def per_fedavg(data: Dataset, seed: int) -> Partition:
    """Fallah et al., section 5: half of the users hold `a` images of each of the first five classes; the others a/2 of
    one of these and 2a of one of the other five. Of a user's images of a class, a tenth is for val, a fifth for test.
    """
    owner, split = np.full(len(data.labels), -1, np.int32), np.full(len(data.labels), UNUSED, np.uint8)
    rng = rng_of(seed, "per-fedavg deal")
    stock = {c: list(rng.permutation(np.flatnonzero(data.labels == c))) for c in range(10)}
    for user in range(USERS):
        if user < USERS // 2:
            wanted = dict.fromkeys(range(5), A)
        else:
            wanted = {user % 5: A // 2, 5 + (user // 5) % 5: 2 * A}
        for label, number in wanted.items():
            images = [stock[label].pop() for _ in range(number)]
            owner[images] = user
            val, test = round(0.1 * number), round(0.2 * number)
            split[images[:val]], split[images[val : val + test]] = VAL, TEST
            split[images[val + test :]] = TRAIN
    names = tuple(f"user-{i:02d}" for i in range(USERS))
    return Partition(owner, split, USERS, 0, data.hash, {"rule": "per-fedavg", "data": data.name, "seed": seed}, names)


def pfedhn(data: Dataset, seed: int) -> Partition:
    """Shamsian et al., section 5: two classes a client; its share of a class is drawn from U(0.4, 0.6) and divided by
    the sum over the clients that have the class. Ten thousand of the official training images are for val; train, val
    and the official test images are dealt by the same shares. Every class goes to as many clients as any other.
    """
    rng = rng_of(seed, "pfedhn deal")
    wanted = np.full(10, 2 * NODES // 10)
    held: list[list[int]] = []
    for _ in range(NODES):
        held.append([])
        for _ in range(2):
            label = int(rng.choice(np.flatnonzero(wanted == wanted.max())))
            wanted[label] -= 1
            held[-1].append(label)
    parts = rng.permutation(np.flatnonzero(~data.official_test))
    splits = {VAL: parts[:VAL_IMAGES], TRAIN: parts[VAL_IMAGES:], TEST: np.flatnonzero(data.official_test)}
    owner, split = np.full(len(data.labels), -1, np.int32), np.full(len(data.labels), UNUSED, np.uint8)
    for label in range(10):
        holders = [i for i, labels in enumerate(held) for each in labels if each == label]
        shares = rng.uniform(0.4, 0.6, len(holders))
        ends = np.cumsum(shares / shares.sum())[:-1]
        for kind, images in splits.items():
            mine = rng.permutation(images[data.labels[images] == label])
            for client, dealt in zip(holders, np.split(mine, np.floor(ends * len(mine)).astype(int)), strict=True):
                owner[dealt], split[dealt] = client, kind
    names = tuple(f"node-{i:02d}" for i in range(NODES))
    return Partition(owner, split, NODES, 0, data.hash, {"rule": "pfedhn", "data": data.name, "seed": seed}, names)


def fedrep(data: Dataset, seed: int) -> Partition:
    """Collins et al., as public copies of their code deal: the official training images of a class are cut into equal
    shards, as are its test images, and every client draws two. Nothing keeps it from drawing one class twice, as one
    in ten does. Of a client's 500 training images, fifty are for val.
    """
    rng = rng_of(seed, "fedrep deal")
    drawn = rng.permutation(np.repeat(np.arange(10), OWNERS * SHARDS // 10)).reshape(OWNERS, SHARDS)
    owner, split = np.full(len(data.labels), -1, np.int32), np.full(len(data.labels), UNUSED, np.uint8)
    for official, kind in ((False, TRAIN), (True, TEST)):
        for label in range(10):
            images = rng.permutation(np.flatnonzero((data.labels == label) & (data.official_test == official)))
            holders = np.repeat(np.arange(OWNERS), (drawn == label).sum(1))
            for client, shard in zip(holders, np.array_split(images, len(holders)), strict=True):
                owner[shard], split[shard] = client, kind
    for client in range(OWNERS):
        mine = np.flatnonzero((owner == client) & (split == TRAIN))
        split[rng.choice(mine, KEPT_FOR_VAL, replace=False)] = VAL
    names = tuple(f"client-{i:02d}" for i in range(OWNERS))
    return Partition(owner, split, OWNERS, 0, data.hash, {"rule": "fedrep", "data": data.name, "seed": seed}, names)
