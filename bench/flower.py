"""What Flower costs: seconds of a round in which nothing is computed, with four clients on this machine.

    python bench/flower.py [--rounds 6]

A message of 2 MB (a small network) and one of 40 MB, with and without TLS. `serialise` is packing tasks, and unpacking
and checking replies, at the server; `push` is handing the four messages to the SuperLink, one after another; `wait` is
the rest: the way to the clients, their unpacking and packing, the way back, and everybody's polling. `one reply` is how
long the server takes to fetch one from the SuperLink; the four are fetched at once. Medians over rounds, the first left
out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
HIDDEN = {2: 3_500, 40: 72_000}  # of the net `cnn`: megabytes of weights


class Meter(Watcher):
    """Seconds of every round by what they were spent on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.rounds: list[dict[str, float]] = []
        self.began = time.perf_counter()

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - began

        return run

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.began = time.perf_counter()

    def round(self, number: int, facts: dict[str, float]) -> None:
        now = time.perf_counter()
        self.rounds.append({"round": now - self.began, **self.spent})
        self.began, self.spent = now, {}

    def median(self, what: str) -> float:
        return statistics.median(r.get(what, 0.0) for r in self.rounds[1:])


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    pack, read = wire.Request.pack, crowd.read_response
    wire.Request.pack = meter.timed("serialise", pack)  # type: ignore[method-assign]
    crowd.read_response = meter.timed("serialise", read)
    try:
        yield
    finally:
        wire.Request.pack, crowd.read_response = pack, read  # type: ignore[method-assign]


def measure(megabytes: int, tls: bool, rounds: int, folder: Path) -> Meter:
    federation = Loopback(folder / "fl", NAMES, insecure=not tls)
    keys = server_folder(federation.keys) if tls else None
    link = SuperLink("127.0.0.1", federation.port, keys, folder / "link", print)
    changes = {"method.name": ECHO, "clients": 4, "participants": 4, "rounds": rounds, "checkpoint_every": rounds}
    changes |= {"evaluate_every": rounds, "net.name": "cnn", "net.hidden": HIDDEN[megabytes], "partition.samples": 60}
    meter = Meter()
    try:
        for name in NAMES:
            federation.join(name, "--trust", ECHO)
        link.start()
        names = link.register(node_keys(keys)) if keys else None
        with link.run() as grid, metered(meter):
            post = GridPost(grid, names)
            grid.push_messages = meter.timed("push", grid.push_messages)  # type: ignore[method-assign]
            grid.pull_messages = fetched(meter, grid.pull_messages)  # type: ignore[method-assign]
            serve(load("demo", changes), folder / "run", post, NAMES if names else (), watch=meter)
    finally:
        federation.close()
        link.close()
    return meter


def fetched(meter: Meter, pull: Callable[..., Any]) -> Callable[..., Any]:
    """Times the calls that bring a reply; looking for one that is not there is waiting."""

    def run(ids: Any) -> Any:
        began = time.perf_counter()
        found = list(pull(ids))
        if found:
            meter.spent["pull"] = meter.spent.get("pull", 0.0) + time.perf_counter() - began
        return found

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", type=int, choices=tuple(HIDDEN))
    options = parser.parse_args()
    print("| message | TLS | s/round | serialise | push | wait | one reply | MB/s pushed | MB/s, both ways |")
    print("|---|---|---|---|---|---|---|---|---|")
    for megabytes in HIDDEN:
        for tls in (True, False) if options.only in (None, megabytes) else ():
            with tempfile.TemporaryDirectory() as folder:
                meter = measure(megabytes, tls, options.rounds, Path(folder))
            whole, pack, push = (meter.median(what) for what in ("round", "serialise", "push"))
            seconds = [whole, pack, push, whole - pack - push, meter.median("pull") / 4]
            cells = [f"{megabytes} MB", "yes" if tls else "no", *(f"{s:.2f}" for s in seconds)]
            cells += [f"{4 * megabytes / push:.0f}", f"{8 * megabytes / whole:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
