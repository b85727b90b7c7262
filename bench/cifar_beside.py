"""Several rows of the CIFAR-10 tables side by side on one GPU, each in a process of its own.

    python bench/cifar_beside.py devices:fedrep,fedbabu devices:fedavg:--seed=1 authors:pfedhn --minutes 9 --out DIR
    python bench/cifar_beside.py budgets:fedcs+budgets:fedcs:--seed=1 --minutes 9 --out DIR

A word is a queue: a federation, its rows, one after the other, and options of bench/cifar.py for these alone; several
such can follow each other, joined by +. A row whose learning rate is not chosen yet is tuned first. The same command
goes on where the last one was cut short; what is finished is collected with

    python bench/cifar.py --collect DIR/*

One run leaves about a quarter of a card idle while Python prepares; three or four fill it. They share it through
NVIDIA's MPS where that is installed, and each plans with its part of the memory. The first queue has the right of way:
name the longest first. A process that is refused memory all the same is started again. Options that are not named below
go to bench/cifar.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parent / "cifar.py"
TRIES = 4  # of a process that fails
SHORTEST = 40.0  # seconds that are worth another process


@contextlib.contextmanager
def shared_card() -> Iterator[dict[str, str]]:
    """The environment of processes that share the card."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if daemon is None:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        environment = {**os.environ, **places}
        subprocess.run([daemon, "-d"], env=environment, check=True)
        try:
            yield environment
        finally:
            subprocess.run([daemon], input="quit\n", text=True, env=environment, check=False)


class Job(NamedTuple):
    """One row, with options for bench/cifar.py."""

    federation: str
    row: str
    options: list[str]


def jobs(word: str) -> list[Job]:
    """What a queue is made of."""
    found = []
    for group in word.split("+"):
        federation, rows, options = (*group.split(":", 2), "", "")[:3]
        if not rows:
            sys.exit(
                f"'{group}' names no rows: write FEDERATION:ROW,ROW or FEDERATION:ROW:--option=value,--option=value"
            )
        found += [Job(federation, row, [o for o in options.split(",") if o]) for row in rows.split(",")]
    return found


class Queue:
    """Rows that run one after the other until the time is over."""

    def __init__(self, word: str, out: Path, end: float, more: Sequence[str], environment: dict[str, str]) -> None:
        self.jobs, self.more = jobs(word), list(more)
        self.out, self.end, self.environment = out / re.sub(r"[^\w.]+", "-", word), end, environment

    def run(self) -> bool:
        """Whether all rows' processes ended well."""
        return all(map(self._ends_well, self.jobs))

    def _ends_well(self, job: Job) -> bool:
        self.out.mkdir(parents=True, exist_ok=True)
        for attempt in range(TRIES):
            left = self.end - time.monotonic()
            if left < SHORTEST:
                return True  # the next command goes on
            command = [sys.executable, str(SCRIPT), job.federation, "--rows", job.row, "--tune-first"]
            command += ["--out", str(self.out), "--minutes", f"{left / 60:.3f}", *self.more, *job.options]
            with (self.out / "log.txt").open("a") as log:
                code = subprocess.run(command, stdout=log, stderr=log, env=self.environment, check=False).returncode
            if code == 0:
                return True
            print(
                f"{job.federation}, {job.row}: ended with {code}, try {attempt + 1} of {TRIES}; see {log.name}",
                flush=True,
            )
            time.sleep(3.0)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queues", nargs="+", metavar="FEDERATION:ROW,ROW[:OPTIONS]")
    parser.add_argument("--minutes", type=float, required=True, help="stop cleanly before so many")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-out"), help="a folder of results for every queue")
    args, more = parser.parse_known_args()
    end = time.monotonic() + 60 * args.minutes
    with shared_card() as environment, ThreadPoolExecutor(len(args.queues)) as pool:
        more += [f"--beside={len(args.queues)}"]
        environment["FEDTAILOR_GPU_SHARE"] = f"{1 / len(args.queues):.3f}"
        ways = [environment | {"CUDA_MPS_CLIENT_PRIORITY": str(min(i, 1))} for i in range(len(args.queues))]
        queues = [Queue(word, args.out, end, more, way) for word, way in zip(args.queues, ways, strict=True)]
        running = []
        for queue in queues:
            running.append(pool.submit(queue.run))
            time.sleep(1.0)  # processes that begin at the same moment are refused more often
        fine = [each.result() for each in running]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
