"""The federation's data as two stores: what clients learn from, and what only evaluation may open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .batches import Split, normalisation
from .dataset import Dataset
from .partition import TEST, TRAIN, VAL, Partition


@dataclass(frozen=True)
class Store:
    """Images of some splits of all clients, on the compute device, each client's split a contiguous range."""

    ranges: dict[tuple[int, int], Split]
    public: Split | None = None  # images that everybody may read and nobody has labels of

    def split(self, client: int, which: int) -> Split:
        return self.ranges[client, which]


def stores(dataset: Dataset, partition: Partition, device: torch.device) -> tuple[Store, Store]:
    """The learning store (train and val) and the test store. Methods are handed splits of the first alone."""
    return _store(dataset, partition, (TRAIN, VAL), device), _store(dataset, partition, (TEST,), device)


def _store(dataset: Dataset, partition: Partition, splits: tuple[int, ...], device: torch.device) -> Store:
    places: list[np.ndarray] = []
    bounds: dict[tuple[int, int], tuple[int, int]] = {}
    at = 0
    for client in range(partition.clients + partition.new_clients):
        for which in splits:
            found = partition.indices(client, which)
            places.append(found)
            bounds[client, which] = (at, len(found))
            at += len(found)
    order = np.concatenate(places)
    images = torch.from_numpy(np.ascontiguousarray(dataset.images[order].transpose(0, 3, 1, 2))).to(device)
    labels = torch.from_numpy(dataset.labels[order].astype(np.int64)).to(device)
    mean, std = (t.to(device) for t in normalisation(dataset.name, dataset.shape[0]))
    return Store({key: Split(images, labels, start, size, mean, std) for key, (start, size) in bounds.items()})
