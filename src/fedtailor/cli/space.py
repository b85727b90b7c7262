"""`fedtailor space`: look at a search space or a fixed network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError, unknown

if TYPE_CHECKING:
    from ..spaces.base import Arch, Space
    from ..spaces.measure import Cost

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Search spaces and fixed networks.")

Input = Annotated[str, typer.Option("--input", help="Image shape: channels,height,width.")]
Classes = Annotated[int, typer.Option(min=1, help="Number of classes.")]
Batch = Annotated[int, typer.Option(min=1, help="Local batch at which training memory is counted.")]


@app.callback()
def space() -> None:
    """Search spaces and fixed networks."""


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A space or net, such as tiny or cnn, or your own: file.py:ClassName.")],
    arch: Annotated[str, typer.Option(help="largest, smallest, random, or a number per dimension: 1,0,2.")] = "largest",
    net: Annotated[bool, typer.Option("--net", help="The fixed net, where a space has the same name.")] = False,
    input: Input = "3,32,32",
    classes: Classes = 10,
    batch: Batch = 32,
    seed: Annotated[int, typer.Option(help="Seed of --arch random.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="An option of the space: option=value.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the arch into this SVG file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Shows what a space can choose, what its networks cost, and one arch piece by piece.

    An arch is a list of numbers, one per dimension: the number of the option chosen, counted from 0, smallest first.

    Costs are for one image: FLOPs of the forward pass (two per multiply-add), training memory at the batch.

    Examples:

    - `fedtailor space show tiny`
    - `fedtailor space show tiny --arch 1,0,1,0,0,1 --svg arch.svg`
    - `fedtailor space show cnn --input 1,28,28 --set width=16 --json`
    """
    space = open_space(name, input, classes, set_ or [], net)
    chosen = read_arch(space, arch, seed)
    if svg is not None:
        try:
            svg.write_text(space.draw(chosen), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {svg}: {error.strerror}.") from error
    if json:
        import json as json_module

        typer.echo(json_module.dumps(_as_json(space, chosen, batch), indent=2, default=str))
    else:
        _print(space, chosen, batch)
        if svg is not None:
            typer.echo(f"Drawn in {svg}.")


def open_space(name: str, input: str, classes: int, settings: list[str], net: bool = False) -> Space:
    """The space of that name, or else the net (with `net` only the net), or a user's own, for images of that shape."""
    from ..config import Config
    from ..registry import names

    nets, spaces = names("net"), names("space")
    known = nets if net else sorted({*spaces, *nets})
    if name not in known and not (".py" in name or ":" in name):
        raise unknown("net" if net else "space or net", name, known)
    shape = _ints("--input", input)
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"--input {input}: an image has three sizes above 0, channels,height,width, such as 3,32,32.")
    table = {"name": name, **read_settings(settings)}
    config = Config(net=table) if net or (name in nets and name not in spaces) else Config(space=table)
    return config.make_space((shape[0], shape[1], shape[2]), classes)


def size_of(space: Space) -> str:
    """'64 archs', or that the network is fixed."""
    if space.fixed:
        return "a fixed network"
    return f"{space.size:,} archs" if space.size < 10**9 else f"{space.size:.2e} archs"


def read_arch(space: Space, text: str, seed: int) -> Arch:
    """largest, smallest, random or numbers, checked against the space."""
    if text == "random":
        from ..seeds import rng_of

        return space.sample(rng_of(seed, "cli", "arch"))
    if text in ("largest", "smallest"):
        return getattr(space, text)
    return space.check(_ints("--arch", text))


def read_settings(settings: list[str]) -> dict[str, Any]:
    """The table of `option=value` texts; `table.option=value` sets an option of an inner table."""
    from ..config import change

    table: dict[str, Any] = {}
    for text in settings:
        table = change(table, text)
    return table


def _ints(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"{option} {text}: expected whole numbers with commas between them.") from None


def _numbers(cost: Cost, batch: int) -> dict[str, int]:
    return {
        "parameters": cost.parameters,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "training_memory": cost.training_memory(batch),
        "inference_memory": cost.inference_memory(),
    }


def _as_json(space: Space, arch: Arch, batch: int) -> dict[str, Any]:
    return {
        "space": space.name,
        "input": space.input,
        "classes": space.classes,
        "batch": batch,
        "size": space.size,
        "dimensions": [{"name": d.name, "options": d.options} for d in space.dimensions],
        "smallest": _numbers(space.cost(space.smallest), batch),
        "largest": _numbers(space.cost(space.largest), batch),
        "arch": {
            "arch": arch,
            "options": space.options(arch),
            "cost": _numbers(space.cost(arch), batch),
            "pieces": [
                {"name": name, "output": piece.outputs[0], **_numbers(piece.cost, batch)}
                for name, piece in space.pieces(arch).items()
            ],
        },
    }


def _print(space: Space, arch: Arch, batch: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..fleet.budget import readable

    def cells(cost: Cost, *quantities: str) -> list[str]:
        numbers = _numbers(cost, batch)
        return [readable("memory" if "memory" in q else q, numbers[q]) for q in quantities]

    console = Console()
    shape = " x ".join(map(str, space.input))
    console.print(f"[bold]{space.name}[/bold]: {size_of(space)}, input {shape}, {space.classes} classes")
    if space.dimensions:
        dimensions = Table("dimension", "options, smallest first", "chosen", title="Dimensions", title_justify="left")
        for d, i in zip(space.dimensions, arch, strict=True):
            dimensions.add_row(d.name, ", ".join(map(str, d.options)), f"{i}: {d.options[i]}")
        console.print(dimensions)

    shown = ("parameters", "flops", "bytes", "training_memory", "inference_memory")
    costs = Table("", *(q.replace("_", " ") for q in shown), title=f"Cost, batch {batch}", title_justify="left")
    points = {space.smallest: "smallest", arch: "shown", space.largest: "largest"}
    for point, label in points.items():
        costs.add_row(label, *cells(space.cost(point), *shown))
    console.print(costs)

    pieces = Table("piece", "output", "parameters", "flops", "training memory", title="Pieces", title_justify="left")
    for name, piece in space.pieces(arch).items():
        output = " x ".join(map(str, piece.outputs[0]))
        pieces.add_row(name or "network", output, *cells(piece.cost, "parameters", "flops", "training_memory"))
    console.print(pieces)
    if arch:
        console.print(f"arch {','.join(map(str, arch))}", highlight=False)
