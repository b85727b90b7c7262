"""`fedtailor shrink`: how much of every layer the clients of a run kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def shrink_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Where to draw. Default: shrink.svg in RUN.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Also write the shares as CSV, client by client.")
    ] = None,
) -> None:
    """Draw how much of every layer each client kept of the largest network, by what clients can afford.

    The shrink-ratio picture of Luo et al. (Figure 3). The mean distance (L2, of the kept shares) says how different
    networks of equal budgets are. Needs: pip install 'fedtailor[report]'

    Example: `fedtailor shrink runs/cifar10-fedcs-1 --svg shrink.svg --csv shrink.csv`
    """
    from rich.table import Table

    from fedtailor.report.shrink import read_shrinkage
    from fedtailor.runs.results import Results

    console = Console()
    found = read_shrinkage(Results.read(run))
    path = svg or run / "shrink.svg"
    found.to_svg(path)
    table = Table("budget", "clients", "kept on average", "mean distance")
    for group, rows in found.groups.items():
        kept = f"{100 * found.mean(group).mean():.1f} %"
        table.add_row(group, str(len(rows)), kept, f"{found.distance(group):.2f}")
    console.print(table)
    console.print(f"Picture: {path}", markup=False, highlight=False, soft_wrap=True)
    if csv:
        found.to_csv(csv)
        console.print(f"CSV: {csv}", markup=False, highlight=False, soft_wrap=True)
