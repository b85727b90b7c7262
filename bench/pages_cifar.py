"""docs/results.md and its pictures from bench/results/cifar."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cifar_rows import FEDERATIONS, Federation, Row
from curves import lines, spreads

from fedtailor.config import load
from fedtailor.runs.results import spread

RESULTS = Path(__file__).parent / "results" / "cifar"
HEADS = (
    "row",
    "personal",
    "worst decile",
    "paper",
    "global",
    "seeds",
    "rounds",
    "parameters",
    "GB",
    "simulated h",
    "paper h",
    "GPU min",
    "note",
)


@dataclass(frozen=True)
class Shown:
    """A line of a table: a row with one of its endings, over its seeds."""

    row: str
    ending: str  # without the value that val chose
    chosen: str
    results: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        return self.row if self.ending == "as it is" else f"{self.row} + {self.ending}"

    def accuracies(self, split: str = "test") -> list[list[float]]:
        return [r["endings"][self.chosen][split] for r in self.results]

    @property
    def figures(self) -> tuple[float, float, float]:
        """Mean, standard deviation and worst decile over clients, in percent; the mean over seeds of each."""
        each = [s for s in (spread(a) for a in self.accuracies()) if s]
        mean, std, worst = (100 * float(np.mean([s[k] for s in each])) for k in range(3))
        return mean, std, worst


def read() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Results by federation and row, seeds in order."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(RESULTS.glob("*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        found[one["federation"], one["row"]].append(one)
    return {key: sorted(ones, key=lambda r: r["seed"]) for key, ones in found.items()}


def at_other_rates() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Whole runs of a row at another rate than the one that tuning chose, by federation and row, rates in order."""
    path, found = RESULTS / "rates.jsonl", defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        one = json.loads(line)
        found[one["federation"], one["row"]].append(one)
    return {key: sorted(ones, key=lambda r: (rate(r), r["seed"])) for key, ones in found.items()}


def rate(run: Mapping[str, Any]) -> float:
    return float(run["config"]["local"]["lr"] if "config" in run else run["lr"])


def shown(row: str, results: Sequence[Mapping[str, Any]], order: Iterable[str]) -> list[Shown]:
    """The row's endings in order; of several values of one ending that with the best val accuracy over the seeds."""
    groups: dict[str, list[str]] = {}
    for name in order:
        if all(name in r["endings"] for r in results):
            groups.setdefault(name.split("@")[0], []).append(name)
    out = []
    for ending, names in groups.items():
        best = max(names, key=lambda n: float(np.mean([np.mean(r["endings"][n]["val"]) for r in results])))
        out.append(Shown(row, ending, best, results))
    return out


def pages() -> dict[str, str]:
    """The page and its pictures by path."""
    results, out = read(), {}
    parts = [HEAD]
    if said := findings().get("short"):
        parts += ["## In short", "", said.strip(), ""]
    parts.append(READING)
    for name, federation in FEDERATIONS.items():
        section, pictures = chapter(name, federation, results)
        parts.append(section)
        out |= pictures
    parts.append(costs(results))
    return {"results.md": "\n".join(parts)} | out


HEAD = """# Results on CIFAR-10

<!-- written by `make results` from bench/results/cifar; change it there -->

Real CIFAR-10, one GPU, from committed configurations.
"""

READING = """## How to read the tables

- **personal** is the headline: test accuracy of the network each client keeps, at the last round, mean over all clients
  ± standard deviation over clients. **worst decile** is the mean of the lowest tenth. Nothing is a best-ever value.
- Learning rates are tuned per row on val, four values at a tenth of the rounds, the same for every row; the runs are in
  `bench/results/cifar/tuning.jsonl`. Rows without a tuned rate yet use the preset's and say so. Where fine-tuning was
  tried at several rates, val decides which one is shown.
- A row is trained once. *prior*, *fine-tuned* and *half-way* are made of its trained state at the end: the client's
  label frequencies in the last layer, some epochs on the client's own images, and the middle between the two networks.
  *own statistics*: those of normalisation layers from the client's own images. Rows called *-prior* were trained with
  the prior in every client's loss.
- Lines *at lr …* are whole runs at another rate than the one that tuning chose, made afterwards to find out why a row
  fell short (`bench/results/cifar/rates.jsonl`). Other rows had no such second chance, so they are never ranked.
- **paper** is the published figure. No paper has this partition, these splits and this way of reporting; see the notes.
- **parameters**: of the network a client keeps, mean over clients. **GB**: all traffic of the run. **simulated h**:
  what the cost model of the fleet says the rounds would take; **paper h** is the published time. **GPU min**: measured,
  all seeds together, with evaluations and endings; where runs shared the card, their time divided by their number.
"""


def chapter(
    name: str, federation: Federation, results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
) -> tuple[str, dict[str, str]]:
    """A federation's part of the page, and its pictures."""
    presets = sorted({row.preset or federation.preset for row in federation.rows.values()})
    hashes = dict.fromkeys(row.partition or federation.partition for row in federation.rows.values())
    out = ["", f"## {name}", "", f"{federation.title}.", ""]
    out.append(f"Presets {', '.join(f'`{p}`' for p in presets)}; partitions {', '.join(f'`{h}`' for h in hashes)}.")
    out += ["", f"```\npython bench/cifar.py {name} --rows ROW --seed 0 --out DIR\n```", ""]
    tried = {
        row: shown(row, own, spec.endings) for row, spec in federation.rows.items() if (own := results.get((name, row)))
    }
    best = {row: max(found, key=lambda x: float(np.mean(x.accuracies("val")))) for row, found in tried.items()}
    out += summary(best) if len(hashes) == 1 else []  # rows of other deals are not to be compared
    out += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    curves, clients, pictures, others = {}, {}, {}, at_other_rates()
    for row, spec in federation.rows.items():
        own = results.get((name, row), [])
        if not own:
            paper = ", ".join(f"{v} ({k})" if k != "as it is" else v for k, v in spec.paper.items())
            out.append(f"| {row} | not run yet | | {paper} | | | | | | | {spec.hours} | | {spec.note} |")
            continue
        found = tried[row]
        out += ["| " + " | ".join(cells(x, spec, federation, first=x is found[0])) + " |" for x in found]
        there = {x.ending for x in found}
        left = [e for e in dict.fromkeys(e.split("@")[0] for e in spec.endings) if e not in there]
        out += [f"| … {ending} | not run yet |" + " |" * (len(HEADS) - 2) for ending in left]
        out += ["| " + " | ".join(line) + " |" for run in others.get((name, row), []) for line in afterwards(run, spec)]
        clients[best[row].name] = best[row].accuracies()[0]
        if own[0]["rounds"] >= 20:  # local training has few, of all clients: another axis
            curves[row] = own[0]["curves"]["personal"]
    if curves:
        pictures[f"assets/results-{name}-curves.svg"] = lines(
            curves, "round", "personal accuracy on val, before endings"
        )
        out += ["", f"![Accuracy over rounds](assets/results-{name}-curves.svg)"]
    if clients:
        pictures[f"assets/results-{name}-clients.svg"] = spreads(clients)
        out += ["", f"![Accuracy of every client](assets/results-{name}-clients.svg)", ""]
        out.append("Test accuracy of every client, first seed, after the ending that is best on val; bars are means.")
    said = findings().get(name, "")
    out += ["", said.strip()] if said else []
    return "\n".join([*out, ""]), pictures


def summary(best: Mapping[str, Shown]) -> list[str]:
    """The rows with the endings that val prefers, the best first."""
    if len(best) < 2:
        return []
    out = ["Each row with the ending that val prefers, best first; all endings are in the table below.", ""]
    out += ["| row and ending | personal | worst decile | seeds | parameters |", "|---|---|---|---|---|"]
    for x in sorted(best.values(), key=lambda x: -x.figures[0]):
        mean, std, worst = x.figures
        size = np.mean([r["endings"][x.chosen]["parameters"] for r in x.results]) / 1e6
        out.append(f"| {x.name} | **{mean:.2f}** ± {std:.2f} | {worst:.2f} | {len(x.results)} | {size:.2f} M |")
    return [*out, ""]


def cells(x: Shown, spec: Row, federation: Federation, first: bool) -> list[str]:
    """A line; what belongs to the row as a whole is said in its first line."""
    one, ended = x.results[0], [r["endings"][x.chosen] for r in x.results]
    name = told(x) if x.ending == "as it is" else f"{x.row} + {told(x)}"
    start = [name if first else f"… {told(x)}", *figures(x, spec, spec.paper.get(x.ending, ""))]
    if not first:
        return [*start, *[""] * (len(HEADS) - len(start))]
    traffic = np.mean([r["bytes_up"] + r["bytes_down"] for r in x.results]) / 1e9
    hours, minutes = np.mean([r["simulated_hours"] for r in x.results]), gpu_minutes(x.results)
    return [
        *start,
        str(one["rounds"]),
        f"{np.mean([found['parameters'] for found in ended]) / 1e6:.2f} M",
        f"{traffic:.1f}",
        f"{hours:.2f}",
        spec.hours,
        f"{minutes:.1f}" if minutes else "",
        "; ".join(n for n in [*notes(one, spec, federation), to_come(x.results, spec), unseeded(x.results, spec)] if n),
    ]


def told(x: Shown) -> str:
    """The ending, with the value that val chose; the row's name where there is none."""
    chosen = x.chosen.partition("@")[2]
    return (x.row if x.ending == "as it is" else x.ending) + (f" (lr {chosen})" if chosen else "")


def figures(x: Shown, spec: Row, paper: str = "") -> list[str]:
    """The cells of a line from `personal` to `seeds`."""
    mean, std, worst = x.figures
    ended = [r["endings"][x.chosen] for r in x.results]
    shared = [np.mean(found["global test"]) for found in ended if "global test" in found]
    seeds = ", ".join(f"{r['seed']}: {100 * np.mean(a):.2f}" for r, a in zip(x.results, x.accuracies(), strict=True))
    return [f"**{mean:.2f}** ± {std:.2f}", f"{worst:.2f}", paper, shown_global(shared, spec), seeds]


def afterwards(run: Mapping[str, Any], spec: Row) -> list[list[str]]:
    """The lines of a run at another rate; of some only the means were kept."""
    name = f"… at lr {rate(run):g}"
    if "endings" in run:
        found = shown(run["row"], [run], spec.endings)
        lines = [[name if x.ending == "as it is" else f"{name}, {told(x)}", *figures(x, spec)] for x in found]
    else:
        lines = [[name, f"**{100 * run['test']:.2f}**", "", "", "", f"{run['seed']}: {100 * run['test']:.2f}"]]
    lines = [[*line, *[""] * (len(HEADS) - len(line))] for line in lines]
    minutes = gpu_minutes([run]) if "gpu_seconds" in run else 0.0
    lines[0][-2:] = [f"{minutes:.1f}" if minutes else "", "made afterwards"]
    return lines


def shown_global(means: Sequence[float], spec: Row) -> str:
    if not means:
        return ""
    paper = f" (paper {spec.paper['global']})" if "global" in spec.paper else ""
    return f"{100 * float(np.mean(means)):.2f}{paper}"


def notes(one: Mapping[str, Any], spec: Row, federation: Federation) -> list[str]:
    usual = int(spec.changes.get("rounds", load(spec.preset or federation.preset).rounds))
    local = one["config"]["local"]
    return [
        f"lr {local['lr']:g}" + ("" if one["row"] in tuned().get(one["federation"], {}) else ", not tuned"),
        f"{one['rounds']} rounds instead of {usual}" if one["rounds"] != usual else "",
        one["precision"] if one["precision"] != "fp32" else "",
        "" if on_a_gpu(one) else "on a processor",
        spec.note,
    ]


def to_come(results: Sequence[Mapping[str, Any]], spec: Row) -> str:
    """Values of endings that not all seeds have tried, where other values were."""
    tried = {name for name in spec.endings if "@" in name and all(name in r["endings"] for r in results)}
    begun = {name.split("@")[0] for name in tried}
    left = [n.replace("@", " at ") for n in spec.endings if n not in tried and n.split("@")[0] in begun]
    return f"not tried with every seed: {', '.join(left)}" if left else ""


def unseeded(results: Sequence[Mapping[str, Any]], spec: Row) -> str:
    """Seeds that the row is to have and was not run with."""
    left = [str(seed) for seed in range(spec.seeds) if seed not in {r["seed"] for r in results}]
    return f"not run yet with seed {', '.join(left)}" if left else ""


def on_a_gpu(run: Mapping[str, Any]) -> bool:
    return not run.get("device", "cuda").startswith("cpu")


def gpu_minutes(runs: Iterable[Mapping[str, Any]]) -> float:
    """Of runs that shared the card, each one's share."""
    return sum(run["gpu_seconds"] / run.get("beside", 1) for run in runs if on_a_gpu(run)) / 60


def costs(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    """The whole table's cost, and an estimate of what the plain path would have taken."""
    ones = [r for found in results.values() for r in found if on_a_gpu(r)]
    path = RESULTS / "tuning.jsonl"
    tried = [json.loads(t) for t in path.read_text().splitlines()] if path.exists() else []
    tried = list(filter(on_a_gpu, tried))
    out = ["", "## What it cost", ""]
    if not ones:
        return "\n".join([*out, "Nothing has been run on a GPU yet.", ""])
    more = [r for found in at_other_rates().values() for r in found if on_a_gpu(r)]
    rows, tuning, others = gpu_minutes(ones), gpu_minutes(tried), gpu_minutes(more)
    peak = max(float(r["peak_gib"]) for r in ones)
    machines = sorted({f"{r['device']}, torch {r['torch']}, Python {r['python']}" for r in ones})
    out.append(
        f"{rows:.0f} GPU minutes for {len(ones)} runs, {tuning:.0f} for {len(tried)} tuning runs and {others:.0f} for "
        f"{len(more)} at other rates, at most"
    )
    out += [
        f"{peak:.1f} GiB of GPU memory; {'; '.join(machines)}. Runs that never ended are not in it.",
        "",
    ]
    ratios, plain, known = eager(), 0.0, 0.0
    for (name, row), found in results.items():
        ratio = ratios.get(name, {}).get(row)
        if ratio:
            known += gpu_minutes(found)
            plain += ratio * gpu_minutes(found)
    if known:
        out.append(f"Client after client and step after step, {known:.0f} of these minutes would have been about")
        out.append(
            f"{plain / 60:.1f} hours, by the ratios of `bench/gpu.py` for the most similar workload (bench/README.md)."
        )
    return "\n".join([*out, ""])


def findings() -> dict[str, str]:
    return _toml("findings.toml")


def tuned() -> dict[str, dict[str, float]]:
    return _toml("tuned.toml")


def eager() -> dict[str, dict[str, float]]:
    """How much longer the plain path takes, by federation and row."""
    return _toml("eager.toml")


def _toml(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
