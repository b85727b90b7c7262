"""Rows of the CIFAR-10 tables on one GPU, in resumable pieces: the runs behind docs/results.md.

    python bench/cifar.py devices --rows fedavg,perfedrlnas-mobilenetv3 --seed 0 --out DIR --minutes 9
    python bench/cifar.py devices --rows fedavg --tune --out DIR --minutes 9      # four learning rates, judged on val
    python bench/cifar.py --collect DIR ...                                       # into bench/results/cifar
    python bench/cifar.py --list                                                  # federations, rows, what is not run
    python bench/cifar.py silos --rehearse                                        # do all rows run? In small, on digits

A row trains in a run folder under --work, which is picked up again by the same command; what is finished is written to
DIR/results.jsonl. A run that the time cuts short also leaves DIR/NAME.part00, .part01, ... (14 MB each) where it is
small enough to travel; --parts FOLDER unpacks such files on another machine before going on. Data: --data-dir or the
variable FEDTAILOR_DATA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cifar_kept import accuracies, chosen, collect, lacking, pack, result, rows_in, tunings, unpack
from cifar_rows import FEDERATIONS, Ending, Row
from cifar_small import small

from fedtailor.config import Config, load
from fedtailor.data import partition as partitions
from fedtailor.data.federation import Store
from fedtailor.data.sources import load as load_data
from fedtailor.engine.loop import Event, Federation, State
from fedtailor.errors import Diverged
from fedtailor.evaluate import Kept, evaluate, keep_networks, offers_of
from fedtailor.method import Server
from fedtailor.runs.execute import LocalDriver, Report, Setup, Watcher, choose_device, drive, prepare
from fedtailor.runs.facts import facts_of, read_facts, write_facts
from fedtailor.values import write_bytes

TUNING_SEED = 100


class Late(KeyboardInterrupt):
    """The time is over: the run saves what it has, as at Ctrl-C."""


class Clock:
    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")

    def left(self) -> float:
        return self.end - time.monotonic()


class Piece(LocalDriver):
    """Runs rounds until the time is over, and at the end of the run the row's endings, one after the other."""

    def __init__(self, setup: Setup, federation: Federation, test: Store, row: Row, folder: Path, clock: Clock) -> None:
        super().__init__(federation, test)
        self.setup, self.row, self.folder, self.clock = setup, row, folder, clock
        self.judged = test if row.judged else None  # tuning never opens test

    def rounds(self, state: State, report: Report, due: Callable[[int], bool]) -> Iterator[State]:
        latest: deque[float] = deque(maxlen=10)  # seconds of rounds: not of the first ones, which capture steps
        began = time.monotonic()
        for found in super().rounds(state, report, due):
            yield found
            latest.append(time.monotonic() - began)
            began = time.monotonic()
            if self.clock.left() < 15 + max(latest):
                raise Late

    def finish(self, state: State) -> tuple[list[Event], list[Kept]]:
        took = 0.0
        for name, ending in self.row.endings.items():
            path = self.folder / "endings" / f"{name}.json"
            if path.exists():
                continue
            if self.clock.left() < 15 + 1.5 * took:
                raise Late
            began = time.monotonic()
            path.parent.mkdir(exist_ok=True)
            found = self.ending(ending, state, whole=name == next(iter(self.row.endings)))
            path.write_text(json.dumps(found))
            took = max(took, time.monotonic() - began)
            says = ", ".join(f"{k} {100 * np.mean(found[k]):.2f} %" for k in ("val", "test") if k in found)
            print(f"  {name}: {says}, {time.monotonic() - began:.0f} s", flush=True)
        return [], []

    def ending(self, ending: Ending, state: State, whole: bool) -> dict[str, Any]:
        """Accuracies of all clients after an ending, and, where `whole`, of the server's model. Keeps no networks."""
        config = load(tomllib.loads(self.setup.config.to_toml()), ending.changes)
        job = dataclasses.replace(self.federation.job, local=config.local)
        server = Server(job, state.round, **state.server.values)
        before = self.federation
        federation = Federation(job, config.make_method(), before.store, before.engine, before.fleet, before.rules)
        ended = State(server, state.memories, state.round)
        if whole and not ending.epochs:
            events = evaluate(federation, ended, self.judged)[0]
        else:
            offers = offers_of(federation, server, job.seats[: job.clients])
            more = (state.memories, self.judged, "personal", ending.epochs)
            events = keep_networks(federation, state.round, offers, *more)[0]
        return accuracies(events)


class Progress(Watcher):
    def __init__(self, name: str) -> None:
        self.name, self.before = name, time.monotonic()

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.rounds, self.every = rounds, max(1, rounds // 20)
        print(f"{self.name}: {done} of {rounds} rounds done", flush=True)

    def round(self, number: int, facts: dict[str, float]) -> None:
        if number % self.every == 0:
            now = time.monotonic()
            each, self.before = (now - self.before) / self.every, now
            says = " ".join(f"{k} {v:.4f}" for k, v in facts.items())
            print(f"  round {number}/{self.rounds}, {each:.2f} s each: {says}", flush=True)

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)


# one row -------------------------------------------------------------------------------------------------------------


def configure(args: argparse.Namespace, row: str, lr: float | None, rounds: int = 0, tuning: bool = False) -> Config:
    """The row's configuration: preset, row, command line; all seeds share the partition of the preset's seed."""
    federation, spec = FEDERATIONS[args.federation], FEDERATIONS[args.federation].rows[row]
    preset, changes = spec.preset or federation.preset, dict(spec.changes)
    changes |= {"data.dir": args.data_dir} if args.data_dir else {}
    if lr is not None:
        changes["local.lr"] = lr
    config = load(preset, changes)
    rounds = rounds or spec.changes.get("rounds") or args.rounds or config.rounds
    expected = spec.partition or federation.partition
    file = args.work / f"{expected[:16]}.npz"
    if not file.exists():
        made = deal(config, load(preset).seed, spec)
        if made.hash != expected:
            sys.exit(f"{args.federation}, {row}: the partition is {made.hash}, not {expected}")
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(file)
    precision = args.precision or (federation.precision if choose_device(args.device).type == "cuda" else "fp32")
    tops = {"seed": TUNING_SEED if tuning else args.seed, "rounds": rounds, "precision": precision}
    # while tuning, nobody looks before the end
    tops |= {"evaluate_every": rounds if tuning else max(1, rounds // 10), "checkpoint_every": max(1, rounds // 10)}
    return load(tomllib.loads(config.to_toml()), {**tops, "partition.file": str(file)})


def deal(config: Config, seed: int, spec: Row) -> partitions.Partition:
    """The row's partition, by its own rule or the configuration's."""
    data = load_data(config.data.name, Path(config.data.dir) if config.data.dir else None)
    return spec.deal(data, seed) if spec.deal else partitions.make(data, config.make_partition(), config.clients, seed)


def rate(args: argparse.Namespace, row: str) -> float | None:
    """The learning rate: of the command line, of tuning here, of committed tuning; None: the preset's."""
    if args.lr:
        return args.lr
    return chosen(args.federation, row, tunings(args.work))


def train(args: argparse.Namespace, row: str, clock: Clock) -> dict[str, Any] | None:
    """Runs a row or what is left of it; its result, or None where the time was too short.

    Once all rounds are done there is a result, which lacks the endings that are still to come.
    """
    lr = rate(args, row)
    if lr is None:
        print(f"{row}: its learning rate is not chosen yet. Run it with --tune first, or give --lr.", flush=True)
        return None
    config = configure(args, row, lr)
    name = f"{args.federation}-{row}-s{config.seed}-r{config.rounds}-lr{config.local.lr:g}-{config.precision}"
    folder = args.work / name
    if not folder.exists() and args.parts:
        unpack(args.parts, name, args.work)
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text())
    try:
        go(config, folder, FEDERATIONS[args.federation].rows[row], clock, args, Progress(name))
    except Late:
        pack(folder, args.out)
        print(f"{name}: the time is over; the same command goes on", flush=True)
        return sofar(args, row, folder) if any((folder / "endings").glob("*.json")) else None
    found = sofar(args, row, folder)
    (folder / "result.json").write_text(json.dumps(found))
    return found


def sofar(args: argparse.Namespace, row: str, folder: Path) -> dict[str, Any]:
    return result(args.federation, row, folder) | {"beside": args.beside}


def go(config: Config, folder: Path, row: Row, clock: Clock, args: argparse.Namespace, watch: Watcher) -> None:
    """Starts or resumes a run in its folder."""
    device = choose_device(args.device)
    there = (folder / "run.json").exists()
    if there:
        setup = prepare(load(folder / "config.toml", {"data.dir": args.data_dir}), folder / "partition.npz")
    else:
        setup = prepare(config)
        write_bytes(folder / "config.toml", config.to_toml().encode())
        setup.partition.save(folder / "partition.npz")
        write_facts(folder, facts_of(setup, device, " ".join(sys.argv)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    driver = Piece(setup, *setup.federation(device, args.workers, args.engine, watch.say), row, folder, clock)
    try:
        drive(driver, setup.config, setup.job, folder, device, watch)
    finally:
        peak = folder / "peak.json"
        before = json.loads(peak.read_text()) if peak.exists() else 0.0
        now = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        peak.write_text(json.dumps(max(before, round(now, 3))))
        del driver
        if device.type == "cuda":
            torch.cuda.empty_cache()


# tuning --------------------------------------------------------------------------------------------------------------


def tune(args: argparse.Namespace, row: str, clock: Clock) -> None:
    """The row's learning rates at a tenth of its rounds, with the tuning seed; val accuracy as it is decides."""
    spec = FEDERATIONS[args.federation].rows[row]
    whole = configure(args, row, None).rounds
    first = next(iter(spec.endings.items()))
    if args.lr and args.lr not in spec.rates:
        sys.exit(f"{args.federation}, {row}: --tune tries {', '.join(map(str, spec.rates))}, not {args.lr:g}")
    for lr in [args.lr] if args.lr else spec.rates:
        config = configure(args, row, lr, max(2, whole // 10), tuning=True)
        name = f"tune-{args.federation}-{row}-lr{lr:g}-r{config.rounds}-{config.precision}"
        folder = args.work / name
        if any((t["federation"], t["row"], t["lr"]) == (args.federation, row, lr) for t in tunings(args.work)):
            continue
        if clock.left() < 20:
            raise Late
        spec = dataclasses.replace(spec, endings=dict([first]), judged=False)
        began = time.monotonic()
        try:
            go(config, folder, spec, clock, args, Progress(name))
            ended = json.loads((folder / "endings" / f"{first[0]}.json").read_text())
        except Diverged as error:
            print(f"  {error}", flush=True)
            ended = {"val": [0.0]}  # too large a rate is the worst of all
        facts = read_facts(folder)
        seconds = float(facts["seconds"]) or time.monotonic() - began  # a run that ends so has not written its own
        found = {"federation": args.federation, "row": row, "lr": lr, "rounds": config.rounds, "ending": first[0]}
        found |= {"val": round(float(np.mean(ended["val"])), 5), "gpu_seconds": round(seconds, 1)}
        found |= {"precision": config.precision, "seed": config.seed, "rounds_of_row": whole, "device": facts["device"]}
        found |= {"beside": args.beside}
        (folder / "tune.json").write_text(json.dumps(found))
    print(f"{row}: lr {chosen(args.federation, row, tunings(args.work))}", flush=True)


def rehearse(args: argparse.Namespace, rows: Sequence[str]) -> None:
    """Tunes and runs rows in small, with all their endings; exits with an error that names those that cannot."""
    if args.federation == "authors":
        sys.exit("authors: the deals of its rows are of CIFAR-10's own images; the others can be rehearsed.")
    name = f"{args.federation}-in-small"
    FEDERATIONS[name] = small(args.federation)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        own = argparse.Namespace(**{**vars(args), "federation": name, "data_dir": "", "rounds": 0, "lr": 0.0})
        own.work, own.out = Path(folder), Path(folder)
        for row in rows:
            try:
                tune(own, row, Clock(0))
                found = train(own, row, Clock(0))
            except Exception:  # whatever it is, the other rows are tried too
                traceback.print_exc()
                found = None
            if found is None or found["endings"].keys() != FEDERATIONS[name].rows[row].endings.keys():
                failed.append(row)
    del FEDERATIONS[name]
    if failed:
        sys.exit(f"{args.federation}: these rows cannot be run: {', '.join(failed)}")
    print(f"{args.federation}: {len(rows)} rows ran in small, with their tuning and endings", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("federation", nargs="?", choices=list(FEDERATIONS))
    parser.add_argument("--rows", default="", help="separated by commas; default: all of the federation's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="instead of the preset's; not for rows with their own")
    parser.add_argument("--lr", type=float, default=0.0, help="instead of the tuned one; with --tune: the one to try")
    parser.add_argument("--tune", action="store_true", help="try the rows' learning rates instead of running them")
    parser.add_argument("--tune-first", action="store_true", help="try those of rows for which none is chosen yet")
    parser.add_argument("--rehearse", action="store_true", help="run the rows in small, to see that nothing stops them")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop cleanly before so many; 0: no limit")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="instead of the federation's")
    parser.add_argument("--beside", type=int, default=1, help="runs that share the card, as the results will say")
    parser.add_argument("--engine", choices=("auto", "eager"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=0, help="threads on a CPU")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--work", type=Path, default=Path("runs/cifar"), help="run folders")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-out"), help="results, and parts that travel")
    parser.add_argument("--parts", type=Path, help="folder with parts of runs from another machine")
    parser.add_argument("--collect", type=Path, nargs="+", help="folders with results.jsonl")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect)
        return
    if args.list or not args.federation:
        for name, federation in FEDERATIONS.items():
            print(f"{name}: {', '.join(federation.rows)}")
            for row, seeds in lacking(name).items():
                print(f"  {row}: not run yet with seed {', '.join(map(str, seeds))}")
        return
    known = FEDERATIONS[args.federation].rows
    wanted = [row.strip() for row in args.rows.split(",")] if args.rows else list(known)
    if unknown := [row for row in wanted if row not in known]:
        sys.exit(f"no such row in {args.federation}: {', '.join(unknown)}. There are: {', '.join(known)}")
    if args.rehearse:
        rehearse(args, wanted)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.minutes)
    done: list[dict[str, Any]] = []
    try:
        for row in wanted:
            if args.tune or (args.tune_first and rate(args, row) is None):
                tune(args, row, clock)
            if args.tune:
                continue
            if found := train(args, row, clock):
                done.append(found)
            else:
                break
    except Late:
        print("the time is over; the same command goes on", flush=True)
    finally:
        lines = tunings(args.work) + rows_in(args.out, without=done) + done
        (args.out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
