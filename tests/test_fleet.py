"""Devices, budgets, the cost model of a round and the simulated clock."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedtailor.cli import fleet as cli_fleet
from fedtailor.cli import space as cli_space
from fedtailor.errors import UserError
from fedtailor.fleet import (
    NAMES,
    Budget,
    Clock,
    Device,
    FleetConfig,
    Limits,
    Profile,
    available,
    make,
    require_feasible,
    round_seconds,
    shipped,
)
from fedtailor.fleet.budget import readable
from fedtailor.fleet.fleet import CAPACITY_COSTS, deal
from fedtailor.fleet.profile import read_catalogue
from fedtailor.nets.mobilenetv2 import MobileNetV2
from fedtailor.options import read, table_of
from fedtailor.seeds import rng_of
from fedtailor.spaces.measure import Cost
from fedtailor.spaces.tiny import Tiny

TINY = Tiny((3, 32, 32), 10)
DEVICE = Profile("toy", flops_per_second=1e9, memory=1e9, up_mbit=10, down_mbit=40, availability=1, battery="none")
COST = Cost(parameters=1000, buffers=100, flops=2_000_000, activations=5000, peak=800)


# the cost model and the clock ---------------------------------------------------------------------------------------


def test_round_seconds_by_hand():
    # 5 MB down at 40 Mbit/s: 1 s. 5 MB up at 10 Mbit/s: 4 s. 3 GFLOP at 1 GFLOP/s: 3 s.
    assert round_seconds(DEVICE, 5e6, 5e6, 3e9) == pytest.approx(8)
    assert round_seconds(DEVICE, 5e6, 0, 0) == pytest.approx(1)
    assert round_seconds(DEVICE, 0, 5e6, 0) == pytest.approx(4)
    assert round_seconds(DEVICE, 0, 0, 0) == 0
    # a link shared by five is five times as slow, computing is not
    assert round_seconds(DEVICE.sharing(5), 5e6, 5e6, 3e9) == pytest.approx(5 + 20 + 3)


def test_a_round_lasts_as_long_as_its_slowest_client():
    clock, ended = Clock().round({3: 10.0, 1: 30.0, 2: 20.0})
    assert ended == (30.0, (1, 2, 3), ())
    clock, ended = clock.round({5: 3570.0})
    assert (clock.seconds, clock.hours) == (3600.0, 1.0)
    assert clock.round({})[1] == (0.0, (), ())
    assert Clock().seconds == 0  # a value: rounds return the next clock


def test_a_deadline_ends_the_round_and_drops_the_late():
    clock, ended = Clock(deadline=20).round({0: 10.0, 1: 20.0, 2: 20.5})
    assert ended == (20.0, (0, 1), (2,))
    assert clock == Clock(deadline=20, seconds=20)
    assert clock.round({0: 5.0})[1] == (5.0, (0,), ())  # nobody late: the server does not wait for the deadline
    assert Clock(deadline=1).round({0: 5.0})[1] == (1.0, (), (0,))


def test_availability_is_a_counter():
    fleet = make(FleetConfig(availability=0.3), 1000, seed=1)
    first = available(fleet, range(1000), 4, seed=1)
    assert first == available(fleet, reversed(range(1000)), 4, seed=1)
    assert available(fleet, [7, 8, 9], 4, seed=1) == first & {7, 8, 9}  # whoever else is asked about
    assert first != available(fleet, range(1000), 5, seed=1) != available(fleet, range(1000), 5, seed=2)
    seen = [len(available(fleet, range(1000), r, seed=1)) for r in range(10)]
    assert abs(np.mean(seen) - 300) < 5 * math.sqrt(1000 * 0.3 * 0.7 / 10)
    always = make(FleetConfig(), 1000, seed=1)
    assert available(always, range(1000), 1, seed=1) == set(range(1000))


# profiles -----------------------------------------------------------------------------------------------------------


def test_shipped_profiles():
    profiles = shipped().profiles
    assert {"microcontroller", "phone-low", "phone-high", "single-board", "laptop", "gpu-server"} <= profiles.keys()
    assert profiles["microcontroller"].flops_per_second < profiles["phone-low"].flops_per_second
    assert profiles["phone-high"].up_mbit == profiles["phone-high"].down_mbit == 100
    assert math.isclose(sum(shipped().shares.values()), 1)


GOOD = {
    "flops_per_second": "1e9",
    "memory": "1e9",
    "up_mbit": "10",
    "down_mbit": "10",
    "availability": "0.5",
    "battery": '"none"',
}


def profile_file(folder: Path, rest: str = "", **changes: str | None) -> Path:
    lines = [f"{key} = {value}" for key, value in {**GOOD, **changes}.items() if value is not None]
    path = folder / "devices.toml"
    path.write_text(rest + "\n[profiles.mine]\n" + "\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": None}, "'memory' is missing"),
        ({"memory": "-1"}, "memory = -1"),
        ({"up_mbit": "0"}, "up_mbit = 0"),
        ({"flops_per_second": '"fast"'}, "flops_per_second = 'fast'"),
        ({"flops_per_second": "true"}, "flops_per_second = True"),
        ({"memory": "nan"}, "memory = nan"),
        ({"availability": "1.5"}, "availability = 1.5"),
        ({"battery": '"huge"'}, "battery = 'huge'"),
        ({"memroy": "1e9"}, "unknown key 'memroy'. Did you mean 'memory'?"),
    ],
)
def test_malformed_profiles(tmp_path: Path, changes: dict[str, str | None], words: str):
    with pytest.raises(UserError) as error:
        read_catalogue(profile_file(tmp_path, **changes))
    assert "profile 'mine'" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[profiles", "is not TOML"),
        ("profiles = 3", "must be a table"),
        ("profiles.mine = 3", "profile 'mine' must be a table"),
        ("profile.mine.memory = 3", "unknown key 'profile'. Did you mean 'profiles'?"),
        ("shares.laptpo = 1", "unknown device profile 'laptpo'. Did you mean 'laptop'?"),
        ("shares.laptop = -1", "laptop = -1"),
        ("clients = ['laptpo']", "Did you mean 'laptop'?"),
        ("clients = 'laptop'", "must be a list"),
        ("", "say who has which device"),
        ("clients = ['laptop']\nshares.laptop = 1", "say who has which device"),
        ("clients = ['laptop']", "lists 1 devices, but the federation has 10"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, words: str):
    path = tmp_path / "devices.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        make(FleetConfig(name=f"file:{path}"), 10, seed=0)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read"):
        make(FleetConfig(name=f"file:{tmp_path / 'none.toml'}"), 10, seed=0)


# distributions ------------------------------------------------------------------------------------------------------


def test_equal_is_the_default():
    fleet = make(FleetConfig(), 4, seed=0)
    assert len(set(fleet)) == 1
    assert fleet[0].budget == Budget()
    assert (fleet[0].profile.up_mbit, fleet[0].profile.down_mbit, fleet[0].profile.availability) == (100, 100, 1)


def test_uniform_memory_is_fixed_and_uniform():
    config = FleetConfig(name="uniform-memory")
    fleet = make(config, 2000, seed=3)
    memory = np.array([d.budget.memory for d in fleet])
    assert memory.min() >= 2e9
    assert memory.max() <= 16e9
    assert abs(memory.mean() - 9e9) < 0.5e9
    assert all(d.profile.memory == d.budget.memory for d in fleet)
    assert make(config, 2000, seed=3) == fleet
    assert make(config, 10, seed=3) == fleet[:10]  # who else there is does not matter
    assert make(config, 10, seed=4) != fleet[:10]


@pytest.mark.parametrize(
    ("name", "clients", "counts"),
    [
        ("capacity-high", 10, (5, 3, 2)),
        ("capacity-low", 10, (2, 3, 5)),
        ("capacity-high", 100, (50, 30, 20)),
        ("capacity-low", 7, (1, 2, 4)),  # quotas 1.4, 2.1, 3.5: the odd client goes to the largest remainder
        ("capacity-high", 1, (1, 0, 0)),
    ],
)
def test_capacity_shares_are_exact(name: str, clients: int, counts: tuple[int, ...]):
    config = FleetConfig(name=name, quantity="parameters", fractions=(1.0, 0.75, 0.5))
    fleet = make(config, clients, seed=5)
    found = Counter(d.budget.of_largest.parameters for d in fleet if d.budget.of_largest)
    assert tuple(found[f] for f in config.fractions) == counts
    assert make(config, clients, seed=5) == fleet
    if clients == 100:
        assert make(config, clients, seed=6) != fleet


@pytest.mark.parametrize("quantity", ["flops", "parameters"])
def test_capacity_tiers_are_the_costs_of_mobilenetv2_widths(quantity: str):
    needs = [getattr(cost, quantity) for cost in mobilenetv2_costs()]
    for tier, need in zip(CAPACITY_COSTS[quantity], needs, strict=True):
        assert tier - 0.01 < need / needs[0] <= tier


@cache
def mobilenetv2_costs() -> list[Cost]:
    return [MobileNetV2((3, 32, 32), 10, width=w).cost(()) for w in (1.0, 0.75, 0.5)]


def test_high_capacity_affords_the_largest():
    fleet = make(FleetConfig(name="capacity-low"), 10, seed=0)
    assert sum(d.budget.within(TINY, 32, d.profile)(TINY.largest) for d in fleet) == 2


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 200), st.integers(0, 9))
def test_dealing_is_exact(shares: list[float], clients: int, seed: int):
    counts = Counter(deal(shares, clients, seed))
    assert sum(counts.values()) == clients
    for i, share in enumerate(shares):
        assert abs(counts[i] - clients * share / sum(shares)) < 1 + 1e-6


def test_mixed_follows_the_weights():
    fleet = make(FleetConfig(name="mixed", availability=0), 2000, seed=0)
    counts = Counter(d.profile.name for d in fleet)
    for name, share in shipped().shares.items():
        assert abs(counts[name] / 2000 - share) < 0.05
    assert counts.keys() <= shipped().shares.keys()
    assert all(d.profile == shipped().get(d.profile.name) for d in fleet)  # 0 = the device's own
    assert all(d.budget == Budget(memory=d.profile.memory) for d in fleet)
    assert make(FleetConfig(name="mixed", availability=0), 50, seed=0) == fleet[:50]


def test_own_devices_by_share_and_by_client(tmp_path: Path):
    path = profile_file(tmp_path, "shares.mine = 3\nshares.laptop = 1")
    fleet = make(FleetConfig(name=f"file:{path}"), 8, seed=0)
    assert Counter(d.profile.name for d in fleet) == {"mine": 6, "laptop": 2}
    path = profile_file(tmp_path, "clients = ['laptop', 'mine', 'mine']")
    assert [d.profile.name for d in make(FleetConfig(name=f"file:{path}"), 3, seed=0)] == ["laptop", "mine", "mine"]


def test_options_apply_to_everybody():
    config = FleetConfig(name="mixed", up_mbit=7, down_mbit=9, availability=0.5, budget=Limits(memory="1.5 GB"))
    for profile, budget in make(config, 30, seed=0):
        assert (profile.up_mbit, profile.down_mbit, profile.availability) == (7, 9, 0.5)
        assert budget.memory == min(1.5e9, profile.memory)  # the stricter of the two


def test_config_from_a_table_and_back():
    table = {"name": "capacity-low", "memory_gb": [1, 2], "budget": {"flops": "50%", "memory": 4e9}}
    config = read(FleetConfig, table, "fleet")
    assert config.budget.budget() == Budget(memory=4e9, of_largest=Budget(flops=0.5))
    assert read(FleetConfig, table_of(config), "fleet") == config


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "equall"}, "unknown fleet 'equall'. Did you mean 'equal'?"),
        ({"profile": "fone-high"}, "Did you mean 'phone-high'?"),
        ({"deadline": -1}, "fleet.deadline"),
        ({"availability": 1.5}, "fleet.availability"),
        ({"memory_gb": [16, 2]}, "fleet.memory_gb"),
        ({"fractions": [1, 0.5]}, "fleet.fractions"),
        ({"quantity": "watts"}, "fleet.quantity"),
        ({"budget": {"flps": 1}}, "unknown key 'fleet.budget.flps'. Did you mean 'flops'?"),
        ({"budget": {"flops": "half"}}, "fleet.budget.flops = 'half'"),
        ({"budget": {"memory": -4}}, "fleet.budget.memory = -4"),
    ],
)
def test_bad_options_name_their_key(table: dict[str, object], words: str):
    with pytest.raises(UserError) as error:
        read(FleetConfig, table, "fleet")
    assert words in str(error.value)


def test_a_fleet_has_clients():
    with pytest.raises(UserError, match="at least one client"):
        make(FleetConfig(), 0, seed=0)


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
