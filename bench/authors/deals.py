"""Deals of images that the package's partition rules do not know."""

from __future__ import annotations

import numpy as np

from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import TEST, TRAIN, UNUSED, VAL, Partition
from fedtailor.seeds import rng_of

USERS, A = 50, 68


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
