"""A method that moves weights and computes nothing: what is left of a round is overhead.

Everybody gets and returns other numbers, so that no piece of a message is one that was sent before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedtailor.engine.client import Client
from fedtailor.method import Job, Method, Reply, Seat, Server, Task


@dataclass(frozen=True)
class Echo(Method):
    name = "echo"

    def start(self, job: Job) -> Server:
        return Server(job, weights=job.space.new_weights(job.seed))

    def ask(self, server: Server, client: Seat) -> Task:
        return Task({n: t + (1e-3 * client.id + server.round) for n, t in server.weights.items()})

    async def work(self, task: Task, client: Client) -> Reply:
        return Reply({n: t + 1e-4 for n, t in task.weights.items()}, facts={"loss": 0.0})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace()
