"""`fedtailor partition`: make a partition, save it, look at it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .data import Colour, ColourOption, Fit, FitOption, Size, Skip, reading_of

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.dataset import Dataset
    from ..data.partition import Partition

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Say which client holds which image: make a partition, save it, look at it.",
)

Data = Annotated[str, typer.Option("--data", help="Data set, as in 'fedtailor list data'.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder that holds the data.", envvar="FEDTAILOR_DATA", show_envvar=True),
]


@app.command()
def make(
    data: Data = "digits",
    data_dir: DataDir = None,
    name: Annotated[
        str, typer.Option(help="Rule: iid, dirichlet-class, dirichlet-client, label-skew or natural.")
    ] = "dirichlet-client",
    clients: Annotated[
        int, typer.Option(help="Clients that train. 0: all natural clients, 10 for the other rules.")
    ] = 0,
    alpha: Annotated[float, typer.Option(help="Concentration of dirichlet-*; small: few classes per client.")] = 0.3,
    classes: Annotated[int, typer.Option(help="Classes per client (label-skew).")] = 2,
    samples: Annotated[int, typer.Option(help="Images per client; 0: as many as there are.")] = 0,
    min_samples: Annotated[int, typer.Option(help="Fewest images a client may hold.")] = 10,
    val: Annotated[float, typer.Option(help="Share of a client's images for validation.")] = 0.2,
    test: Annotated[float, typer.Option(help="Share of a client's images for testing.")] = 0.2,
    new_clients: Annotated[int, typer.Option(help="Extra clients held out of training.")] = 0,
    pool: Annotated[str, typer.Option(help="'all': official train and test images; 'train': train only.")] = "all",
    size: Size = 0,
    fit: FitOption = Fit.crop,
    colour: ColourOption = Colour.auto,
    skip: Skip = False,
    seed: Annotated[int, typer.Option(help="Another seed, another deal.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Save the partition here (.npz).")] = None,
    svg: Annotated[Path | None, typer.Option(help="Save the class by client picture here (.svg).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Deal a data set to clients, show the result, and save it for the runs that are to share it.

    Example: 100 clients with 600 CIFAR-10 images each, few classes per client

      fedtailor partition make --data cifar10 --data-dir ~/data --clients 100 --samples 600
      --alpha 0.3 --out cifar10-100.npz --svg cifar10-100.svg

    Then, in the configuration of every run you compare: partition.file = "cifar10-100.npz"
    """
    from rich.console import Console

    from ..data.partition import PartitionConfig
    from ..data.partition import make as deal
    from ..data.picture import class_by_client_svg
    from ..data.sources import load
    from ..errors import UserError

    for file in (out, svg):
        if file and file.exists() and not force:
            raise UserError(f"{file} exists already. Choose another name, or overwrite it with --force.")
        if file and not file.parent.is_dir():
            raise UserError(f"{file}: there is no folder {file.parent}. Create it first.")
    if out and out.suffix != ".npz":
        raise UserError(f"--out {out}: a partition file ends in .npz.")
    dataset = load(data, data_dir, reading_of(size, fit, colour, skip))
    if clients == 0:
        clients = len(dataset.owners) - new_clients if name == "natural" and dataset.owners else 10
    config = PartitionConfig(name, alpha, classes, samples, min_samples, val, test, pool, new_clients)
    partition = deal(dataset, config, clients, seed)
    console = Console()
    _describe(console, partition, dataset)
    if out:
        partition.save(out)
        console.print(f"saved {out}", highlight=False)
    else:
        console.print("not saved: name a file with --out FILE.npz", style="dim", highlight=False)
    if svg:
        counts = partition.counts(dataset.labels, len(dataset.classes))
        svg.write_text(class_by_client_svg(counts, dataset.classes, _client_names(partition)), encoding="utf-8")
        console.print(f"drew  {svg}", highlight=False)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A partition saved by 'fedtailor partition make'.")],
    data: Annotated[str, typer.Option("--data", help="Data set it was made for, to see the classes too.")] = "",
    data_dir: DataDir = None,
    size: Size = 0,
    fit: FitOption = Fit.crop,
    colour: ColourOption = Colour.auto,
    skip: Skip = False,
) -> None:
    """Show what a saved partition deals to whom, its hash, and what made it.

    Example:

      fedtailor partition show cifar10-100.npz --data cifar10 --data-dir ~/data
    """
    from rich.console import Console

    from ..data.partition import Partition
    from ..data.sources import load

    partition = Partition.load(file)
    dataset = load(data, data_dir, reading_of(size, fit, colour, skip)) if data else None
    if dataset:
        partition.require(dataset)
    _describe(Console(), partition, dataset)


def _describe(console: Console, partition: Partition, dataset: Dataset | None) -> None:
    from rich import box
    from rich.table import Table

    from ..data.partition import SPLITS
    from ..data.picture import class_by_client_text

    held_out = f" and {partition.new_clients} held out" if partition.new_clients else ""
    about = Table.grid(padding=(0, 2))
    about.add_row("partition", partition.hash, style="bold")
    about.add_row("data", partition.dataset_hash)
    about.add_row("clients", f"{partition.clients}{held_out}")
    about.add_row("recipe", ", ".join(f"{key} = {value}" for key, value in partition.recipe.items()))
    console.print(about, highlight=False)
    names, sizes = _client_names(partition), partition.sizes()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if dataset:
        console.print(
            class_by_client_text(partition.counts(dataset.labels, len(dataset.classes)), dataset.classes, names)
        )
        rows = {"fewest": sizes.min(0), "mean": sizes.mean(0).round(1), "most": sizes.max(0), "all": sizes.sum(0)}
        table.add_column("images per client")
    else:
        rows = dict(zip(names, sizes, strict=True))
        table.add_column("client")
    for split in SPLITS:
        table.add_column(split, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{size:,}" for size in row.tolist()))
    console.print(table)


def _client_names(partition: Partition) -> list[str]:
    return [f"{name} (new)" if i >= partition.clients else name for i, name in enumerate(partition.names)]
