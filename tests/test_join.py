"""Clients after a run: newcomers join in their method's way, known ones fit their networks to new data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli.main import app
from fedtailor.data.partition import TRAIN, Partition
from fedtailor.data.sources import load
from fedtailor.errors import UserError
from fedtailor.export.card import read_card
from fedtailor.export.predict import open_model
from fedtailor.export.write import export_run
from fedtailor.registry import lookup, names
from fedtailor.runs.execute import open_space, read_networks, start
from fedtailor.runs.facts import read_facts
from fedtailor.runs.join import _grown, join, refit
from fedtailor.runs.results import Results
from test_sweep import config_of
from tools import small_config

SILENT: Any = lambda text: None  # noqa: E731


def write_digits(folder: Path, at: np.ndarray, scale: int = 1) -> Path:
    """Handwritten digits as a folder of pictures."""
    data = load("digits")
    for i in at.tolist():
        path = folder / data.classes[data.labels[i]] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.images[i, :, :, 0].repeat(scale, 0).repeat(scale, 1)).save(path)
    return folder


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("newcomer") / "berlin", np.arange(1500, 1580), scale=2)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("fedavg-ft", clients=2, participants=2, rounds=6, local__epochs=2, partition__samples=200)
    return start(config, tmp_path_factory.mktemp("fedavg") / "run", "cpu", 1)


def test_a_newcomer_sees_the_public_set_and_fits_again_without_the_run(newcomer: Path, tmp_path: Path) -> None:
    run = start(config_of("perfedckt", "", rounds=2, clients=2), tmp_path / "run", "cpu", 1)
    own = join(run, f"folder:{newcomer}", "berlin", tmp_path / "own", device="cpu", workers=1, say=SILENT)
    shutil.rmtree(run)
    _, compared = refit(own, "berlin", "", tmp_path / "again", epochs=0, device="cpu", workers=1, say=SILENT)
    assert compared.keys() == {"val", "test"}
    (own / "public.npz").unlink()
    with pytest.raises(UserError, match=r"public\.npz"):
        refit(own, "berlin", "", tmp_path / "once more", epochs=0, device="cpu", workers=1, say=SILENT)


def test_a_newcomer_with_pictures_of_the_public_set_is_refused(tmp_path: Path) -> None:
    config = config_of("perfedckt", "", rounds=1, clients=2, public__name="rest", public__images=0)
    run, owner = start(config, tmp_path / "run", "cpu", 1), Partition.load(tmp_path / "run" / "partition.npz").owner
    photos = write_digits(tmp_path / "berlin", np.flatnonzero(owner < 0)[:60])
    with pytest.raises(UserError, match="are this client's own"):
        join(run, f"folder:{photos}", "berlin", tmp_path / "own", device="cpu", workers=1, say=SILENT)


@pytest.mark.parametrize("method", [m for m in names("method") if lookup("method", m).needs == "net"])
def test_a_newcomer_joins_every_method_with_a_net(method: str, newcomer: Path, tmp_path: Path) -> None:
    run = start(config_of(method, "", rounds=2, clients=2), tmp_path / "run", "cpu", 1)
    _joins(run, newcomer, tmp_path / "out")


@pytest.mark.parametrize("method", ["perfedrlnas", "fedcs", "fedrlnas", "random-arch"])
def test_a_newcomer_joins_methods_that_search(method: str, newcomer: Path, tmp_path: Path) -> None:
    options = {"fleet__name": "capacity-high", "clients": 4} if method == "fedcs" else {"clients": 2}
    run = start(config_of(method, "tiny", rounds=2, **options), tmp_path / "run", "cpu", 1)
    _joins(run, newcomer, tmp_path / "out")


def _joins(run: Path, newcomer: Path, out: Path) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    join(run, f"folder:{newcomer}", "berlin", out, device="cpu", workers=1, say=SILENT)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before  # the run is left as it is
    results = Results.read(out)
    assert results.facts["client_names"] == ["berlin"]
    assert results.facts["input"] == [1, 8, 8]  # pictures were 16 by 16
    assert Partition.load(out / "partition.npz").sizes().tolist() == [[48, 16, 16]]
    assert set(results.per_client("personal_accuracy", "test")) == {0}
    _, _, weights = read_networks(out, open_space(out))[0]
    assert all(torch.isfinite(t).all() for t in weights.values())


def test_the_newcomers_network_is_exported_and_reported(fedavg: Path, newcomer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--data", f"folder:{newcomer}", "--name", "berlin", "--out", str(out), "--device", "cpu"]
    done = CliRunner().invoke(app, ["onboard", str(fedavg), *options, "--profile", "phone-low"])
    assert done.exit_code == 0, done.output
    assert (out / "report.html").is_file()
    card = read_card(out / "export" / "berlin")
    assert card["warnings"] == []
    assert card["budget"]["device"] == "phone-low"
    assert 0 < card["budget"]["limits"]["memory"]["used"] < 1
    recorded = Results.read(out).per_client("personal_accuracy", "test")[0]
    assert card["accuracy"]["test"]["accuracy"] == recorded
    assert recorded > 0.5  # strangers' digits, but digits
    model = open_model(out / "export" / "berlin" / "network.onnx")
    assert model.about["client"] == "berlin"


def test_fine_tuning_stops_where_val_is_best(newcomer: Path, tmp_path: Path) -> None:
    """FedAvg leaves clients nothing of their own: newcomers fine-tune its model, never to the worse on val."""
    run = start(config_of("fedavg", "", rounds=2, clients=2), tmp_path / "run", "cpu", 1)
    found: dict[int, float] = {}
    for tune in (-1, 0, 3):
        out = join(run, f"folder:{newcomer}", "berlin", tmp_path / f"{tune}", device="cpu", say=SILENT, tune=tune)
        found[tune] = Results.read(out).per_client("personal_accuracy", "val")[0]
    assert found[0] <= found[3] <= found[-1]
    assert found[0] < found[-1]


def test_the_same_from_python(fedavg: Path, newcomer: Path, tmp_path: Path) -> None:
    made = ft.load(fedavg).onboard(f"folder:{newcomer}", "berlin", out=tmp_path / "out", device="cpu")
    assert made.export(int8=False) == [tmp_path / "out" / "export" / "berlin"]
    assert (tmp_path / "out" / "export" / "berlin" / "network.onnx").is_file()


def test_the_budget_holds_for_newcomers(newcomer: Path, tmp_path: Path) -> None:
    config = small_config("perfedrlnas", rounds=2, fleet__name="capacity-low", fleet__quantity="parameters", clients=2)
    run = start(config, tmp_path / "run", "cpu", 1)
    out = join(run, f"folder:{newcomer}", "berlin", tmp_path / "out", device="cpu", workers=1, say=SILENT)
    card = export_run(out, int8=False, say=SILENT)[0].card
    limit = card["budget"]["limits"]["parameters"]
    assert limit["needs"] == card["network"]["parameters"] <= limit["limit"]


def test_a_newcomer_has_a_device_of_the_runs_own_fleet_file(newcomer: Path, tmp_path: Path) -> None:
    small = "[profiles.sensor]\nflops_per_second = 2e9\nmemory = 2e7\nup_mbit = 1\ndown_mbit = 2\navailability = 0.8\n"
    (tmp_path / "fleet.toml").write_text(f'clients = ["sensor", "laptop"]\n{small}battery = "small"\n')
    config = small_config("fedavg", rounds=1, fleet__name=f"file:{tmp_path / 'fleet.toml'}", clients=2)
    run = start(config, tmp_path / "run", "cpu", 1)
    with pytest.raises(UserError, match="no device for one more client"):
        join(run, f"folder:{newcomer}", "berlin", tmp_path / "a", device="cpu", workers=1, say=SILENT)
    with pytest.raises(UserError, match="device profile 'sensors'"):
        join(
            run, f"folder:{newcomer}", "berlin", tmp_path / "b", profile="sensors", device="cpu", workers=1, say=SILENT
        )
    out = join(
        run, f"folder:{newcomer}", "berlin", tmp_path / "c", profile="sensor", device="cpu", workers=1, say=SILENT
    )
    budget = export_run(out, int8=False, say=SILENT)[0].card["budget"]
    assert (budget["device"], budget["limits"]["memory"]["limit"]) == ("sensor", 2e7)


def test_newcomers_that_cannot_join(fedavg: Path, newcomer: Path, tmp_path: Path) -> None:
    def joining(source: str, name: str = "berlin", out: str = "out") -> None:
        join(fedavg, source, name, tmp_path / out, device="cpu", workers=1, say=SILENT)

    with pytest.raises(UserError, match=r"client of this name.*personalize"):
        joining(f"folder:{newcomer}", "client-001")
    strange = write_digits(tmp_path / "strange", np.arange(60))
    (strange / "3").rename(strange / "cat")
    with pytest.raises(UserError, match=r"pictures of 'cat', which the run does not know. Its classes are 0, 1, 2"):
        joining(f"folder:{strange}")
    np.savez(tmp_path / "large.npz", images=np.zeros((30, 9, 9), np.uint8), labels=np.arange(30) % 3)
    with pytest.raises(UserError, match=r"images are \[1, 9, 9\].*the run's are \[1, 8, 8\]"):
        joining(f"npz:{tmp_path / 'large.npz'}")
    few = write_digits(tmp_path / "few", np.arange(5))
    with pytest.raises(UserError, match=r"'berlin' has 5 pictures.*asks for 10"):
        joining(f"folder:{few}")
    write_digits(tmp_path / "two" / "rome", np.arange(20))
    write_digits(tmp_path / "two" / "oslo", np.arange(20))
    with pytest.raises(UserError, match=r"holds 2 clients \(oslo, rome\), none is 'berlin'"):
        joining(f"folder:{tmp_path / 'two'}")
    assert not (tmp_path / "out").exists()
    joining(f"folder:{tmp_path / 'two'}", "rome", "rome")
    assert sum(Partition.load(tmp_path / "rome" / "partition.npz").sizes()[0]) == 20
    with pytest.raises(UserError, match="not empty"):
        joining(f"folder:{newcomer}", out="rome")


def test_one_class_only_is_said(fedavg: Path, tmp_path: Path) -> None:
    data = load("digits")
    write_digits(tmp_path / "sevens", np.flatnonzero(data.labels == 7)[:40])
    heard: list[str] = []
    out = join(
        fedavg, f"folder:{tmp_path / 'sevens'}", "x", tmp_path / "out", device="cpu", workers=1, say=heard.append
    )
    assert "one class only (7)" in heard[0]
    assert read_facts(out)["train_counts"] == [[0, 0, 0, 0, 0, 0, 0, 24, 0, 0]]


def test_places_for_one_more_client() -> None:
    old = {
        "alpha": torch.ones(2, 3),
        "w": torch.ones(2, 2),
        "archs": [(1,), (2,)],
        "deep": {"m": torch.ones(2)},
        "n": 5,
    }
    fresh = {
        "alpha": torch.zeros(3, 3),
        "w": torch.zeros(2, 2),
        "archs": [(0,)] * 3,
        "deep": {"m": torch.zeros(3)},
        "n": 0,
    }
    got = _grown(old, fresh, 2, 3)
    assert got["alpha"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert got["w"].tolist() == [[1, 1], [1, 1]]
    assert got["archs"] == [(1,), (2,), (0,)]
    assert got["deep"]["m"].tolist() == [1, 1, 0]
    assert got["n"] == 5


# personalize ------------------------------------------------------------------------------------------------------


def test_new_data_keeps_the_splits_of_the_old(fedavg: Path, tmp_path: Path) -> None:
    partition = Partition.load(fedavg / "partition.npz")
    mine = np.flatnonzero(partition.owner == 0)
    theirs = np.flatnonzero(partition.owner == -1)[:50]
    folder = write_digits(tmp_path / "now", np.concatenate([mine, theirs]))
    out, compared = refit(
        fedavg, "client-000", f"folder:{folder}", tmp_path / "out", device="cpu", workers=1, say=SILENT
    )
    deal, images = Partition.load(out / "partition.npz"), np.load(out / "data.npz")["images"]
    assert deal.sizes().tolist() == [[120 + 30, 40 + 10, 40 + 10]]
    data = load("digits")
    was = {data.images[i].tobytes(): partition.split[i] for i in mine}
    assert all(was.get(image.tobytes(), s) == s for image, s in zip(images, deal.split, strict=True))
    assert set(compared) == {"val", "test"}
    assert compared["test"][1] == Results.read(out).per_client("personal_accuracy", "test")[0]
    assert compared["test"][1] > 0.7


def test_without_new_data_the_old_network_is_the_measure(fedavg: Path, tmp_path: Path) -> None:
    _, compared = refit(fedavg, "client-001", "", tmp_path / "out", epochs=0, device="cpu", workers=1, say=SILENT)
    results = Results.read(fedavg)
    for split, (old, new) in compared.items():
        assert old == results.per_client("personal_accuracy", split)[1]
        assert new == old  # the same data, the same seeds, the same network
    with pytest.raises(UserError, match="unknown client 'client-9'"):
        refit(fedavg, "client-9", "", tmp_path / "other")


def test_a_warning_where_it_got_worse(fedavg: Path, tmp_path: Path) -> None:
    """A fifth of the labels are right: whoever learns them gets worse on what it knew."""
    partition = Partition.load(fedavg / "partition.npz")
    mine, data = np.flatnonzero(partition.owner == 0), load("digits")
    labels = data.labels[mine].copy()
    train = partition.split[mine] == TRAIN
    labels[train] = (labels[train] + 1) % 10
    np.savez(tmp_path / "bad.npz", images=data.images[mine], labels=labels)
    options = ["--client", "client-000", "--data", f"npz:{tmp_path / 'bad.npz'}", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["personalize", str(fedavg), *options, "--device", "cpu", "--no-export"])
    assert done.exit_code == 1
    assert "worse:" in done.output
    assert "% before" in done.output


def test_a_folder_that_has_grown(tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "data" / "oslo", np.arange(60)).parent
    write_digits(folder / "rome", np.arange(60, 120))
    changes = {"data__name": f"folder:{folder}", "partition__name": "natural", "partition__samples": 0}
    run = start(small_config("ditto", clients=2, participants=2, rounds=1, **changes), tmp_path / "run", "cpu", 1)
    write_digits(folder / "oslo", np.arange(200, 240))
    out, compared = refit(run, "oslo", "", tmp_path / "out", device="cpu", workers=1, say=SILENT)
    deal, images = Partition.load(out / "partition.npz"), np.load(out / "data.npz")["images"]
    data, was = load("digits"), Partition.load(run / "partition.npz")
    assert deal.sizes().tolist() == [[36 + 24, 12 + 8, 12 + 8]]
    tested = {image.tobytes() for image in images[deal.split != TRAIN]}
    trained = np.flatnonzero((was.owner == 0) & (was.split == TRAIN))
    order = sorted(range(60), key=lambda i: (data.classes[data.labels[i]], f"{i}.png"))  # as the folder lists them
    assert not any(data.images[order[i]].tobytes() in tested for i in trained)
    assert set(compared) == {"val", "test"}
    (run / "fingerprints.npy").unlink()
    heard: list[str] = []
    refit(run, "oslo", "", tmp_path / "again", device="cpu", workers=1, say=heard.append)
    assert "not there any more" in heard[0]
