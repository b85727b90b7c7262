"""Exported networks: they agree with PyTorch, stand alone, describe themselves, and refuse what they cannot take."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fedtailor.config import Config
from fedtailor.config import load as load_config
from fedtailor.data.partition import TEST, Partition
from fedtailor.errors import UserError
from fedtailor.export import graph, write
from fedtailor.export.card import accuracy, read_card
from fedtailor.export.graph import KEY, Portable, network, to_onnx
from fedtailor.export.predict import Model, main, open_model, picture_paths
from fedtailor.export.write import export_run, folder_names
from fedtailor.nets.base import FixedNet
from fedtailor.registry import names
from fedtailor.runs.execute import open_space, prepare, read_networks, start
from fedtailor.runs.results import Results
from tools import small_config

METHODS = ("perfedrlnas", "spider", "fedcs", "fedrep")


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options: dict[str, Any] = {"clients": 2, "rounds": 2, "evaluate_every": 2}
    options["local__prior"] = request.param == "fedrep"
    if request.param == "fedcs":  # half of four clients afford the largest network
        options |= {
            "clients": 4,
            "fleet__name": "capacity-high",
            "partition__new_clients": 1,
            "local__bn": "recalibrate",
        }
    if request.param == "spider":
        options |= {"local__epochs": 0.2, "space__name": "darts", "space__channels": 4, "space__cells": 3}
        options |= {"space__variant": "s2", "partition__samples": 60}
    return start(small_config(request.param, **options), tmp_path_factory.mktemp(request.param) / "run", "cpu", 1)


@pytest.fixture(scope="module")
def fedrep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("fedrep", clients=2, rounds=2, local__epochs=2)
    folder = start(config, tmp_path_factory.mktemp("one") / "run", "cpu", 1)
    export_run(folder, say=lambda text: None)
    return folder


def model_of(run: Path, client: str = "client-000") -> Path:
    return run / "export" / client / "network.onnx"


def test_every_client_agrees_with_pytorch_on_the_whole_test_split(run: Path) -> None:
    setup = prepare(load_config(run / "config.toml"), run / "partition.npz")
    space, results = open_space(run), Results.read(run)
    heard: list[str] = []
    done = export_run(run, int8=False, say=heard.append)
    assert len(done) == len(setup.partition.names)
    for client, (own, arch, weights) in read_networks(run, space).items():
        model = open_model(done[client].folder / "network.onnx")
        at = setup.partition.indices(client, TEST)
        images, labels = setup.dataset.images[at], setup.dataset.labels[at]
        net = network(own, arch, weights)
        with torch.no_grad():
            x = torch.from_numpy(images).permute(0, 3, 1, 2) / 255.0
            expected = net((x - 0.5) / 0.5).softmax(1).numpy()
        got = model.run(images)
        assert np.abs(got - expected).max() <= 1e-4
        kind = "personal" if client < setup.partition.clients else "new"
        assert (got.argmax(1) == labels).mean() == results.per_client(f"{kind}_accuracy", "test")[client]
        card = read_card(done[client].folder)
        assert card["warnings"] == []
        assert card["accuracy"]["test"]["pictures"] == len(labels)
        assert card["network"]["parameters"] == own.cost(arch).parameters
        assert all(row["used"] <= 1 for row in card["budget"]["limits"].values())
    assert all("largest difference to PyTorch" in line for line in heard[: len(done)])
    if results.method == "fedcs":
        assert card["budget"]["limits"].keys() == {"flops"}


def test_the_prior_is_inside(tmp_path: Path) -> None:
    plain, corrected = (
        start(small_config("fedavg", clients=1, participants=1, rounds=1, local__prior=p), tmp_path / str(p), "cpu", 1)
        for p in (False, True)
    )
    outputs = []
    for folder in (plain, corrected):
        export_run(folder, int8=False, say=lambda text: None)
        outputs.append(open_model(model_of(folder)).run(np.zeros((1, 8, 8, 1), np.uint8)))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_files_beside_the_network(fedrep: Path) -> None:
    folder = fedrep / "export" / "client-001"
    assert {p.name for p in folder.iterdir()} == {"network.onnx", "network-int8.onnx", "card.json", "card.html"}
    card = read_card(folder)
    small, full = card["files"]["network-int8.onnx"], card["files"]["network.onnx"]
    assert small["bytes"] < 0.6 * full["bytes"]
    assert full["test_change"] == 0
    assert small["test_change"] == small["test_accuracy"] - full["test_accuracy"]
    assert [entry["batch"] for entry in full["latency"]] == [1, 32]
    images = prepare(small_config("fedrep")).dataset.images[:300]
    answers = [open_model(folder / name).run(images).argmax(1) for name in ("network.onnx", "network-int8.onnx")]
    assert (answers[0] == answers[1]).mean() > 0.95
    assert card["data"]["partition_hash"] == Partition.load(fedrep / "partition.npz").hash
    assert card["machine"]["onnxruntime"]
    page = (folder / "card.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "95 % interval" in page
    assert card["data"]["hash"] in page
    assert "int8 takes" in page
    about = open_model(folder / "network-int8.onnx").about
    assert about["int8"]
    assert about["classes"] == card["classes"]


def test_the_network_is_written_where_8_bits_fail(
    fedrep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example where a service may write no temporary files."""

    def failing(*_: Any) -> bytes:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(write, "quantise", failing)
    heard: list[str] = []
    (done,) = export_run(fedrep, "client-000", out=tmp_path, say=heard.append)
    assert (done.folder / "network.onnx").is_file()
    assert not (done.folder / "network-int8.onnx").exists()
    assert list(read_card(done.folder)["files"]) == ["network.onnx"]
    assert "there is no int8 file: it could not be made (FileNotFoundError: no usable" in heard[-1]


def test_one_client_and_one_that_is_not_there(fedrep: Path, tmp_path: Path) -> None:
    done = export_run(fedrep, "client-001", out=tmp_path, int8=False, say=lambda text: None)
    assert [e.name for e in done] == ["client-001"]
    with pytest.raises(UserError, match=r"unknown client 'client-1'.*Did you mean"):
        export_run(fedrep, "client-1")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch before 2.13, of its own file
def test_the_torch_file_stands_alone(fedrep: Path, tmp_path: Path) -> None:
    done = export_run(fedrep, "client-000", "torch", tmp_path, say=lambda text: None)
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 1), np.uint8)
    got = torch.export.load(done[0].folder / "network.pt2").module()(torch.from_numpy(images))
    assert np.abs(got.numpy() - open_model(model_of(fedrep)).run(images)).max() < 1e-5


def test_without_the_data_it_is_checked_on_random_pictures(fedrep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.json", "config.toml", "events.csv", "partition.npz"):
        (copy / name).write_bytes((fedrep / name).read_bytes())
    (copy / "nets").symlink_to(fedrep / "nets")
    text = (copy / "config.toml").read_text().replace('name = "digits"', 'name = "folder:/nowhere"')
    (copy / "config.toml").write_text(text)
    heard: list[str] = []
    done = export_run(copy, "client-000", say=heard.append)
    assert "not at hand" in heard[0]
    card = read_card(done[0].folder)
    assert card["accuracy"] == {}
    assert card["checked_on"] == "64 random pictures"
    assert set(card["in_the_run"]) == {"val", "test"}
    assert (done[0].folder / "network.onnx").read_bytes() == model_of(fedrep).read_bytes()


def test_wilson_interval_by_hand() -> None:
    told = accuracy(8, 10)  # z = 1.96: centre (0.8 + 0.19207) / 1.38415, half width 0.31318 / 1.38415
    assert told is not None
    assert told["low"] == pytest.approx(0.4902, abs=1e-4)
    assert told["high"] == pytest.approx(0.9433, abs=1e-4)
    assert accuracy(0, 0) is None
    assert accuracy(5, 5)["high"] == 1.0  # type: ignore[index]


def test_folder_names_are_safe_and_distinct() -> None:
    names = ["St. Mary's / ward 3", "a b", "a-b", "../..", "client-004"]
    assert folder_names(names) == ["St.-Mary-s-ward-3", "a-b-1", "a-b-2", "client", "client-004"]


def test_a_folders_number_makes_it_no_other_clients() -> None:
    assert folder_names(["x y", "x-y", "x-y-1"]) == ["x-y-0", "x-y-1-1", "x-y-1-2"]
    assert len(set(folder_names(["a b", "a-b", "A-b-0", "a-b-1", "a-b-0-2"]))) == 5


class _Neighbours(nn.Module):
    """A network and a store of features: probabilities are the mean of both, as in kNN-Per."""

    keys: Tensor
    values: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.register_buffer("keys", torch.zeros(size, 16))
        self.register_buffer("values", torch.zeros(size, 3))

    def forward(self, x: Tensor) -> Tensor:
        features = x.flatten(1)
        near, at = (features[:, None] - self.keys).square().sum(2).topk(2, largest=False)
        votes = (self.values[at] * (-near).softmax(1).unsqueeze(2)).sum(1)
        return (0.5 * self.head(features).softmax(1) + 0.5 * votes + 1e-6).log()


class _NeighboursNet(FixedNet):
    name = "neighbours"

    def module(self) -> nn.Module:
        return _Neighbours(0)


def test_a_network_that_holds_a_datastore(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = _Neighbours(20)
    made.keys.normal_()
    made.values.copy_(torch.eye(3)[torch.arange(20) % 3])
    weights = {n: t.detach().clone() for n, t in made.state_dict().items()}
    whole = Portable(network(_NeighboursNet((1, 4, 4), 3), (), weights), "own", 1)
    about = {"format": 1, "input": [1, 4, 4], "classes": ["a", "b", "c"], "fit": "crop"}
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 1), np.uint8)
    expected = whole.run(images)
    assert np.abs(open_model(to_onnx(whole, (1, 4, 4), about)).run(images) - expected).max() < 1e-5

    def lacking(*arguments: object) -> bytes:
        raise torch.onnx.errors.UnsupportedOperatorError("aten::something", 17, 18)

    monkeypatch.setattr(graph, "_traced", lacking)  # the other exporter takes over
    assert np.abs(open_model(to_onnx(whole, (1, 4, 4), about)).run(images) - expected).max() < 1e-5


@pytest.mark.parametrize("name", names("space"))
def test_every_space_can_be_exported(name: str) -> None:
    space = Config(space={"name": name}).make_space((3, 32, 32), 4)
    arch = space.smallest
    whole = Portable(network(space, arch, space.cut(space.new_weights(0), arch)), "own", 3)
    about = {"format": 1, "input": [3, 32, 32], "classes": list("abcd"), "fit": "crop"}
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    got = open_model(to_onnx(whole, (3, 32, 32), about)).run(images)
    assert np.abs(got - whole.run(images)).max() < 1e-5


def test_what_onnx_cannot_say_is_told() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvals(x.flatten(1)[:, :9].reshape(-1, 3, 3)).real

    about = {"format": 1, "input": [1, 4, 4], "classes": ["a", "b", "c"], "fit": "crop"}
    with pytest.raises(UserError, match=r"cannot become an ONNX file.*operators"):
        to_onnx(Portable(Odd(), "own", 1), (1, 4, 4), about)


# predict ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    images = prepare(small_config("fedrep")).dataset.images
    for i in range(3):
        Image.fromarray(images[i, :, :, 0]).save(folder / f"{i}.png")
    return folder


def test_predict_needs_only_onnxruntime_numpy_and_pillow(fedrep: Path, photos: Path) -> None:
    """A fresh process in which everything else that fedtailor uses cannot be imported."""
    blocked = (
        "torch",
        "typer",
        "rich",
        "pydantic",
        "sklearn",
        "safetensors",
        "tomli_w",
        "onnx",
        "matplotlib",
        "jinja2",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from fedtailor.cli import main; main()"
    command = [sys.executable, "-c", code, "predict", str(model_of(fedrep)), str(photos), "--csv"]
    source = str(Path(__file__).parent.parent / "src")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source})
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    images = prepare(small_config("fedrep")).dataset.images[:3]
    expected = open_model(model_of(fedrep)).run(images)
    assert [int(r["class"]) for r in rows] == expected.argmax(1).tolist()
    assert [float(rows[0][str(d)]) for d in range(10)] == pytest.approx(expected[0].tolist(), abs=1e-6)


def test_the_documented_snippet_does_the_same(fedrep: Path, photos: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "how-to" / "take-home.md").read_text(encoding="utf-8")
    snippet = text.split("```python\n", 1)[1].split("```", 1)[0]
    assert len(snippet.strip().splitlines()) <= 10
    code = snippet.replace("network.onnx", str(model_of(fedrep))).replace("photo.jpg", str(photos / "1.png"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = open_model(model_of(fedrep)).run(prepare(small_config("fedrep")).dataset.images[1:2])[0]
    name, probability = done.stdout.split()
    assert name == str(expected.argmax())
    assert float(probability) == pytest.approx(expected.max(), abs=1e-5)


def test_predict_names_broken_pictures_and_goes_on(
    fedrep: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").write_bytes((photos / "0.png").read_bytes()[:40])
    assert main([str(model_of(fedrep)), str(photos / "0.png"), str(tmp_path / "bad.png"), "--top", "2"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert out.count("%") == 2
    assert "bad.png: not a readable picture" in err
    with pytest.raises(UserError, match="no such file or folder"):
        picture_paths([str(tmp_path / "none.png")])


def test_a_name_in_a_table_is_no_formula(
    fedrep: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formula = '=HYPERLINK("http://example.org")'

    def rename(model: Any) -> None:
        (entry,) = [entry for entry in model.metadata_props if entry.key == "fedtailor"]
        about = json.loads(entry.value)
        entry.value = json.dumps(about | {"classes": [formula, "-1", *([formula] * 8)]})

    (tmp_path / "network.onnx").write_bytes(_changed(model_of(fedrep), rename))
    assert main([str(tmp_path / "network.onnx"), str(photos), "--csv"]) == 0
    table = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert table[0][3:5] == ["'" + formula, "-1"]
    assert all(row[1] in ("'" + formula, "-1") for row in table[1:])


def _changed(source: Path, change: Any) -> bytes:
    model = onnx.load(source)
    change(model)
    return model.SerializeToString()


def test_files_of_other_versions_are_refused_clearly(fedrep: Path, tmp_path: Path) -> None:
    def retold(**facts: Any) -> Any:
        def change(model: Any) -> None:
            entry = next(e for e in model.metadata_props if e.key == KEY)
            entry.value = json.dumps(json.loads(entry.value) | facts)

        return change

    source = model_of(fedrep)
    with pytest.raises(UserError, match=r"fedtailor 9\.0 in export format 7.*reads format 1"):
        open_model(_changed(source, retold(format=7, fedtailor="9.0")))
    with pytest.raises(UserError, match="not one of 'fedtailor export'"):
        open_model(_changed(source, lambda model: model.metadata_props.pop()))
    with pytest.raises(UserError, match="newer onnxruntime"):
        open_model(_changed(source, lambda model: setattr(model, "ir_version", 99)))
    with pytest.raises(UserError, match="cannot load it"):
        open_model(source.read_bytes()[:500])
    with pytest.raises(UserError, match="no such file"):
        open_model(tmp_path / "none.onnx")


def test_arrays_of_another_size_are_refused(fedrep: Path) -> None:
    model: Model = open_model(model_of(fedrep))
    with pytest.raises(UserError, match=r"takes uint8 pictures \[number, 8, 8, 1\], not uint8 \[1, 9, 8, 1\]"):
        model.run(np.zeros((1, 9, 8, 1), np.uint8))
    with pytest.raises(UserError, match="not float64"):
        model.run(np.zeros((1, 8, 8, 1)))
    assert math.isclose(model.run(np.zeros((1, 8, 8, 1), np.uint8)).sum(), 1, rel_tol=1e-5)
