"""The report: one HTML file that holds everything it shows, opens offline and prints."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtailor.errors import UserError
from fedtailor.report import words
from fedtailor.runs.compare import Comparison, compare
from fedtailor.runs.results import KINDS, Results, duration, worst_tenth
from fedtailor.ui.freeze import embedded, freeze, freeze_comparison

HERE = Path(__file__).parent
COSTS = {
    "bytes_down": ("Sent to clients", words.size),
    "bytes_up": ("Received from clients", words.size),
    "personal_parameters": ("Parameters of a client’s network, mean", words.count),
    "personal_flops": ("FLOPs per sample, mean", words.count),
    "simulated_hours": ("Simulated time on the fleet", lambda hours: duration(hours and 3600 * hours)),
    "measured_seconds": ("Measured time of the simulation", duration),
}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of one run (report.html in its folder unless told) and return where it is."""
    run = Results.read(Path(folder))
    return write_page("template.html", run_page(run), Path(out) if out else run.folder / "report.html")


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write several runs side by side and return where the page is."""
    return write_comparison_page(compare(folders), Path(out))


def write_comparison_page(comparison: Comparison, out: Path) -> Path:
    return write_page("comparison.html", comparison_page(comparison), out)


def write_page(template: str, page: dict[str, Any], out: Path) -> Path:
    """Fills a template of this room and writes the page, whole or not at all."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UserError("the report needs jinja2, which is not installed: pip install 'fedtailor[report]'") from None
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": words.percent, "count": words.count, "size": words.size, "duration": duration,
        "setting": words.setting, "moment": words.moment, "links": words.pieces_with_links,
    }  # fmt: skip
    text = environment.get_template(template).render({"css": (HERE / "style.css").read_text(encoding="utf-8"), **page})
    if out.is_dir():
        raise UserError(f"{out} is a folder. Give the name of the HTML file to write, such as {out / 'report.html'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # a file's name may be any bytes
    partial.replace(out)  # a reader never sees half a page
    return out


# ---- one run


def run_page(run: Results) -> dict[str, Any]:
    """Everything the template of one run shows, as plain values."""
    split, at = run.reported_at()
    summary, views = run.summary(), freeze(run)
    return {
        "title": run.name,
        "run": run,
        "facts": run.facts,
        "lead": words.sentence(run),
        "warnings": run.warnings(),
        "split": split,
        "round": at,
        "headline": [(kind, words.KIND_NAMES[kind], words.KIND_WORDS[kind], s) for kind, s in run.spreads.items() if s],
        "seed": run.config.get("seed"),
        "settings": settings(run.config),
        "table": _client_table(run),
        "searched": views["archs"] is not None,
        "costs": [(label, say(summary[key])) for key, (label, say) in COSTS.items()],
        "config_text": (run.folder / "config.toml").read_text(encoding="utf-8"),
        "definitions": words.DEFINITIONS,
        **embedded(views),
    }


def settings(config: dict[str, Any]) -> list[tuple[str, Any, list[tuple[str, Any]]]]:
    """The config as titled lists: the top-level keys first, then table by table, its name beside its title."""
    plain = {key: value for key, value in config.items() if not isinstance(value, dict)}
    tables = [(key, value) for key, value in config.items() if isinstance(value, dict) and value]
    return [("run", "", list(plain.items()))] + [
        (title, table.get("name", ""), [(k, v) for k, v in _dotted(table) if k != "name"]) for title, table in tables
    ]


def _dotted(table: dict[str, Any], prefix: str = "") -> Any:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _client_table(run: Results) -> dict[str, Any]:
    """One line per client, lowest personal accuracy first (clients without one last); only columns with values."""
    split, at = run.reported_at()
    accuracies = {kind: run.per_client(metric, split, at) for kind, metric in KINDS.items()}
    sizes = {"parameters": run.per_client("personal_parameters", ""), "FLOPs": run.per_client("personal_flops", "")}
    counts = run.facts.get("train_counts") or []
    known = {client: value for client, value in accuracies["personal"].items() if not math.isnan(value)}
    worst = set(sorted(known, key=lambda client: (known[client], client))[: worst_tenth(len(known))])
    everyone = {client for found in accuracies.values() for client in found}
    clients = sorted(everyone, key=lambda client: (client not in known, known.get(client, 0), client))
    columns = [kind for kind, found in accuracies.items() if found]
    measures = [name for name, found in sizes.items() if found]
    lines = [
        {
            "name": run.client_name(client),
            "worst": client in worst,
            "samples": str(sum(counts[client])) if client < len(counts) else words.NONE,
            "accuracies": [words.percent(accuracies[kind].get(client)) for kind in columns],
            "sizes": [words.count(sizes[name].get(client)) for name in measures],
        }
        for client in clients
    ]
    return {"heads": [words.KIND_NAMES[kind] for kind in columns], "measures": measures, "lines": lines}


# ---- several runs


def comparison_page(comparison: Comparison) -> dict[str, Any]:
    """Everything the template of a comparison shows, as plain values."""
    rows = comparison.rows
    return {
        "title": "Comparison of " + ", ".join(row.label for row in rows[:4]) + (" and more" if len(rows) > 4 else ""),
        "lead": _comparison_lead(comparison),
        "comparison": comparison,
        "rows": [_row(row) for row in rows],
        "kinds": [kind for kind in KINDS if any(row.accuracy(kind) for row in rows)],
        "kind_names": words.KIND_NAMES,
        "costs": _cost_rows(comparison),
        "settings": comparison.differing(),
        "definitions": words.DEFINITIONS,
        **embedded(freeze_comparison(comparison)),
    }


def _row(row: Any) -> dict[str, Any]:
    split, at = row.runs[0].reported_at()
    told = ("mean", "std", "worst_decile")
    numbers = {kind: {n: row.accuracy(kind, n) for n in told} | {"n": row.clients(kind)} for kind in KINDS}
    return {
        "label": row.label, "runs": row.runs, "seeds": ", ".join(map(str, row.seeds)), "flags": row.flags,
        "finished": row.finished, "split": split, "round": at, "accuracy": numbers,
    }  # fmt: skip


def _comparison_lead(comparison: Comparison) -> str:
    runs, rows = sum(len(row.runs) for row in comparison.rows), len(comparison.rows)
    told = (
        f"{runs} run{'s' * (runs != 1)} in {rows} row{'s' * (rows != 1)}; runs that differ only in the seed share one."
    )
    if comparison.fair:
        return f"{told} All rows have the same data, partition, seeds, clients, participants and rounds."
    return f"{told} The rows are not equal in everything that matters: read the flags before the numbers."


def _cost_rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """One line per cost that any row has: what it is, and its words for each row."""
    found = [(told, [row.cost(key) for row in comparison.rows]) for key, told in COSTS.items()]
    return [(label, [say(v and v.mean) for v in values]) for (label, say), values in found if any(values)]
