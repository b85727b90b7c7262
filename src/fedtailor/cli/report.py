"""`fedtailor report` and `fedtailor compare`: from run folders to something to read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Order(StrEnum):
    """The order of rows in a comparison."""

    personal = "personal"
    given = "given"


def report_command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run; it need not be finished."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write the page. Default: report.html in RUN."),
    ] = None,
) -> None:
    """Write one run as a self-contained HTML page.

    The page opens offline and prints. Its numbers are those of the last round, over all clients: personal, global and
    new accuracy with mean, std over clients and worst decile. Needs: pip install 'fedtailor[report]'

    Example: `fedtailor report runs/digits-ditto-1 --out ditto.html`
    """
    from fedtailor.report.html import write_report
    from fedtailor.runs.results import Results

    console = Console()
    path = write_report(run, out)
    console.print(Results.read(run).table())
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders. Those that differ only in the seed become one row."),
    ],
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write the table as CSV, one line per row, all digits."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page: curves, clients paired, costs."),
    ] = None,
    order: Annotated[
        Order, typer.Option("--order", help="personal: highest personal accuracy first. given: as on the command line.")
    ] = Order.personal,
) -> None:
    """Put runs side by side, last round against last round.

    Nothing is refused, but everything that makes the comparison unfair is flagged: another partition, other data,
    rounds, seeds, clients or participants, and runs that did not finish. ± is the std over seeds; the std over clients
    has its own column.

    Example: `fedtailor compare runs/digits-* --html comparison.html --csv comparison.csv`
    """
    from fedtailor.runs.compare import compare

    console = Console()
    comparison = compare(runs, order=order.value)
    console.print(comparison.table())
    if csv:
        comparison.to_csv(csv)
        console.print(f"CSV: {csv}", markup=False, highlight=False, soft_wrap=True)
    if html:
        comparison.to_html(html)
        console.print(f"Page: {html}", markup=False, highlight=False, soft_wrap=True)
