"""Does a system do better than the same federation without its idea? Every small preset against its control.

    python examples/systems_vs_controls.py                      # all pairs, seeds 0, 1 and 2
    python examples/systems_vs_controls.py perfedrlnas-small --seeds 0 1 2 3 4

A seed fixes the partition, the devices, the participants and the first weights, so a pair of runs differs in nothing
else. Numbers are personal test accuracy, mean over clients; ± is the std over seeds. Finished runs are read, not run
again.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.api import resume, run
from fedtailor.config import preset_names


@dataclass(frozen=True)
class Pair:
    """A preset, and the changes that take its idea away."""

    preset: str
    control: str  # what the control is called in the table
    changes: dict[str, Any] = field(default_factory=dict)  # as for `fedtailor.run`


PAIRS = (
    # the search against archs drawn once and kept: same supernet, same averaging, same budgets
    Pair("perfedrlnas-small", "random-arch", {"method": "random-arch"}),
    # the searched cell, trained for what the search leaves of the rounds, against a plain network trained for all
    Pair("fednas-small", "fedavg", {"method": "fedavg"}),
    # personal networks that share weights with a global one against clients that search and train alone
    Pair("spider-small", "lambda-0", {"method__lamda": 0.0}),
    # networks that clients prune themselves against uniformly narrow ones: same budgets, same aggregation
    Pair("fedcs-small", "feduniform", {"method": "feduniform"}),
)


def accuracy(preset: str, name: str, seed: int, folder: Path, **changes: Any) -> float:
    """Personal test accuracy of one run, mean over clients."""
    out = folder / f"{preset}-{name}-{seed}"
    if not out.exists():
        run(preset, out=out, device="cpu", seed=seed, **changes)
    values = resume(out, device="cpu").results.per_client("personal_accuracy", "test").values()
    return statistics.fmean(values)


def say(name: str, values: list[float]) -> None:
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    each = ", ".join(f"{100 * v:.2f}" for v in values)
    print(f"  {name:24} {100 * statistics.fmean(values):6.2f}{spread} %   ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="only these presets")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/systems_vs_controls"))
    args = parser.parse_args()
    known = {pair.preset for pair in PAIRS}
    for preset in args.presets:
        if preset not in known:
            parser.error(f"no pair for '{preset}'; there is {', '.join(sorted(known))}")
    for pair in PAIRS:
        if pair.preset not in (args.presets or preset_names()):
            continue
        print(f"{pair.preset} against {pair.control}, seeds {args.seeds}", flush=True)
        system = [accuracy(pair.preset, "system", seed, args.out) for seed in args.seeds]
        say("system", system)
        control = [accuracy(pair.preset, pair.control, seed, args.out, **pair.changes) for seed in args.seeds]
        say(pair.control, control)
        say("difference", [a - b for a, b in zip(system, control, strict=True)])


if __name__ == "__main__":
    main()
