"""A method that moves weights and computes nothing: what is left of a round is overhead.

Everybody gets and returns other numbers, so that no piece of a message is one that was sent before. Where a client
loads this file, it writes down how long it takes to unpack a message and to pack the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedtailor.card import LOSS, Card, Message
from fedtailor.engine.client import Client
from fedtailor.engine.parcel import Parcel
from fedtailor.engine.site import Site
from fedtailor.method import Job, Method, Reply, Seat, Server, Task

TIMES = "seconds.txt"  # in a client's folder: one line per message


@dataclass(frozen=True)
class Echo(Method):
    name = "echo"
    card: ClassVar[Card] = Card(shared="nothing", down=Message("network"), up=Message("network", facts=LOSS))

    def start(self, job: Job) -> Server:
        return Server(job, weights=job.space.new_weights(job.seed))

    def ask(self, server: Server, client: Seat) -> Task:
        return Task({n: t + (1e-3 * client.id + server.round) for n, t in server.weights.items()})

    async def work(self, task: Task, client: Client) -> Reply:
        return Reply({n: t + 1e-4 for n, t in task.weights.items()}, facts={"loss": 0.0})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace()


answer = Site.answer


def timed(site: Site, parcel: Parcel) -> Parcel:
    began = time.perf_counter()
    try:
        return answer(site, parcel)
    finally:
        with (site.folder / TIMES).open("a") as file:
            file.write(f"{time.perf_counter() - began}\n")


if not hasattr(Site, "timed"):  # a file may be loaded more than once
    Site.answer, Site.timed = timed, True  # type: ignore[attr-defined, method-assign]
