"""What methods that send sub-networks of one supernet share: a task, a client's round, a network for keeps."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ..engine.client import Client
from ..errors import UserError
from ..method import Job, Reply, Seat, Server, Task
from ..spaces.base import Arch

Deploy = Literal["trained", "as-is"]


def affords(seat: Seat, arch: Arch) -> bool:
    """Whether the arch stays within every limit of the client's budget, be the budget hard or soft."""
    return all(share <= 1 for share in seat.use(arch).values())


def require_room(job: Job) -> None:
    """Raises `UserError` where a client could never train anything: nobody checks soft budgets before."""
    smallest = job.space.smallest
    for seat in job.seats:
        if not affords(seat, smallest):
            why = seat.budget.why_not(job.space.cost(smallest), seat.batch, seat.profile, seat.images)
            raise UserError(
                f"client '{seat.name}': no arch of '{job.space.name}' fits its budget; the smallest, {smallest}, needs "
                f"{why}. Raise fleet.budget, lower local.batch, or choose a smaller space."
            )


def sub_network(server: Server, arch: Arch) -> Task:
    """The arch and its weights, cut out of the server's supernet."""
    return Task(server.space.cut(server.weights, arch), arch)


async def train(task: Task, client: Client, lr: float | None = None) -> Reply:
    """One round of ordinary training, then the accuracy on val. What does not fit the device is not trained."""
    if not affords(client.seat, task.arch):
        return refusal(task)
    net = client.build(task)
    loss = await client.fit(net, lr=lr)
    return Reply(client.take(net), task.arch, facts={"loss": loss, "accuracy": await client.score(net)})


def refusal(task: Task) -> Reply:
    """The reply of a client whose device cannot hold what it was sent (PerFedRLNAS, eq. 9)."""
    return Reply(arch=task.arch, facts={"refused": 1})


def refused(reply: Reply) -> bool:
    return "refused" in reply.facts


async def keep(task: Task, client: Client, deploy: Deploy) -> nn.Module:
    """The network a client keeps: as it comes out of the supernet, or after `local.epochs` on its own data."""
    net = client.build(task)
    if deploy == "trained":
        await client.fit(net)
    return net
