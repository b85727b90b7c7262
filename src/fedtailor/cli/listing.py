"""`fedtailor list` and `fedtailor doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import shutil
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import UserError, unknown

KINDS = ("methods", "spaces", "nets", "data", "partitions", "fleets", "presets")
EXTRAS = {
    "report": ("matplotlib", "HTML reports"),
    "ui": ("starlette", "the live page"),
    "tensorboard": ("tensorboard", "logs for TensorBoard"),
    "mlflow": ("mlflow", "logs for MLflow"),
    "hub": ("pyarrow", "data from the Hugging Face hub"),
    "onnx": ("onnxruntime", "export of networks as ONNX files"),
}


def describe(kind: str) -> dict[str, str]:
    """Every name of a kind with one line on it."""
    if kind == "data":
        from ..data.sources import NAMES

        return dict(NAMES)
    if kind == "partitions":
        from ..data.partition import NAMES

        return dict(NAMES)
    if kind == "fleets":
        from ..fleet.fleet import NAMES

        return dict(NAMES)
    if kind == "presets":
        from ..config import describe_preset, preset_names

        return {name: describe_preset(name) for name in preset_names()}
    if kind in KINDS:
        from ..registry import lookup, names

        single = kind.removesuffix("s")
        found = {name: lookup(single, name) for name in names(single)}
        modules = [thing.__module__ for thing in found.values()]
        return {name: _first_line(thing, modules.count(thing.__module__) > 1) for name, thing in found.items()}
    raise unknown("list", kind, KINDS)


def _first_line(thing: object, shares_its_file: bool) -> str:
    """What the file says it is about, or the class where a file holds several."""
    own = (getattr(thing, "__doc__", "") or "").strip()
    generated = own.startswith(f"{getattr(thing, '__name__', '')}(")  # by the dataclass decorator
    module = inspect.getmodule(thing)
    text = own if shares_its_file and own and not generated else (module.__doc__ if module else "") or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def print_names(kind: str, as_json: bool, console: Console) -> None:
    found = describe(kind)
    if as_json:
        console.print_json(json.dumps(found))
        return
    table = Table(box=None, header_style="bold")
    table.add_column(kind.removesuffix("s"), no_wrap=True)
    table.add_column("what it is")
    for name, text in found.items():
        table.add_row(name, text)
    console.print(table)


def print_table(kind: str, as_json: bool, console: Console) -> None:
    """What every method shares, keeps and costs: the survey's table."""
    if kind != "methods":
        raise UserError(f"--table is for methods, not for {kind}.")
    from ..report.explain import COLUMNS, table

    rows = table()
    if as_json:
        console.print_json(json.dumps(rows))
        return
    drawn = Table(box=box.SIMPLE, header_style="bold", show_lines=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        drawn.add_column(column, no_wrap=column == "method", justify="right" if column in COLUMNS[-3:] else "left")
    for row in rows:
        drawn.add_row(*(row[column] for column in COLUMNS))
    wide = console if console.width >= 160 else Console(width=160)
    wide.print(drawn)
    wide.print("Costs of a client's round and of the server's state, as multiples of FedAvg's on the same networks.")


def print_diagnosis(console: Console) -> None:
    import torch

    from .. import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    say = lambda text: console.print(text, soft_wrap=True, highlight=False)  # noqa: E731
    say(f"fedtailor {__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        say(f"device: CUDA ({names}); runs use the first one unless you say --device cpu")
    else:
        say(f"device: CPU with {cores} cores; no CUDA device found, so runs train {cores} clients at once on the CPU")
    for extra, (module, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module):
            found = importlib.metadata.packages_distributions().get(module, [module])[0]  # mlflow is in mlflow-skinny
            say(f"  yes  {purpose} ({found} {importlib.metadata.version(found)})")
        else:
            say(f"  no   {purpose}: pip install 'fedtailor[{extra}]'".replace("[", "\\["))
    folder = os.environ.get("FEDTAILOR_DATA", "")
    if folder:
        state = "there" if Path(folder).is_dir() else "NOT THERE"
        say(f"data folder: {folder} ({state})")
    else:
        say("data folder: none named; digits are built in, for others set FEDTAILOR_DATA or --data-dir")
    say(f"disk: {shutil.disk_usage('.').free / 1e9:.1f} GB free here")
    say("'fedtailor demo' would run on the CPU in about a minute; 'fedtailor run demo' uses the device above")
