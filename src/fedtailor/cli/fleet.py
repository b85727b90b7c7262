"""`fedtailor fleet`: look at the clients' devices before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .space import Batch, Classes, Input, open_space, read_settings, size_of

if TYPE_CHECKING:
    from ..fleet.fleet import Device
    from ..spaces.base import Space

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="The clients' devices and budgets.")
SAMPLES = 300  # archs drawn to estimate how much of a large space fits


@app.callback()
def fleet() -> None:
    """The clients' devices and budgets."""


@app.command()
def show(
    name: Annotated[
        str, typer.Option(help="equal, uniform-memory, capacity-high, capacity-low, mixed or file:PATH.")
    ] = "equal",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the run, which deals the devices.")] = 0,
    space: Annotated[str, typer.Option(help="The space whose archs have to fit.")] = "tiny",
    net: Annotated[str, typer.Option(help="A fixed net that has to fit, instead of a space.")] = "",
    input: Input = "3,32,32",
    classes: Classes = 10,
    batch: Batch = 32,
    images: Annotated[int, typer.Option(min=1, help="Images a client trains on in a round: samples x epochs.")] = 2500,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the fleet table: option=value or budget.option=value."),
    ] = None,
) -> None:
    """Shows who has which device, what fits its budget, and how long a round takes there.

    Clients with equal devices share a row. Times are those of the simulated clock: receive, train, send. Options of
    the config's fleet table can be tried here before they go into it.

    Examples:

    - `fedtailor fleet show --name capacity-low --clients 20`
    - `fedtailor fleet show --name mixed --net cnn --batch 64`
    - `fedtailor fleet show --set profile=laptop --set budget.flops=50%`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..config import Config
    from ..fleet.fleet import NAMES, make

    config = Config(fleet={"name": name, **read_settings(set_ or [])}).make_fleet()
    network = open_space(net or space, input, classes, [], net=bool(net))
    devices = make(config, clients, seed)
    alike: dict[Device, list[int]] = {}
    for client, device in enumerate(devices):
        alike.setdefault(device, []).append(client)

    console = Console()
    about = NAMES.get(config.name, NAMES["file:PATH"])
    console.print(f"[bold]{escape(config.name)}[/bold]: {about}", highlight=False)
    table = Table("clients", "device", "budget", "fits", "round", show_lines=True)
    for device, members in alike.items():
        table.add_row(*_row(device, members, network, batch, images))
    console.print(table)
    console.print(f"For {network.name} ({size_of(network)}) at batch {batch}, {images:,} images a round.")
    alone = ", one client alone on the link that a round's participants share" if config.shared_link else ""
    console.print(f"Round: the simulated time of the smallest and of the largest arch{alone}.")
    if config.deadline:
        console.print(f"Replies after {config.deadline:g} s are dropped.")


def _row(device: Device, members: list[int], space: Space, batch: int, images: int) -> list[str]:
    from rich.markup import escape

    from ..fleet.budget import need, readable

    profile, budget = device
    ends = dict.fromkeys((space.smallest, space.largest))  # one, if the network is fixed
    times = [readable("seconds", need("seconds", space.cost(arch), batch, profile, images)) for arch in ends]
    about = [
        f"[bold]{escape(profile.name)}[/bold]",
        f"{profile.flops_per_second / 1e9:,g} GFLOP/s, {readable('memory', profile.memory)}",
        f"down {profile.down_mbit:g}, up {profile.up_mbit:g} Mbit/s",
    ]
    if profile.availability < 1:
        about.append(f"reachable {100 * profile.availability:g} %")
    return [
        _ranges(members),
        "\n".join(about),
        str(budget).replace(", ", "\n"),
        _fitting(device, space, batch, images),
        "\n".join(times),
    ]


def _fitting(device: Device, space: Space, batch: int, images: int) -> str:
    """How many archs fit: counted in a small space, estimated from random archs in a large one."""
    from ..seeds import rng_of

    profile, budget = device
    fits = budget.within(space, batch, profile, images)
    if not fits(space.smallest):
        limits = budget.absolute(space.cost(space.largest), batch, profile, images)
        return f"none: {limits.why_not(space.cost(space.smallest), batch, profile, images)}"
    if fits(space.largest):
        return "all"
    if space.size <= SAMPLES:
        return f"{sum(map(fits, space.archs()))} of {space.size} archs"
    rng = rng_of(0, "cli", "fits")
    hits = sum(fits(space.sample(rng)) for _ in range(SAMPLES))
    return f"about {100 * hits / SAMPLES:.0f} % of the archs" if hits else f"fewer than 1 arch in {SAMPLES}"


def _ranges(numbers: list[int]) -> str:
    """'0-3, 7' for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(map(str, run)) for run in runs)
