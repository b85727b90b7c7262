"""What methods have in common that share one part of a network and keep the rest at the client."""

from __future__ import annotations

import torch
from torch import nn

from .engine.client import Client
from .engine.jobs import Measured
from .method import Job, Server, Task
from .parts import Part, choose, learnt
from .spaces.measure import tensors_of


def start_shared(job: Job, part: Part) -> Server:
    """A server that holds one part of a fresh network."""
    return Server(job, weights=choose(job.space.new_weights(job.seed), part))


def whole(task: Task, client: Client, key: str, own: Part) -> nn.Module:
    """The network of a task that lacks the client's own part: what it kept under `key`, else its initial weights.

    Before it has kept any, statistics of its own part are missing, and are estimated before the network is used.
    """
    kept = client.memory.get(key)
    if kept is None:
        kept = choose(client.initial, lambda name: own(name) and learnt(name))
    return client.build(Task(task.weights | kept, task.arch))


async def settle(net: nn.Module, client: Client) -> nn.Module:
    """The network with statistics to train from: from 0 and 1 they would need dozens of batches to come right."""
    if client.local.bn != "recalibrate":  # then nothing reads them before they are estimated anyway
        await client.refresh(net)
    return net


async def fit_head(net: nn.Module, client: Client, part: Part, epochs: float, lr: float | None = None) -> Measured:
    """Trains one part on top of the rest, which stays as it is, also the statistics that a forward pass moves."""
    await settle(net, client)
    held = {n: t.detach().clone() for n, t in tensors_of(net).items() if not learnt(n) and not part(n)}
    loss = await client.fit(net, epochs=epochs, lr=lr, only=part)
    with torch.no_grad():
        for name, tensor in tensors_of(net).items():
            if name in held:
                tensor.copy_(held[name])
    return loss


async def fine_tune(net: nn.Module, client: Client, only: Part | None, epochs: float, lr: float) -> None:
    """Trains the whole network or one part of it, at a tenth of the run's learning rate unless one is given."""
    if not epochs:
        return
    lr = lr or client.local.lr / 10
    if only is None:
        await client.fit(net, epochs=epochs, lr=lr)
    else:
        await fit_head(net, client, only, epochs, lr)
