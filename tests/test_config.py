"""Bad configurations: one clear error naming the key, the value and what is allowed, before anything is written."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.config import load, preset_names
from fedtailor.errors import UserError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["local.lrr=0.1"], ["local.lrr", "Did you mean 'lr'"]),
        (["rouns=3"], ["rouns", "Did you mean 'rounds'"]),
        (["rounds=0"], ["rounds", "0", "greater than or equal to 1"]),
        (["rounds=many"], ["rounds", "many", "integer"]),
        (["rounds=2.5"], ["rounds", "2.5"]),
        (["seed=-1"], ["seed", "-1"]),
        (["local.lr=0"], ["local.lr", "greater than 0"]),
        (["local.augment=flip"], ["local.augment", "crop-flip"]),
        (["participants=11"], ["participants = 11", "10"]),
        (["method.name=fedavgg"], ["fedavgg", "Did you mean 'fedavg'"]),
        (["method.name=ditto", "method.lambda=1"], ["method.lambda", "Did you mean 'lamda'"]),
        (["method.name=ditto", "method.lamda=-1"], ["method.lamda", "greater than or equal to 0"]),
        (["method=ditto"], ["method", "method.name=ditto"]),
        (["local=3"], ["local", "table"]),
        (["partition.name=dirichlet"], ["dirichlet"]),
        (["partition.colour=1"], ["partition.colour"]),
        (["fleet.name=equals"], ["equals", "Did you mean 'equal'"]),
        (["fleet.budget.flop=3"], ["fleet.budget.flop", "Did you mean 'flops'"]),
        (["format=2"], ["another version"]),
        (["=3"], ["key=value"]),
        (["rounds"], ["key=value"]),
    ],
)
def test_errors_name_key_value_and_nearest(changes: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load("demo", changes).make_partition()
    for word in words:
        assert word in str(caught.value)


def test_method_and_network_must_fit_together() -> None:
    with pytest.raises(UserError, match="searches among architectures"):
        load({"method": {"name": "perfedrlnas"}, "net": {"name": "cnn"}})
    with pytest.raises(UserError, match="trains one fixed network"):
        load({"method": {"name": "fedavg"}, "space": {"name": "tiny"}})


def test_another_method_drops_the_first_one_s_options() -> None:
    config = load({"method": {"name": "ditto", "lamda": 2.0}}, ["method.name=fedprox"])
    assert config.method == {"name": "fedprox"}


def test_a_table_without_a_name_changes_what_it_says_and_leaves_the_rest() -> None:
    demo = load("demo")
    for changes in ({"local": {"lr": 0.5}}, ["local={lr = 0.5}"], {"local.lr": 0.5}):
        assert load("demo", changes).local == replace(demo.local, lr=0.5)
    assert load("demo", {"method": {"name": "ditto", "lamda": 2.0}}).method == {"name": "ditto", "lamda": 2.0}
    assert load("demo", {"method.name": "ditto", "method": {"lamda": 2.0}}).method == {"name": "ditto", "lamda": 2.0}
    with pytest.raises(UserError, match=r"local\.rate"):
        load("demo", {"local": {"rate": 0.5}})


def test_resolved_config_reads_back_the_same() -> None:
    for name in preset_names():
        config = load(name)
        import tomllib

        again = load(tomllib.loads(config.to_toml()))
        assert again.to_toml() == config.to_toml()


def test_what_a_name_stands_for_is_a_whole_sentence_of_its_own() -> None:
    """`fedtailor list` shows one line, so nothing may go on in the second."""
    from fedtailor.cli.listing import describe

    for kind in ("presets", "methods", "spaces", "nets"):
        told = describe(kind)
        assert not [name for name, text in told.items() if text[-1] not in ".?)"]
        assert len(set(told.values())) == len(told), kind


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(UserError, match="not valid TOML"):
        load(tmp_path / "bad.toml")
    with pytest.raises(UserError, match=r"unknown preset 'dmeo'.*Did you mean 'demo'"):
        load("dmeo")


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ("demo", ["local=3"], r"for example local\.epochs="),
        ("demo", ["method=ditto"], r"for example method\.name=ditto"),
        ({"local": 3}, [], r"for example local\.epochs"),
        ({"data": 3}, [], r"for example data\.name"),
        ({"space": ["tiny", "darts"]}, [], r"write a table for each: \[\[space\]\]"),
    ],
)
def test_what_is_a_table_is_told_with_a_key_that_it_has(table: Any, changes: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(table, changes)


def test_own_method_from_a_file_that_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_elsewhere.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedtailor.methods.fedavg import FedAvg\n"
        "from fedtailor.registry import register\n"
        "@register('method', 'elsewhere')\n@dataclass(frozen=True)\nclass Elsewhere(FedAvg):\n    knob: float = 1.0\n"
    )
    (tmp_path / "outer.py").write_text(
        "from fedtailor.methods.ditto import Ditto\nfrom kept_elsewhere import Elsewhere\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        config = load("demo", [f"method.name={tmp_path / 'outer.py'}", "method.knob=2.0"])
        assert config.make_method().knob == 2.0  # type: ignore[attr-defined]


def test_own_method_and_own_net_from_one_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedtailor.methods.fedavg import FedAvg\n"
        "from fedtailor.registry import register\n"
        "@register('method', 'mine')\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n    knob: float = 1.0\n"
    )
    config = load("demo", [f"method.name={tmp_path / 'mine.py'}", "method.knob=2.0"])
    assert config.make_method().knob == 2.0  # type: ignore[attr-defined]
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Flat(nn.Module):\n"
        "    def __init__(self, input, classes):\n"
        "        super().__init__(); c, h, w = input\n"
        "        self.flat = nn.Flatten(); self.drop = nn.Dropout(0.5); self.head = nn.Linear(c * h * w, classes)\n"
        "    def forward(self, x):\n        return self.head(self.drop(self.flat(x)))\n"
    )
    config = load("demo", [f"net.name={tmp_path / 'net.py'}:Flat"])
    assert config.make_space((1, 8, 8), 10).cost(()).parameters == 650
    with pytest.raises(UserError, match="no file"):
        load("demo", ["method.name=nowhere.py"])
    with pytest.raises(UserError, match="has no 'Missing'"):
        load("demo", [f"net.name={tmp_path / 'net.py'}:Missing"]).make_space((1, 8, 8), 10)


def test_cli_exit_code_2_and_nothing_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fedtailor", "run", "demo", "--set", "rounds=0", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "rounds = 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_of_several_nets_the_first_that_the_method_can_use() -> None:
    assert load("demo", ["method.name=fedavg", "net.width=8"]).net == {"name": "cnn", "width": 8, "hidden": 64}
    assert load("demo", ["method.name=fedtp"]).net["name"] == "vit"
    assert load("demo", ["net.depth=1", "method.name=fedmn", "net.name=vit"]).net["depth"] == 1
    assert load("demo", ["method.name=fedavg", "net.name=vit"]).net["dim"] == 32  # the listed one, with its options


def test_a_public_set_is_kept_in_the_resolved_config() -> None:
    text = load("demo", ["public.name=rest", "public.images=5"]).to_toml()
    assert tomllib.loads(text)["public"] == {"name": "rest", "images": 5}
    assert "public" not in load("demo").to_toml()
