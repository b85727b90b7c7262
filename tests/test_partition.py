"""Every partition rule keeps its guarantees; saved partitions cannot change unnoticed."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.data import rules
from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import NAMES, TEST, TRAIN, UNUSED, VAL, Partition, PartitionConfig, make
from fedtailor.errors import UserError


def toy(n: int = 600, classes: int = 6, owners: int = 4, seed: int = 0, test: float = 0.0) -> Dataset:
    """A set of 1x1 images with unequal classes; every natural owner has some."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(classes, 5.0))
    labels = np.concatenate([np.arange(classes), rng.choice(classes, n - classes, p=weights)])
    owner = np.arange(n) % owners
    images = rng.integers(0, 256, (n, 1, 1, 1), dtype=np.uint8)
    names = tuple(f"owner {i}" for i in range(owners))
    return Dataset("toy", images, labels, tuple("abcdefghij"[:classes]), rng.random(n) < test, owner, names)


TOY = toy()


def check(partition: Partition, dataset: Dataset, config: PartitionConfig) -> None:
    total = partition.clients + partition.new_clients
    assert partition.owner.dtype == np.int32
    assert partition.split.dtype == np.uint8
    assert len(partition.names) == len(set(partition.names)) == total
    assert ((partition.owner == -1) == (partition.split == UNUSED)).all()
    seen = np.zeros(len(dataset), int)
    for client in range(total):
        parts = [partition.indices(client, split) for split in (TRAIN, VAL, TEST)]
        for part, share in zip(parts, (1.0, config.val, config.test), strict=True):
            assert (len(part) > 0) == (share > 0)
            assert (np.diff(part) > 0).all()
            seen[part] += 1
        assert sum(map(len, parts)) >= config.min_samples
    assert seen.max() == 1
    assert (seen > 0).sum() == partition.sizes().sum() == (partition.owner >= 0).sum()
    json.dumps(partition.recipe)


configs = st.builds(
    PartitionConfig,
    name=st.sampled_from(sorted(set(NAMES) - {"natural", "dirichlet-class"})),
    alpha=st.floats(1e-3, 100),
    classes=st.integers(2, 4),
    samples=st.sampled_from([0, 0, 12, 13]),
    min_samples=st.integers(1, 12),
    val=st.sampled_from([0.0, 0.01, 0.2, 0.45]),
    test=st.sampled_from([0.0, 0.01, 0.25, 0.5]),
    pool=st.sampled_from(["all", "train"]),
    new_clients=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(config=configs, clients=st.integers(3, 9), seed=st.integers(0, 2**32))
def test_guarantees(config: PartitionConfig, clients: int, seed: int):
    dataset = toy(test=0.2)
    partition = make(dataset, config, clients, seed)
    check(partition, dataset, config)
    assert make(dataset, config, clients, seed).hash == partition.hash
    others = (make(dataset, config, clients, seed + i) for i in range(1, 10))  # two of a small set may be dealt alike
    assert any(other.hash != partition.hash for other in others)
    if config.pool == "train":
        assert (partition.owner[dataset.official_test] == -1).all()
    if config.samples:
        assert set(partition.sizes().sum(1)) == {config.samples}
    counts = partition.counts(dataset.labels, 6)
    if config.name == "label-skew":
        held = counts > 0
        assert (held.sum(1) == config.classes).all()
        assert held.any(0).all()
        holders = held.sum(0)
        assert holders.max() - holders.min() <= 1
        if not config.samples:
            for label in range(6):
                shares = counts[held[:, label], label]
                assert shares.max() - shares.min() <= 1
    elif config.name in ("iid", "dirichlet-client"):
        assert np.ptp(counts.sum(1)) <= (config.name == "iid")


@settings(max_examples=25, deadline=None)
@given(
    alpha=st.floats(0.2, 100),
    clients=st.integers(2, 7),
    new_clients=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_guarantees_of_dirichlet_class(alpha: float, clients: int, new_clients: int, seed: int):
    config = PartitionConfig("dirichlet-class", alpha, min_samples=5, new_clients=new_clients)
    partition = make(TOY, config, clients, seed)
    check(partition, TOY, config)
    assert (partition.owner >= 0).all()
    assert make(TOY, config, clients, seed).hash == partition.hash
    assert make(TOY, config, clients, seed + 1).hash != partition.hash


@pytest.mark.parametrize("new_clients", [0, 1, 2])
def test_natural(new_clients: int):
    config = PartitionConfig("natural", new_clients=new_clients)
    one, again, other = (make(TOY, config, 4 - new_clients, seed) for seed in (0, 0, 1))
    check(one, TOY, config)
    assert one.hash == again.hash != other.hash
    assert set(one.names) == set(TOY.owners)
    assert TOY.owner is not None
    for client, name in enumerate(one.names):
        assert (TOY.owner[one.owner == client] == TOY.owners.index(name)).all()
    held_out = {make(TOY, config, 4 - new_clients, seed).names[4 - new_clients :] for seed in range(20)}
    assert len(held_out) == {0: 1, 1: 4, 2: 6}[new_clients]


def test_names_and_rules_are_the_same():
    assert {*rules.RULES, "natural"} == set(NAMES)


# what each rule is about


def balanced(per_class: int = 600, classes: int = 10) -> Dataset:
    n = per_class * classes
    labels = np.tile(np.arange(classes), per_class)
    images = np.random.default_rng(0).integers(0, 256, (n, 1, 1, 1), dtype=np.uint8)
    return Dataset("balanced", images, labels, tuple("abcdefghij"[:classes]), np.zeros(n, bool))


def test_the_fednas_setting():
    """20 clients, 5 of 10 classes, all images: a class has 10 holders with a tenth of it each."""
    data = balanced()
    partition = make(data, PartitionConfig("label-skew", classes=5, val=0, test=0.25), 20, 0)
    counts = partition.counts(data.labels, 10)
    assert set(counts.ravel()) == {0, 60}
    assert (partition.sizes() == [225, 0, 75]).all()
    assert len({tuple(row) for row in counts > 0}) > 10  # not a few blocks of clients with the same classes


def test_label_skew_uses_every_class_when_it_does_not_divide():
    data = balanced(60)
    counts = make(data, PartitionConfig("label-skew", classes=3), 7, 0).counts(data.labels, 10)
    assert ((counts > 0).sum(1) == 3).all()
    assert sorted((counts > 0).sum(0)) == [2] * 9 + [3]
    assert counts.sum() == 600


def test_dirichlet_client_uses_everything_and_nobody_gets_only_leftovers():
    data = balanced()
    counts = make(data, PartitionConfig(alpha=0.3), 100, 0).counts(data.labels, 10)
    assert (counts.sum(1) == 60).all()
    top = np.sort(counts, axis=1)[:, ::-1] / 60
    assert 0.4 < top[:, 0].mean() < 0.5  # .46 is what Dir(.3) over 10 classes gives
    assert abs(top[:50, 0].mean() - top[50:, 0].mean()) < 0.06


def test_dirichlet_client_mix_does_not_depend_on_the_other_clients():
    data = balanced()
    config = PartitionConfig(alpha=0.3, samples=100)
    few, many = (make(data, config, clients, 0).counts(data.labels, 10) for clients in (4, 8))
    assert (abs(few - many[:4]).sum(1) / 200 < 0.2).all()


@pytest.mark.parametrize("name", ["dirichlet-class", "dirichlet-client"])
def test_alpha_is_the_skew(name: str):
    data = balanced(300)
    config = PartitionConfig(name, min_samples=5)
    top = []
    for alpha in (0.1, 1.0, 100.0):
        counts = make(data, dataclasses.replace(config, alpha=alpha), 8, 3).counts(data.labels, 10)
        top.append((counts.max(1) / counts.sum(1)).mean())
    assert top[0] > top[1] > top[2]


def test_dirichlet_class_gives_nothing_to_a_full_client():
    data = balanced()
    counts = make(data, PartitionConfig("dirichlet-class", alpha=0.2), 8, 0).counts(data.labels, 10)
    before = np.cumsum(counts, axis=1) - counts
    assert (counts[before >= 6000 / 8] == 0).all()
    assert np.ptp(counts.sum(1)) > 0


def test_a_tiny_alpha_is_still_dealt():
    data = balanced(60)
    counts = make(data, PartitionConfig(alpha=1e-8), 10, 0).counts(data.labels, 10)
    assert (counts.sum(1) == 60).all()


@settings(max_examples=30, deadline=None)
@given(val=st.floats(0.05, 0.4), test=st.floats(0.05, 0.4), seed=st.integers(0, 1000))
def test_splits_are_stratified(val: float, test: float, seed: int):
    partition = make(TOY, PartitionConfig(val=val, test=test), 5, seed)
    counts = partition.counts(TOY.labels, 6)
    sizes = partition.sizes()
    for split in (VAL, TEST):
        share = sizes[:, [split]] / sizes.sum(1, keepdims=True)
        assert (abs(partition.counts(TOY.labels, 6, split) - counts * share) < 2).all()
    assert (abs(sizes[:, VAL] - sizes.sum(1) * val) <= 1).all()


def test_other_shares_keep_the_owners():
    one, other = (make(TOY, PartitionConfig(test=test), 5, 0) for test in (0.2, 0.3))
    assert np.array_equal(one.owner, other.owner)
    assert one.hash != other.hash


# bad options


@pytest.mark.parametrize(
    ("change", "clients", "words"),
    [
        ({"name": "dirichlet"}, 4, "unknown partition 'dirichlet'.*Did you mean"),
        ({"alpha": 0.0}, 4, r"partition\.alpha = 0\.0: allowed is a number above 0"),
        ({"alpha": -1.0}, 4, r"partition\.alpha"),
        ({"alpha": float("nan")}, 4, r"partition\.alpha"),
        ({"alpha": float("inf")}, 4, r"partition\.alpha"),
        ({"val": 0.5, "test": 0.5}, 4, r"partition\.val = 0\.5 and partition\.test = 0\.5 leave nothing"),
        ({"val": -0.1}, 4, r"partition\.val"),
        ({"test": 1.0}, 4, r"partition\.test"),
        ({"pool": "test"}, 4, r"partition\.pool = 'test': allowed is 'all' or 'train'"),
        ({"new_clients": -1}, 4, r"partition\.new_clients"),
        ({"samples": -1}, 4, r"partition\.samples"),
        ({"min_samples": 0}, 4, r"partition\.min_samples"),
        ({"samples": 5}, 4, r"partition\.samples = 5 is below the 10"),
        ({"samples": 151}, 4, r"partition\.samples = 151.*at most 150"),
        ({"samples": 151, "name": "iid"}, 4, "at most 150"),
        ({"samples": 50, "name": "dirichlet-class"}, 4, "no equal shares"),
        ({}, 0, "clients = 0"),
        ({}, 61, "clients = 61.*enough for 60"),
        ({"new_clients": 2}, 59, "enough for 60"),
        ({"name": "label-skew", "classes": 0}, 4, r"partition\.classes"),
        ({"name": "label-skew", "classes": 7}, 4, r"partition\.classes = 7.*1 to 6"),
        (
            {"name": "label-skew", "classes": 1},
            4,
            "cover only 4 of 6 classes. Raise it to 2 or have at least 6 clients",
        ),
        ({"name": "label-skew", "samples": 140, "classes": 5}, 4, r"partition\.samples = 140.*at most"),
        ({"name": "natural"}, 5, "clients = 5.*4 natural"),
        ({"name": "natural", "new_clients": 1}, 4, "new_clients = 1.*4 natural"),
        ({"name": "natural", "min_samples": 200}, 4, "owner 0 holds 150 images.*200"),
    ],
)
def test_bad_options(change: dict, clients: int, words: str):
    with pytest.raises(UserError, match=words):
        make(TOY, PartitionConfig(**change), clients, 0)


def test_natural_needs_owners():
    with pytest.raises(UserError, match="names no clients of its own"):
        make(balanced(10), PartitionConfig("natural"), 4, 0)


def test_dirichlet_class_gives_up_with_advice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "TRIES", 20)
    with pytest.raises(UserError, match=r"alpha = 0\.01.*Raise partition\.alpha.*partition\.min_samples"):
        make(TOY, PartitionConfig("dirichlet-class", alpha=0.01, min_samples=14), 40, 0)


def test_a_class_with_too_few_images():
    labels = np.array([0] * 50 + [1] * 50 + [2])
    data = Dataset("toy", np.zeros((101, 1, 1, 1), np.uint8), labels, ("a", "b", "rare"), np.zeros(101, bool))
    with pytest.raises(UserError, match="class 'rare' has 1 images"):
        make(data, PartitionConfig("label-skew", classes=2), 5, 0)


def test_classes_without_images_are_left_alone():
    labels = np.array([0, 2] * 50)
    data = Dataset("toy", np.zeros((100, 1, 1, 1), np.uint8), labels, ("a", "none", "b"), np.zeros(100, bool))
    for name in rules.RULES:
        check(make(data, PartitionConfig(name, alpha=1.0), 4, 0), data, PartitionConfig(name))


def test_every_split_gets_an_image_whatever_the_least_is():
    assert make(TOY, PartitionConfig("iid", samples=3, min_samples=1), 4, 0).sizes().tolist() == [[1, 1, 1]] * 4
    with pytest.raises(UserError, match="below the 3 images"):
        make(TOY, PartitionConfig("iid", samples=2, min_samples=1), 4, 0)


def test_a_hash_is_of_the_deal_and_its_data_and_of_nothing_else():
    one = make(TOY, PartitionConfig("iid", new_clients=1), 3, 0)
    owner, split = one.owner.copy(), one.split.copy()
    owner[0], split[0] = (owner[0] + 1) % 4, (split[0] + 1) % 3
    changes = ({"owner": owner}, {"split": split}, {"clients": 4}, {"new_clients": 2}, {"dataset_hash": "0"})
    assert len({one.hash, *(dataclasses.replace(one, **change).hash for change in changes)}) == 6
    assert dataclasses.replace(one, recipe={}, names=()).hash == one.hash
