"""What methods have in common that share one part of a network and keep the rest at the client."""

from __future__ import annotations

from torch import nn

from .engine.client import Client
from .method import Job, Server, Task
from .parts import Part, choose, learnt


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
