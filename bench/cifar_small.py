"""The CIFAR-10 tables in small: every row of a federation on digits, with few clients and steps.

What would stop a row, be it in its tuning, its phases or an ending, does so here in a minute on a processor, and not on
a card that somebody waits for. Accuracies mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cifar_rows import FEDERATIONS, Ending, Federation, Row

from fedtailor.config import load
from fedtailor.data import partition as partitions
from fedtailor.data.sources import load as load_data

SMALL: Mapping[str, Any] = {
    "data.name": "digits",
    "clients": 4,
    "participants": 4,
    "rounds": 10,
    "local.batch": 8,
    "local.epochs": 0.1,
    "partition.name": "dirichlet-client",
    "partition.samples": 60,
}
CELLS: Mapping[str, Any] = {"space.channels": 4, "space.cells": 3}
LENGTHS = ("method.epochs", "method.final_epochs")  # of endings


def small(name: str) -> Federation:
    """A federation with the same rows, to be called otherwise than the real one: nothing of it is a result."""
    federation = FEDERATIONS[name]
    config = load(federation.preset, SMALL)
    made = partitions.make(load_data("digits"), config.make_partition(), config.clients, config.seed)
    rows = {row: _row(spec, config.space) for row, spec in federation.rows.items()}
    return dataclasses.replace(federation, partition=made.hash, rows=rows)


def _row(spec: Row, space: Mapping[str, Any]) -> Row:
    has_cells = "darts" in (spec.changes.get("space.name"), space.get("name"))
    found = {**spec.changes, **SMALL, **(CELLS if has_cells else {})}
    endings = {name: _ending(ending) for name, ending in spec.endings.items()}
    return dataclasses.replace(spec, changes=found, endings=endings, rates=spec.rates[:2], seeds=1)


def _ending(ending: Ending) -> Ending:
    lengths = {key: SMALL["local.epochs"] for key in LENGTHS if key in ending.changes}
    return Ending({**ending.changes, **lengths}, min(ending.epochs, SMALL["local.epochs"]))
