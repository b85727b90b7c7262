"""Every method on one small federation, tuned alike: the runs behind docs/results-zoo.md.

    python bench/zoo.py --out DIR --jobs 16 [--only fedavg,ditto] [--minutes 9]
    python bench/zoo.py --collect DIR           # into bench/results/zoo/runs.jsonl
    make results                                # writes the page

A row is a method with what it needs on top of the preset `zoo`. Every row has the same tuning budget, eight runs with
a seed of their own, judged by personal accuracy on val: four learning rates for two values of the method's decisive
option, or eight learning rates where it has none. The best values are then run with three other seeds, on the same
partition, and reported on test at the last round. A run is a process on one core and becomes a line of DIR/runs.jsonl,
so that work goes on where it was; runs that are collected already are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fedtailor import __version__
from fedtailor.config import PRESETS, load
from fedtailor.data import partition as partitions
from fedtailor.data.sources import load as load_data
from fedtailor.registry import lookup, names
from fedtailor.runs.execute import start
from fedtailor.runs.results import Results, spread

RESULTS = Path(__file__).parent / "results" / "zoo" / "runs.jsonl"
SEEDS, TUNING_SEED = (0, 1, 2), 100
RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5)  # of a row without an option of its own
FEW_RATES = (0.01, 0.04, 0.15, 0.5)
BUDGETS = {"fleet.name": "capacity-high"}  # half of the clients afford any network, the others two thirds or a third
DARTS = {"space.name": "darts"}
APART = {"method.merge_val": False}  # who trains on val in the end cannot be judged by it


@dataclass(frozen=True)
class Row:
    """A line of the table: changes to the preset, and the option that is tuned beside the learning rate."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    option: str = ""
    values: tuple[Any, ...] = ()

    def trials(self) -> list[dict[str, Any]]:
        """The values to try, eight sets for every row."""
        if not self.option:
            return [{"local.lr": lr} for lr in RATES]
        return [{"local.lr": lr, self.option: value} for value in self.values for lr in FEW_RATES]


BY_METHOD: dict[str, Row] = {
    "apfl": Row(option="method.alpha", values=(0.5, 0.75)),
    "direct-fednas": Row(DARTS, "method.alpha_lr", (1e-3, 1e-2)),
    "ditto": Row(option="method.lamda", values=(0.1, 1.0)),
    "fedavg-ft": Row(option="method.interpolate", values=(0.0, 0.5)),
    "fedavg-uniform": Row({"method.width": 0.25, **BUDGETS}, "method.final_epochs", (0.0, 10.0)),
    "fedbabu": Row(option="method.part", values=("all", "head")),
    "fedcs": Row(BUDGETS, "method.final_epochs", (0.0, 10.0)),
    "feddyn": Row(option="method.alpha", values=(0.01, 0.1)),
    "fedmn": Row(option="method.routing_lr", values=(0.1, 1.0)),
    "fednas": Row(DARTS, "method.alpha_lr", (3e-4, 3e-3)),
    "fednas-personal": Row(DARTS, "method.alpha_lr", (3e-4, 3e-3)),
    "fedopt": Row(option="method.server_lr", values=(0.01, 0.03)),
    "fedoras": Row(option="method.tune_lr", values=(0.0, 0.005)),  # its tiers are its budgets
    "fedpa": Row(BUDGETS, "method.final_epochs", (0.0, 10.0)),
    "fedper": Row(option="method.final_epochs", values=(0.0, 10.0)),
    "fedprox": Row(option="method.mu", values=(0.01, 0.1)),
    "fedrep": Row(option="method.head_epochs", values=(2.0, 3.0)),
    "fedrlnas": Row(option="method.policy_lr", values=(0.1, 0.5)),
    "fedrolex": Row(BUDGETS, "method.final_epochs", (0.0, 10.0)),
    "fedtp": Row(option="method.lr", values=(0.01, 0.1)),
    "feduniform": Row(BUDGETS, "method.final_epochs", (0.0, 10.0)),
    "fml": Row(option="method.alpha", values=(0.5, 0.8)),
    "global-perturbation": Row({**DARTS, **APART}),
    "heterofl": Row(BUDGETS, "method.final_epochs", (0.0, 10.0)),
    "knn-per": Row(option="method.neighbours", values=(5, 10)),
    "l2gd": Row(option="method.lamda", values=(0.02, 0.2)),
    "largest-fit": Row(BUDGETS, "method.deploy", ("trained", "as-is")),
    "per-fedavg": Row(option="method.alpha", values=(0.01, 0.1)),
    "perfedckt": Row({"public.name": "rest", "public.images": 300}, "method.lamda", (0.01, 0.1)),
    "perfedrlnas": Row(BUDGETS, "method.policy_lr", (0.1, 0.5)),
    "pfedhn": Row(option="method.lr", values=(0.01, 0.1)),
    "pfedme": Row(option="method.lamda", values=(1.0, 15.0)),
    "random-arch": Row(BUDGETS, "method.deploy", ("trained", "as-is")),
    "sfl": Row(option="method.lamda", values=(0.03, 0.3)),
    "spider": Row({**DARTS, **APART}, "method.lamda", (0.01, 0.2)),
}
PRIOR = {"local.prior": True}
VARIANTS: dict[str, Row] = {  # rows that are no method of their own, but a method with something
    "fedavg + prior": Row({"method.name": "fedavg", **PRIOR}, "local.prior_tau", (0.5, 1.0)),
    "fedavg-ft + prior": Row({"method.name": "fedavg-ft", **PRIOR}, "method.interpolate", (0.0, 0.5)),
    "fedavg-ft on tiny": Row(
        {"method.name": "fedavg-ft", "archs": "widest", "space.name": "tiny", **BUDGETS},
        "method.interpolate",
        (0.0, 0.5),
    ),
    "fedavg-ft with norm": Row(  # of FedBN's network
        {"method.name": "fedavg-ft", "net.name": "cnn", "net.norm": "batch"}, "method.interpolate", (0.0, 0.5)
    ),
    "fedavg-ft on modular": Row(  # FedMN's network
        {"method.name": "fedavg-ft", "net.name": "modular"}, "method.interpolate", (0.0, 0.5)
    ),
    "fedavg-ft on vit": Row({"method.name": "fedavg-ft", "net.name": "vit"}, "method.interpolate", (0.0, 0.5)),
    "vit-swap": Row({"method.name": "fedavg", "net.name": "vit"}),
}


def rows() -> dict[str, Row]:
    """Every registered method of the package, and the variants; those that take longest come last."""
    shipped = [name for name in names("method") if lookup("method", name).__module__.startswith("fedtailor.")]
    methods = {name: BY_METHOD.get(name, Row()) for name in shipped}
    found = {n: Row({"method.name": n, **r.changes}, r.option, r.values) for n, r in methods.items()} | VARIANTS
    return dict(sorted(found.items(), key=lambda item: (item[1].changes.get("space.name") == "darts", item[0])))


@dataclass(frozen=True)
class Trial:
    """One run: a row with values and a seed."""

    row: str
    stage: str  # "tune" or "final"
    seed: int
    changes: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Names the run. It changes with everything that decides its numbers, save the code."""
        preset = tomllib.loads((PRESETS / "zoo.toml").read_text(encoding="utf-8"))
        text = json.dumps([preset, self.row, self.stage, self.seed, dict(self.changes)], sort_keys=True)
        name = self.row.replace(" ", "")
        return f"{name}-{self.stage}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def partition_file(folder: Path) -> Path:
    """The one partition of all runs: that of the preset with seed 0."""
    path = folder / "partition.npz"
    if not path.exists():
        config = load("zoo")
        made = partitions.make(load_data(config.data.name), config.make_partition(), config.clients, config.seed)
        made.save(path)
    return path


def execute(trial: Trial, partition: str) -> dict[str, Any]:
    """Runs a trial; an error is a result too."""
    began = time.perf_counter()
    found: dict[str, Any] = {"key": trial.key, "row": trial.row, "stage": trial.stage, "seed": trial.seed}
    found |= {"changes": dict(trial.changes), "fedtailor": __version__, "cores": os.cpu_count()}
    try:
        config = load("zoo", {**trial.changes, "seed": trial.seed})
        config = load(tomllib.loads(config.to_toml()), {"partition.file": partition})
        with tempfile.TemporaryDirectory() as folder:
            found |= measured(Results.read(start(config, Path(folder) / "run", "cpu", workers=1)), trial.stage)
    except Exception as error:  # a method that fails is reported, the others go on
        found["error"] = f"{type(error).__name__}: {error}"[:500]
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def measured(results: Results, stage: str) -> dict[str, Any]:
    """The numbers of a run that the table needs. Test numbers are read in final runs alone."""
    summary, at = results.summary(), results.rounds_done
    exchanges = at * int(results.config["participants"])
    val, curve = results.per_client("personal_accuracy", "val", at), results.series("personal_accuracy", "val")
    found: dict[str, Any] = {
        "val": rounded(spread(list(val.values()))),
        "curve": [[int(r), round(float(m), 4)] for r, m in zip(curve.rounds, curve.mean, strict=True)],
        "rounds": at,
        "network": (results.config.get("space") or results.config["net"])["name"],
        "bytes": round((summary["bytes_up"] + summary["bytes_down"]) / exchanges),
        "partition_hash": summary["partition_hash"],
        "torch": results.facts["torch"],
        "python": results.facts["python"],
    }
    if stage == "final":
        test = results.per_client("personal_accuracy", "test", at)
        found["test"] = [round(float(v), 4) for _, v in sorted(test.items())]
        shared = results.per_client("global_accuracy", "test", at)
        if shared:
            found["global"] = rounded(spread(list(shared.values())))
    return found


def rounded(value: Any) -> dict[str, float] | None:
    return None if value is None else {k: round(float(v), 5) for k, v in value._asdict().items()}


def best(tried: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The values with the highest mean accuracy on val; of equals the smaller learning rate. None if all failed."""
    whole = [r for r in tried if r.get("val")]
    if not whole:
        return None
    return dict(min(whole, key=lambda r: (-r["val"]["mean"], r["changes"]["local.lr"]))["changes"])


def known(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Results by key: the committed ones, and those in some folders."""
    files = [path for path in (RESULTS, *(folder / "runs.jsonl" for folder in folders)) if path.exists()]
    found = [json.loads(line) for path in files for line in path.read_text().splitlines() if line.endswith("}")]
    return {r["key"]: r for r in found}


def waiting(row: str, done: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
    """What is left to run of a row now: its tuning, and when that is whole, its final runs."""
    spec = rows()[row]
    tuning = [Trial(row, "tune", TUNING_SEED, {**spec.changes, **values}) for values in spec.trials()]
    left = [t for t in tuning if t.key not in done]
    if left:
        return left
    chosen = best([done[t.key] for t in tuning])
    finals = [Trial(row, "final", seed, chosen) for seed in SEEDS] if chosen else []
    return [t for t in finals if t.key not in done]


def run(out: Path, wanted: Sequence[str], jobs: int, minutes: float) -> None:
    """Runs what is missing with so many processes, until all is there or the time is over."""
    out.mkdir(parents=True, exist_ok=True)
    partition, done = str(partition_file(out)), known([out])
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    finished: queue.Queue[dict[str, Any]] = queue.Queue()
    flying: set[str] = set()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:  # leaving it ends what still runs

        def launch(row: str) -> None:
            for trial in waiting(row, done):
                if trial.key not in flying:
                    flying.add(trial.key)
                    pool.apply_async(execute, (trial, partition), callback=finished.put, error_callback=print)

        for row in wanted:
            launch(row)
        while flying and time.monotonic() < deadline:
            try:
                result = finished.get(timeout=1.0)
            except queue.Empty:
                continue
            with (out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            done[result["key"]] = result
            flying.discard(result["key"])
            launch(result["row"])
            says = result.get("error") or f"val {100 * result['val']['mean']:.1f} %"
            print(f"{len(flying):4d} left  {result['key']}: {says}, {result['seconds']:.0f} s", flush=True)
        pool.terminate()
    left = {row: len(waiting(row, done)) for row in wanted}
    open_rows = [row for row, n in left.items() if n]
    print("all done" if not open_rows else f"not done: {', '.join(open_rows)}; run the same command again", flush=True)


def collect(folders: Sequence[Path]) -> None:
    """Writes one file with the results that belong to today's rows."""
    found, keep = known(folders), []
    for row, spec in rows().items():
        tuning = [Trial(row, "tune", TUNING_SEED, {**spec.changes, **values}) for values in spec.trials()]
        keep += [found[t.key] for t in tuning if t.key in found]
        chosen = best([found[t.key] for t in tuning if t.key in found])
        if chosen and all(t.key in found for t in tuning):
            finals = [Trial(row, "final", seed, chosen) for seed in SEEDS]
            keep += [found[t.key] for t in finals if t.key in found]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(r, separators=(",", ":"), sort_keys=True) + "\n" for r in keep))
    print(f"{len(keep)} runs in {RESULTS}, {RESULTS.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results of this machine")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, each on one core")
    parser.add_argument("--only", default="", help="rows, separated by commas")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many; 0: when all is done")
    parser.add_argument("--collect", type=Path, nargs="+", help="folders whose results are put into bench/results")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect)
        return
    if not args.out:
        parser.error("name a folder with --out, or use --collect")
    wanted = [w.strip() for w in args.only.split(",")] if args.only else list(rows())
    unknown = [w for w in wanted if w not in rows()]
    if unknown:
        sys.exit(f"no such row: {', '.join(unknown)}. There are: {', '.join(rows())}")
    run(args.out, wanted, args.jobs, args.minutes)


if __name__ == "__main__":
    main()
