"""Arrays, folders of images and sets from the hub that users bring."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtailor.data import hub
from fedtailor.data.inspect import inspect
from fedtailor.data.sources import load
from fedtailor.errors import UserError
from test_sources import no_data_folder, random_images  # noqa: F401, used by every test

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


def test_links_are_followed(tmp_path: Path):
    write_images(tmp_path / "store", "cats/1.png", "cats/2.png", "rome/dog/1.png")
    write_images(tmp_path / "set", "oslo/dog/1.png")
    (tmp_path / "set" / "oslo" / "cat").symlink_to(tmp_path / "store" / "cats")
    (tmp_path / "set" / "rome").symlink_to(tmp_path / "store" / "rome")
    (tmp_path / "set" / "oslo" / "all").symlink_to(tmp_path / "set")  # without end
    data = load(f"folder:{tmp_path / 'set'}")
    assert (data.owners, data.classes) == (("oslo", "rome"), ("cat", "dog"))
    assert data.owner is not None
    assert list(zip(data.owner.tolist(), data.labels.tolist(), strict=True)) == [(0, 0), (0, 0), (0, 1), (1, 1)]


def test_a_link_to_a_picture_that_is_not_there_is_told(tmp_path: Path):
    write_images(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "dog" / "2.png").symlink_to("not-fetched.png")
    with pytest.raises(UserError, match=r"1 of 3 pictures cannot be read: .*dog/2\.png .*No such file"):
        load(f"folder:{tmp_path}")


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path, "oslo/cat/1.png", "oslo/dog/1.png")
    true = os.scandir

    def refusing(path: str) -> object:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return true(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"oslo/dog: .*cannot be listed \(Permission denied\)"):
        load(f"folder:{tmp_path}")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep names as text")
def test_names_that_are_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "kept"))
    root = tmp_path / "set"
    write_images(root, "1/2/3.png", "osl\udcf8/k\udce4t/\udcff.png")
    data = load(f"folder:{root}")
    assert (data.owners, data.classes) == (("1", "osl\\xf8"), ("2", "k\\xe4t"))
    assert inspect(f"folder:{root}").names == ["1/2/3.png", "osl\\xf8/k\\xe4t/\\xff.png"]


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
