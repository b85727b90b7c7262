"""Runs of PerFedRLNAS: presets, policies that are drawn, clients that are late."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedtailor.config import load, preset_names
from fedtailor.errors import UserError
from fedtailor.runs.execute import start
from tools import rows, small_config


def test_presets_say_what_they_are_called() -> None:
    ours = {n: load(n) for n in preset_names() if n.startswith("perfedrlnas")}
    assert ours["perfedrlnas"].participants == 5
    assert ours["perfedrlnas-50-percent"].participants == 50
    assert ours["perfedrlnas-200-clients"].clients == 200
    assert ours["perfedrlnas-no-time"].make_method().weights["time"] == 0  # type: ignore[attr-defined]
    assert "memory" in ours["perfedrlnas-memory"].make_method().rewards  # type: ignore[attr-defined]
    assert not ours["perfedrlnas-memory"].make_fleet().hard
    assert ours["perfedrlnas-onboarding"].make_partition().new_clients == 100
    for config in ours.values():
        partition = config.make_partition()
        images = 1797 if config.data.name == "digits" else 60_000
        assert partition.samples * (config.clients + partition.new_clients) <= images


def test_the_memory_preset_has_devices_that_some_networks_do_not_fit() -> None:
    config = load("perfedrlnas-memory")
    space = config.make_space((3, 32, 32), 10)
    low, high = config.make_fleet().memory_gb
    need = [space.cost(a).training_memory(config.local.batch) / 1e9 for a in (space.smallest, space.largest)]
    assert need[0] < low < need[1] < high


def test_similar_labels_and_similar_policies_correlate() -> None:
    from fedtailor.report.similarity import compare_clients, similarity_svg

    rng = np.random.default_rng(1)
    groups = np.arange(12) % 3
    counts = np.eye(3)[groups] * 40 + rng.integers(0, 5, (12, 3))
    policies = [np.eye(4)[groups] * 0.6 + 0.1, np.full((12, 2), 0.5)]
    found = compare_clients(counts, policies)
    assert found.correlation > 0.9
    assert found.chance < 0.01
    assert len(found.pairs) == 66
    assert found.policies.max() == pytest.approx((0.7**2 + 3 * 0.1**2 + 0.5) / 2)
    assert 0 <= found.labels.min() <= found.labels.max() <= 1
    other = compare_clients(counts, [policies[0][rng.permutation(12)]])
    assert abs(other.correlation) < 0.5
    equal = compare_clients(np.ones((4, 3)), policies[0][None, :4])
    assert equal.labels == pytest.approx(np.ones(6))
    assert math.isnan(equal.correlation)
    assert similarity_svg(counts, policies).startswith("<svg")
    with pytest.raises(UserError, match="three clients"):
        compare_clients(counts[:2], [policies[0][:2]])


def test_pairs_of_equal_similarity_stay_together() -> None:
    from fedtailor.report.similarity import equal_shares

    assert [len(part) for part in equal_shares(np.arange(16.0))] == [2] * 8
    tied = equal_shares(np.array([0.5, *[0.0] * 10, 0.3]))  # most pairs of a label skew share no label at all
    assert sorted(tied[0].tolist()) == list(range(1, 11))
    assert sum(map(len, tied)) == 12


def test_policies_of_a_run_are_drawn_and_written(tmp_path: Path) -> None:
    from fedtailor.cli.policies import policies_command
    from fedtailor.report.similarity import policy_similarity

    run = start(small_config("perfedrlnas", participants=4), tmp_path / "run", "cpu", workers=1)
    policies_command(run, None, tmp_path / "pairs.csv")
    assert (run / "policies.svg").read_text().startswith("<svg")
    lines = (tmp_path / "pairs.csv").read_text().splitlines()
    assert lines[0] == "client,other,label_similarity,policy_similarity"
    assert len(lines) == 1 + 6
    assert policy_similarity(run) == (run / "policies.svg").read_text()
    none = start(small_config("random-arch", rounds=1), tmp_path / "none", "cpu", workers=1)
    assert policy_similarity(none) is None
    with pytest.raises(UserError, match="no policies"):
        policies_command(none, None, None)


def test_a_search_with_late_absent_and_refusing_clients_goes_on(tmp_path: Path) -> None:
    changes = {
        "fleet__hard": False,
        "fleet__availability": 0.6,
        "fleet__deadline": 0.02,
        "fleet__budget": {"memory": "50%"},
        "method__rewards": ["accuracy", "time", "memory", "energy", "bytes"],
        "rounds": 6,
        "participants": 4,
    }
    folder = start(small_config("perfedrlnas", **changes), tmp_path / "run", "cpu", workers=1)
    found = rows(folder)
    assert any(",refused," in line for line in found)
    assert len([line for line in found if ",test,personal_accuracy," in line]) == 4
