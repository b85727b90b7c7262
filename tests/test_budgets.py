"""Budgets, and fleets on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtailor.cli import fleet as cli_fleet
from fedtailor.cli import space as cli_space
from fedtailor.config import load
from fedtailor.errors import UserError
from fedtailor.fleet import (
    NAMES,
    Budget,
    Device,
    Limits,
    make,
    require_feasible,
    shipped,
)
from fedtailor.fleet.budget import readable
from fedtailor.runs.execute import make_seats
from fedtailor.seeds import rng_of
from test_fleet import COST, DEVICE, TINY

# budgets ------------------------------------------------------------------------------------------------------------


def test_needs_by_hand():
    # memory at batch 10: 4 * (3 * 1000 + 100) + 10 * 5000 bytes; a round with 100 images: 4400 bytes each way
    memory, seconds = 62_400, 8 * 4400 / 40e6 + 8 * 4400 / 10e6 + 100 * 6_000_000 / 1e9
    exact = Budget(flops=2e6, parameters=1000, memory=memory, seconds=seconds * (1 + 1e-12), bytes=4400)
    assert exact.fits(COST, 10, DEVICE, 100)
    assert exact.use(COST, 10, DEVICE, 100) == pytest.approx(dict.fromkeys(exact.limits, 1.0))
    assert not exact.fits(COST, 11, DEVICE, 100)
    assert set(exact.excess(COST, 11, DEVICE, 101)) == {"memory", "seconds"}
    for quantity, limit in exact.limits.items():
        tight = replace(exact, **{quantity: 0.99 * limit})
        assert list(tight.excess(COST, 10, DEVICE, 100)) == [quantity]
        assert tight.why_not(COST, 10, DEVICE, 100).startswith(f"{quantity} ")
    assert exact.why_not(COST, 10, DEVICE, 100) == ""
    assert Budget().fits(COST, 10**6, DEVICE)
    with pytest.raises(ValueError, match="images"):
        exact.fits(COST, 10, DEVICE)


def test_fractions_are_of_the_largest():
    budget = Budget(memory=1e9, of_largest=Budget(flops=0.5, memory=0.25))
    with pytest.raises(ValueError, match="absolute"):
        budget.fits(COST, 10, DEVICE)
    assert budget.absolute(COST, 10, DEVICE) == Budget(flops=1e6, memory=15_600)
    assert replace(budget, memory=10).absolute(COST, 10, DEVICE).memory == 10
    assert Budget(flops=1).absolute(COST, 10, DEVICE) == Budget(flops=1)


def test_budgets_combine_to_the_stricter():
    a = Budget(flops=5, memory=2, of_largest=Budget(flops=0.5))
    b = Budget(flops=3, bytes=9, of_largest=Budget(flops=0.7, memory=0.1))
    assert a & b == b & a == Budget(flops=3, memory=2, bytes=9, of_largest=Budget(flops=0.5, memory=0.1))
    assert a & Budget() == a
    with pytest.raises(UserError, match="above 0"):
        Budget(flops=-1)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (0, Budget()),
        (12, Budget(memory=12)),
        ("4 GB", Budget(memory=4e9)),
        ("600M", Budget(memory=6e8)),
        ("1.5kB", Budget(memory=1500)),
        ("2e3", Budget(memory=2000)),
        ("50%", Budget(of_largest=Budget(memory=0.5))),
    ],
)
def test_limits_as_written(text: float | str, budget: Budget):
    assert Limits(memory=text).budget() == budget


@pytest.mark.parametrize("text", ["", "GB", "-3", "4 XB", "50 %%", "nan", float("nan"), float("inf"), True])
def test_limits_that_are_none(text: float | str):
    with pytest.raises(UserError, match=r"fleet\.budget\.memory"):
        Limits(memory=text)


@pytest.mark.parametrize(
    ("budget", "draws"),
    [
        (Budget(flops=3e6), 3000),
        (Budget(memory=6e6, bytes=20_000), 2000),
        (Budget(seconds=1.0), 3000),
        (Budget(of_largest=Budget(flops=0.32)), 1900),
        (Budget(of_largest=Budget(parameters=0.12, memory=0.2)), 100),  # two archs
    ],
    ids=str,
)
def test_draws_never_exceed_the_budget(budget: Budget, draws: int):
    profile = shipped().get("phone-high")
    fits = budget.within(TINY, 32, profile, images=2500)
    inside = {arch for arch in TINY.archs() if fits(arch)}
    assert 0 < len(inside) < TINY.size
    limits = budget.absolute(TINY.cost(TINY.largest), 32, profile, 2500)
    rng = rng_of(0, "test", str(budget))
    upwards = [np.array([0.1, 0.9])] * 6  # what does not fit is likelier: most draws end in the Gibbs sweeps
    seen = {TINY.sample(rng, fits=fits) for _ in range(draws)} | {TINY.sample(rng, upwards, fits) for _ in range(10)}
    assert seen == inside
    assert all(limits.fits(TINY.cost(arch), 32, profile, 2500) for arch in seen)


@pytest.mark.parametrize(("samples", "epochs", "images"), [(33, 1.0, 64), (64, 1.0, 64), (10, 0.2, 10), (0, 1.0, 0)])
def test_a_round_is_as_long_as_its_full_batches(samples: int, epochs: float, images: int):
    """33 images in batches of 32 are two full batches, and 0.2 epochs of ten images one batch of ten."""
    config = load("demo", {"local.epochs": epochs, "local.batch": 32, "method.name": "fedavg"})
    (seat,) = make_seats(config, config.make_space((1, 8, 8), 10), [("a", samples)], make(config.make_fleet(), 1, 0))
    assert seat.images == images


def test_infeasible_budget_names_client_limit_and_cost():
    smallest = TINY.cost(TINY.smallest)
    with pytest.raises(UserError) as error:
        require_feasible(TINY, Budget(memory=1e6, flops=1e9), "ward-7", 32, DEVICE)
    for words in ("'ward-7'", "'tiny'", "limit 1 MB", readable("memory", smallest.training_memory(32)), "(0, 0, 0"):
        assert words in str(error.value)
    assert "flops" not in str(error.value)
    with pytest.raises(UserError, match=r"parameters .* \(limit"):
        require_feasible(TINY, Budget(of_largest=Budget(parameters=0.01)), "ward-7", 32, DEVICE)
    require_feasible(TINY, Budget(memory=smallest.training_memory(32)), "ward-7", 32, DEVICE)


def test_readable():
    assert [readable("memory", v) for v in (12, 999.96, 4e9, 1.23456e6)] == ["12 B", "1 kB", "4 GB", "1.235 MB"]
    assert readable("parameters", 1234) == "1.234 k"
    assert [readable("seconds", v) for v in (0.01234, 3600)] == ["0.0123 s", "3,600 s"]


def test_devices_are_plain_values():
    assert hash(Device(DEVICE, Budget(flops=1))) == hash(Device(DEVICE, Budget(flops=1)))


# the command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "160")
    return CliRunner()


def shown(runner: CliRunner, app: object, *words: str) -> str:
    result = runner.invoke(app, ["show", *words], catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


def test_fleet_show(wide: CliRunner):
    text = shown(wide, cli_fleet.app, "--name", "capacity-high", "--clients", "20")
    for words in ("flops ≤ 100 % of largest", "flops ≤ 68 %", "27 of 64", "all", "0.259 s", "2.83 s"):
        assert words in text
    text = shown(wide, cli_fleet.app, "--net", "cnn", "--set", "profile=laptop", "--set", "budget.memory=1 MB")
    for words in ("laptop", "0-9", "none: memory", "limit 1 MB", "a fixed network"):
        assert words in text
    text = shown(wide, cli_fleet.app, "--name", "mixed", "--set", "availability=0", "--set", "deadline=20")
    assert "reachable 40 %" in text
    assert "after 20 s are dropped" in text
    help_text = wide.invoke(cli_fleet.app, ["show", "--help"]).output
    assert all(name in help_text for name in NAMES)
    with pytest.raises(UserError, match=r"unknown key 'fleet\.dedline'"):
        shown(wide, cli_fleet.app, "--set", "dedline=20")


def test_space_show(wide: CliRunner, tmp_path: Path):
    text = shown(wide, cli_space.app, "tiny", "--arch", "1,0,1,0,0,1")
    for words in ("64 archs", "stage1.width", "1: 16", "body.1.1", "head", "arch 1,0,1,0,0,1"):
        assert words in text
    found = json.loads(shown(wide, cli_space.app, "tiny", "--arch", "smallest", "--json"))
    cost = TINY.cost(TINY.smallest)
    assert found["arch"]["arch"] == [0] * 6
    assert found["smallest"] == found["arch"]["cost"]
    assert found["smallest"]["training_memory"] == cost.training_memory(32)
    assert sum(piece["flops"] for piece in found["arch"]["pieces"]) == cost.flops
    draws = [shown(wide, cli_space.app, "tiny", "--arch", "random", "--seed", s, "--json") for s in "001"]
    assert draws[0] == draws[1] != draws[2]
    for flag, fixed in {"--json": False, "--net": True}.items():  # a space and a net of one name
        found = json.loads(shown(wide, cli_space.app, "mobilenetv2", "--json", flag))
        assert (found["dimensions"] == []) == fixed
    net = json.loads(shown(wide, cli_space.app, "cnn", "--input", "1,28,28", "--set", "width=4", "--json"))
    assert (net["size"], net["dimensions"], net["input"]) == (1, [], [1, 28, 28])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tny"], "unknown space or net 'tny'. Did you mean 'tiny'?"),
        (["tiny", "--net"], "unknown net 'tiny'"),
        (["tiny", "--arch", "1,0"], "has 6 numbers, not 2"),
        (["tiny", "--arch", "big"], "--arch big: expected whole numbers"),
        (["tiny", "--input", "32,32"], "--input 32,32"),
        (["tiny", "--set", "norm"], "--set norm: write it as key=value"),
        (["tiny", "--set", "norm=layer"], "norm = 'layer'"),
        (["cnn", "--set", "wdth=3"], "Did you mean 'width'?"),
    ],
)
def test_space_show_explains_mistakes(wide: CliRunner, words: list[str], message: str):
    with pytest.raises(UserError) as error:
        shown(wide, cli_space.app, *words)
    assert message in str(error.value)


def test_space_show_draws(wide: CliRunner, tmp_path: Path):
    pytest.importorskip("fedtailor.spaces.draw")
    shown(wide, cli_space.app, "tiny", "--svg", str(tmp_path / "arch.svg"))
    assert "<svg" in (tmp_path / "arch.svg").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="cannot write"):
        shown(wide, cli_space.app, "tiny", "--svg", str(tmp_path / "none" / "arch.svg"))
