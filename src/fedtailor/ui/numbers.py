"""Numbers for JSON: short, and null where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def number(value: Any, digits: int = 6) -> float | int | None:
    """A number with so many significant digits; None for nan, and for what is no number."""
    if value is None or isinstance(value, (str, bool)):
        return None
    value = float(value)
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def numbers(values: Iterable[Any], digits: int = 6) -> list[float | int | None]:
    return [number(value, digits) for value in values]


def shares(values: np.ndarray) -> list[int | None]:
    """Accuracies in ten-thousandths: half the text of a decimal fraction."""
    return [round(1e4 * v) if math.isfinite(v) else None for v in values.tolist()]
