"""The compact layout of image sets."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtailor.data.sources import load
from fedtailor.errors import UserError
from test_sources import Attack, no_data_folder, random_images  # noqa: F401, used by every test


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
