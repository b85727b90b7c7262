"""Faults of public versions that ours must not have: the list in docs/methods/faults.md, and tests of a few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedtailor.config import Local
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.fml import FML
from fedtailor.runs.execute import start
from tools import by_hand, numbers, one_round, personal, rows, small_config, three

ROOT = Path(__file__).parent.parent
PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]


def test_every_fault_has_a_test() -> None:
    page = (ROOT / "docs" / "methods" / "faults.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ") and "::" in line]
    assert len(lines) > 30
    for line in lines:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", line)
        assert named, line
        for file, name in named:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_fedrep_gives_nobody_the_heads_of_others() -> None:
    federation = by_hand(FedRep(final_epochs=0.0), DATA, PLAIN, participants=1)
    federation.engine.initial = lambda space, seed: three(1, 0.3, 0)  # type: ignore[method-assign]
    state = one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    (called,) = state.memories
    assert numbers(state.memories[called]["head"]) != pytest.approx([0.3, 0.0])
    absent = federation.job.seats[1 - called]
    assert list(federation.method.offer(state.server, absent).weights) == ["body.weight"]
    assert numbers(personal(federation, state, absent.id))[1:] == pytest.approx([0.3, 0.0])


@pytest.mark.parametrize("part", ["all", "head"])
def test_fedbabu_fine_tunes_the_whole_network_unless_told_otherwise(part: str) -> None:
    method = FedBABU(epochs=2.0) if part == "all" else FedBABU(epochs=2.0, part="head")
    federation = by_hand(method, DATA, PLAIN)
    federation.engine.initial = lambda space, seed: three(1, 0.3, 0)  # type: ignore[method-assign]
    state = one_round(federation, weights={"body.weight": torch.tensor([[1.0]])})
    body, *head = numbers(personal(federation, state, 0))
    assert (body == pytest.approx(state.server.weights["body.weight"].item(), abs=1e-7)) == (part == "head")
    assert head != pytest.approx([0.3, 0.0])


def test_defaults_switch_no_method_off() -> None:
    assert Ditto().lamda > 0
    assert 0 < FML().alpha < 1
    assert 0 < FML().beta < 1


def test_personal_networks_are_evaluated_during_a_run(tmp_path: Path) -> None:
    folder = start(small_config("ditto", rounds=2, evaluate_every=1), tmp_path / "run", "cpu", workers=1)
    found = [row.split(",")[0] for row in rows(folder) if ",val,personal_accuracy," in row]
    assert found == ["1"] * 4 + ["2"] * 4
