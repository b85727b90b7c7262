"""Views in one table, for a page that carries them within itself: the report of a run, or a comparison."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs.compare import Comparison
from ..runs.results import Results
from . import networks, searches, views
from .shelf import readable

STATIC = Path(__file__).parent / "static"
EACH = 100  # clients up to which a report tells every single one's rounds
POLICIES = 1_200_000  # characters of policies over the rounds
DRAWINGS = 1_000_000  # of drawings
PICTURES = 700_000  # of confusion matrices and pictures
WORK = 3e11  # FLOPs that a report spends on asking clients' networks about their pictures: seconds


def freeze(run: Results) -> dict[str, Any]:
    """What the page asks the live server for, by the names under which it looks in itself."""
    people = views.clients(run)
    found: dict[str, Any] = {
        "overview": views.overview(run, readable(run.name), str(run.facts.get("status", "unknown"))),
        "clients": people,
        "archs": searches.archs(run),
        "gain": views.gain(run),
        "about": {"card": {k: str(v) for k, v in (run.facts.get("method_card") or {}).items()}},
        "devices": _tried(lambda: networks.devices(run)),
    }
    n = len(people["name"])
    if n <= EACH:
        found |= {f"client&client={c}": views.client(run, c) for c in range(n)}
    found |= _within(POLICIES, {f"policy&round={r}": lambda r=r: searches.policy_frame(run, r) for r in _spread(run)})
    if n <= EACH and found["devices"] is not None:
        found |= _within(DRAWINGS, {f"drawing&client={c}": lambda c=c: networks.drawing(run, c) for c in range(n)})
        found |= _within(PICTURES, {f"look&client={c}": lambda c=c: networks.look(run, c) for c in _cheap(run, people)})
    return found


def freeze_comparison(comparison: Comparison) -> dict[str, Any]:
    """What the page of a comparison carries: its rows, and of each run the curves, the costs and who fares how."""
    runs = [run for row in comparison.rows for run in row.runs]
    ids = {run: str(i) for i, run in enumerate(runs)}
    people = {ids[run]: views.clients(run) for run in runs}
    return {
        "compare": views.comparison(comparison, ids),
        "overviews": {ids[r]: views.overview(r, r.name, str(r.facts.get("status", "unknown"))) for r in runs},
        "people": {i: {key: of[key] for key in ("split", "name", "personal", "held")} for i, of in people.items()},
    }


def _tried(make: Callable[[], Any]) -> Any:
    """What can be made; None where a run's networks or data cannot be opened here."""
    try:
        return make()
    except (UserError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError):
        return None


def _within(room: int, made: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Views until the room is full; the first that cannot be made ends it, for the others will not do better."""
    found: dict[str, Any] = {}
    for name, make in made.items():
        view = _tried(make)
        room -= len(json.dumps(view))
        if view is None or room < 0:
            break
        found[name] = view
    return found


def _spread(run: Results) -> list[int]:
    """Rounds with policies: the last first, then halves between, so that any number of them is spread out."""
    rounds = searches.policy_rounds(run)[1]
    order, step = ([len(rounds) - 1, 0] if len(rounds) > 1 else [0][: len(rounds)]), len(rounds)
    while step > 1:
        step = (step + 1) // 2
        order += [i for i in range(step, len(rounds), step) if i not in order]
        if step == 1:
            break
    return [rounds[i] for i in order]


def _cheap(run: Results, people: dict[str, Any]) -> list[int]:
    """The clients whose networks can be asked within the work that a report may take."""
    images = [sum(row) for row in run.facts.get("train_counts") or []]
    cost = sum((f or 0) * n for f, n in zip(people["flops"] or [], images, strict=False))
    return list(range(len(people["name"]))) if people["flops"] and cost < WORK else []


def embedded(views_: dict[str, Any]) -> dict[str, str]:
    """What the template puts into the page: the views as text that cannot end a script, the script and its hash."""
    text = json.dumps(views_, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    script = (STATIC / "app.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "data": text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "script": script,
        "script_hash": f"sha256-{digest}",
        "css": (STATIC / "app.css").read_text(encoding="utf-8"),
    }
