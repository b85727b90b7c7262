"""`fedtailor data`: look at data before anything runs."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.inspect import Inspection
    from ..data.pixels import Reading

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at data before anything runs.")


class Fit(StrEnum):
    crop = "crop"
    squash = "squash"
    pad = "pad"


class Colour(StrEnum):
    auto = "auto"
    grey = "grey"
    colour = "colour"


# the options of [data] by which picture files are read
Size = Annotated[int, typer.Option(min=0, help="Make pictures this high and wide, as data.size does.")]
FitOption = Annotated[Fit, typer.Option("--fit", help="What happens to other proportions, as data.fit.")]
ColourOption = Annotated[Colour, typer.Option("--colour", help="As data.colour.")]
Skip = Annotated[bool, typer.Option("--skip-broken", help="As data.broken = skip.")]


def reading_of(size: int, fit: Fit, colour: Colour, skip: bool) -> Reading:
    """How pictures are to be read."""
    from ..data.pixels import Reading

    return Reading(size, fit.value, colour.value, "skip" if skip else "stop")


@app.callback()
def data() -> None:
    """Look at data before anything runs."""


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="folder:DIR, npz:FILE, FILE.csv, or any name of 'list data'.")],
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds downloaded data.")] = None,
    size: Size = 0,
    fit: FitOption = Fit.crop,
    colour: ColourOption = Colour.auto,
    skip: Skip = False,
    labels: Annotated[bool, typer.Option(help="Look for labels that are probably wrong.")] = True,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with sample pictures.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what is in a data source, what a run would do to it and what is wrong with it.

    Pictures are decoded once and kept, so a run that follows starts at once. The exit code is 1 where something is
    wrong.

    Examples:

    - `fedtailor data inspect folder:photos --size 32 --html photos.html`
    - `fedtailor data inspect photos.csv --skip-broken`
    """
    from rich.console import Console

    from ..data.inspect import inspect as look

    console = Console()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    name = f"folder:{source}" if ":" not in source and Path(source).is_dir() else source
    found = look(name, data_dir, reading_of(size, fit, colour, skip), labels, None if json else say)
    if json:
        typer.echo(json_module.dumps(found.as_json(), indent=1))
    else:
        _print(console, found)
    if html is not None:
        from ..report.inspect import write_inspection

        write_inspection(found, html)
        if not json:
            say(f"page: {html}")
    if found.wrong:
        raise typer.Exit(1)


def _print(console: Console, found: Inspection) -> None:
    from rich.markup import escape
    from rich.table import Table

    data, counts = found.data, found.counts
    channels, height, width = data.shape
    kind = "grey" if channels == 1 else "colour"
    console.print(f"[bold]{escape(found.name)}[/]: {len(data):,} pictures, {width}x{height} {kind}", highlight=False)
    table = Table("client", "pictures", "classes", "most frequent")
    for name, row in zip(found.clients, counts, strict=True):
        most = ", ".join(f"{data.classes[i]} {row[i]}" for i in (-row).argsort(kind="stable")[:5] if row[i])
        table.add_row(escape(name), f"{row.sum():,}", str(int((row > 0).sum())), escape(most))
    console.print(table)
    say = lambda text, style="": console.print(escape(text), style=style, highlight=False, soft_wrap=True)  # noqa: E731
    for title, counter in (("sizes", found.sizes), ("kinds", found.kinds)):
        say(f"{title}: {', '.join(f'{what} ({n:,})' for what, n in counter.most_common(8))}")
    for name, why in list(found.broken.items())[:10]:
        say(f"cannot be read: {name} ({why})", "yellow")
    for twins in found.twins[:5]:
        say(f"copies: {', '.join(found.names[i] for i in twins.places[:6])}", "yellow")
    for s in found.judge.suspects[:10] if found.judge else ():
        say(f"label to look at: {found.names[s.place]} is {data.classes[s.label]}, looks like {data.classes[s.looks]}")
    for text in found.plan:
        say(f"would: {text}", "green")
    for text in found.remarks:
        say(f"note: {text}", "yellow")
    for text in found.wrong:
        say(f"wrong: {text}", "bold red")
    if not found.wrong:
        say("nothing is wrong", "bold green")
