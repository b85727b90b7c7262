"""Drawings of archs as SVG: a chain of blocks for stage spaces, a graph for cells. Plain strings, no library.

A drawing stands alone and can also be put into a page next to others: it has no ids, scripts or style sheets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Arch, Space

WIDTH = 900
INK, SOFT, LINE = "#1f2933", "#5f6c7b", "#b8c2cc"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"

# Okabe and Ito's colours, which colour-blind readers tell apart; the dashes help in print
STYLES: dict[str, tuple[str, str]] = {
    "sep_conv_3x3": ("#0072b2", ""),
    "sep_conv_5x5": ("#56b4e9", ""),
    "dil_conv_3x3": ("#d55e00", "9 3"),
    "dil_conv_5x5": ("#e69f00", "9 3"),
    "max_pool_3x3": ("#009e73", "4 3"),
    "avg_pool_3x3": ("#cc79a7", "4 3"),
    "skip_connect": ("#333333", "1 3"),
    "noise": ("#8a8a8a", "1 5"),
}
TITLES = {"normal": "Normal cell", "reduce": "Reduction cell"}


# small parts ------------------------------------------------------------------------------------------------------


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{escape(FONT)}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            *parts,
            "</svg>",
        ]
    )


def _text(
    x: float, y: float, text: object, size: float = 12, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}'
    return f"<text {where}>{escape(str(text))}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str, extra: str = "") -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"'
    return f'<rect {shape} fill="{fill}" stroke="{stroke}"{extra}/>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _tail(name: str, length: int) -> str:
    """The end of a dotted name, which tells it from its neighbours."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _count(number: float) -> str:
    """Three digits and a unit: 1.93 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


# chains -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    name: str
    shape: tuple[int, ...]
    parameters: int = 0
    flops: int = 0

    @property
    def size(self) -> tuple[float, float]:
        """Roots of channels and of positions: height times width, or the tokens of (tokens, channels)."""
        positions = math.prod(self.shape[1:]) if len(self.shape) == 3 else self.shape[0] if len(self.shape) == 2 else 1
        return math.sqrt(self.shape[1] if len(self.shape) == 2 else self.shape[0]), math.sqrt(positions)


def chain_svg(space: Space, arch: Arch) -> str:
    """The arch's pieces as blocks, input to output: taller is more pixels, wider more channels, darker more FLOPs."""
    cost = space.cost(arch)
    steps = [_Step("input", space.input), *_steps(space, arch)]
    most = max(s.flops for s in steps) or 1
    widest, highest = (max(s.size[axis] for s in steps) for axis in range(2))
    sizes = [(10 + 66 * s.size[0] / widest, 10 + 54 * s.size[1] / highest) for s in steps]

    columns, slot, row = 8, 108.0, 158.0
    left, top = (WIDTH - columns * slot) / 2, 78.0
    parts = [
        _text(left, 32, space.name, 18, bold=True),
        _text(left, 54, f"{_count(cost.parameters)} parameters, {_count(cost.flops)} FLOPs per image", 13, SOFT),
        _text(WIDTH - left, 54, "taller: more pixels · wider: more channels · darker: more FLOPs", 12, SOFT, "end"),
    ]
    for i, (step, (width, height)) in enumerate(zip(steps, sizes, strict=True)):
        x, y = left + slot * (i % columns + 0.5), top + row * (i // columns) + 38
        if i:  # from the block before, or in from the margin where a row starts
            start = x - slot + sizes[i - 1][0] / 2 if i % columns else x - slot / 2 - 8
            parts.append(_arrow(start + 3, x - width / 2 - 3, y))
        fill, stroke = (_shade(step.flops / most), "#3b6ea5") if i else ("#ffffff", SOFT)
        parts.append(_box(x - width / 2, y - height / 2, width, height, fill, stroke))
        label = _text(x, y + 50, _tail(step.name, 15), 11.5, anchor="middle", bold=True)
        parts.append(f"<g><title>{escape(step.name)}</title>{label}</g>")
        lines = [" × ".join(map(str, step.shape))]
        if i:
            lines += [f"{_count(step.parameters)} param.", f"{_count(step.flops)} FLOPs"]
        parts += [_text(x, y + 65 + 14 * k, line, 11, SOFT, "middle") for k, line in enumerate(lines)]
    y = top + row * math.ceil(len(steps) / columns) + 10
    table = _options(space.options(arch), left, y)
    height = y + 20 * len(table) - (8 if table else 12)
    return _svg(f"{space.name}: {space.describe(arch)}", height, parts + table)


def _steps(space: Space, arch: Arch) -> list[_Step]:
    """A block per piece. Where that makes too many, the pieces of one module (its convolutions, say) are one block."""
    pieces = space.pieces(arch)
    merge = len(pieces) > 31
    found: list[_Step] = []
    for name, piece in pieces.items():
        parent, _, own = name.rpartition(".")
        label = parent if merge and parent.count(".") and not own.isdigit() else name or "network"
        step = _Step(label, piece.outputs[0], piece.cost.parameters, piece.cost.flops)
        if found and found[-1].name == label:
            before = found.pop()
            step = _Step(label, step.shape, before.parameters + step.parameters, before.flops + step.flops)
        found.append(step)
    return found


def _options(options: Mapping[str, object], left: float, top: float) -> list[str]:
    """The chosen options as a table; those with the same name before the dot, a stage mostly, share a line."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in options.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, []).append((rest, _short(str(value), 24)))
    longest = max((len(name) + len(value) for entries in groups.values() for name, value in entries), default=0)
    step = max(84.0, 6.9 * longest + 18)
    fit = max(1, int((WIDTH - 2 * left - 100) // step))
    lines: list[str] = []
    for group, entries in groups.items():
        for first in range(0, len(entries), fit):
            spans = [f'<tspan font-weight="600">{escape(_short(group, 14))}</tspan>'] if first == 0 else []
            for k, (name, value) in enumerate(entries[first : first + fit]):
                title = f'<tspan fill="{SOFT}">{escape(name)}</tspan> ' if name else ""
                spans.append(f'<tspan x="{left + 100 + step * k:.1f}">{title}{escape(value)}</tspan>')
            where = f'x="{left:.1f}" y="{top + 20 * len(lines):.1f}"'
            lines.append(f'<text {where} font-size="12" fill="{INK}">{"".join(spans)}</text>')
    return lines


def _shade(share: float) -> str:
    """Pale to strong blue."""
    pale, strong = (232, 240, 249), (58, 124, 186)
    return "#" + "".join(f"{round(a + (b - a) * math.sqrt(share)):02x}" for a, b in zip(pale, strong, strict=True))


def _arrow(x0: float, x1: float, y: float) -> str:
    line = f'<line x1="{x0:.1f}" y1="{y:.1f}" x2="{x1 - 5:.1f}" y2="{y:.1f}" stroke="{SOFT}"/>'
    return line + _head((x1, y), (1.0, 0.0), SOFT, 5)


def _head(tip: tuple[float, float], along: tuple[float, float], fill: str, size: float) -> str:
    norm = math.hypot(*along) or 1.0
    dx, dy = along[0] / norm, along[1] / norm
    base = tip[0] - size * 1.6 * dx, tip[1] - size * 1.6 * dy
    aside = (size * 0.6 * dy, -size * 0.6 * dx)
    corners = (tip, (base[0] + aside[0], base[1] + aside[1]), (base[0] - aside[0], base[1] - aside[1]))
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="{fill}"/>'


# cells ------------------------------------------------------------------------------------------------------------

Edge = tuple[int, int, str]
"""The state an edge leaves (0 and 1 are the inputs), the node it enters (from 2 on), and its operation."""
Point = tuple[float, float]
HEIGHT = 420  # of one cell


@dataclass(frozen=True)
class _Curve:
    """A cubic curve."""

    points: tuple[Point, Point, Point, Point]

    def at(self, t: float) -> Point:
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
        x, y = (sum(w * p[axis] for w, p in zip(weights, self.points, strict=True)) for axis in range(2))
        return x, y

    def moved(self, by: float) -> _Curve:
        """Aside, by about so many pixels."""
        (x0, y0), _, _, (x3, y3) = self.points
        norm = math.hypot(x3 - x0, y3 - y0) or 1.0
        dx, dy = -by * (y3 - y0) / norm, by * (x3 - x0) / norm
        a, b, c, d = ((x + dx, y + dy) for x, y in self.points)
        return _Curve((a, b, c, d))


def cells_svg(cells: Mapping[str, Sequence[Edge]]) -> str:
    """One graph per cell, one above the other, and a legend. Several operations on an edge lie side by side."""
    parts: list[str] = []
    for i, (name, edges) in enumerate(cells.items()):
        parts += _cell(TITLES.get(name, name), edges, 12 + i * HEIGHT)
    y = 12 + HEIGHT * len(cells)
    used = {op for edges in cells.values() for _, _, op in edges}
    known = [op for op in STYLES if op in used] + sorted(used - STYLES.keys())
    columns = 4
    for i, op in enumerate(known):
        colour, dash = _style(op)
        x, at = 36 + (i % columns) * (WIDTH - 60) / columns, y + 14 + 22 * (i // columns)
        parts.append(f'<line x1="{x:.1f}" y1="{at - 4}" x2="{x + 34:.1f}" y2="{at - 4}" {_stroke(colour, dash, 3)}/>')
        parts.append(_text(x + 42, at, op, 12))
    y += 22 * math.ceil(len(known) / columns)
    return _svg(", ".join(TITLES.get(name, name) for name in cells), y + 14, parts)


def cell_svg(edges: Sequence[Edge], title: str = "Cell") -> str:
    """One cell as a graph, left to right: two inputs, the nodes, the output."""
    return cells_svg({title: edges})


def _cell(title: str, edges: Sequence[Edge], top: float) -> list[str]:
    nodes = max([5, *(target for _, target, _ in edges)])
    middle = top + HEIGHT / 2 + 8
    first, last = 272.0, 742.0
    step = (last - first) / (nodes - 2)
    place: dict[int, Point] = {0: (74, middle - 62), 1: (74, middle + 62)}
    place |= {n: (first + (n - 2) * step, middle) for n in range(2, nodes + 1)}
    half = {n: (44.0, 17.0) if n < 2 else (19.0, 17.0) for n in place}
    out = (852.0, middle)

    together: dict[tuple[int, int], list[str]] = {}
    for source, target, op in edges:
        together.setdefault((source, target), []).append(op)
    amount = f"{len(together)} edges" + (f", {len(edges)} operations" if len(edges) > len(together) else "")
    curves = {pair: _route(*pair, place, half) for pair in together}
    parts = [
        _text(24, top + 22, title, 16, bold=True),
        _text(WIDTH - 24, top + 22, amount, 12, SOFT, "end"),
    ]
    for n in range(2, nodes + 1):  # every node goes to the output: thin, below everything
        (x, y), drop = place[n], 150 + 8 * (nodes - n)
        straight = _Curve(((x + 19, y), (x + 40, y), (out[0] - 60, y), (out[0] - 34, y)))
        bowed = _Curve(((x + 13, y + 17), (x + 34, y + drop), (out[0] - 4, y + drop), (out[0], y + 18)))
        path = _path(straight if n == nodes else bowed)
        parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.2"/>')
    for pair, ops in together.items():
        for i, op in enumerate(ops):
            colour, dash = _style(op)
            curve = curves[pair].moved(min(6.5, 26 / len(ops)) * (i - (len(ops) - 1) / 2))
            parts.append(f'<path d="{_path(curve)}" fill="none" {_stroke(colour, dash, 2.2)}/>')
            tip, before = curve.points[3], curve.at(0.93)
            parts.append(_head(tip, (tip[0] - before[0], tip[1] - before[1]), colour, 6))
    for n, (x, y) in place.items():
        (w, h), fed = half[n], n < 2 or any(target == n for _, target in together)
        extra = "" if fed else ' stroke-dasharray="3 3"'
        fill = "#e8f0f9" if n < 2 else "#ffffff"
        parts.append(_box(x - w, y - h, 2 * w, 2 * h, fill, INK, extra + ' stroke-width="1.3"'))
        label = ("cell k−2", "cell k−1")[n] if n < 2 else str(n - 2) if fed else "zero"
        parts.append(_text(x, y + 4.5, label, 13, anchor="middle", bold=n >= 2))
    parts.append(_box(out[0] - 34, out[1] - 18, 68, 36, "#e8f0f9", INK, ' stroke-width="1.3"'))
    parts.append(_text(out[0], out[1] + 4.5, "concat", 13, anchor="middle"))
    parts += _labels(together, curves, [(x, y, *half[n]) for n, (x, y) in place.items()])
    return parts


def _route(source: int, target: int, place: Mapping[int, Point], half: Mapping[int, tuple[float, float]]) -> _Curve:
    """Edges of the first input pass above, of the second below; those between nodes bow towards the emptier side.

    At their node outer edges arrive to the right of inner ones, so that they do not cross on the way.
    """
    (x0, y0), (x1, y1) = place[source], place[target]
    width, height = half[target]
    if source < 2:
        side, far = (-1, 1)[source], target - 2
        lift = side * (16 + 46 * far)
        start, end = (x0 + half[source][0], y0 + side * 3 * far), (x1 + (9 if far else -4), y1 + side * height)
        return _Curve((start, (x0 + 96, y0 + lift), (x1 - (10 + 14 * far), y0 + lift), end))
    span = target - source
    if span == 1:
        return _Curve(((x0 + width, y0), (x0 + 50, y0), (x1 - 50, y1), (x1 - width, y1)))
    side = -1 if source == 2 and span % 2 == 0 else 1
    lift = side * (18 + 34 * span)
    start, end = (x0 + 4 * (4 - span), y0 + side * height), (x1 - 9 * (4 - span) + 8, y1 + side * height)
    return _Curve((start, (x0 + 26, y0 + lift), (x1 - 18, y1 + lift), end))


def _labels(
    together: Mapping[tuple[int, int], Sequence[str]],
    curves: Mapping[tuple[int, int], _Curve],
    taken: list[tuple[float, float, float, float]],
) -> list[str]:
    """A label on each curve, where it covers least of the boxes, the labels already placed and the other curves."""
    samples = {pair: [curve.at(k / 24) for k in range(25)] for pair, curve in curves.items()}
    parts: list[str] = []
    for pair in sorted(together, key=lambda p: p[1] - p[0]):  # short edges have the least choice
        ops = together[pair]
        text = " + ".join(_label(op) for op in ops) if len(ops) < 3 else f"{len(ops)} operations"
        w, h = 3.15 * len(text) + 6, 9.0

        def clash(t: float, pair: tuple[int, int] = pair, w: float = w, h: float = h) -> float:
            x, y = curves[pair].at(t)
            covered = sum(
                max(0.0, w + bw + 2 - abs(x - bx)) * max(0.0, h + bh + 2 - abs(y - by)) for bx, by, bw, bh in taken
            )
            crossed = sum(
                abs(px - x) < w + 2 and abs(py - y) < h + 2
                for p, points in samples.items()
                if p != pair
                for px, py in points
            )
            return covered + 30 * crossed + 20 * abs(t - 0.5)

        x, y = curves[pair].at(min((k / 40 for k in range(8, 33)), key=clash))
        taken.append((x, y, w, h))
        colour = _style(ops[0])[0] if len(ops) == 1 else SOFT
        parts.append(_box(x - w, y - h, 2 * w, 2 * h, "#ffffff", colour))
        parts.append(_text(x, y + 4, text, 11, anchor="middle"))
    return parts


def _label(op: str) -> str:
    kind, _, size = op.rpartition("_")
    if size[:1].isdigit():
        return f"{kind.replace('_conv', '').replace('_', ' ')} {size.replace('x', '×')}"
    return op.removesuffix("_connect").replace("_", " ")


def _style(op: str) -> tuple[str, str]:
    return STYLES.get(op, (SOFT, "6 2"))


def _stroke(colour: str, dash: str, width: float) -> str:
    dashes = (
        f' stroke-dasharray="{dash}" stroke-linecap="{"round" if dash.startswith("1") else "butt"}"' if dash else ""
    )
    return f'stroke="{colour}" stroke-width="{width:g}"{dashes}'


def _path(curve: _Curve) -> str:
    a, *rest = (f"{x:.1f} {y:.1f}" for x, y in curve.points)
    return f"M{a} C" + ", ".join(rest)
