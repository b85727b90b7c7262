"""Devices, budgets, the cost model of a round and the simulated clock."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.errors import UserError
from fedtailor.fleet import (
    Budget,
    Clock,
    FleetConfig,
    Limits,
    Profile,
    available,
    make,
    round_seconds,
    shipped,
)
from fedtailor.fleet.fleet import CAPACITY_COSTS, deal
from fedtailor.fleet.profile import read_catalogue
from fedtailor.nets.mobilenetv2 import MobileNetV2
from fedtailor.options import read, table_of
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
