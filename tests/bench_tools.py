"""What tests of the scripts in bench/ share."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def script(name: str) -> ModuleType:
    """A module of bench/, which is no package."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    return importlib.import_module(name)


def call(cifar: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["cifar.py", *map(str, words)])
    cifar.main()
    if "--out" not in words:
        return []
    out = Path(words[words.index("--out") + 1])
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def made_up(seed: int, good: float) -> dict[str, Any]:
    """A result as bench/cifar.py writes it."""
    accuracies = {"val": [good, 0.5], "test": [good, 0.4], "parameters": [2e5, 3e5]}
    return {
        "federation": "devices",
        "row": "fedavg",
        "seed": seed,
        "rounds": 400,
        "endings": {
            "as it is": accuracies | {"global test": [0.25, 0.75]},
            "fine-tuned@0.001": {"val": [0.9, 0.9], "test": [0.6, 0.8], "parameters": [2e5, 3e5]},
            "fine-tuned@0.01": {"val": [0.8, 0.8], "test": [1.0, 1.0]},
        },
        "curves": {"personal": [[40, 0.3], [400, good]], "global": []},
        "bytes_up": 1e9,
        "bytes_down": 2e9,
        "simulated_hours": 1.5,
        "gpu_seconds": 120.0,
        "peak_gib": 2.0,
        "precision": "tf32",
        "device": "a card",
        "torch": "2",
        "python": "3",
        "config": {"local": {"lr": 0.05}},
    }
