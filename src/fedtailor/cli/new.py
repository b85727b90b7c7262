"""`fedtailor new`: a method, a space or a net of your own as a file that works, with its test."""

from __future__ import annotations

import keyword
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError

TEMPLATES = Path(__file__).parent.parent / "templates"


class Kind(StrEnum):
    method = "method"
    space = "space"
    net = "net"


def new_command(
    kind: Annotated[Kind, typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(help="Its name in configurations, for example half-way.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the two files.")] = Path("."),
) -> None:
    """Write a method, a search space or a network of your own, with a test that passes as it is.

    Example: `fedtailor new method half-way`, then `pytest test_half_way.py`, then change both.
    """
    files = new_files(kind.value, name, out)
    for path in files:
        if path.exists():
            raise UserError(f"{path} exists already. Choose another name or another --out.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    made, test = files
    typer.echo(f"wrote {made} and {test}")
    typer.echo(f"check it:  pytest {test}")
    use = {"method": "", "space": "--set method.name=perfedrlnas ", "net": "--set method.name=fedavg "}[kind.value]
    typer.echo(f"run it:    fedtailor run demo {use}--set {kind.value}.name={made}")
    typer.echo(f"read on:   docs/how-to/own-{kind.value}.md")


def new_files(kind: str, name: str, out: Path) -> dict[Path, str]:
    """The two files' paths and texts: the thing itself, then its test."""
    from ..registry import names

    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UserError(f"name '{name}': use small letters, digits and single dashes, such as half-way.")
    if name in names(kind):
        raise UserError(f"there is a {kind} '{name}' already. Choose another name.")
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise UserError(f"name '{name}' is a word of Python. Choose another name.")
    words = re.split(r"[-_]", name)
    changes = {
        "@TITLE@": " ".join(words).capitalize(),
        "@NAME@": name,
        "@FILE@": f"{module}.py",
        "@CLASS@": "".join(word.capitalize() for word in words),
    }
    found: dict[Path, str] = {}
    for template, file in ((kind, f"{module}.py"), (f"test_{kind}", f"test_{module}.py")):
        text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        for mark, word in changes.items():
            text = text.replace(mark, word)
        found[out / file] = text
    return found
