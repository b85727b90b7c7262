"""The same things as the command line, from Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .config import load as load_config
from .runs.compare import Comparison
from .runs.compare import compare as compare_folders
from .runs.execute import Watcher, start
from .runs.execute import resume as resume_folder
from .runs.folder import new_folder
from .runs.logs import require_logs, with_logs
from .runs.results import Results


class Run:
    """A run's folder and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = Results.read(folder)

    def table(self) -> None:
        """Prints the headline numbers."""
        Console().print(self.results.table())

    def report(self) -> Path:
        """Writes the HTML report; returns its path."""
        from .report.html import write_report

        return write_report(self.folder)

    def export(self, client: str = "all", *, out: str | Path | None = None, int8: bool = True) -> list[Path]:
        """Writes clients' networks as ONNX files with their cards; returns a folder for each."""
        from .export.write import export_run

        done = export_run(self.folder, client, "onnx", Path(out) if out else None, int8, say=lambda _: None)
        return [exported.folder for exported in done]

    def onboard(self, data: str, name: str, *, out: str | Path | None = None, device: str = "auto") -> Run:
        """Gives a client that was never there its network, in the method's own way; returns its folder as a run."""
        from .export.write import folder_name
        from .runs.join import join

        folder = Path(out) if out else self.folder / "onboard" / folder_name(name)
        return Run(join(self.folder, data, name, folder, device=device, say=lambda _: None))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def run(
    source: str | Path | dict[str, Any] = "demo",
    *,
    out: str | Path | None = None,
    device: str = "auto",
    workers: int = 0,
    watch: Watcher | None = None,
    log: Sequence[str] = (),
    **changes: Any,
) -> Run:
    """Runs a preset, a TOML file or a table, with changes on top.

    `method`, `space`, `net`, `data`, `partition` and `fleet` may be given by name; other keys of tables are written
    with two underscores, as in `run("demo", method="ditto", method__lamda=1.0, local__lr=0.1)`. `log` names what else
    gets each round's numbers: csv, tensorboard, mlflow.
    """
    named = {"method", "space", "net", "data", "partition", "fleet"}
    dotted = {f"{k}.name" if k in named and isinstance(v, str) else k.replace("__", "."): v for k, v in changes.items()}
    config = load_config(source, dotted)
    require_logs(log)
    folder = Path(out) if out else free_folder(Path("runs"), config.data.name, config.method["name"])
    words = [f"{k}={v!r}" for k, v in changes.items()]
    command = f"fedtailor.run({', '.join([repr(str(source)) if not isinstance(source, dict) else '{...}', *words])})"
    return Run(start(config, folder, device, workers, with_logs(watch or Watcher(), log, folder), command))


def resume(
    folder: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    watch: Watcher | None = None,
    log: Sequence[str] = (),
) -> Run:
    """Continues a stopped run."""
    return Run(resume_folder(Path(folder), device, workers, with_logs(watch or Watcher(), log, Path(folder))))


def load(folder: str | Path) -> Run:
    """Opens a run that exists."""
    return Run(Path(folder))


def compare(folders: Sequence[str | Path | Run]) -> Comparison:
    """Puts several runs side by side."""
    several = [folders] if isinstance(folders, str | Path) else folders
    return compare_folders([f.folder if isinstance(f, Run) else Path(f) for f in several])


def free_folder(parent: Path, *names: str) -> Path:
    """A new folder `names-N`; a name that is a path gives its last part."""
    return new_folder(parent, "-".join(re.sub(r"[^\w.-]+", "-", Path(n.partition(":")[2] or n).stem) for n in names))
