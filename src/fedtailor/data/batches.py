"""Batches on the compute device: uint8 images stay put, a batch is drawn by index, normalised and augmented there.

Every batch is full: batches are cut one after another from shuffles of the client's images joined end to end, so no
client has a ragged last batch and a step always has the same shape. A client with fewer images than a batch uses them
all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.random import uniform
from ..seeds import rng_of
from ..values import sent

NORMALISATION = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def normalisation(name: str, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and std of a data set's channels, [1, channels, 1, 1] each; others are mapped from 0..255 to -1..1."""
    mean, std = NORMALISATION.get(name, ((0.5,) * channels, (0.5,) * channels))
    return torch.tensor(mean).reshape(1, -1, 1, 1), torch.tensor(std).reshape(1, -1, 1, 1)


@dataclass(frozen=True)
class Split:
    """A client's images of one split: a range of a store."""

    images: Tensor  # uint8 [N, C, H, W], the whole store
    labels: Tensor  # int64 [N]
    start: int
    size: int
    mean: Tensor
    std: Tensor

    def normal(self, images: Tensor) -> Tensor:
        return (images.to(torch.float32) / 255 - self.mean) / self.std

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels at positions of the store."""
        return self.normal(self.images[index]), self.labels[index]

    def chunks(self, size: int) -> list[Tensor]:
        """Positions of all images in order, in pieces."""
        everything = torch.arange(self.start, self.start + self.size, device=self.labels.device)
        return list(everything.split(size))

    def label_counts(self, classes: int) -> np.ndarray:
        return np.bincount(self._labels, minlength=classes)

    @cached_property
    def _labels(self) -> np.ndarray:
        """On the host; read from the device once."""
        return self.labels[self.start : self.start + self.size].cpu().numpy()


def steps_for(size: int, batch: int, epochs: float) -> int:
    """How many full batches make this many epochs."""
    return max(1, math.ceil(epochs * size / min(batch, size))) if epochs > 0 else 0


def trained_on(size: int, batch: int, epochs: float) -> int:
    """How many images these epochs see, of a split of so many: batches are full."""
    return steps_for(size, batch, epochs) * min(batch, size) if size else 0


def shuffled(split: Split, batch: int, steps: int, seed: int) -> np.ndarray:
    """Positions for `steps` full batches, [steps, batch], from shuffles joined end to end."""
    width = min(batch, split.size)
    rng = rng_of(seed, "shuffle")
    rounds = -(-steps * width // split.size)
    order = np.concatenate([rng.permutation(split.size) for _ in range(rounds)])[: steps * width]
    return order.reshape(steps, width) + split.start


def augmentation(seeds: Tensor, count: int) -> Tensor:
    """The random numbers that `augment` needs for `count` images of every step, [5, steps * count]."""
    return uniform(seeds, 5, count).movedim(-2, 0).reshape(5, -1)


def augment(x: Tensor, how: str, draws: Tensor) -> Tensor:
    """Random crop, flip and cutout of normalised images, as the drawn numbers [5, images] say."""
    if how == "none":
        return x
    count, _, height, width = x.shape
    pad = max(1, height // 8)
    top, left = (draws[0] * (2 * pad + 1)).long(), (draws[1] * (2 * pad + 1)).long()
    rows = top[:, None] + torch.arange(height, device=x.device)
    columns = left[:, None] + torch.arange(width, device=x.device)
    if "flip" in how:
        columns = torch.where((draws[2] < 0.5)[:, None], columns.flip(1), columns)
    padded = F.pad(x, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    who = torch.arange(count, device=x.device)[:, None, None]
    x = padded[who, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
    if "cutout" in how:
        half = height // 4
        middle_row, middle_column = (draws[3] * height).long(), (draws[4] * width).long()
        down = torch.arange(height, device=x.device) - middle_row[:, None]
        right = torch.arange(width, device=x.device) - middle_column[:, None]
        tall, wide = (-half <= down) & (down < half), (-half <= right) & (right < half)  # 16 of 32, as in DARTS
        x = x * ~(tall[:, None, :, None] & wide[:, None, None, :])
    return x


@dataclass(frozen=True)
class Stream:
    """Where a training job's batches come from."""

    split: Split
    batch: int
    augment: str
    seed: int

    @property
    def width(self) -> int:
        """Images in a batch."""
        return min(self.batch, self.split.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a batch's images."""
        return (self.width, *self.split.images.shape[1:])

    def order(self, steps: int) -> Tensor:
        """Positions of its images for so many steps, [steps, width]."""
        return joint_order([self], steps)[:, 0]

    def batches(self, order: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The batches of some rows of the order, the first of which is step `first`: [rows, width, ...] each."""
        x, y = joint_batches([self], order[:, None], first)
        return x[:, 0], y[:, 0]


def joint_order(streams: Sequence[Stream], steps: int) -> Tensor:
    """Positions for several streams of one store, [steps, streams, width]."""
    found = torch.from_numpy(np.stack([shuffled(s.split, s.batch, steps, s.seed) for s in streams], axis=1))
    return sent(found, streams[0].split.labels.device)


def joint_batches(streams: Sequence[Stream], order: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The batches of several streams of one store and one augmentation: [rows, streams, width, ...] each."""
    x, y = streams[0].split.at(order.reshape(-1))
    how = streams[0].augment
    if how != "none":
        steps = torch.arange(first, first + len(order), device=order.device)
        seeds = torch.stack([s.seed + steps for s in streams], dim=1)
        x = augment(x, how, augmentation(seeds.reshape(-1), order.shape[-1]))
    return x.reshape(*order.shape, *x.shape[1:]), y.reshape(order.shape)


AUGMENTATIONS = ("none", "crop", "crop-flip", "crop-flip-cutout")
