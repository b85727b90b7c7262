"""Every method does what its card says: what it sends, keeps and holds is declared, and what is declared is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.card import Card, Message
from fedtailor.engine.local import LocalEngine
from fedtailor.errors import UserError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.registry import lookup, names
from fedtailor.report.explain import COLUMNS, explain, row
from fedtailor.runs.execute import open_space, read_networks, start
from fedtailor.runs.rehearse import Rehearsal, rehearse
from tools import small_config

FEW = {"clients": 2, "participants": 2, "local__epochs": 0.2}
SITUATIONS: dict[str, dict[str, Any]] = {  # where part of a card is only used in some federations
    "pfedhn": {"method__head": "private"},
    "fedcs": {"clients": 4, "participants": 3, "rounds": 4, "fleet__name": "capacity-high"},
}
RARE = {"up: refused"}  # only where a soft budget is too small for an arch that was drawn
GIVEN = [m for m in names("method") if lookup("method", m).needs == "net" and not lookup("method", m).one_network]


def seen(method: str) -> Rehearsal:
    """Trained for real, but for searches on darts: what they send does not depend on the accuracies they wait for."""
    config = small_config(method, **FEW | SITUATIONS.get(method, {}))
    searches_darts = config.space.get("name") == "darts"
    return rehearse(config, None if searches_darts else LocalEngine(torch.device("cpu"), 1))


@pytest.mark.parametrize("method", names("method"))
def test_messages_memories_and_server_state_are_on_the_card(method: str) -> None:
    found = seen(method)
    assert found.undeclared() == []
    assert set(found.unused()) <= RARE
    assert found.method.card.shared
    assert found.method.card.personal


def test_what_is_not_on_the_card_is_found() -> None:
    found = seen("ditto")
    found.method = FedAvg()
    assert found.undeclared() == ["keeps: v"]
    found.down.weights["head.weight"] = found.up.extra["gradient"] = found.up.facts["images"] = None
    assert found.undeclared() == ["up: extra: gradient", "up: facts: images", "keeps: v"]
    assert Message("body").undeclared(["body.0.weight", "head.bias"], [], []) == ["weights: head.bias"]
    other = Message("body", head=("body.0",))
    assert other.undeclared(["body.0.weight", "head.bias"], [], []) == ["weights: body.0.weight"]


@pytest.mark.parametrize("head", [("head", "body.7"), ("body.0",)])
@pytest.mark.parametrize("method", ["fedrep", "fedper", "fedbabu", "lg-fedavg"])
def test_a_card_follows_the_layers_that_the_options_call_the_head(method: str, head: tuple[str, ...]) -> None:
    found = rehearse(small_config(method, **FEW, method__head=list(head)))
    assert found.undeclared() == found.unused() == []


@pytest.mark.parametrize("method", ["fedrep", "fedper", "fedbabu", "lg-fedavg"])
def test_a_head_of_layers_that_are_not_there_is_an_error(method: str) -> None:
    with pytest.raises(UserError, match=r"has no layer 'body\.77' with weights\. Did you mean 'body\.7'\?"):
        rehearse(small_config(method, method__head=["head", "body.77"]))
    with pytest.raises(UserError, match="is everything of 'cnn'"):
        rehearse(small_config(method, method__head=["head", "body"]))


def test_a_rehearsal_counts_what_a_run_costs() -> None:
    config = small_config("fedrep", **FEW)
    dry, real = rehearse(config), rehearse(config, LocalEngine(torch.device("cpu"), 1))
    assert dry == real
    assert dry.flops > 0
    assert dry.bytes_up > 0


@pytest.mark.parametrize("method", GIVEN)
def test_methods_run_on_archs_given_to_clients(method: str) -> None:
    found = rehearse(
        small_config(method, **FEW, space__name="tiny", archs="random"), LocalEngine(torch.device("cpu"), 1)
    )
    assert found.undeclared() == []


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("perfedrlnas", {"archs": "random"}, "chooses the archs itself"),
        ("fedavg", {"archs": "random", "space__name": "no-such"}, "unknown space"),
        ("fedavg", {"archs": "runs/nowhere", "space__name": "tiny"}, "the folder of a finished run"),
        ("fedavg", {"archs": "widest", "space__name": "darts"}, "not wide or narrow"),
    ],
)
def test_archs_that_cannot_be_given(method: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        rehearse(small_config(method, **options))


def test_archs_that_a_search_found_are_trained_by_another_method(tmp_path: Path) -> None:
    searched = start(small_config("perfedrlnas", rounds=1, clients=2), tmp_path / "search", "cpu", workers=1)
    config = small_config("fedrep", rounds=1, clients=2, space__name="tiny", archs=str(searched))
    trained = start(config, tmp_path / "train", "cpu", workers=1)
    spaces = [open_space(folder) for folder in (searched, trained)]
    found, kept = (read_networks(f, s) for f, s in zip((searched, trained), spaces, strict=True))
    assert {i: net[1] for i, net in found.items()} == {i: net[1] for i, net in kept.items()}
    assert config.archs in (trained / "config.toml").read_text()
    with pytest.raises(UserError, match="space or its options are not those"):
        rehearse(small_config("fedrep", space__name="vit", archs=str(searched)))
    with pytest.raises(UserError, match="no network of client"):
        rehearse(small_config("fedrep", clients=3, space__name="tiny", archs=str(searched)))


def test_a_method_for_one_network_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "one_network", "its server makes weights of one shape")
    with pytest.raises(UserError, match="the same network everywhere: its server makes weights of one shape"):
        small_config("fedavg", space__name="tiny", archs="random")


def test_explain_says_what_is_sent_kept_and_learnt() -> None:
    text = explain("scaffold")
    for part in ("SERVER holds", "CLIENT keeps", "control variate c_i", "network + dc (109.6 kB)", "server_lr  1.0"):
        assert part in text
    assert "bytes          2.00x" in text  # measured: the control variate is as large as the network
    assert max(map(len, text.splitlines())) <= 120
    own = str(Path(__file__).parent.parent / "examples" / "own_method.py")
    assert "the client's own network" in explain(own)
    assert rehearse(small_config(own, **FEW)).undeclared() == []


def test_costs_of_the_table_are_counted() -> None:
    found = {name: row(name) for name in ("fedavg", "ditto", "fedopt", "local", "per-fedavg", "random-arch")}
    assert all(list(line) == list(COLUMNS) for line in found.values())
    assert [found["fedavg"][c] for c in ("compute", "bytes", "server memory")] == ["1.00x"] * 3
    assert found["ditto"]["compute"] == "2.00x"
    assert found["fedopt"]["server memory"] == "3.00x"
    assert found["local"]["bytes"] == "0"
    assert found["per-fedavg"]["compute"] == "2.00x"  # first order: two gradients in a step
    assert float(found["random-arch"]["bytes"].rstrip("x")) < 1  # sub-networks of the network that FedAvg sends


def test_explanations_say_what_runs_and_what_fedavg_trains_beside() -> None:
    fedmn, fedavg = explain("fedmn"), explain("fedavg")
    assert explain("fedavg-ft").startswith("FedAvg, then every client fine-tunes the result")
    assert explain("ditto").startswith("Ditto: Li et al., ICML 2021, Algorithm 1.")
    assert "nets modular; no archs per client" in fedmn
    assert "any fixed network, or archs given" in fedavg
    assert "compared with FedAvg on the same network:" in fedavg
    assert "compared with FedAvg on the largest network of the space tiny:" in explain("random-arch")
    assert "compared with FedAvg on random networks of the space darts:" in explain("direct-fednas")


def test_a_method_without_a_card_cannot_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "card", Card())
    with pytest.raises(UserError, match="declares no card"):
        explain("fedavg")


def test_the_command_line_explains_and_lists() -> None:
    from typer.testing import CliRunner

    from fedtailor.cli.main import app

    shown = CliRunner().invoke(app, ["explain", "fedper"])
    assert shown.exit_code == 0
    assert "personal part  head" in shown.output
    refused = CliRunner().invoke(app, ["list", "spaces", "--table"])
    assert isinstance(refused.exception, UserError)


PAGES = Path(__file__).parent.parent / "docs" / "methods"


@pytest.mark.parametrize(
    "method", [m for m in names("method") if lookup("method", m).needs == "net" and (PAGES / f"{m}.md").exists()]
)
def test_a_methods_page_names_its_options_and_lists_its_deviations(method: str) -> None:
    page, cls = (PAGES / f"{method}.md").read_text(encoding="utf-8"), lookup("method", method)
    flat = " ".join(page.split())
    for deviation in vars(cls).get("deviations", ()):
        assert f"- {deviation}" in flat
    for field in dataclasses.fields(cls):
        assert f"| `{field.name}` |" in page
