"""Several rows of the CIFAR-10 tables side by side on one GPU, each in a process of its own.

    python bench/cifar_beside.py silos budgets --lanes 3 --minutes 9 --out DIR
    python bench/cifar_beside.py devices:fedrep,fedbabu devices:fedavg:--seed=1 authors:pfedhn --minutes 9 --out DIR
    python bench/cifar_beside.py budgets:fedcs+budgets:fedcs:--seed=1 --minutes 9 --out DIR

A word is a queue: a federation, its rows, one after the other, and options of bench/cifar.py for these alone; several
such can follow each other, joined by +. A federation without rows means all that its table lacks, first seeds first.
Queues run beside each other; with --lanes they are one, in the order of the words, from which so many processes take
what is next. A row whose learning rate is not chosen yet is tuned first, with --lanes its rates beside each other. A
row that fails does not stop the others. The same command goes on where the last one was cut short; what is finished is
collected with

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from cifar_kept import chosen, lacking, tunings
from cifar_rows import FEDERATIONS

SCRIPT = Path(__file__).parent / "cifar.py"
TRIES = 4  # of a process that fails
SHORTEST = 40.0  # seconds that are worth another process
SHARED = 0.9  # of the card's memory; the rest is for what a process has beside its tensors


@contextlib.contextmanager
def shared_card(many: int) -> Iterator[dict[str, str]]:
    """The environment of so many processes that share the card; one alone needs no MPS."""
    daemon = shutil.which("nvidia-cuda-mps-control") if many > 1 else None
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
    lr: float = 0.0  # that is tried; 0: the row is run

    @property
    def what(self) -> str:
        return f"{self.federation}, {self.row}" + (f", tuning {self.lr:g}" if self.lr else "")


def jobs(word: str) -> list[Job]:
    """What a queue is made of."""
    found = []
    for group in word.split("+"):
        federation, rows, options = (*group.split(":", 2), "", "")[:3]
        if federation not in FEDERATIONS:
            sys.exit(f"'{federation}' is no federation: there are {', '.join(FEDERATIONS)}")
        more = [o for o in options.split(",") if o]
        if rows:
            found += [Job(federation, row, more) for row in rows.split(",")]
        else:
            left = [(seed, row) for row, seeds in lacking(federation).items() for seed in seeds]
            left.sort(key=lambda one: one[0])  # a first seed of every row before a second of any
            found += [Job(federation, row, [f"--seed={seed}", *more]) for seed, row in left]
    return found


def with_tuning(jobs: Sequence[Job], work: Path) -> list[Job]:
    """The jobs, and before the first of every row that has no learning rate yet those that are to be tried."""
    found, tried = list[Job](), tunings(work)
    for job in jobs:
        federation, row, options, _ = job
        known = chosen(federation, row, tried) is not None or any(o.startswith("--lr") for o in options)
        if not known and not any(other[:2] == job[:2] for other in found):
            done = {t["lr"] for t in tried if (t["federation"], t["row"]) == job[:2]}
            own = [o for o in options if not o.startswith("--seed")]
            rates = FEDERATIONS[federation].rows[row].rates
            found += [Job(federation, row, own, lr) for lr in rates if lr not in done]
        found.append(job)
    return found


class Queue:
    """Rows that run until the time is over, in one lane or in several that take what is next."""

    def __init__(self, jobs: Sequence[Job], end: float, more: Sequence[str]) -> None:
        self.jobs, self.end, self.more = list(jobs), end, list(more)
        self._running: list[Job] = []
        self._changed = Condition()

    def run(self, out: Path, environment: Mapping[str, str]) -> bool:
        """One lane, until there is nothing that it could take. Whether all its processes ended well."""
        out.mkdir(parents=True, exist_ok=True)
        fine = True
        while job := self._next():
            try:
                fine = self._ends_well(job, out, environment) and fine
            finally:  # else lanes that wait for it would wait for ever
                with self._changed:
                    self._running.remove(job)
                    self._changed.notify_all()
        return fine

    def _next(self) -> Job | None:
        """The first job whose row is not being tuned; waits for one."""
        with self._changed:
            while self.jobs:
                tuning = {job[:2] for job in (*self._running, *self.jobs) if job.lr}
                if job := next((job for job in self.jobs if job.lr or job[:2] not in tuning), None):
                    self.jobs.remove(job)
                    self._running.append(job)
                    return job
                self._changed.wait()
            return None

    def _ends_well(self, job: Job, out: Path, environment: Mapping[str, str]) -> bool:
        for attempt in range(TRIES):
            left = self.end - time.monotonic()
            if left < SHORTEST:
                return True  # the next command goes on
            how = ["--tune", f"--lr={job.lr}"] if job.lr else ["--tune-first"]
            command = [sys.executable, str(SCRIPT), job.federation, "--rows", job.row, *how]
            command += ["--out", str(out), "--minutes", f"{left / 60:.3f}", *self.more, *job.options]
            with (out / "log.txt").open("a") as log:
                code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
            if code == 0:
                return True
            print(f"{job.what}: ended with {code}, try {attempt + 1} of {TRIES}; see {log.name}", flush=True)
            time.sleep(3.0)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queues", nargs="+", metavar="FEDERATION[:ROW,ROW[:OPTIONS]]")
    parser.add_argument("--lanes", type=int, default=0, help="so many processes take from one queue of all the words")
    parser.add_argument("--minutes", type=float, required=True, help="stop cleanly before so many")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-out"), help="a folder of results for every lane")
    parser.add_argument("--work", type=Path, default=Path("runs/cifar"), help="run folders")
    args, more = parser.parse_known_args()
    end = time.monotonic() + 60 * args.minutes
    many = args.lanes or len(args.queues)
    more += [f"--work={args.work}", f"--beside={many}"]
    if args.lanes:
        queue = Queue(with_tuning([job for word in args.queues for job in jobs(word)], args.work), end, more)
        lanes = [(f"lane-{i}", queue) for i in range(many)]
    else:
        lanes = [(re.sub(r"[^\w.]+", "-", word), Queue(jobs(word), end, more)) for word in args.queues]
    with shared_card(many) as environment, ThreadPoolExecutor(many) as pool:
        environment["FEDTAILOR_GPU_SHARE"] = f"{SHARED / many if many > 1 else 1:.3f}"
        running = []
        for i, (name, queue) in enumerate(lanes):
            way = environment | {"CUDA_MPS_CLIENT_PRIORITY": str(min(i, 1))}
            running.append(pool.submit(queue.run, args.out / name, way))
            time.sleep(1.0)  # processes that begin at the same moment are refused more often
        fine = [each.result() for each in running]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
