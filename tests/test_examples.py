"""The examples that the documentation shows: they run, resume and obey the rules. And the reference names every key."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fedtailor.config import Config, Data, Local, Public
from fedtailor.data.partition import PartitionConfig
from fedtailor.fleet.budget import Limits
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.registry import lookup
from fedtailor.runs.execute import Watcher, resume, start
from fedtailor.runs.results import Results
from fedtailor.seeds import rng_of
from fedtailor.spaces.pasting import paste
from test_methods_golden import DATA, PLAIN
from tools import by_hand, numbers, one_round, personal, rows, small_config, three

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Crash(Exception):
    """Stands for a power cut."""


class CrashAtTwo(Watcher):
    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == 2:
            raise Crash


def test_own_method_runs_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = small_config(str(EXAMPLES / "own_method.py"), method__keep=0.25, checkpoint_every=1)
    whole = start(config, tmp_path / "whole", "cpu", workers=1)
    with pytest.raises(Crash):
        start(config, tmp_path / "cut", "cpu", workers=2, watch=CrashAtTwo())
    assert rows(whole) == rows(resume(tmp_path / "cut", "cpu", workers=2))
    assert "keep = 0.25" in (whole / "config.toml").read_text()
    assert set(Results.read(whole).spreads) >= {"personal", "global"}


def test_own_method_by_hand() -> None:
    federation = by_hand(lookup("method", str(EXAMPLES / "own_method.py"))(keep=1.0), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0, 0))
    # heads (0.1, -0.1) and (-0.1, 0.1) with masses 1 and 3; the velocity was zero
    assert numbers(state.server.weights) == pytest.approx([1, -0.05, 0.05])
    assert numbers(state.server.velocity) == pytest.approx([0, -0.05, 0.05])
    # with keep = 1 a client's own network goes on from where it was, whatever the server sends
    own = numbers(state.memories[0]["v"])
    assert own == pytest.approx([1, 0.1, -0.1])
    assert numbers(personal(federation, state, 0))[1] > own[1]
    # without news the server goes on by half of its velocity
    still = federation.method.merge(state.server, [])
    assert numbers(still.weights) == pytest.approx([1, -0.075, 0.075])


def test_own_space_obeys_the_prefix_rule() -> None:
    space = lookup("space", str(EXAMPLES / "own_space.py"))(input=(1, 8, 8), classes=10)
    assert space.size == 243
    weights = space.new_weights(0)
    archs = [space.smallest, space.largest, *(space.sample(rng_of("examples", i)) for i in range(10))]
    for arch in archs:
        part = space.cut(weights, arch)
        space.build(arch).load_state_dict(part)  # strict: the same names and shapes
        pasted = paste(space, weights, [(part, arch, 1.0)])
        assert all((pasted[n] == t).all() for n, t in weights.items())
    costs = [space.cost(arch).parameters for arch in archs]
    assert costs[0] == min(costs)
    assert costs[1] == max(costs)


def test_own_space_is_searched(tmp_path: Path) -> None:
    config = small_config("perfedrlnas", space__name=str(EXAMPLES / "own_space.py"), rounds=2)
    results = Results.read(start(config, tmp_path / "run", "cpu", workers=1))
    assert all(len(word.split("-")) == 5 for word in results.per_client_text("personal_arch").values())


@pytest.mark.parametrize(("name", "options"), [("small", {}), ("Strip", {"net__width": 24})])
def test_own_net_runs(name: str, options: dict[str, int], tmp_path: Path) -> None:
    config = small_config("fedrep", net__name=f"{EXAMPLES / 'own_net.py'}:{name}", rounds=1, **options)
    results = Results.read(start(config, tmp_path / "run", "cpu", workers=1))
    assert results.spreads["personal"] is not None


def test_own_data_gives_every_silo_its_images(tmp_path: Path) -> None:
    run = load_script("own_data").main(tmp_path / "own", rounds=2)
    assert run.results.facts["client_names"] == ["east", "north", "south"]
    assert run.results.summary()["personal"]["n"] == 3


def test_examples_say_how_to_run_them() -> None:
    for name in ("own_method", "own_space", "own_net", "own_data"):
        text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
        assert "Run it:" in text or "Run them:" in text, name


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("## Top level", Config),
        ("## `[data]`", Data),
        ("## `[public]`", Public),
        ("## `[partition]`", PartitionConfig),
        ("## `[local]`", Local),
        ("## `[fleet]`", FleetConfig),
        ("## `[fleet.budget]`", Limits),
    ],
)
def test_reference_names_every_key_with_its_default(heading: str, options: type) -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    section = text.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    tables = ("method", "space", "net", "data", "public", "partition", "local", "fleet", "budget")
    for field in dataclasses.fields(options):
        if field.name in tables and field.default is dataclasses.MISSING:
            continue  # a table with a section of its own
        line = next((line for line in section.splitlines() if line.startswith(f"| `{field.name}` |")), "")
        assert line, f"docs/reference/config.md, {heading}: '{field.name}' is missing"
        default = tomllib.loads(f"v = {line.split(' | ')[2].strip('` ')}")["v"]
        told = list(field.default) if isinstance(field.default, tuple) else field.default
        assert default == told, f"docs/reference/config.md, {heading}: the default of '{field.name}' is {told}"
