"""Every partition rule keeps its guarantees; saved partitions cannot change unnoticed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from fedtailor.cli.partition import app
from fedtailor.data import rules
from fedtailor.data.dataset import Dataset
from fedtailor.data.partition import NAMES, TEST, TRAIN, UNUSED, VAL, Partition, PartitionConfig, make
from fedtailor.data.picture import class_by_client_svg, class_by_client_text
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
    assert make(dataset, config, clients, seed + 1).hash != partition.hash
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


# saved partitions


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make(TOY, PartitionConfig(new_clients=1), 4, 0).save(tmp_path / "p.npz")
    return tmp_path / "p.npz"


def test_save_and_load(saved: Path):
    made, read = make(TOY, PartitionConfig(new_clients=1), 4, 0), Partition.load(saved)
    assert read.hash == made.hash
    assert np.array_equal(read.owner, made.owner)
    assert np.array_equal(read.split, made.split)
    assert (read.recipe, read.names, read.clients, read.new_clients) == (made.recipe, made.names, 4, 1)
    first = saved.read_bytes()
    made.save(saved)
    assert saved.read_bytes() == first
    assert os.listdir(saved.parent) == ["p.npz"]  # no temporary file stays behind


def test_a_saved_partition_is_used(saved: Path):
    config = PartitionConfig(name="iid", file=str(saved))
    assert make(TOY, config, 4, 99).hash == Partition.load(saved).hash
    with pytest.raises(UserError, match="has 4 clients, but clients = 5"):
        make(TOY, config, 5, 0)
    with pytest.raises(UserError, match="the data set changed since this partition was made"):
        make(toy(seed=1), config, 4, 0)
    with pytest.raises(UserError, match="no such file"):
        make(TOY, PartitionConfig(file="nowhere.npz"), 4, 0)


@pytest.mark.parametrize(
    "key", ["owner", "split", "recipe", "names", "clients", "dataset_hash", "format", "seal", "lost"]
)
def test_tampered_partitions(saved: Path, key: str):
    with np.load(saved) as file:
        arrays = dict(file)
    told = json.loads(arrays["about"].tobytes())
    if key in ("owner", "split", "seal"):
        arrays[key] = arrays[key].copy()
        arrays[key][0] ^= 1
    elif key == "lost":
        del arrays["owner"]
    else:
        told[key] = {"recipe": {}, "names": ["x"] * 5, "clients": 3, "dataset_hash": "0", "format": 2}[key]
        arrays["about"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    np.savez(saved, **arrays)
    with pytest.raises(UserError, match=r"p\.npz"):
        Partition.load(saved)


def test_damaged_partitions(saved: Path):
    whole = saved.read_bytes()
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 0xFF
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-5], bytes(middle)):
        saved.write_bytes(content)
        with pytest.raises(UserError, match=r"p\.npz"):
            Partition.load(saved)


def test_unwritable(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be written"):
        make(TOY, PartitionConfig(), 4, 0).save(tmp_path / "no" / "p.npz")


# pictures


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (8, 10), (100, 10), (60, 100), (700, 3)])
def test_pictures(clients: int, classes: int):
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    labels, names = [f"<class {i}>" for i in range(classes)], [f"client-{i:03d} & co" for i in range(clients)]
    root = ElementTree.fromstring(class_by_client_svg(counts, labels, names))
    cells = [cell for cell in root.iter("{http://www.w3.org/2000/svg}title") if ", <class" in (cell.text or "")]
    assert len(cells) == (counts > 0).sum()
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(class_by_client_text(counts, labels, names))
    console.file.close()
    text = console.export_text()
    assert "client-000" in text
    assert ("more" in text.replace("more images", "")) == (clients > 40)


# the command line


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})
    if result.exception:
        raise result.exception
    return result.output


def test_command_line(tmp_path: Path):
    out, svg = tmp_path / "p.npz", tmp_path / "p.svg"
    text = run("make", "--clients", 5, "--alpha", 0.5, "--new-clients", 1, "--seed", 3, "--out", out, "--svg", svg)
    partition = Partition.load(out)
    assert partition.hash in text
    assert "client-005 (new)" in text
    assert (partition.clients, partition.new_clients, partition.recipe["alpha"]) == (5, 1, 0.5)
    ElementTree.parse(svg)
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"p\.npz exists already.*--force"):
        run("make", "--clients", 4, "--out", out)
    assert out.read_bytes() == before
    run("make", "--clients", 4, "--out", out, "--force")
    assert Partition.load(out).clients == 4
    for extra in ([], ["--data", "digits"]):
        assert Partition.load(out).hash in run("show", out, *extra)
    np.savez(tmp_path / "own.npz", x=np.zeros((60, 2, 2)), y=np.arange(60) % 3, client=np.arange(60) % 3)
    with pytest.raises(UserError, match="data set changed"):
        run("show", out, "--data", f"npz:{tmp_path / 'own.npz'}")
    assert "clients    3" in run("make", "--data", f"npz:{tmp_path / 'own.npz'}", "--name", "natural")


def test_command_line_refuses_bad_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"ends in \.npz"):
        run("make", "--out", tmp_path / "p.txt")
    with pytest.raises(UserError, match="there is no folder"):
        run("make", "--out", tmp_path / "no" / "p.npz")
