"""Is a personal network better than the shared one? Ten clients with three digits each, three seeds.

    python examples/personal_vs_global.py [--seeds 0 1 2]

Prints, for every method, the accuracy of FedAvg's shared model on the clients' test images and of the networks that the
clients keep; mean over clients, then mean ± std over seeds. Finished runs are read, not run again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import fedtailor as ft

METHODS = ("local", "fedavg", "fedavg-ft", "ditto", "fedrep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/personal_vs_global"))
    args = parser.parse_args()
    for method in METHODS:
        found: dict[str, list[float]] = {"global": [], "personal": []}
        for seed in args.seeds:
            folder = args.out / f"{method}-{seed}"
            run = ft.resume(folder) if folder.exists() else ft.run("demo", out=folder, method=method, seed=seed)
            summary = run.results.summary()
            for kind, values in found.items():
                if summary[kind]:
                    values.append(100 * summary[kind]["mean"])
        print(f"{method:12}", *(f"{kind} {_spread(values)}" for kind, values in found.items()), flush=True)


def _spread(values: list[float]) -> str:
    if not values:
        return "   –          "
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):6.2f}{spread}"


if __name__ == "__main__":
    main()
