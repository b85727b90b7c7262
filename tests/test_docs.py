"""The pages of the reference say what the code has: options, commands, environment variables."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

from fedtailor.cli.main import app
from fedtailor.report.html import write_report
from fedtailor.runs.execute import start
from tools import small_config

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
]


def commands(group: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}".strip())
    if not hasattr(group, "commands"):
        yield path, group


COMMANDS = dict(commands(get_command(app)))
ONLY_BY_ITSELF = {"predict": {"--csv", "--top"}}  # reads its own options, so that it needs no typer


def options(name: str) -> set[str]:
    return {o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference_with_all_its_options(name: str) -> None:
    assert re.search(rf"^\| .*`{name}`", PAGE, re.M), f"{name} is missing in the table of commands"
    sections = [text for text in PAGE.split("\n## ") if re.search(rf"fedtailor {name}\b", text)]
    for parameter in COMMANDS[name].params:
        spellings = [o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--")]
        assert not spellings or any(f"{o}" in text for o in spellings for text in sections), f"{name}: {spellings}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name: str) -> None:
    if COMMANDS[name].params:
        assert f"fedtailor {name}" in (COMMANDS[name].help or "")


def test_commands_in_the_pages_exist_with_the_options_they_are_given() -> None:
    shortest_last = sorted(COMMANDS, key=len, reverse=True)
    seen = 0
    for page in PAGES:
        for line in re.findall(r"fedtailor ([a-z][^\n`;|&)]*)", page.read_text(encoding="utf-8").replace("\\\n", " ")):
            name = next((n for n in shortest_last if re.match(rf"{n}(?![\w-])", line)), None)
            if name is None:
                continue  # a sentence that begins with the package's name
            seen += 1
            given = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", line)) - {"--help"}
            assert given <= options(name) | ONLY_BY_ITSELF.get(name, set()), f"{page.name}: fedtailor {line}"
    assert seen > 150


def test_every_file_and_fact_of_a_run_is_in_the_reference(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S)))
    folder = start(small_config("perfedrlnas", rounds=2), tmp_path / "run", "cpu", workers=1)
    write_report(folder)
    files = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    with (folder / "events.csv").open(encoding="utf-8") as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert files | set(facts) | metrics <= named


def test_every_environment_variable_of_ours_is_in_the_reference() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"FEDTAILOR_[A-Z_]+", code))
    listed = set(re.findall(r"^\| `(FEDTAILOR_[A-Z_]+)` \|", PAGE, re.M))
    assert named == listed
