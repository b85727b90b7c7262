"""`fedtailor new`: what it writes passes its own tests and the linter, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli.main import app
from fedtailor.cli.new import new_files
from fedtailor.errors import UserError

ROOT = Path(__file__).parent.parent


def test_templates_pass_as_they_are(tmp_path: Path) -> None:
    for kind, name in (("method", "half-way-home"), ("space", "rooms"), ("net", "my-net")):
        done = CliRunner().invoke(app, ["new", kind, name, "--out", str(tmp_path)])
        assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "half_way_home.py", "my_net.py", "rooms.py", "test_half_way_home.py", "test_my_net.py", "test_rooms.py",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    done = subprocess.run(tests, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
    lint = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(lint, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_that_cannot_be(tmp_path: Path) -> None:
    for name in ("Half", "1st", "a--b", "../x", "class", "a b"):
        with pytest.raises(UserError, match="name '"):
            new_files("method", name, tmp_path)
    with pytest.raises(UserError, match="a method 'ditto' already"):
        new_files("method", "ditto", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    done = CliRunner().invoke(app, ["new", "net", "mine", "--out", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert (tmp_path / "test_mine.py").read_text() == "mine"
    assert not (tmp_path / "mine.py").exists()
