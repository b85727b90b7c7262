"""Networks of the clients' own: where only predictions or a proxy are shared, every client may have another one.

A method's option lists [net] tables. A client takes, of those that its hard budget admits, one by its number, so that
clients with equal devices deal them out evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from ..engine.client import Client
from ..errors import UserError
from ..method import Job, Seat, Task
from ..nets.base import net_of
from ..spaces.base import Arch, Space, Weights

Tables = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Own:
    """A client's own network: a fixed net, or the run's with the arch that the client was given."""

    space: Space
    arch: Arch = ()

    def build(self, client: Client, weights: Weights | None) -> nn.Module:
        """The network with these weights, or with its first ones."""
        first = client.initial if self.space is client.space else client.initial_of(self.space)
        return client.build(Task(weights or first, self.arch), self.space)


def own_net(tables: Tables, seat: Seat) -> Own:
    """The client's own network; without tables it is the run's."""
    nets = [_listed(table, seat) for table in tables] or [Own(seat.space, seat.arch)]
    fitting = [net for net in nets if not seat.hard or not _why_not(net, seat)]
    if not fitting:
        raise UserError(
            f"client '{seat.name}': none of its possible networks fits its budget; '{nets[0].space.name}' needs "
            f"{_why_not(nets[0], seat)}. List a smaller one, or raise fleet.budget."
        )
    return fitting[seat.id % len(fitting)]


def own_tables(tables: Tables, seat: Seat) -> Tables:
    """Of the tables that of the client's own network, for a folder in which nothing is dealt out any more."""
    own = own_net(tables, seat)
    return tuple(table for table in tables if _listed(table, seat) == own)[:1]


def require_own(tables: Tables, job: Job) -> None:
    """Raises `UserError` where a table makes no network or a client can hold none of them."""
    for seat in job.seats:
        own_net(tables, seat)


def _listed(table: Mapping[str, Any], seat: Seat) -> Own:
    return Own(_made(json.dumps(table), seat.space.input, seat.space.classes))


@lru_cache(maxsize=64)  # a space remembers what it has counted
def _made(table: str, shape: tuple[int, int, int], classes: int) -> Space:
    return net_of(json.loads(table), shape, classes)


def _why_not(net: Own, seat: Seat) -> str:
    return seat.budget.why_not(net.space.cost(net.arch), seat.batch, seat.profile, seat.images)
