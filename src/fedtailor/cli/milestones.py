"""`fedtailor milestones`: what runs had sent when they reached an accuracy."""

from __future__ import annotations

import csv as tables
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Kind(StrEnum):
    """Whose accuracy."""

    personal = "personal"
    shared = "global"


def milestones_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    accuracy: Annotated[
        list[float] | None,
        typer.Option(
            "--accuracy",
            "-a",
            min=0,
            max=1,
            help="To reach, 0 to 1. Repeatable. Default: 0.5, 0.7, 0.8, 0.9.",
        ),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="The clients' own networks, or the server's model.")] = Kind.personal,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the table as CSV.")] = None,
) -> None:
    """Say how many bytes runs had sent, down and up together, when they first reached an accuracy.

    Accuracies are means over clients on the validation images, at the evaluations that the run made (option
    `evaluate_every`); a dash means never.

    Example: `fedtailor milestones runs/fedcs runs/feduniform --accuracy 0.8 --accuracy 0.9`
    """
    from rich.table import Table

    from fedtailor.runs.milestones import bytes_to_reach
    from fedtailor.runs.results import Results

    wanted = sorted(accuracy or (0.5, 0.7, 0.8, 0.9))
    table = Table("run", "method", *(f"{100 * a:g} %" for a in wanted))
    rows: list[tuple[str | float | int, ...]] = []
    for folder in runs:
        run = Results.read(folder)
        cells = []
        for a in wanted:
            found = bytes_to_reach(run, a, kind.value)
            cells.append(f"{found.bytes / 1e6:,.1f} MB, round {found.round}" if found else "–")
            rows.append((run.name, run.method, kind.value, a, *(found or ("", "", "", "", ""))))
        table.add_row(run.name, run.method, *cells)
    console = Console()
    console.print(table)
    if csv:
        with csv.open("w", newline="", encoding="utf-8") as file:
            writer = tables.writer(file)
            writer.writerow(
                ("run", "method", "kind", "wanted", "round", "reached", "bytes_down", "bytes_up", "simulated_seconds")
            )
            writer.writerows(rows)
        console.print(f"CSV: {csv}", markup=False, highlight=False, soft_wrap=True)
