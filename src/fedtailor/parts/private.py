"""Networks of the clients' own: where only predictions or a proxy are shared, every client may have another one.

A method's option lists [net] tables. A client takes, of those that its hard budget admits, one by its number, so that
clients with equal devices deal them out evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import UserError
from ..method import Job, Seat
from ..nets.base import net_of
from ..spaces.base import Space

Tables = tuple[dict[str, Any], ...]


def private_net(tables: Sequence[Mapping[str, Any]], seat: Seat) -> Space:
    """The client's own network; without tables it is the run's."""
    nets = [_made(json.dumps(table), seat.space.input, seat.space.classes) for table in tables] or [seat.space]
    fitting = [net for net in nets if not seat.hard or not _why_not(net, seat)]
    if not fitting:
        raise UserError(
            f"client '{seat.name}': none of its possible networks fits its budget; '{nets[0].name}' needs "
            f"{_why_not(nets[0], seat)}. List a smaller one, or raise fleet.budget."
        )
    return fitting[seat.id % len(fitting)]


def require_private(tables: Sequence[Mapping[str, Any]], job: Job) -> None:
    """Raises `UserError` where a table makes no network or a client can hold none of them."""
    for seat in job.seats:
        private_net(tables, seat)


@lru_cache(maxsize=64)  # a space remembers what it has counted
def _made(table: str, shape: tuple[int, int, int], classes: int) -> Space:
    return net_of(json.loads(table), shape, classes)


def _why_not(net: Space, seat: Seat) -> str:
    return seat.budget.why_not(net.cost(()), seat.batch, seat.profile, seat.images)
