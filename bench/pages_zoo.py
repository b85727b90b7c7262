"""docs/results-zoo.md from bench/results/zoo."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zoo
from zoo import FEW_RATES, RATES, SEEDS, TUNING_SEED, Row, known, rows

from fedtailor.config import load
from fedtailor.runs.results import spread

BASELINE = "fedavg-ft"
SURE = 1.0  # points; a smaller difference may be chance
STRONG = ("fedavg", "fedavg-ft", "fedavg + prior", "fedavg-ft + prior", "local")


@dataclass(frozen=True)
class Line:
    """A row of the table with what its runs gave."""

    name: str
    row: Row
    tuning: Sequence[Mapping[str, Any]]
    finals: Sequence[Mapping[str, Any]]

    @property
    def whole(self) -> bool:
        return len(self.finals) == len(SEEDS) and not any("error" in r for r in self.finals)

    def over_seeds(self, value: str) -> np.ndarray:
        """`mean` or `worst_decile` over clients, of every seed."""
        return 100 * np.array([getattr(spread(r["test"]), value) for r in self.finals])

    @property
    def personal(self) -> float:
        return float(self.over_seeds("mean").mean())


def page() -> str:
    runs = known([])
    lines = [line(name, row, runs.values()) for name, row in rows().items()]
    whole = sorted((x for x in lines if x.whole), key=lambda x: (-x.personal, x.name))
    missing = sorted((x for x in lines if not x.whole), key=lambda x: x.name)
    parts = [HEAD.format(**settings(lines)), table(whole, missing), after(whole, missing)]
    return "\n".join(parts)


def line(name: str, row: Row, runs: Iterable[Mapping[str, Any]]) -> Line:
    found = [r for r in runs if r["row"] == name]
    finals = sorted((r for r in found if r["stage"] == "final"), key=lambda r: r["seed"])
    return Line(name, row, [r for r in found if r["stage"] == "tune"], finals)


HEAD = """# Every method on one small federation

<!-- written by `make results` from bench/results/zoo; change it there -->

{rows} rows: every method of the package, and FedAvg with what makes it a strong baseline. All have the same
federation, the same number of rounds and the same tuning budget.

- **Federation**: preset `zoo`, handwritten digits of 8×8 pixels. {clients} clients, {participants} a round, each with
  30 images to learn from, 30 for val and 60 for test, label mixes drawn from Dirichlet({alpha:g}). One partition for
  all runs, hash `{hash}`.
- **Training**: {rounds} rounds of {epochs:g} epochs, batch {batch}, cosine schedule. Methods with phases (search, then
  training) divide the same {rounds} rounds.
- **Tuning**: {tries} runs a row with seed {tuning}, judged by personal accuracy on val: learning rates {few} for two
  values of the method's decisive option; where it has none, {many}.
- **Report**: seeds {seeds} at the chosen values, personal test accuracy at the last round, mean over clients. ± is the
  standard deviation over the seeds. With 600 test images, differences below about one point say nothing.
- **Networks**: methods without a search train a CNN of 13,706 parameters; FedBN has one with batch normalisation, FedTP
  and the ViT swap a small ViT, FedMN its modules. Methods that search use the space `tiny`, those of the DARTS family
  a DARTS space of 4 channels and 3 cells. Rows marked ◐ run on the fleet `capacity-high`: half of the clients afford
  any network, the others two thirds or a third of the largest one's arithmetic. `fedavg-ft on tiny` is their baseline
  under the same budgets, `fedavg-ft with norm` that of FedBN, `on vit` that of FedTP and `on modular` that of FedMN.

```
python bench/zoo.py --out runs/zoo && python bench/zoo.py --collect runs/zoo && make results     # or: make zoo
```
"""

AFTER = """
kB: sent and received by a client in a round. Seconds: of the shortest run, on one core that others wanted too. Global:
the server's own model on the same test images, where there is one. A try of tuning fails where the loss is no number
any more, or where the method refuses the rate. `+ prior`: the clients' label frequencies in the loss and in the kept
network. SPIDER and global-perturbation do not train on val in the end, as the paper has it: val has to judge them.
"""


def settings(lines: Sequence[Line]) -> dict[str, Any]:
    config = load("zoo")
    hashes = {r["partition_hash"] for x in lines for r in x.finals if "partition_hash" in r}
    return {
        "rows": len(lines),
        "clients": config.clients,
        "participants": config.participants,
        "alpha": config.make_partition().alpha,
        "rounds": config.rounds,
        "epochs": config.local.epochs,
        "batch": config.local.batch,
        "hash": ", ".join(sorted(hashes)) or "not run yet",
        "tries": len(RATES),
        "tuning": TUNING_SEED,
        "few": ", ".join(f"{r:g}" for r in FEW_RATES),
        "many": ", ".join(f"{r:g}" for r in RATES),
        "seeds": ", ".join(map(str, SEEDS)),
    }


def table(whole: Sequence[Line], missing: Sequence[Line]) -> str:
    heads = ("row", "network", "personal", "worst decile", "global", "kB", "seconds", "val, half-way and end", "chosen")
    out = ["", "| " + " | ".join(heads) + " |", "|---|---|---|---|---|---|---|---|---|"]
    for x in whole:
        out.append("| " + " | ".join(cells(x)) + " |")
    out += [f"| {label(x)} | | {state(x)} | | | | | | |" for x in missing]
    return "\n".join(out)


def state(x: Line) -> str:
    """Why a row has no numbers."""
    errors = [r["error"] for r in x.finals if "error" in r]
    if len(x.tuning) == len(RATES) and all("error" in r for r in x.tuning):
        errors = [r["error"] for r in x.tuning]
    if errors:
        ended = [f"{100 * np.mean(r['test']):.1f}" for r in x.finals if "test" in r]
        said = errors[0].split(". ")[0].removesuffix(".")
        others = f" (the others: {', '.join(ended)})" if ended else ""
        return f"failed with {len(x.finals) - len(ended)} of {len(SEEDS)} seeds{others}: {said}"
    done = len(x.tuning) + len(x.finals)
    return f"not run yet ({done} of {len(RATES) + len(SEEDS)} runs are there)" if done else "not run yet"


def label(x: Line) -> str:
    budgets = " ◐" if "fleet.name" in x.row.changes else ""
    return f"**{x.name}**{budgets}" if x.name in STRONG else f"{x.name}{budgets}"


def cells(x: Line) -> list[str]:
    shared = [100 * r["global"]["mean"] for r in x.finals if r.get("global")]
    curves = np.array([[m for _, m in r["curve"]] for r in x.finals])
    chosen = x.finals[0]["changes"]
    values = [f"lr {chosen['local.lr']:g}"]
    if x.row.option:
        value = chosen[x.row.option]
        short = x.row.option.removeprefix("method.").removeprefix("local.")
        short = x.row.option if short == "lr" else short
        values.append(f"{short} {value if isinstance(value, str) else format(value, 'g')}")
    diverged = sum("error" in r for r in x.tuning)
    values += [f"{diverged} tries failed"] if diverged else []
    return [
        label(x),
        x.finals[0]["network"],
        plus_minus(x.over_seeds("mean")),
        plus_minus(x.over_seeds("worst_decile")),
        plus_minus(np.array(shared)) if shared else "–",
        f"{np.mean([r['bytes'] for r in x.finals]) / 1e3:.1f}",
        f"{min(r['seconds'] for r in x.finals):.0f}",
        " → ".join(f"{100 * m:.1f}" for m in curves.mean(axis=0)),
        ", ".join(values),
    ]


def plus_minus(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def after(whole: Sequence[Line], missing: Sequence[Line]) -> str:
    out = [AFTER]
    runs = [r for x in whole for r in x.finals]
    machines = sorted({f"torch {r['torch']}, Python {r['python']}, {r['cores']} cores" for r in runs})
    out += ["", f"Run with {'; '.join(machines)}."] if machines else []
    base = next((x for x in whole if x.name == BASELINE), None)
    if base is None:
        return "\n".join([*out, ""])
    below = [x for x in whole if x.personal < base.personal and x.name != BASELINE]
    above = [x for x in whole if x.personal >= base.personal and x.name != BASELINE]
    out += ["", "## Against FedAvg + fine-tuning", ""]
    out += [f"{len(above)} rows are at or above `{BASELINE}`, {len(below)} below it. Why they are below:", ""]
    reasons = read_reasons()
    for x in below:
        gap = base.personal - x.personal
        unknown = "less than 600 test images can tell." if gap < SURE else "the reason is not known yet."
        out.append(f"- **{x.name}** (−{gap:.1f}): {reasons.get(x.name, unknown)}")
    failed = [x for x in missing if any("error" in r for r in x.finals)]
    out += [f"- **{x.name}** (failed): {reasons.get(x.name, 'the reason is not known yet.')}" for x in failed]
    return "\n".join([*out, ""])


def read_reasons() -> dict[str, str]:
    path = zoo.RESULTS.parent / "reasons.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
