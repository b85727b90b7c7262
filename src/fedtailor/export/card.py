"""The model card: what an exported network is, what it was made from and how good it is, as JSON and as a page."""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..fleet.budget import QUANTITIES, need, readable
from ..method import Seat
from ..report import words
from ..report.html import write_page
from ..spaces.base import Arch, Space
from ..spaces.measure import Cost
from ..values import write_bytes
from .predict import Model

FORMAT = 1
Z = 1.959964  # of a 95 % interval
SECONDS = 0.3  # spent on measuring each latency


def accuracy(hits: int, n: int) -> dict[str, float] | None:
    """An accuracy with Wilson's 95 % interval; None where there are no pictures."""
    if not n:
        return None
    p = hits / n
    middle, spread = p + Z**2 / (2 * n), Z * math.sqrt(p * (1 - p) / n + (Z / (2 * n)) ** 2)
    low, high = ((middle + sign * spread) / (1 + Z**2 / n) for sign in (-1, 1))
    return {"accuracy": p, "low": max(0.0, low), "high": min(1.0, high), "correct": hits, "pictures": n}


def latency(model: Model, batch: int) -> dict[str, float]:
    """Milliseconds that onnxruntime takes for a batch: median and 95th percentile, by the model's own threads."""
    channels, height, width = model.about["input"]
    images = np.random.default_rng(0).integers(0, 256, (batch, height, width, channels), np.uint8)
    for _ in range(3):
        model.run(images)
    times: list[float] = []
    while len(times) < 10 or (sum(times) < SECONDS and len(times) < 300):
        began = time.perf_counter()
        model.run(images)
        times.append(time.perf_counter() - began)
    return {
        "batch": batch,
        "median_ms": 1e3 * float(np.median(times)),
        "p95_ms": 1e3 * float(np.quantile(times, 0.95)),
        "repeats": len(times),
    }


def network_facts(space: Space, arch: Arch, cost: Cost, batch: int) -> dict[str, Any]:
    return {
        "name": space.name,
        "kind": "net" if space.fixed else "space",
        "arch": space.word(arch),
        "architecture": space.describe(arch) or "a fixed network",
        "parameters": cost.parameters,
        "flops": cost.flops,
        "training_memory": cost.training_memory(batch),
        "inference_memory": cost.inference_memory(),
    }


def budget_facts(seat: Seat, cost: Cost) -> dict[str, Any]:
    """The client's limits and how much of each the network uses; 1 is all of it."""
    used = seat.budget.use(cost, seat.batch, seat.profile, seat.images)
    return {
        "device": seat.profile.name,
        "hard": seat.hard,
        "limits": {
            q: {"limit": limit, "needs": need(q, cost, seat.batch, seat.profile, seat.images), "used": used[q]}
            for q in QUANTITIES
            if (limit := seat.budget.limits.get(q)) is not None
        },
    }


def machine() -> dict[str, str]:
    """Where latencies were measured."""
    import onnxruntime

    return {
        "system": platform.system(),
        "processor": _processor(),
        "onnxruntime": onnxruntime.__version__,
        "threads": "1",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def write_card(folder: Path, card: dict[str, Any], drawing: str) -> None:
    """card.json and card.html in the folder."""
    write_bytes(folder / "card.json", json.dumps(card, indent=1).encode())
    page = {
        "title": f"{card['client']['name']}: its own network",
        "card": card,
        "drawing": drawing,
        "lead": _lead(card),
        "limits": [
            (q, readable(q, row["needs"]), readable(q, row["limit"]), words.percent(row["used"], 0))
            for q, row in card["budget"]["limits"].items()
        ],
        "numbers": _numbers(card),
    }
    write_page("card.html", page, folder / "card.html")


def read_card(folder: Path) -> dict[str, Any]:
    path = folder / "card.json"
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        version = card["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}). 'fedtailor export' writes it.") from None
    if version != FORMAT:
        raise UserError(f"{path} has card format {version}, this fedtailor reads format {FORMAT}. Export it again.")
    return card


def _lead(card: dict[str, Any]) -> str:
    network, channels = card["network"], card["input"][0]
    test = card["accuracy"].get("test")
    kind = "grey" if channels == 1 else "colour"
    told = (
        f"A network of {words.count(network['parameters'])} parameters that tells {len(card['classes'])} classes apart "
        f"in {kind} pictures of {card['input'][2]} by {card['input'][1]} pixels, made for client "
        f"{card['client']['name']} by {card['method']['name']}"
    )
    if not test:
        return f"{told}. It could not be tested: the client has no test pictures, or they were not at hand."
    return (
        f"{told}. It gets {words.percent(test['accuracy'], 1)} of the client’s {test['pictures']} test pictures right "
        f"(95 % interval {words.percent(test['low'], 1)} to {words.percent(test['high'], 1)})."
    )


def _numbers(card: dict[str, Any]) -> list[tuple[str, str]]:
    network = card["network"]
    return [
        ("Architecture", f"{network['name']}: {network['architecture']}"),
        ("Parameters", f"{network['parameters']:,}"),
        ("FLOPs for a picture", words.count(network["flops"])),
        ("Memory to run", words.size(network["inference_memory"])),
        ("Memory to train", words.size(network["training_memory"])),
    ]
