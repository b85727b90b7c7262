"""Sources of images and the partitions that deal them to clients.

`sources.load` reads a data set, `partition.make` says who holds which image in which split, `picture` draws it.
"""

from __future__ import annotations

from .dataset import Dataset
from .partition import TEST, TRAIN, VAL, Partition, PartitionConfig
from .sources import load

__all__ = ["TEST", "TRAIN", "VAL", "Dataset", "Partition", "PartitionConfig", "load"]
