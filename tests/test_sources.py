"""Every source, in every layout, and every way its files can be wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtailor.data import cifar, hub
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


# the compact layout


def write_pack(folder: Path, splits: dict[str, int], packed: str = "webps", grey: bool = False) -> np.ndarray:
    """A pack of 8x8 images with two silos; returns all images in order."""
    folder.mkdir(parents=True)
    meta: dict = {"name": folder.name, "classes": ["a", "b", "c"], "silos": ["north", "south"], "splits": {}}
    every = []
    for split, n in splits.items():
        images = random_images(n, 8, 8) if grey else random_images(n, 8, 8, 3)
        arrays = {"labels": np.arange(n, dtype=np.uint8) % 3, "silo": np.arange(n, dtype=np.uint8) % 2}
        blob = lzma.compress(images.tobytes())
        if packed == "webps":
            strips = []
            for at in range(0, n, 4):
                strip = Image.fromarray(
                    images[at : at + 4].reshape(-1, 8) if grey else images[at : at + 4].reshape(-1, 8, 3)
                )
                buffer = io.BytesIO()
                strip.save(buffer, "WEBP", lossless=True, exact=True)
                strips.append(buffer.getvalue())
            blob = b"".join(strips)
        (folder / f"{split}_00.{packed}").write_bytes(blob)
        for key, array in arrays.items():
            np.save(folder / f"{split}_{key}.npy", array)
        meta["splits"][split] = {
            "shape": list(images.shape),
            "dtype": "uint8",
            "files": [f"{split}_00.{packed}"],
            "arrays": {key: f"{split}_{key}.npy" for key in arrays},
            "sha256": {k: hashlib.sha256(a.tobytes()).hexdigest() for k, a in {"images": images, **arrays}.items()},
        }
        every.append(images)
    (folder / "meta.json").write_text(json.dumps(meta))
    return np.concatenate(every)


@pytest.mark.parametrize("packed", ["webps", "xz"])
@pytest.mark.parametrize("grey", [False, True])
def test_compact_packs(packed: str, grey: bool, tmp_path: Path):
    images = write_pack(tmp_path / "flowers", {"train": 10, "test": 6}, packed, grey)
    by_name, by_path = load("flowers", tmp_path), load(f"compact:{tmp_path / 'flowers'}")
    assert np.array_equal(by_name.images.reshape(images.shape), images)
    assert by_name.shape == ((1 if grey else 3), 8, 8)
    assert by_name.official_test.tolist() == [False] * 10 + [True] * 6
    assert by_name.owners == ("north", "south")
    assert by_name.owner is not None
    assert by_name.owner[:4].tolist() == [0, 1, 0, 1]
    assert by_name.hash == by_path.hash


def test_an_all_split_is_no_test_split(tmp_path: Path):
    write_pack(tmp_path / "flowers", {"all": 10})
    assert not load("flowers", tmp_path).official_test.any()


def test_cifar_may_be_a_compact_pack(tmp_path: Path):
    write_pack(tmp_path / "cifar10", {"train": 4, "test": 4})
    assert load("cifar10", tmp_path).hash == load("cifar10", tmp_path / "cifar10").hash


def test_unknown_names_list_the_packs(tmp_path: Path):
    write_pack(tmp_path / "flowers", {"all": 4})
    with pytest.raises(UserError, match="Did you mean 'flowers'"):
        load("flower", tmp_path)


@pytest.mark.parametrize("packed", ["webps", "xz"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "noise", "flip", "twice"])
def test_damaged_image_files_of_a_pack(packed: str, damage: str, tmp_path: Path):
    write_pack(tmp_path / "flowers", {"train": 10}, packed)
    path = tmp_path / "flowers" / f"train_00.{packed}"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    if damage == "gone":
        path.unlink()
    else:
        changed = {"cut": whole[:-9], "empty": b"", "noise": b"RIFF" * 9, "flip": bytes(flipped), "twice": whole * 2}
        path.write_bytes(changed[damage])
    with pytest.raises(UserError, match="train_00"):
        load("flowers", tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone", "other", "short", "pickle"])
def test_damaged_arrays_of_a_pack(damage: str, tmp_path: Path):
    write_pack(tmp_path / "flowers", {"train": 10})
    path = tmp_path / "flowers" / "train_labels.npy"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "gone":
        path.unlink()
    elif damage == "pickle":
        np.save(path, np.array([Attack(os.mkdir, str(tmp_path / "executed"))] * 10), allow_pickle=True)
    else:
        np.save(path, np.zeros({"other": 10, "short": 9}[damage], np.uint8))
    with pytest.raises(UserError, match=r"train_labels\.npy"):
        load("flowers", tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {}},
        {"splits": {"train": {}}},
        {"splits": {"train": []}},
        {"shape": [10, 8]},
        {"shape": "many"},
        {"dtype": "float32"},
        {"arrays": {}},
        {"files": ["../flowers/train_00.webps"]},
        {"files": []},
    ],
)
def test_damaged_descriptions_of_a_pack(change: dict, tmp_path: Path):
    write_pack(tmp_path / "flowers", {"train": 10})
    path = tmp_path / "flowers" / "meta.json"
    meta = json.loads(path.read_text())
    (meta if "splits" in change else meta["splits"]["train"]).update(change)
    path.write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"meta\.json"):
        load("flowers", tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"meta\.json"):
        load("flowers", tmp_path)


def test_splits_of_different_sizes_are_refused(tmp_path: Path):
    write_pack(tmp_path / "flowers", {"train": 8})
    path = tmp_path / "flowers" / "meta.json"
    meta = json.loads(path.read_text())
    meta["splits"]["test"] = {**meta["splits"]["train"], "shape": [8, 4, 16, 3], "sha256": {}}
    path.write_text(json.dumps(meta))
    with pytest.raises(UserError, match="different sizes"):
        load("flowers", tmp_path)


# the user's own arrays


def test_npz(tmp_path: Path):
    images, labels = random_images(6, 5, 4, 3), np.array([0, 1, 2, 0, 1, 2])
    path = tmp_path / "own.npz"
    np.savez(path, images=images, labels=labels, client=np.array(["x", "y"] * 3), classes=np.array(["a", "b", "c"]))
    data = load(f"npz:{path}")
    assert data.classes == ("a", "b", "c")
    assert data.owners == ("x", "y")
    assert data.owner is not None
    assert data.owner.tolist() == [0, 1] * 3
    np.savez(path, x=images[..., 0], y=labels, client=np.array([7, 30, 7, 30, 7, 30]))
    data = load(f"npz:{path}")
    assert data.shape == (1, 5, 4)
    assert data.classes == ("0", "1", "2")
    assert data.owners == ("7", "30")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"labels": np.zeros(2)}, "no array 'images'"),
        ({"images": random_images(2, 4, 4)}, "no array 'labels'"),
        ({"images": random_images(2, 4, 4), "labels": np.array([0, -1])}, "-1"),
        ({"images": random_images(2, 4, 4), "labels": np.array([0, np.nan])}, "whole numbers"),
        ({"images": random_images(2, 4, 4), "labels": np.array(["a", "b"])}, "whole numbers"),
        ({"images": random_images(2, 4, 4), "labels": np.array([0, 2]), "classes": np.array(["a", "b"])}, "2 classes"),
        ({"images": random_images(2, 4, 4), "labels": np.zeros(2), "client": np.array([0.5, 1])}, "client has type"),
        ({"images": random_images(2, 4, 4), "labels": np.zeros(2), "client": np.array([1])}, "clients have shape"),
        ({"images": np.empty((0, 4, 4)), "labels": np.empty(0)}, "no images"),
        ({"images": np.array([random_images(4, 4), None], object), "labels": np.zeros(2)}, "plain arrays"),
    ],
)
def test_bad_npz(arrays: dict[str, np.ndarray], words: str, tmp_path: Path):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words) as caught:
        load(f"npz:{path}")
    assert "own.npz" in str(caught.value)


def test_npz_that_is_something_else(tmp_path: Path):
    path = tmp_path / "own.npz"
    np.savez(path, images=random_images(9, 8, 8), labels=np.zeros(9))
    whole = path.read_bytes()
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for content in (b"", b"hello", whole[: len(whole) // 2], buffer.getvalue(), pickle.dumps({"images": 1})):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"own\.npz"):
            load(f"npz:{path}")


# the user's own image files


def write_images(root: Path, *files: str, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> None:
    for i, file in enumerate(files):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, i + 1 if mode in ("L", "I;16") else (i + 1, 0, 0)).save(path)


def test_folder_of_classes(tmp_path: Path):
    write_images(tmp_path, "dog/2.png", "cat/b.png", "cat/a.png", ".hidden/x/y/z.png")
    (tmp_path / "cat" / "notes.txt").touch()
    data = load(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 0, 1]
    assert data.images[:, 0, 0, 0].tolist() == [3, 2, 1]  # sorted, not in the order of writing
    assert data.shape == (3, 5, 6)
    assert data.owner is None


def test_folder_of_clients(tmp_path: Path):
    write_images(tmp_path, "rome/dog/1.png", "oslo/cat/1.png", "oslo/dog/1.png", mode="L")
    data = load(f"folder:{tmp_path}")
    assert data.owners == ("oslo", "rome")
    assert data.owner is not None
    assert data.owner.tolist() == [0, 0, 1]
    assert data.labels.tolist() == [0, 1, 1]
    assert data.shape == (1, 5, 6)


def test_folder_of_official_splits(tmp_path: Path):
    write_images(tmp_path, "train/dog/1.png", "test/cat/1.png")
    data = load(f"folder:{tmp_path}")
    assert data.owner is None
    assert data.official_test.tolist() == [True, False]


def test_grey_and_colour_together_are_colour(tmp_path: Path):
    write_images(tmp_path, "a/1.png")
    write_images(tmp_path, "b/1.png", mode="L")
    assert load(f"folder:{tmp_path}").shape == (3, 5, 6)


def test_bad_folders(tmp_path: Path):
    with pytest.raises(UserError, match="no images"):
        load(f"folder:{tmp_path}")
    write_images(tmp_path, "1.png")
    with pytest.raises(UserError, match="neither class/image"):
        load(f"folder:{tmp_path}")
    (tmp_path / "1.png").unlink()
    write_images(tmp_path, "a/1.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="b: holds no images"):
        load(f"folder:{tmp_path}")
    write_images(tmp_path, "b/c/1.png")
    with pytest.raises(UserError, match=r"a/1\.png.*b/c/1\.png.*different depths"):
        load(f"folder:{tmp_path}")


def test_bad_image_files(tmp_path: Path):
    write_images(tmp_path, "a/1.png", "a/2.png")
    write_images(tmp_path, "b/1.png", size=(7, 5))
    with pytest.raises(UserError, match=r"a/1\.png is 6x5 and .*b/1\.png is 7x5.*resize"):
        load(f"folder:{tmp_path}")
    path = tmp_path / "b" / "1.png"
    Image.fromarray(np.zeros((5, 6), np.float32)).save(path.with_suffix(".tif"))
    path.unlink()
    with pytest.raises(UserError, match=r"b/1\.tif.*mode 'F'.*16 bits"):
        load(f"folder:{tmp_path}")
    path.with_suffix(".tif").unlink()
    Image.fromarray(random_images(5, 6, 3)).save(path)
    whole = path.read_bytes()
    for content in (whole[:-60], whole[:40], whole[:20], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"b/1\.png"):
            load(f"folder:{tmp_path}")


# the hub


def write_parquet(path: Path, images: np.ndarray, column: str, **labels: list[int]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table({column: rows, **labels}), path)


def test_parquet(tmp_path: Path):
    images = random_images(5, 8, 8, 3)
    write_parquet(tmp_path / "0.parquet", images[:3], "img", fine_label=[1, 2, 3], coarse_label=[0, 0, 0])
    write_parquet(tmp_path / "1.parquet", images[3:], "image", fine_label=[4, 5])
    got, labels = hub.read_parquet([tmp_path / "0.parquet", tmp_path / "1.parquet"], "fine_label")
    assert np.array_equal(got, images)
    assert labels.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"0\.parquet.*'label'"):
        hub.read_parquet([tmp_path / "0.parquet"], "label")
    (tmp_path / "1.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"1\.parquet"):
        hub.read_parquet([tmp_path / "1.parquet"], "fine_label")


def test_hub_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    images = random_images(5, 32, 32, 3)
    write_parquet(tmp_path / "plain_text" / "train-00000-of-00001.parquet", images[:3], "img", label=[1, 2, 3])
    write_parquet(tmp_path / "plain_text" / "test-00000-of-00001.parquet", images[3:], "img", label=[4, 9])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    data = load("hub:cifar10")
    assert np.array_equal(data.images, images)
    assert data.official_test.tolist() == [False] * 3 + [True] * 2

    def offline(repo: str, **_: object) -> str:
        raise RuntimeError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"uoft-cs/cifar10.*no route"):
        load("hub:cifar10")


def test_hub_without_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"fedtailor\[hub\]"):
        load("hub:cifar100")
