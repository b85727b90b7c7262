"""The commands of `fedtailor`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from . import data, fleet, gain, join, milestones, new, partition, policies, report, serving, shrink, space, take, ui

if TYPE_CHECKING:
    from ..config import Config

console = Console()
app = typer.Typer(
    name="fedtailor",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Federated learning in which every client ends with its own network.

Start here:

- `fedtailor demo` compares four methods on handwritten digits in about a minute
- `fedtailor run demo --set method.name=ditto` runs one method
- `fedtailor list methods` shows what there is
""",
)
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the config, for example `local.lr=0.1`. Repeatable."
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
Workers = Annotated[int, typer.Option(help="Clients trained at once on a CPU; 0 = one per core. Changes no number.")]
Engine = Annotated[
    str, typer.Option(help="How to run clients: auto, or eager for the plain path, one step after another.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]
LogTo = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="csv|tensorboard|mlflow", help="Also log each round's numbers there. Repeatable."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with the data; else `data.dir` or $FEDTAILOR_DATA.")
]


def run(
    config: Annotated[str, typer.Argument(help="A preset (`fedtailor list presets`) or a TOML file.")],
    changes: Set = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; default: a new one under runs/.")] = None,
    device: Device = "auto",
    engine: Engine = "auto",
    workers: Workers = 0,
    data_dir: DataDir = None,
    log: LogTo = None,
    quiet: Quiet = False,
) -> None:
    """Run one method on one federation.

    Examples:

    - `fedtailor run demo`
    - `fedtailor run demo --set method.name=perfedrlnas --set rounds=60 --out runs/search`
    - `fedtailor run my.toml --set local.lr=0.02 --set seed=1 --device cuda`
    - `fedtailor run demo --log tensorboard` and, beside it, `tensorboard --logdir runs`

    Watch it with `fedtailor ui`. Ctrl-C stops at the last finished round; `fedtailor resume` goes on from there.
    """
    from ..api import free_folder
    from ..config import load
    from ..runs.logs import require_logs

    pairs = list(changes or []) + ([f"data.dir={json.dumps(str(data_dir))}"] if data_dir else [])
    loaded = load(config, pairs)
    require_logs(log or [])
    folder = out or free_folder(Path("runs"), loaded.data.name, loaded.method["name"])
    _run(folder, device, engine, workers, quiet, loaded, log)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    device: Device = "auto",
    engine: Engine = "auto",
    workers: Workers = 0,
    log: LogTo = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was stopped or killed.

    On a CPU the numbers are the same, bit for bit, as if it had never stopped.

    Example: `fedtailor resume runs/digits-ditto-1`
    """
    _run(folder, device, engine, workers, quiet, log=log)


def _run(
    folder: Path,
    device: str,
    engine: str,
    workers: int,
    quiet: bool,
    config: Config | None = None,
    log: list[str] | None = None,
) -> None:
    from ..runs.execute import resume as resume_run
    from ..runs.execute import start
    from ..runs.logs import with_logs
    from ..runs.results import Results
    from .progress import watcher

    watch = with_logs(watcher(console, quiet), log or [], folder)
    try:
        if config is None:
            resume_run(folder, device, workers, watch, engine)
        else:
            start(config, folder, device, workers, watch, engine=engine)
    except KeyboardInterrupt:
        begun = (folder / "run.json").exists()
        again = (
            f"Continue with: {shlex.join(['fedtailor', 'resume', str(folder)])}"
            if begun
            else "The run had not begun: there is nothing to resume."
        )
        console.print(f"\nStopped. {again}", soft_wrap=True)
        raise typer.Exit(130) from None
    if not quiet:
        console.print(Results.read(folder).table())
    page = _write_report(folder)
    if not quiet:
        console.print(f"run folder: {folder}\nreport: {page}" if page else f"run folder: {folder}", soft_wrap=True)


def _write_report(folder: Path) -> Path | None:
    """The report, where its extra is installed."""
    from importlib.util import find_spec

    if find_spec("jinja2") is None:
        console.print("no report: install it with  pip install 'fedtailor[report]'", markup=False)
        return None
    from ..report.html import write_report

    return write_report(folder)


def demo(
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="One to compare. Repeatable. Default: local, fedavg, fedavg-ft, perfedrlnas."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; default: a new one under runs/.")] = None,
    workers: Workers = 0,
    log: LogTo = None,
) -> None:
    """Compare methods on handwritten digits, ten clients that each know three digits.

    Example: `fedtailor demo --method local --method ditto`
    """
    from ..api import free_folder
    from ..config import load
    from ..errors import UserError
    from ..runs.compare import compare
    from ..runs.execute import start
    from ..runs.folder import held
    from ..runs.logs import with_logs
    from .progress import watcher

    chosen = methods or ["local", "fedavg", "fedavg-ft", "perfedrlnas"]
    configs = [load("demo", {"method.name": name}) for name in chosen]
    if out and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty. Choose another --out.")
    parent = out or free_folder(Path("runs"), "demo")
    folders = [parent / name for name in chosen]
    try:
        with held(parent):
            for config, folder in zip(configs, folders, strict=True):
                watch = with_logs(watcher(console, False), log or [], folder)
                start(config, folder, "cpu", workers, watch, "fedtailor demo")
                _write_report(folder)
    except KeyboardInterrupt:
        console.print(f"\nStopped. What is finished lies in {parent}.", soft_wrap=True)
        raise typer.Exit(130) from None
    table = compare(folders)
    console.print(table.table())
    page = parent / "report.html"
    table.to_html(page)
    console.print(f"report: {page.resolve()}", soft_wrap=True)


def list_names(
    what: Annotated[str, typer.Argument(help="methods, spaces, nets, data, partitions, fleets or presets")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="methods: what each shares, keeps and costs; takes half a minute.")
    ] = False,
) -> None:
    """List what can be named in a config.

    Examples: `fedtailor list methods`, `fedtailor list methods --table`
    """
    from .listing import print_names, print_table

    if table:
        print_table(what, as_json, console)
    else:
        print_names(what, as_json, console)


def explain(method: Annotated[str, typer.Argument(help="A name from `fedtailor list methods`, or your own.")]) -> None:
    """Say what a method sends, keeps and learns, in words and as a diagram.

    Example: `fedtailor explain ditto`
    """
    from ..report.explain import explain as explained

    console.print(explained(method), markup=False, highlight=False, soft_wrap=True)


def doctor() -> None:
    """Say what is installed, which devices are found and what would run."""
    from .listing import print_diagnosis

    print_diagnosis(console)


# In the order in which one meets them, which `fedtailor --help` keeps; those that have commands of their own come last.
PANELS = {
    "Run": {"demo": demo, "run": run, "resume": resume},
    "Look at runs": {"ui": ui.ui_command, "compare": report.compare_command, "report": report.report_command},
    "See what there is": {"list": list_names, "explain": explain, "doctor": doctor},
    "Write your own": {"new": new.new_command},
    "Take networks home": {
        "export": take.export_command,
        "predict": take.predict_command,
        "onboard": join.onboard_command,
        "personalize": join.personalize_command,
    },
    "A federation of real machines": {
        "certs": serving.certs_command,
        "serve": serving.serve_command,
        "join": serving.join_command,
    },
    "Study finished runs": {
        "milestones": milestones.milestones_command,
        "policies": policies.policies_command,
        "gain": gain.gain_command,
        "cells": gain.cells_command,
        "shrink": shrink.shrink_command,
    },
}
GROUPS = {
    "data": (data.app, "Look at data before anything runs."),
    "partition": (partition.app, "Make, show and picture a partition of a data set."),
    "fleet": (fleet.app, "Show the clients' devices, budgets and round times."),
    "space": (space.app, "Show a search space or one of its architectures."),
}
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # `predict` reads its options itself
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel, context_settings=PASSED_ON if name == "predict" else None)(command)
for name, (group, does) in GROUPS.items():
    app.add_typer(group, name=name, help=does, rich_help_panel="See what there is")
