"""`fedtailor onboard` and `fedtailor personalize`: clients after the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
Source = Annotated[str, typer.Option("--data", help="The client's data: folder:DIR, npz:FILE, FILE.csv, ...")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds downloaded data.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
Export = Annotated[bool, typer.Option("--export/--no-export", help="Also write the network as an ONNX file.")]

console = Console()


def _say(text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def onboard_command(
    run: Run,
    data: Source,
    name: Annotated[str, typer.Option(help="What the new client is called.")],
    out: Annotated[Path | None, typer.Option(help="Folder for its network; default: RUN/onboard/NAME.")] = None,
    tune: Annotated[
        int, typer.Option(help="Most epochs of fine-tuning; val decides how many. -1: 10 where the method has none.")
    ] = -1,
    profile: Annotated[str, typer.Option(help="Its device, as in 'fedtailor fleet show'; default: the fleet's.")] = "",
    data_dir: DataDir = None,
    device: Device = "auto",
    export: Export = True,
) -> None:
    """Give a client that was never there its own network, in the way of the run's method.

    PerFedRLNAS searches on the frozen supernet, FedRep trains a new head, and so on. The run is not changed. The
    client's budget holds. What comes out is a folder like a run's, with a report and the exported network.

    Example: `fedtailor onboard runs/photos --data folder:berlin --name berlin`
    """
    from ..export.write import folder_name
    from ..runs.join import join

    folder = out or run / "onboard" / folder_name(name)
    join(run, data, name, folder, data_dir, profile, device, say=_say, tune=tune)
    _show(folder, export)


def personalize_command(
    run: Run,
    client: Annotated[str, typer.Option(help="The client's name in the run.")],
    data: Source = "",
    epochs: Annotated[
        float,
        typer.Option(help="Training on the new data in the end; default: the run's local.epochs.", show_default=False),
    ] = -1.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the network; default: RUN/personalize/NAME-N.")] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    export: Export = True,
) -> None:
    """Fit a client's network again to the data it has now, without a round, and say whether that helped.

    Pictures that the client had in the run keep their split, so what was trained on is never tested on. Without --data
    the run's own source is read again. The exit code is 1 where the new network is worse on val.

    Example: `fedtailor personalize runs/photos --client paris --data folder:paris-now`
    """
    from ..api import free_folder
    from ..runs.facts import read_facts
    from ..runs.folder import held
    from ..runs.join import refit

    read_facts(run)  # there is a run to put it into
    folder = out or free_folder(run / "personalize", client)
    with held(folder):
        folder, compared = refit(run, client, data, folder, data_dir, epochs, device, say=_say)
    _show(folder, export)
    for split, (old, new) in compared.items():
        _say(f"{split}: {100 * old:.2f} % before, {100 * new:.2f} % now")
    old, new = compared.get("val", (0.0, 0.0))
    if new < old:
        console.print(
            f"[bold red]worse:[/] on val the new network is {100 * (old - new):.2f} percentage points below the old "
            f"one. Keep the old one, or try other --epochs.",
            soft_wrap=True,
        )
        raise typer.Exit(1)


def _show(folder: Path, export: bool) -> None:
    from importlib.util import find_spec

    from ..runs.results import Results

    console.print(Results.read(folder).table())
    if find_spec("matplotlib") is not None:
        from ..report.html import write_report

        _say(f"report: {write_report(folder)}")
    if export:
        from ..export.write import export_run

        export_run(folder, say=_say)
