"""Batches: full, repeatable, the same one by one and all at once; augmentation by counter."""

from __future__ import annotations

import torch

from fedtailor.data.batches import AUGMENTATIONS, Split, Stream, augment, augmentation, steps_for
from fedtailor.kernels.random import uniform
from fedtailor.seeds import seed_of


def make_split(size: int = 10, side: int = 16) -> Split:
    images = (torch.arange(size * 3 * side * side) % 251).to(torch.uint8).reshape(size, 3, side, side)
    ones = torch.ones(1, 3, 1, 1)
    return Split(images, torch.arange(size) % 4, 2, size - 4, 0 * ones, ones)


def test_every_batch_is_full_and_every_image_used_equally() -> None:
    split = make_split()
    assert steps_for(6, 4, 2.0) == 3
    assert steps_for(6, 32, 1.0) == 1
    assert steps_for(6, 4, 0.0) == 0
    order = Stream(split, 4, "none", 7).order(3)
    assert order.shape == (3, 4)
    assert torch.bincount(order.flatten(), minlength=10).tolist() == [0, 0, 2, 2, 2, 2, 2, 2, 0, 0]
    assert Stream(split, 32, "none", 7).order(2).shape == (2, 6)


def test_batches_one_by_one_equal_batches_at_once() -> None:
    for how in AUGMENTATIONS:
        stream = Stream(make_split(), 4, how, 11)
        order = stream.order(5)
        x, y = stream.batches(order, 0)
        for i in range(5):
            one = stream.batches(order[i : i + 1], i)
            assert torch.equal(one[0][0], x[i])
            assert torch.equal(one[1][0], y[i])


def test_augmentation_crops_flips_and_cuts() -> None:
    x = torch.arange(1.0, 1 + 2 * 16 * 16).reshape(2, 1, 16, 16)
    still = torch.tensor([[0.5, 0.5]] * 5)  # the middle of the padding: no shift; 0.5 is no flip
    assert torch.equal(augment(x, "crop-flip", still), x)
    flip = still.clone()
    flip[2] = 0.1
    assert torch.equal(augment(x, "crop-flip", flip), x.flip(3))
    assert torch.equal(augment(x, "crop", flip), x)
    corner = still.clone()
    corner[:2] = 0.0
    assert torch.equal(augment(x, "crop", corner)[:, :, 2:, 2:], x[:, :, :-2, :-2])
    corner[:2] = 0.999
    assert torch.equal(augment(x, "crop", corner)[:, :, :-2, :-2], x[:, :, 2:, 2:])
    cut = augment(x, "crop-flip-cutout", still)
    hole = torch.zeros(16, 16, dtype=torch.bool)
    hole[4:12, 4:12] = True  # DARTS' Cutout of half the side: from 8 - 4 up to, and without, 8 + 4
    assert torch.equal(cut == 0, hole.expand_as(x))
    aside = still.clone()
    aside[3] = 0.25  # rows from 4 - 4, columns as before
    hole[0:8, 4:12], hole[8:12] = True, False
    assert torch.equal(augment(x, "crop-flip-cutout", aside) == 0, hole.expand_as(x))
    assert torch.equal(augment(x, "none", still), x)


def test_counter_random_numbers_are_uniform_and_independent_of_grouping() -> None:
    seeds = torch.tensor([seed_of("a", i) for i in range(50)])
    together = uniform(seeds, 200)
    alone = torch.stack([uniform(s, 200) for s in seeds])
    assert torch.equal(together, alone)
    assert abs(float(together.mean()) - 0.5) < 0.01
    assert abs(float(together.std()) - 12**-0.5) < 0.01
    counts = torch.histc(together, 10, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 33  # chi-square, 9 degrees of freedom, p = 0.0001
    assert abs(float(torch.corrcoef(together[:2])[0, 1])) < 0.25
    draws = augmentation(seeds[:3], 4)
    assert torch.equal(draws[:, 4:8], augmentation(seeds[1:2], 4))
