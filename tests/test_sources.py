"""Every source, in every layout, and every way its files can be wrong."""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedtailor.data import cifar
from fedtailor.data.dataset import Dataset
from fedtailor.data.sources import NAMES, load
from fedtailor.errors import UserError


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


# the data set itself


def dataset(**change: object) -> Dataset:
    plain = {
        "name": "toy",
        "images": random_images(4, 5, 6, 3),
        "labels": np.array([0, 1, 1, 0]),
        "classes": ("cat", "dog"),
        "official_test": np.zeros(4, bool),
    }
    return Dataset(**{**plain, **change})  # type: ignore[arg-type]


def test_dataset_has_its_declared_types():
    data = dataset(labels=np.array([0.0, 1, 1, 0]), owner=np.array([0, 0, 1, 1], np.uint8), owners=("a", "b"))
    assert data.labels.dtype == np.int64
    assert data.owner is not None
    assert data.owner.dtype == np.int64
    assert data.shape == (3, 5, 6)
    assert len(data) == 4


def test_whole_number_pixels_of_other_types_are_converted():
    images = random_images(4, 5, 6, 3)
    assert dataset(images=images.astype(np.float32)).hash == dataset(images=images).hash


def test_hash_sees_shape_pixels_labels_and_owner_but_not_the_name():
    base = dataset()
    changed = base.images.copy()
    changed[3, 4, 5, 2] ^= 1
    hashes = {
        base.hash,
        dataset(images=changed).hash,
        dataset(images=base.images.reshape(4, 6, 5, 3)).hash,
        dataset(labels=np.array([1, 1, 1, 0])).hash,
        dataset(owner=np.zeros(4, int), owners=("a",)).hash,
    }
    assert len(hashes) == 5
    assert dataset(name="other", classes=("x", "y")).hash == base.hash


NAN = random_images(4, 5, 6, 3).astype(float)
NAN[2, 0, 0, 0] = np.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": np.empty((0, 5, 6, 3), np.uint8)}, "no images"),
        ({"labels": np.array([0, 1, 2, 0])}, r"labels hold 2 \(image 2\).*0 to 1"),
        ({"labels": np.array([0, -1, 1, 0])}, r"labels hold -1 \(image 1\)"),
        ({"labels": np.array([0, 0.5, 1, 0])}, "not whole numbers"),
        ({"labels": np.array([0, np.nan, 1, 0])}, "not whole numbers"),
        ({"labels": np.array(["a", "b", "a", "b"])}, "not whole numbers"),
        ({"labels": np.array([0, 1])}, r"labels have shape \(2,\), 4 images"),
        ({"labels": np.zeros((4, 1))}, "one whole number per image"),
        ({"images": NAN}, r"image 2 .*NaN"),
        ({"images": random_images(4, 5, 6, 3) / 255}, "Multiply by 255"),
        ({"images": random_images(4, 5, 6, 3).astype(np.int32) + 1000}, "do not fit"),
        ({"images": random_images(4, 5, 6, 3).astype(np.int8).astype(int) - 200}, "do not fit"),
        ({"images": np.full((4, 5, 6, 3), np.inf)}, "do not fit"),
        ({"images": random_images(4, 5, 6, 3).astype("U3")}, "Save them as uint8"),
        ({"images": random_images(4, 5, 6)}, "expected"),
        ({"images": random_images(4, 3, 5, 6)}, "channels first"),
        ({"images": [random_images(5, 6, 3)] * 3 + [random_images(5, 7, 3)]}, "image 0 .* image 3"),
        ({"images": [random_images(5, 6, 3)] * 3 + [random_images(5, 6, 1)]}, "same height, width and channels"),
        ({"official_test": np.zeros(3, bool)}, "official_test"),
        ({"owner": np.array([0, 1, 2, 3]), "owners": ("a", "b")}, "clients hold 3"),
    ],
)
def test_bad_datasets_are_refused(change: dict[str, object], words: str):
    with pytest.raises(UserError, match=words) as caught:
        dataset(**change)
    assert str(caught.value).startswith("toy")


# names


def test_digits_use_the_full_range_exactly():
    data = load("digits")
    assert data.images.shape == (1797, 8, 8, 1)
    assert len(np.unique(data.images)) == 17
    assert data.images.max() == 255
    assert not data.official_test.any()


def test_nothing_heavy_is_imported_with_the_names():
    code = (
        "import sys, fedtailor.data, fedtailor.data.picture, fedtailor.cli.partition;"
        "print([m for m in ('torch', 'sklearn', 'PIL', 'pyarrow') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifra10", "Did you mean 'cifar10'"),
        ("../secrets", "no such data set"),
        ("npz:", "path has to follow"),
        ("hub:mnist", "Known: cifar10, cifar100"),
        ("compact:nowhere", "meta.json"),
        ("folder:nowhere", "no such folder"),
        ("npz:nowhere.npz", "no such file"),
    ],
)
def test_unknown_names(name: str, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        load(name, tmp_path)
    assert name not in NAMES


def test_a_data_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"data\.dir .* no such folder"):
        load("cifar10", tmp_path / "no")
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path / "no"))
    with pytest.raises(UserError, match=r"FEDTAILOR_DATA .* no such folder"):
        load("cifar10")


# CIFAR in its official layouts

FILES = {"cifar10": 6, "cifar100": 2}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images per official file instead of ten thousand."""
    for name, files in FILES.items():
        official = dataclasses.replace(cifar.OFFICIAL[name], sizes=(3,) * files)
        monkeypatch.setitem(cifar.OFFICIAL, name, official)


def fake(name: str) -> tuple[np.ndarray, np.ndarray]:
    n = 3 * FILES[name]
    return random_images(n, 32, 32, 3), np.arange(n) % len(cifar.OFFICIAL[name].classes)


def planes(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def python2_pickle(data: np.ndarray, labels: list[int], key: str) -> bytes:
    """What Python 2 wrote into the official archives, opcode by opcode."""

    def text(words: str) -> bytes:
        return b"U" + bytes([len(words)]) + words.encode()

    rows, columns = data.shape
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            text("batch_label") + text("training batch 1 of 5"),
            text(key) + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            text("data") + b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text("b"),
            b"\x87R(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86cnumpy\ndtype\nq\x04",
            text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + struct.pack("<i", data.size) + data.tobytes() + b"tb",
            text("filenames") + b"](" + text("leptodactylus_pentadactylus_s_000004.png") + b"eu.",
        ]
    )


def write_official(folder: Path, name: str, layout: str) -> None:
    folder.mkdir(parents=True)
    images, labels = fake(name)
    official = cifar.OFFICIAL[name]
    for i, file in enumerate(official.python):
        pixels, ids = planes(images)[3 * i : 3 * i + 3], labels[3 * i : 3 * i + 3].tolist()
        if layout == "python 2":
            (folder / file).write_bytes(python2_pickle(pixels, ids, official.key))
        elif layout == "python 3":
            (folder / file).write_bytes(pickle.dumps({b"data": pixels, official.key.encode(): ids}, protocol=2))
        else:
            coarse = [7] * (official.label_bytes - 1)
            records = [bytes([*coarse, label]) + row.tobytes() for label, row in zip(ids, pixels, strict=True)]
            (folder / f"{file}.bin").write_bytes(b"".join(records))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("layout", "sub"), [("python 2", ""), ("python 2", "python"), ("python 3", "name"), ("binary", "binary")]
)
def test_official_layouts(name: str, layout: str, sub: str, tmp_path: Path):
    official = cifar.OFFICIAL[name]
    subs = {"": "root", "python": official.folders[0], "binary": official.folders[1], "name": name}
    root = tmp_path / "data"
    write_official(root / subs[sub] if sub else root, name, layout)
    images, labels = fake(name)
    data = load(name, root)
    assert np.array_equal(data.images, images)
    assert np.array_equal(data.labels, labels)
    assert data.official_test.nonzero()[0].tolist() == list(range(len(images) - 3, len(images)))
    assert len(data.classes) == int(name.removeprefix("cifar"))


@pytest.mark.usefixtures("small")
def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_official(tmp_path / "cifar-10-batches-bin", "cifar10", "binary")
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path))
    assert len(load("cifar10")) == 18


def test_missing_cifar_says_how_to_get_it(tmp_path: Path):
    for folder in (None, tmp_path):
        with pytest.raises(UserError) as caught:
            load("cifar100", folder)
        for words in ("cifar-100-python.tar.gz", "--data-dir", "data.dir", "FEDTAILOR_DATA", "fedtailor[hub]"):
            assert words in str(caught.value)
    (tmp_path / "cifar-100-python.tar.gz").touch()
    with pytest.raises(UserError, match="tar -xzf cifar-100-python"):
        load("cifar100", tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["python 2", "python 3", "binary"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "noise", "short"])
def test_damaged_official_files(layout: str, damage: str, tmp_path: Path):
    root = tmp_path / "cifar10"
    write_official(root, "cifar10", layout)
    path = root / ("data_batch_3.bin" if layout == "binary" else "data_batch_3")
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "short":  # a file of the right form with too few images
        pixels = planes(fake("cifar10")[0])[:1]
        path.write_bytes(whole[:3073] if layout == "binary" else python2_pickle(pixels, [1], "labels"))
    else:
        path.write_bytes({"cut": whole[:-100], "empty": b"", "noise": b"\x93" * 100}[damage])
    with pytest.raises(UserError, match="data_batch_3"):
        load("cifar10", tmp_path)


class Attack:
    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.mkdir, eval, exec, getattr, __import__, np.load, np.fromfile, bytearray])
def test_a_malicious_pickle_runs_nothing(function: object, protocol: int, tmp_path: Path):
    mark = tmp_path / "executed"
    order = f"__import__('os').mkdir({str(mark)!r})" if function in (eval, exec) else str(mark)
    attack = Attack(function, order)
    images, labels = fake("cifar10")
    write_official(tmp_path / "cifar10", "cifar10", "python 2")
    for batch in (
        attack,
        {"data": attack, "labels": [0]},
        {"data": planes(images)[:3], "labels": labels[:3], "x": attack},
    ):
        (tmp_path / "cifar10" / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
        with pytest.raises(UserError, match="data_batch_1"):
            load("cifar10", tmp_path)
        assert not mark.exists()


@pytest.mark.usefixtures("small")
def test_a_pickle_cannot_change_how_the_next_one_is_read(tmp_path: Path):
    write_official(tmp_path / "cifar10", "cifar10", "python 2")
    path = tmp_path / "cifar10" / "data_batch_1"
    whole = path.read_bytes()
    # BUILD on the stand-ins themselves: sets attributes of whatever find_class returned
    for name in (b"numpy\nndarray", b"numpy.core.multiarray\n_reconstruct", b"_codecs\nencode"):
        path.write_bytes(b"\x80\x02c" + name + b"\nN}U\x0c__defaults__NsU\x08__name__U\x01xs\x86b.")
        with pytest.raises(UserError, match="data_batch_1"):
            load("cifar10", tmp_path)
    path.write_bytes(whole)
    assert np.array_equal(load("cifar10", tmp_path).images, fake("cifar10")[0])
