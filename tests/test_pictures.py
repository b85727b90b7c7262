"""Picture files: formats, manifests, the cache of decoded blocks, and what `data inspect` finds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedtailor.cli.main import app
from fedtailor.config import load as load_config
from fedtailor.data import cache
from fedtailor.data.inspect import inspect
from fedtailor.data.partition import TEST, TRAIN, VAL, PartitionConfig, make
from fedtailor.data.pixels import Broken, Reading, Target, decode, header
from fedtailor.data.sources import load
from fedtailor.data.suspects import judge
from fedtailor.errors import UserError
from fedtailor.report.inspect import write_inspection
from fedtailor.runs.execute import prepare

LOSSLESS: dict[str, dict[str, Any]] = {"webp": {"lossless": True, "exact": True}}
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 210)}


def paint(path: Path, colour: str, seed: int, size: tuple[int, int] = (12, 12)) -> None:
    """A noisy picture of one colour: every seed another one."""
    noise = np.random.default_rng(seed).integers(-25, 26, (size[1], size[0], 3))
    pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two clients with twelve pictures of every colour, in four formats."""
    suffixes = ("png", "jpg", "webp", "tif")
    for c, client in enumerate(("north", "south")):
        for k, colour in enumerate(COLOURS):
            for i in range(12):
                seed = 1000 * c + 100 * k + i
                paint(tmp_path / "photos" / client / colour / f"{i}.{suffixes[i % 4]}", colour, seed)
    return tmp_path / "photos"


def write_manifest(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


# pixels -----------------------------------------------------------------------------------------------------------


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129], [257, 32896, 65535]], np.uint16)  # 129 is the first that rounds up to 1
    for suffix in ("png", "tif"):
        Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
        got = decode(tmp_path / f"deep.{suffix}", Target(2, 3, 1))
        assert got[:, :, 0].tolist() == [[0, 0, 1], [1, 128, 255]]
    colour = decode(tmp_path / "deep.png", Target(2, 3, 3))
    assert (colour == colour[:, :, :1]).all()


def test_pictures_are_turned_as_the_camera_says(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 255]], np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6  # to be shown turned clockwise by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    assert decode(tmp_path / "turned.png", Target(2, 1, 1)).ravel().tolist() == [0, 255]


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_a_turned_picture_says_the_size_it_is_read_in(suffix: str, tmp_path: Path) -> None:
    shown = np.arange(24, dtype=np.uint8).reshape(4, 6)  # as it is to be seen
    stored = {1: shown, 2: shown[:, ::-1], 3: shown[::-1, ::-1], 4: shown[::-1]}
    stored |= {5: shown.T, 6: shown.T[::-1], 7: shown.T[::-1, ::-1], 8: shown.T[:, ::-1]}
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.{suffix}"
        Image.fromarray(np.ascontiguousarray(pixels)).save(path, exif=exif, **LOSSLESS.get(suffix, {}))
        told = header(path)
        assert (told.height, told.width) == (4, 6), orientation
        got = decode(path, Target(4, 6, 1))[:, :, 0]
        assert np.abs(got.astype(int) - shown).max() <= 1, orientation  # WebP has no grey of its own


def test_odd_exif_is_no_reason_to_refuse_a_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Maker"
    odd = exif.tobytes().replace(b"\x01\x0f", b"\x01\x29")  # the maker's name is now a page number
    Image.fromarray(np.array([[0, 255]], np.uint8)).save(tmp_path / "odd.png", exif=odd)
    assert decode(tmp_path / "odd.png", Target(2, 1, 1)).ravel().tolist() == [0, 255]


@pytest.mark.parametrize(("fit", "expected"), [("crop", [0, 255]), ("squash", [64, 191]), ("pad", [0, 0])])
def test_other_proportions(fit: str, expected: list[int], tmp_path: Path) -> None:
    strip = np.repeat(np.array([0, 0, 255, 255], np.uint8), 4)[None].repeat(4, 0)  # 16 wide, 4 high
    Image.fromarray(strip).save(tmp_path / "strip.png")
    got = decode(tmp_path / "strip.png", Target(4, 4, 1, fit))  # type: ignore[arg-type]
    row = got[0 if fit == "pad" else 2, :, 0].tolist()
    assert (row[0], row[-1]) == (expected[0], expected[1]) if fit != "squash" else row[0] < 10 < 245 < row[-1]


def test_palette_and_alpha_are_colour(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4, 4), 200, np.uint8)).save(tmp_path / "alpha.png")
    assert decode(tmp_path / "alpha.png", Target(4, 4, 3)).tolist() == np.full((4, 4, 3), 200).tolist()
    Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).convert("P").save(tmp_path / "palette.png")
    assert decode(tmp_path / "palette.png", Target(4, 4, 3)).shape == (4, 4, 3)
    seen = Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).convert("P")
    seen.save(tmp_path / "see-through.png", transparency=bytes(range(256)))  # Pillow warns of these
    assert decode(tmp_path / "see-through.png", Target(4, 4, 3)).shape == (4, 4, 3)
    with pytest.raises(Broken, match="No such file"):
        decode(tmp_path / "none.png", Target(4, 4, 3))


# folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_in_four_formats(photos: Path) -> None:
    data = load(f"folder:{photos}")
    assert len(data) == 72
    assert data.classes == ("blue", "green", "red")
    assert data.owners == ("north", "south")
    strongest = data.images.astype(int).mean((1, 2)).argmax(1)
    assert (np.array(["red", "green", "blue"])[strongest] == np.array(data.classes)[data.labels]).all()


def test_resizing_and_colour_are_asked_for(photos: Path) -> None:
    paint(photos / "south" / "red" / "wide.png", "red", 7, (20, 10))
    with pytest.raises(UserError, match=r"data\.size=32"):
        load(f"folder:{photos}")
    assert load(f"folder:{photos}", reading=Reading(size=8)).shape == (3, 8, 8)
    assert load(f"folder:{photos}", reading=Reading(size=8, colour="grey")).shape == (1, 8, 8)
    changes = {"data.name": f"folder:{photos}", "data.size": 8, "partition.name": "iid", "clients": 2}
    config = load_config("demo", {**changes, "participants": 2})
    assert prepare(config).job.space.input == (3, 8, 8)


def test_a_corrupt_picture_among_many_is_named(photos: Path) -> None:
    bad = photos / "north" / "red" / "0.png"
    bad.write_bytes(bad.read_bytes()[:120])
    with pytest.raises(UserError, match=r"1 of 72 pictures cannot be read: .*north/red/0\.png.*data\.broken=skip"):
        load(f"folder:{photos}")
    heard: list[str] = []
    data = load(f"folder:{photos}", reading=Reading(broken="skip"), say=heard.append)
    assert len(data) == 71
    assert "skipped 1 of 72 pictures" in heard[0]


def test_an_image_size_that_the_space_cannot_take(tmp_path: Path) -> None:
    np.savez(tmp_path / "tiny.npz", images=np.zeros((60, 2, 2, 3), np.uint8), labels=np.arange(60) % 3)
    changes = {"data.name": f"npz:{tmp_path / 'tiny.npz'}", "partition.name": "iid", "clients": 2, "participants": 2}
    with pytest.raises(UserError, match=r"'cnn' cannot take images of 2x2 with 3 channels.*data\.size"):
        prepare(load_config("demo", {"method.name": "fedavg", **changes}))


# manifests --------------------------------------------------------------------------------------------------------


def manifest_of(photos: Path, split: bool = True) -> list[str]:
    rows = ["path,label,client,split" if split else "path,label,client"]
    for path in sorted(photos.glob("*/*/*")):
        client, label, file = path.relative_to(photos).parts
        kind = {"0": "test", "1": "test", "2": "val"}.get(file.split(".")[0], "train")
        rows.append(f"{path.relative_to(photos)},{label},{client}" + (f",{kind}" if split else ""))
    return rows


def test_a_manifest_says_label_client_and_split(photos: Path) -> None:
    path = write_manifest(photos / "all.csv", *manifest_of(photos))
    data = load(str(path))
    assert (data.owners, len(data)) == (("north", "south"), 72)
    partition = make(data, PartitionConfig("natural"), 2, 0)
    assert partition.sizes().tolist() == [[27, 3, 6], [27, 3, 6]]
    assert data.split is not None
    assert (partition.split == data.split).all()
    without = load(str(write_manifest(photos / "plain.csv", *manifest_of(photos, split=False))))
    assert without.split is None
    assert (without.images == data.images).all()
    assert without.hash == load(f"folder:{photos}").hash != data.hash


def test_a_split_that_a_manifest_does_not_give_is_drawn(photos: Path) -> None:
    rows = [row.replace(",val", ",train") for row in manifest_of(photos)]
    data = load(str(write_manifest(photos / "all.csv", *rows)))
    partition = make(data, PartitionConfig("natural"), 2, 0)
    assert partition.sizes().tolist() == [[24, 6, 6], [24, 6, 6]]  # a fifth of the 30 not tested on
    said = [row.replace(",train", ",test").replace(",val", ",test") for row in rows]
    with pytest.raises(UserError, match="north has no train images"):
        make(load(str(write_manifest(photos / "all.csv", *said))), PartitionConfig("natural"), 2, 0)


@pytest.mark.parametrize(("given", "lacking"), [("val", "test"), ("test", "val")])
def test_splits_that_leave_nothing_for_another_are_refused(photos: Path, given: str, lacking: str) -> None:
    rows = manifest_of(photos, split=False)
    said = [f"{rows[0]},split", f"{rows[1]},train", *(f"{row},{given if 'north' in row else ''}" for row in rows[2:])]
    name = str(write_manifest(photos / "all.csv", *said))
    with pytest.raises(UserError, match=f"north has no {lacking} images.*partition.{lacking} = 0"):
        make(load(name), PartitionConfig("natural"), 2, 0)
    without = replace(PartitionConfig("natural"), **{lacking: 0.0})
    assert make(load(name), without, 2, 0).sizes()[0].sum() == 36
    assert any(f"north has no {lacking} images" in text for text in inspect(name, labels=False).wrong)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["file,label", "a.png,x"], "no column 'path'"),
        (["path,label"], "lists no pictures"),
        (["path,label,Label", "a.png,x,y"], "two columns are called 'label'"),
        (["path,label", "a.png,x", "b.png,cat, black"], "line 3: more cells .*in quotes"),
        (["path,label", "a.png,"], "line 2: the label is empty"),
        (["path,label,split", "a.png,x,training"], "line 2: split 'training'. Allowed are train, val, test"),
        (["path,label,client", "a.png,x,one", "b.png,x,"], "line 3: the client is empty"),
        (["path,label", "a.png,x", "a.png,y"], "'a.png' is in line 2 and again in line 3"),
        (["path,label", "a.png,x", "b.png,y"], r"2 of 2 pictures cannot be read: .*a\.png.*No such file"),
    ],
)
def test_bad_manifests(rows: list[str], message: str, tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "list.csv", *rows)
    with pytest.raises(UserError, match=message):
        load(str(path))
    with pytest.raises(UserError, match="no such file"):
        load(str(tmp_path / "none.csv"))


# the cache --------------------------------------------------------------------------------------------------------


def test_pictures_are_decoded_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(cache, "BLOCK", 30)
    decoded: list[Path] = []
    true = cache.decode

    def counting(path: Path, target: Target) -> np.ndarray:
        decoded.append(path)
        if len(decoded) == 45 and not resumed:
            raise KeyboardInterrupt
        return true(path, target)

    monkeypatch.setattr(cache, "decode", counting)
    resumed = False
    with pytest.raises(KeyboardInterrupt):  # in the second of three blocks
        load(f"folder:{photos}")
    resumed = True
    decoded.clear()
    first = load(f"folder:{photos}")
    assert len(decoded) == 42  # the first block was there
    decoded.clear()
    assert load(f"folder:{photos}").hash == first.hash
    assert decoded == []
    paint(photos / "south" / "red" / "11.tif", "red", 99)  # another picture of the last block
    assert load(f"folder:{photos}").hash != first.hash
    assert len(decoded) == 12
    decoded.clear()
    for block in (tmp_path / "kept").rglob("*.npz"):
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(bytes(data))
    load(f"folder:{photos}")
    assert len(decoded) == 72  # damaged blocks are made anew


def test_a_picture_that_could_not_be_read_is_tried_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "kept"))
    asked: list[str] = []

    def failing(true: Callable[..., Any], path: Path, *more: Any) -> Any:
        asked.append(f"{path.parent.parent.name}/{path.parent.name}/{path.name}")
        if away and asked[-1] == "south/blue/3.tif":
            raise Broken("Stale file handle")
        return true(path, *more)

    for name in ("header", "decode"):
        monkeypatch.setattr(cache, name, partial(failing, getattr(cache, name)))
    away = True
    for reading in (Reading(), Reading(target=Target(12, 12, 3))):
        with pytest.raises(UserError, match=r"1 of 72 pictures cannot be read.*Stale file handle"):
            load(f"folder:{photos}", reading=reading)
    away = False
    asked.clear()
    assert len(load(f"folder:{photos}")) == 72
    assert asked == ["south/blue/3.tif"] * 2  # its header and its pixels; the others were kept
    asked.clear()
    assert len(load(f"folder:{photos}")) == 72
    assert asked == []


def test_a_changed_file_of_the_same_age_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path / "kept"))
    hashes = set()
    for seed in (1, 2):  # as from an archive that gives every file one time
        for colour in COLOURS:
            paint(tmp_path / "photos" / colour / "0.bmp", colour, seed)
            os.utime(tmp_path / "photos" / colour / "0.bmp", (0, 0))
        hashes.add(load(f"folder:{tmp_path / 'photos'}").hash)
    assert len(hashes) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", os.devnull)
    assert len(load(f"folder:{photos}")) == 72


# inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_finds_what_is_wrong(photos: Path, tmp_path: Path) -> None:
    (photos / "north" / "green" / "3.tif").write_bytes(b"no picture")
    paint(photos / "south" / "green" / "other.png", "green", 5, (24, 12))
    Image.open(photos / "north" / "blue" / "0.png").save(photos / "south" / "red" / "copy.png")  # another label
    paint(photos / "west" / "blue" / "0.png", "blue", 1)  # one picture, one class
    found = inspect(f"folder:{photos}", reading=Reading(size=12))
    assert list(found.broken) == ["north/green/3.tif"]
    assert found.sizes == {"12x12": 73, "24x12": 1}
    text = "\n".join(found.wrong)
    assert "1 of 75 pictures cannot be read; they stop a run" in text
    assert "1 pictures have copies with another label" in text
    assert "client 'west' has 1 pictures; a run needs 10" in text
    assert any("client 'west' has one class only (blue)" in r for r in found.remarks)
    assert any("held by several clients" in r for r in found.remarks)
    assert any(p == "1 pictures are resized to 12x12, 1 of them cropped at the sides" for p in found.plan)
    assert found.judge is not None
    assert found.judge.accuracy > 0.9
    assert "south/red/copy.png" in {found.names[s.place] for s in found.judge.suspects}
    page = write_inspection(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") > 14
    assert "north/green/3.tif" in page
    assert "looks like blue" in page


def test_inspect_says_what_would_be_done(tmp_path: Path) -> None:
    for i in range(6):
        for label in "ab":
            (tmp_path / label).mkdir(exist_ok=True)
            Image.fromarray(np.full((8, 8), 1000 * i, np.uint16)).save(tmp_path / label / f"{label}{i}.png")
    paint(tmp_path / "a" / "colour.png", "red", 0, (8, 8))
    found = inspect(f"folder:{tmp_path}", labels=False)
    assert found.kinds == {"16-bit grey": 12, "colour": 1}
    assert "12 grey pictures become colour, because others are" in found.plan
    assert "12 pictures of 16 bits become 8 bits (divided by 257)" in found.plan
    assert any("60% train, 20% val, 20% test" in p for p in found.plan)
    assert any("names no clients" in p for p in found.plan)
    paint(tmp_path / "b" / "large.png", "red", 0, (9, 9))
    assert "data.size=32" in inspect(f"folder:{tmp_path}", labels=False).wrong[0]


def test_inspect_sees_leaks_between_given_splits(photos: Path) -> None:
    rows = manifest_of(photos)
    (photos / "north" / "red" / "again.png").write_bytes((photos / "north" / "red" / "0.png").read_bytes())
    path = write_manifest(photos / "all.csv", *rows, "north/red/again.png,red,north,train")
    wrong = inspect(str(path), labels=False).wrong
    assert wrong == ["1 pictures lie in several splits: what is tested was trained on"]


def test_inspect_tells_of_files_that_are_passed_over(photos: Path) -> None:
    (photos / "north" / "red" / "moving.GIF").touch()
    (photos / "north" / "red" / "notes.txt").touch()
    (remark,) = inspect(f"folder:{photos}", labels=False).remarks
    assert remark.startswith("2 files are passed over")
    assert remark.endswith(".gif (1), .txt (1)")


def test_the_judge_knows_its_limits() -> None:
    data = load("digits")
    labels = data.labels.copy()
    flipped = np.random.default_rng(0).choice(len(labels), 15, replace=False)
    labels[flipped] = (labels[flipped] + 3) % 10
    found = judge(type(data)("digits", data.images, labels, data.classes, data.official_test))
    assert len({s.place for s in found.suspects} & set(flipped.tolist())) >= 12
    noise = np.random.default_rng(0).integers(0, 256, (90, 8, 8, 1), np.uint8)
    told = judge(type(data)("noise", noise, np.arange(90) % 3, ("a", "b", "c"), np.zeros(90, bool)))
    assert told.suspects == ()
    assert "not checked" in told.reason


def test_inspect_on_the_command_line(photos: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["data", "inspect", str(photos), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "nothing is wrong" in done.output
    (photos / "north" / "green" / "3.tif").write_bytes(b"no picture")
    done = runner.invoke(app, ["data", "inspect", f"folder:{photos}", "--json", "--no-labels"])
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["clients"]["north"] == {"blue": 12, "green": 11, "red": 12}
    assert list(told["broken"]) == ["north/green/3.tif"]
    done = runner.invoke(app, ["data", "inspect", f"folder:{photos}", "--skip-broken", "--no-labels"])
    assert done.exit_code == 0


def test_splits_have_the_numbers_that_manifests_use() -> None:
    from fedtailor.data.files import GIVEN

    assert {"train": TRAIN, "val": VAL, "test": TEST} == GIVEN
