"""Matplotlib drawings as SVG, for commands that write a picture: without pyplot and without any global state."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedtailor.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, MUTED, RULE = "#1f2933", "#5f6c7b", "#e4e9ef"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, INK)
HALF = (5.2, 3.1)

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label may hold a dollar sign
    "font.family": "DejaVu Sans",  # wide, so that whatever the page sets in its place fits
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#b8c2cc",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": "#b8c2cc",
    "ytick.color": "#b8c2cc",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
}


@contextmanager
def drawing(name: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[tuple[Any, Any, list]]:
    """A figure, its axes in one list, and a list that holds the SVG after the block."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "this picture needs matplotlib, which is not installed: pip install 'fedtailor[report]'"
        ) from None
    out: list[str] = []
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        yield figure, axes, out
        out.append(_inline(figure, name))


def _inline(figure: Figure, name: str) -> str:
    """The drawing as an <svg> element: no prolog, no metadata, and ids that stay unique among the page's drawings."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for length in ("width", "height"):  # the page decides; the viewBox keeps the shape
        svg = re.sub(rf'(<svg[^>]*?) {length}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", svg)
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def percent_axis(axes: Axes, axis: str = "y") -> None:
    from matplotlib.ticker import FuncFormatter

    getattr(axes, f"{axis}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
