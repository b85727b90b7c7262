"""What Flower costs: seconds of a round in which nothing is computed, with four clients on this machine.

    python bench/flower.py [--rounds 10]

Messages of 2 MB (a small network) and of 40 MB, with and without TLS. A round's seconds are split into three:

`serialise`   packing tasks, unpacking and checking replies at the server, and unpacking and packing at one client
`wait`        what a round with empty messages takes: everybody's polling, and requests that carry nothing
`transport`   the rest: what it takes to move the bytes, four hops down and four up, all clients at once

Medians over rounds, the first left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flower_echo import TIMES

from fedtailor.certificates import node_keys, server_folder
from fedtailor.config import load
from fedtailor.engine import crowd, wire
from fedtailor.engine.flower.apps import GridPost
from fedtailor.engine.flower.link import SuperLink
from fedtailor.engine.flower.loopback import Loopback
from fedtailor.runs.execute import Watcher
from fedtailor.runs.serve import serve

NAMES = [f"client-{i:03d}" for i in range(4)]
ECHO = f"{Path(__file__).resolve().parent / 'flower_echo.py'}:Echo"
HIDDEN = {0: 1, 2: 3_500, 40: 72_000}  # of the net `cnn`: megabytes of weights


class Meter(Watcher):
    """Seconds of every round, and those that the server spent on serialising."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.rounds: list[float] = []
        self.serialised: list[float] = []
        self.began = time.perf_counter()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.spent += time.perf_counter() - began

        return run

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.began, self.spent = time.perf_counter(), 0.0

    def round(self, number: int, facts: dict[str, float]) -> None:
        now = time.perf_counter()
        self.rounds.append(now - self.began)
        self.serialised.append(self.spent)
        self.began, self.spent = now, 0.0


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    pack, read = wire.Request.pack, crowd.read_response
    wire.Request.pack = meter.timed(pack)  # type: ignore[method-assign]
    crowd.read_response = meter.timed(read)
    try:
        yield
    finally:
        wire.Request.pack, crowd.read_response = pack, read  # type: ignore[method-assign]


def measure(sizes: Sequence[int], tls: bool, rounds: int, folder: Path) -> dict[int, tuple[float, float]]:
    """Seconds of a round, and those of them that serialising takes, for messages of these sizes in megabytes."""
    federation = Loopback(folder / "fl", NAMES, insecure=not tls)
    keys = server_folder(federation.keys) if tls else None
    link = SuperLink("127.0.0.1", federation.port, keys, folder / "link", print)
    changes = {"method.name": ECHO, "clients": 4, "participants": 4, "rounds": rounds, "checkpoint_every": rounds}
    changes |= {"evaluate_every": rounds, "net.name": "cnn", "partition.samples": 60}
    found: dict[int, tuple[float, float]] = {}
    try:
        for name in NAMES:
            federation.join(name, "--trust", ECHO)
        link.start()
        names = link.register(node_keys(keys)) if keys else None
        for size in sizes:
            meter = Meter()
            with link.run() as grid, metered(meter):
                config = load("demo", changes | {"net.hidden": HIDDEN[size]})
                post, known = GridPost(grid, names), NAMES if names else ()
                serve(config, folder / f"run-{size}", post, known, watch=meter)
            clients = at_clients(federation.sites, rounds)
            found[size] = median(meter.rounds), median(meter.serialised) + clients
    finally:
        federation.close()
        link.close()
    return found


def at_clients(sites: Path, rounds: int) -> float:
    """Seconds that a client took to unpack a round's message and to pack the answer."""
    told = [list(map(float, (sites / name / TIMES).read_text().split())) for name in NAMES]
    return statistics.mean(median(times[-rounds - 1 : -1]) for times in told)  # the last one is the evaluation


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print("| message | TLS | s/round | serialise | transport | wait | MB/s in transport | MB/s in a round |")
    print("|---|---|---|---|---|---|---|---|")
    for tls in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(tuple(HIDDEN), tls, options.rounds, Path(folder))
        empty, packing = found.pop(0)
        for size, (whole, serialise) in found.items():
            wait = empty - packing
            transport = whole - serialise - wait
            cells = [f"{size} MB", "yes" if tls else "no", *(f"{s:.2f}" for s in (whole, serialise, transport, wait))]
            cells += [f"{8 * size / transport:.0f}", f"{8 * size / whole:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
