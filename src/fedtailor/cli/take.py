"""`fedtailor export` and `fedtailor predict`: what a client takes home, and its use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What kind of file."""

    onnx = "onnx"
    torch = "torch"


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    client: Annotated[str, typer.Option(metavar="NAME", help="One client by its name, or all.")] = "all",
    format: Annotated[
        Format, typer.Option(help="onnx: for onnxruntime and others. torch: a torch.export program.")
    ] = Format.onnx,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the files; default: RUN/export.")] = None,
    int8: Annotated[bool, typer.Option(help="Also write the network in 8 bits, with what that costs.")] = True,
) -> None:
    """Write each client's own network as a file that needs no fedtailor, with a model card.

    The file takes uint8 pictures [number, height, width, channels] and returns class probabilities. It is compared with
    PyTorch on the client's val and test pictures before it is written.

    Examples:

    - `fedtailor export runs/digits-perfedrlnas-1`
    - `fedtailor export runs/digits-fedrep-1 --client client-003 --no-int8`
    """
    from rich.console import Console

    from ..export.write import export_run

    console = Console()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    done = export_run(run, client, format.value, out, int8, say)
    say(f"{len(done)} network{'s' * (len(done) != 1)} with card.json and card.html in {out or run / 'export'}")


def predict_command(context: typer.Context) -> None:
    """Classify pictures with an exported network; needs no torch.

    `fedtailor predict MODEL.onnx IMAGES... [--csv] [--top N]`

    Example: `fedtailor predict runs/x/export/paris/network.onnx photos/*.jpg --csv > answers.csv`
    """
    from ..export.predict import main

    raise typer.Exit(main(context.args))
