"""`fedtailor gain`: what each client's own architecture is worth. `fedtailor cells`: drawings of them all."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


class Start(StrEnum):
    """Where tuning starts."""

    own = "own"
    fresh = "fresh"


def gain_command(
    run: Run,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of tuning for each pair of clients.")] = 30,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate; 0: a tenth of the run's, with fresh all of it.")] = 0,
    start: Annotated[
        Start, typer.Option(help="own: the kept network, weights and all. fresh: its architecture, new weights.")
    ] = Start.own,
    clients: Annotated[
        str, typer.Option(help="Only these clients, for example 0,2,5. Default: all that trained.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="The matrix; default: gain.csv in RUN.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="The heat maps; default: gain.svg in RUN.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(help="Clients trained at once on a CPU; 0 = one per core.")] = 0,
) -> None:
    """Tune every client's network on every other client's data: the personalisation gain of SPIDER, eq. 6.

    A row is a client, a column the client whose architecture it was given; the last column is the client's gain, how
    much better its own network serves it than the others' do. The epoch of each is chosen on validation images, the
    numbers are test accuracies. It takes clients squared times the epochs.

    Examples:

    - `fedtailor gain runs/digits-spider-1`
    - `fedtailor gain runs/digits-spider-1 --start fresh --epochs 10 --clients 0,1,2`
    """
    from importlib.util import find_spec

    from rich.console import Console
    from rich.table import Table

    from ..errors import UserError
    from ..search.gain import gain_matrix, heat_map
    from ..values import write_bytes

    try:
        chosen = [int(part) for part in clients.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--clients {clients}: give numbers with commas between them, such as 0,2,5.") from None
    console = Console()
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    gain = gain_matrix(run, epochs, lr, start.value, chosen, device, workers, say)
    table = Table("client", *gain.names, "gain", title="Test accuracy by architecture, %", title_justify="left")
    for name, row, g in zip(gain.names, gain.accuracy, gain.gains, strict=True):
        table.add_row(name, *(f"{100 * p:.1f}" for p in row), f"{100 * g:+.1f}")
    console.print(table)
    say(f"mean gain {100 * gain.mean:+.2f} percentage points")
    csv = csv or run / "gain.csv"
    gain.write_csv(csv)
    say(f"matrix: {csv}")
    if svg is not None or find_spec("matplotlib") is not None:
        svg = svg or run / "gain.svg"
        write_bytes(svg, heat_map(gain).encode())
        say(f"heat maps: {svg}")


def cells_command(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the drawings; default: RUN/cells.")
    ] = None,
) -> None:
    """Draw the architecture that each client keeps: for DARTS its normal and its reduction cell.

    One SVG per client, numbered as the files in RUN/nets, and a line on each in the terminal.

    Example: `fedtailor cells runs/digits-spider-1`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..runs.execute import open_space, read_networks
    from ..runs.facts import read_facts
    from ..values import write_bytes

    folder = out or run / "cells"
    names = read_facts(run)["client_names"]
    table = Table("client", "parameters", "architecture", "drawing")
    for client, (space, arch, _) in read_networks(run, open_space(run)).items():
        path = folder / f"{client:06d}.svg"
        write_bytes(path, space.draw(arch).encode())
        parameters = f"{space.cost(arch).parameters:,}"
        table.add_row(escape(names[client]), parameters, escape(space.describe(arch)), path.name)
    console = Console()
    console.print(table)
    console.print(f"drawings: {folder}", highlight=False, markup=False, soft_wrap=True)
