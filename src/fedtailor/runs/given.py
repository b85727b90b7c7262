"""Archs given to the clients before a run, for methods that make weights personal and leave architectures alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import UserError
from ..method import Seat
from ..search.supernet import affords
from ..search.uniform import widest
from ..seeds import rng_of
from ..spaces.base import Arch, Space


def give(source: str, seats: Sequence[Seat], seed: int) -> list[Seat]:
    """The seats with an arch each: the widest that fits, a random one that fits, or what another run's clients keep."""
    space = seats[0].space
    found = _kept(Path(source), space) if source not in ("widest", "random") else {}
    given = [replace(seat, arch=found[seat.id] if seat.id in found else _arch(source, seat, seed)) for seat in seats]
    for seat in given:
        if not seat.fits(seat.arch):
            raise UserError(
                f"archs = '{source}': arch {seat.arch} of client '{seat.name}' does not fit its hard budget."
            )
    return given


def _arch(source: str, seat: Seat, seed: int) -> Arch:
    space, fits = seat.space, lambda arch: affords(seat, arch)
    if not fits(space.smallest):
        why = seat.budget.why_not(space.cost(space.smallest), seat.batch, seat.profile, seat.images)
        raise UserError(f"client '{seat.name}': no arch of '{space.name}' fits its budget; the smallest needs {why}.")
    if source == "random":
        return space.sample(rng_of(seed, "random-arch", seat.id), fits=fits)
    if source == "widest":
        if not space.ordered():
            raise UserError(f"archs = 'widest': archs of '{space.name}' are not wide or narrow. Use archs = 'random'.")
        return widest(space, fits)
    raise UserError(f"archs = '{source}': that run has no network of client '{seat.name}'.")


def _kept(folder: Path, space: Space) -> dict[int, Arch]:
    from .alone import Offered
    from .execute import open_space, read_networks

    if not (folder / "run.json").is_file():
        raise UserError(f"archs = '{folder}': give 'widest', 'random', or the folder of a finished run.")
    if open_space(folder) != space:
        raise UserError(f"archs = '{folder}': that run's space or its options are not those of this run.")
    nets = read_networks(folder, space)
    if any(own != space for own, _, _ in nets.values()):
        offered = Offered.read(folder, torch.device("cpu"))  # in a client's own folder: it says what it was given
        if offered and offered.task.arch:
            return {0: space.check(offered.task.arch)}
        raise UserError(f"archs = '{folder}': its clients keep networks that are no archs of '{space.name}'.")
    return {client: space.check(arch) for client, (_, arch, _) in nets.items()}
