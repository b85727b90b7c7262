"""How the report says numbers and what they mean: formats, the summary sentence, the definitions."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

from fedtailor.runs.results import Results

NONE = "–"
SPACE = "\u00a0"  # a number and its unit stay on one line
KIND_NAMES = {"personal": "Personal", "global": "Global", "new": "New clients"}
KIND_WORDS = {
    "personal": "each client’s own network on that client’s data",
    "global": "the server’s one model on every client’s data",
    "new": "clients that never took part in training, after joining",
}

DEFINITIONS = [
    (
        "Personal accuracy",
        "The share of a client’s own samples that the network this client keeps classifies correctly. One number "
        "per client; every client counts the same, however many samples it has. This is the headline.",
    ),
    (
        "Global accuracy",
        "The same for the server’s one model, where the method has one. Every client is scored on its own data.",
    ),
    (
        "New-client accuracy",
        "Personal accuracy of clients that were held out of training and joined afterwards, in the way the method "
        "lets a new client join.",
    ),
    (
        "Mean, std over clients",
        "Over all clients at the last round. The std divides by the number of clients (they are all there are, "
        "not a sample of them). It tells how differently clients fare, not how sure the result is.",
    ),
    (
        "Std over seeds",
        "The sample standard deviation (n − 1) of a row’s mean when only the seed changes. It tells how sure the "
        "result is, and needs two runs or more.",
    ),
    (
        "Worst decile",
        "The mean over the tenth of the clients that fare worst, rounded up to whole clients (at least one).",
    ),
    (
        "Split",
        "Train, val and test are separate within each client. Search, rewards and tuning read val; test is opened "
        "once, after the last round. Curves over rounds are therefore validation curves.",
    ),
    (
        "Last round",
        "All reported numbers come from the last round. A best round is never picked.",
    ),
    (
        "Bytes down, bytes up",
        "What the server sent to clients and received from them, summed over all rounds and participants.",
    ),
    (
        "Parameters, FLOPs",
        "Size of the networks that clients keep, and the floating-point operations of one forward pass for one "
        "sample; mean over clients.",
    ),
    (
        "Simulated time",
        "What the rounds would take on the fleet’s devices by the deterministic cost model. Rounds are "
        "synchronous: each lasts as long as its slowest participant.",
    ),
    (
        "Measured time",
        "What the run took on the machine that simulated it. It says nothing about real devices.",
    ),
]


def percent(value: float | None, digits: int = 2) -> str:
    return NONE if value is None or math.isnan(value) else f"{100 * value:.{digits}f}{SPACE}%"


def _scaled(value: float | None, units: tuple[str, ...], step: float = 1000.0) -> str:
    """Three significant digits and a unit: 1234567 as '1.23 M'."""
    if value is None or math.isnan(value):
        return NONE
    unit = 0
    while abs(value) >= step * 0.9995 and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    digits = 0 if (unit == 0 and float(value).is_integer()) or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{SPACE}{units[unit]}".strip()


def count(value: float | None) -> str:
    return _scaled(value, ("", "k", "M", "G", "T"))


def size(value: float | None) -> str:
    return _scaled(value, ("B", "kB", "MB", "GB", "TB"))


def setting(value: Any) -> str:
    """A config value as a reader would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def sentence(run: Results) -> str:
    """What was run and what came out, in one sentence of plain words."""
    clients, participants, rounds = run.config.get("clients"), run.config.get("participants"), run.rounds_done
    each = ""
    if isinstance(participants, int):
        each = " (all in every round)" if participants == clients else f" ({participants} per round)"
    elif participants is not None:
        each = f" (participants per round: {setting(participants)})"
    plural = "round" if rounds == 1 else "rounds"
    ran = f"{run.method} trained {run.network or 'a network'} for {rounds} {plural} on {run.section('data')}"
    ran += f", split over {clients} client{'' if clients == 1 else 's'}{each}" if clients is not None else ""
    split, at = run.reported_at()
    personal, shared = run.spreads["personal"], run.spreads["global"]
    if personal is None:
        return f"{ran}; it has not been evaluated yet."
    kind = "validation" if split == "val" else split
    when = "after the last round" if run.finished else f"so far, in round {at} of {run.rounds_planned},"
    told = f"{ran}; {when} a client’s own network gets {percent(personal.mean, 1)} of its {kind} samples right"
    told += f" on average ({percent(personal.worst_decile, 1)} for the tenth of clients that fare worst)"
    return f"{told}{f', the server’s one model {percent(shared.mean, 1)}' if shared else ''}."


def moment(text: Any) -> str:
    """An ISO time to the minute, as people write it; anything else as it is."""
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return str(text)


def pieces_with_links(text: str) -> list[tuple[str, str | None]]:
    """A citation cut into (text, address) pieces: web addresses and arXiv numbers become links, nothing is fetched."""
    pieces: list[tuple[str, str | None]] = []
    for piece in re.split(r"(https?://[^\s<>\"]*[^\s<>\".,;)]|arXiv:\d{4}\.\d{4,5}(?:v\d+)?)", text):
        if piece.startswith("arXiv:"):
            pieces.append((piece, f"https://arxiv.org/abs/{piece.removeprefix('arXiv:')}"))
        elif piece:
            pieces.append((piece, piece if piece.startswith(("http://", "https://")) else None))
    return pieces
