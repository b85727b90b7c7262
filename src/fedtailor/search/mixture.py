"""What methods that average a DARTS supernet w and its architecture parameters alpha share.

The server's values `weights` and `alpha` are the supernet's tensors and the two alphas by name; a task and a reply
carry them as `weights` and `extra`. Both are averaged by one rule, over all clients, by samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.client import Client
from ..engine.jobs import Measured
from ..errors import UserError
from ..method import Job, Reply, Server, Task
from ..nets.darts import ALPHA, Mixture, mixture_of
from ..spaces.base import Space
from ..spaces.darts import Darts
from ..spaces.pasting import paste

ALPHAS = dict.fromkeys(ALPHA, "architecture parameters")  # as a card names them


def darts(space: Space, method: str = "this method") -> Darts:
    """The space, where its supernet takes gates; else an error that names the spaces that do."""
    if isinstance(space, Darts):
        return space
    raise UserError(
        f"method.name = '{method}' weighs the operations of a supernet by gates, which space '{space.name}' does not "
        "have. The space with gates is darts: --set space.name=darts."
    )


def require_room(job: Job, method: str) -> None:
    """Raises `UserError` where a client's hard budget does not admit the whole supernet."""
    cost = mixture_of(darts(job.space, method)).cost(())
    for seat in job.seats:
        if seat.hard and (why := seat.budget.why_not(cost, seat.batch, seat.profile, seat.images)):
            raise UserError(
                f"client '{seat.name}': '{method}' trains the whole supernet on every client, which needs {why}. Raise "
                "fleet.budget, lower local.batch or space.channels, or use a method that sends sub-networks."
            )


def begin(job: Job) -> Server:
    """A fresh supernet and an alpha that knows nothing."""
    alpha = dict(zip(ALPHA, darts(job.space).new_alpha(job.seed), strict=True))
    return Server(job, weights=job.space.new_weights(job.seed), alpha=alpha)


def task_of(server: Server) -> Task:
    return Task(server.weights, extra=server.alpha)


def mixture(task: Task, client: Client) -> Mixture:
    """The supernet of a task, weighed by its alpha."""
    net = client.build(Task(task.weights | task.extra), mixture_of(darts(client.space)))
    assert isinstance(net, Mixture)
    return net


def reply_of(net: Mixture, client: Client, loss: Measured) -> Reply:
    found = client.take(net)
    return Reply(found, extra={name: found.pop(name) for name in ALPHA}, facts={"loss": loss})


def averaged(server: Server, replies: Sequence[Reply]) -> Server:
    """FedNAS eq. 5: w and alpha <- sum of (N_k / N) times the clients'."""
    parts = [(r.weights | r.extra, (), float(r.samples)) for r in replies]
    merged = paste(mixture_of(darts(server.space)), server.weights | server.alpha, parts)
    return server.replace(alpha={name: merged.pop(name) for name in ALPHA}, weights=merged)
