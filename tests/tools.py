"""Small federations for tests: three weights and hand-made images, or digits through the real configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedtailor.config import Config, Local, load
from fedtailor.data.batches import Split
from fedtailor.data.federation import Store
from fedtailor.data.partition import TRAIN, VAL
from fedtailor.data.public import with_public
from fedtailor.engine.local import LocalEngine
from fedtailor.engine.loop import Federation, State
from fedtailor.fleet import fleet as fleets
from fedtailor.method import Job, Method, Seat
from fedtailor.nets.base import FixedNet
from fedtailor.registry import lookup, register
from fedtailor.spaces.base import Space, Weights


class _Three(nn.Module):
    """One body weight and two head weights: logits = head * (body * x)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


@register("net", "three")
@dataclass(frozen=True)
class Three(FixedNet):
    def module(self) -> nn.Module:
        return _Three()


class _Biased(nn.Module):
    """Only a head with a bias: logits = weight * x + bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


@register("net", "biased")
@dataclass(frozen=True)
class Biased(FixedNet):
    def module(self) -> nn.Module:
        return _Biased()


def three(body: float, *head: float) -> Weights:
    return {"body.weight": torch.tensor([[float(body)]]), "head.weight": torch.tensor([[float(h)] for h in head])}


def numbers(weights: Weights) -> list[float]:
    """The three weights as a list: body, then head."""
    return [float(v) for name in sorted(weights) for v in weights[name].flatten()]


def by_hand(
    method: Method,
    data: Sequence[Sequence[tuple[int, int]]],
    local: Local,
    space: Space | None = None,
    rounds: int = 1,
    fleet: fleets.FleetConfig | None = None,
    participants: int | None = None,
    public: Sequence[int] = (),
) -> Federation:
    """A federation whose clients hold the given (pixel, label) pairs, the same for train and val, and public pixels."""
    space = space or Three((1, 1, 1), 2)
    images = torch.tensor([p for c in data for p, _ in c], dtype=torch.uint8).reshape(-1, 1, 1, 1)
    images = images.expand(-1, *space.input).contiguous()
    labels = torch.tensor([y for c in data for _, y in c])
    ranges, at = {}, 0
    mean, std = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    for i, c in enumerate(data):
        split = Split(images, labels, at, len(c), mean, std)
        ranges[i, TRAIN] = ranges[i, VAL] = split
        at += len(c)
    rules = fleet or fleets.FleetConfig()
    devices = fleets.make(rules, len(data), 0)
    largest = space.cost(space.largest)
    seats = []
    for i, (c, d) in enumerate(zip(data, devices, strict=True)):
        budget = d.budget.absolute(largest, local.batch, d.profile, len(c))
        seats.append(Seat(i, f"client-{i}", len(c), d.profile, budget, rules.hard, space, local.batch, len(c)))
    job = Job(space, tuple(seats), len(data), participants or len(data), rounds, 0, local, len(public))
    method.check(job)
    store = with_public(Store(ranges), np.array(public, np.uint8).reshape(-1, 1, 1, 1) if public else None)
    return Federation(job, method, store, LocalEngine(torch.device("cpu"), 1), devices, rules)


def one_round(federation: Federation, **values: Any) -> State:
    """The state after one round from a server state in which some values are set by hand."""
    state = federation.begin()
    state.server = state.server.replace(**values)
    return next(federation.rounds(state, lambda event: None))


def kept(federation: Federation, state: State, client: int) -> nn.Module:
    """The network that a client keeps."""
    seat = federation.job.seats[client]
    who = federation.client(seat, state.memories.get(client, {}), state.round)
    offer = federation.method.offer(state.server, seat)
    return federation.engine.run([("", federation.method.personal(offer, who))])[0]


def personal(federation: Federation, state: State, client: int) -> Weights:
    """The weights of the network that a client keeps, under the policy on statistics."""
    who = federation.client(federation.job.seats[client], {}, state.round)
    return who.take(kept(federation, state, client))


SMALL = {
    "clients": 4,
    "participants": 2,
    "rounds": 3,
    "partition.name": "iid",
    "partition.samples": 60,
    "local.epochs": 0.5,
    "local.batch": 8,
    "local.bn": "average",
}


QUICK: dict[str, dict[str, Any]] = {"fedoras": {"method.probes": 10, "method.pool": 3, "method.parents": 2}}


def small_config(method: str, **changes: Any) -> Config:
    """Digits, four clients, three rounds: any method in about a second."""
    options = {**lookup("method", method).example, **SMALL, **QUICK.get(method, {})}
    return load("demo", {"method.name": method, **options, **{k.replace("__", "."): v for k, v in changes.items()}})


def rows(folder: Path) -> list[str]:
    """The event log without measured times."""
    return [line for line in (folder / "events.csv").read_text().splitlines() if "measured_seconds" not in line]


class Counted(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.many = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.many[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
