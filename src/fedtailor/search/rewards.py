"""The reward of a search, put together from named pieces: r_i = sum of weight * piece(outcome of client i).

A piece returns what it *adds* to the reward, so a price is negative. PerFedRLNAS's eq. 8 is `accuracy` and `time`, its
eq. 9 `accuracy`, `time` and `memory`. A piece of your own is a function in a file, named as `path/to/file.py:function`:

    def carbon(outcome):
        return -outcome.seat.space.cost(outcome.arch).train_flops * 1e-9
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import UserError, nearest, unknown
from ..method import Job, Reply, Seat
from ..registry import lookup
from ..spaces.base import Arch
from .supernet import refused


@dataclass(frozen=True)
class Outcome:
    """What a round brought one participant."""

    seat: Seat
    arch: Arch
    fits: bool  # False: the device could not hold the network, nothing was trained (eq. 9)
    accuracy: float  # Acc_i on val; 0 where it did not fit
    seconds: float  # RT_i on the simulated clock; the round's longest where it did not fit
    baseline: float  # mean Acc: over clients, of the latest accuracy of each
    fastest: float  # min RT of this round


Piece = Callable[[Outcome], float]


def accuracy(outcome: Outcome) -> float:
    """Acc_i - mean Acc (eq. 8)."""
    return outcome.accuracy - outcome.baseline


def time(outcome: Outcome) -> float:
    """-(RT_i - min RT), in seconds (eq. 8)."""
    return outcome.fastest - outcome.seconds


def memory(outcome: Outcome) -> float:
    """-phi_i, the share of the device's memory that training takes; 1 where it did not fit (eq. 9)."""
    seat = outcome.seat
    limit = seat.budget.memory or seat.profile.memory  # a fleet without limits still has devices with memories
    return -min(1.0, seat.space.cost(outcome.arch).training_memory(seat.batch) / limit) if outcome.fits else -1.0


def energy(outcome: Outcome) -> float:
    """Arithmetic of training as a share of the largest arch's, on devices that run on a battery; else 0.

    An example of a price of our own. Profiles hold no watts, so arithmetic stands in for energy.
    """
    space = outcome.seat.space
    share = space.cost(outcome.arch).train_flops / space.cost(space.largest).train_flops
    return 0.0 if outcome.seat.profile.battery == "none" else -share


def traffic(outcome: Outcome) -> float:
    """Bytes of the network as a share of the largest arch's: an example of a price of our own."""
    space = outcome.seat.space
    return -space.cost(outcome.arch).bytes / space.cost(space.largest).bytes


PIECES: dict[str, Piece] = {
    "accuracy": accuracy,
    "time": time,
    "memory": memory,
    "energy": energy,
    "bytes": traffic,
}
WEIGHTS = {
    "time": 0.001
}  # lambda_time per second, from the authors' configuration: the paper gives no number; others 1


def outcomes(job: Job, replies: Sequence[Reply], latest: Tensor) -> list[Outcome]:
    """What the round brought each participant; `latest` holds every client's latest accuracy, nan where none is known.

    Eq. 9 for a network that did not fit: Acc is 0 and RT the longest of the round; it then cannot be min RT either.
    """
    longest = max(r.seconds for r in replies)
    seconds = [longest if refused(r) else r.seconds for r in replies]
    known = latest[~latest.isnan()]
    baseline = float(known.mean()) if len(known) else 0.0
    return [
        Outcome(
            seat=job.seats[r.client],
            arch=r.arch,
            fits=not refused(r),
            accuracy=float(r.facts.get("accuracy", 0.0)),
            seconds=s,
            baseline=baseline,
            fastest=min(seconds),
        )
        for r, s in zip(replies, seconds, strict=True)
    ]


def remember(latest: Tensor, replies: Sequence[Reply]) -> Tensor:
    """Every client's latest accuracy after a round.

    A refusal leaves its client's entry alone: the mean is what networks reach on clients' data, and a zero in it would
    praise everybody else for one device's lack of memory.
    """
    latest = latest.clone()
    for r in replies:
        if not refused(r):
            latest[r.client] = float(r.facts["accuracy"])
    return latest


def no_accuracies(clients: int) -> Tensor:
    return torch.full((clients,), float("nan"), dtype=torch.float64)


def assemble(names: Sequence[str], weights: Mapping[str, float]) -> Piece:
    """The reward as one function. Weights go by a piece's name, for a piece of your own the function's name."""
    short = {name: name.rpartition(":")[2] for name in names}
    for name in weights:
        if name not in short.values() and name not in WEIGHTS:
            raise UserError(
                f"method.weights.{name}: '{name}' is not among method.rewards = {list(names)}."
                f"{nearest(name, short.values())}"
            )
    parts = [(weights.get(key, WEIGHTS.get(key, 1.0)), _piece(name), name) for name, key in short.items()]

    def reward(outcome: Outcome) -> float:
        total = 0.0
        for weight, piece, name in parts:
            value = float(piece(outcome))
            if not math.isfinite(value):
                raise UserError(f"the reward '{name}' of client '{outcome.seat.name}' is {value}, which is no reward.")
            total += weight * value
        return total

    return reward


@lru_cache(maxsize=64)
def _piece(name: str) -> Piece:
    if name in PIECES:
        return PIECES[name]
    if ":" not in name:
        raise unknown("reward", name, [*PIECES, "path/to/file.py:function"])
    try:
        return lookup("method", name)  # with a colon, any object of the user's file
    except UserError as error:
        raise UserError(str(error).replace("method.name", "method.rewards")) from error
