"""Partitions that are saved, drawn and asked for on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedtailor.cli.partition import app
from fedtailor.data.partition import Partition, PartitionConfig, make
from fedtailor.data.picture import class_by_client_svg, class_by_client_text
from fedtailor.errors import UserError
from test_partition import TOY, toy

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


def test_pictures_are_read_as_the_options_say(tmp_path: Path):
    for i in range(12):
        (tmp_path / "set" / f"{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6 + i % 3, 5), (20 * i, 0, 0)).save(tmp_path / "set" / f"{i % 2}" / f"{i}.png")
    (tmp_path / "set" / "0" / "broken.png").touch()
    data = ["--data", f"folder:{tmp_path / 'set'}"]
    read = ["--size", 4, "--fit", "pad", "--colour", "grey", "--skip-broken"]
    run("make", *data, *read, "--clients", 1, "--out", tmp_path / "p.npz")
    assert Partition.load(tmp_path / "p.npz").hash in run("show", tmp_path / "p.npz", *data, *read)
    with pytest.raises(UserError, match="data set changed"):
        run("show", tmp_path / "p.npz", *data, "--size", 4, "--skip-broken")


def test_command_line_refuses_bad_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"ends in \.npz"):
        run("make", "--out", tmp_path / "p.txt")
    with pytest.raises(UserError, match="there is no folder"):
        run("make", "--out", tmp_path / "no" / "p.npz")
