"""`fedtailor policies`: do clients with similar data end with similar policies?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def policies_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that searches per client.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Where to draw. Default: policies.svg in RUN.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Also write every pair of clients, all digits.")
    ] = None,
) -> None:
    """Compare clients' label distributions with the policies that the search gave them.

    Draws every pair of clients and prints the correlation: the analysis behind Theorem 1 of PerFedRLNAS, from the run's
    last checkpoint. Needs: pip install 'fedtailor[report]'

    Example: `fedtailor policies runs/digits-perfedrlnas-1 --csv pairs.csv`
    """
    from rich.console import Console

    from ..errors import UserError
    from ..report.similarity import picture, read_similarity
    from ..values import write_bytes

    found = read_similarity(run)
    if found is None:
        raise UserError(
            f"{run} has no policies to compare: that takes a method with one per client, such as perfedrlnas, and "
            "three clients or more that took part before the last checkpoint."
        )
    out = svg or run / "policies.svg"
    write_bytes(out, picture(found).encode())
    console = Console()
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    say(f"{found}")
    say(f"Picture: {out}")
    if csv:
        lines = [
            f"{a},{b},{x!r},{y!r}"
            for (a, b), x, y in zip(found.pairs.tolist(), found.labels.tolist(), found.policies.tolist(), strict=True)
        ]
        write_bytes(csv, "\n".join(["client,other,label_similarity,policy_similarity", *lines, ""]).encode())
        say(f"CSV: {csv}")
