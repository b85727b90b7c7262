"""Small pictures as SVG text: lines over rounds, and the spread over clients. The same numbers give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 800, 52, 280, 18, 34
Points = Sequence[Sequence[float]]


def lines(curves: Mapping[str, Points], across: str, up: str, height: int = 300) -> str:
    """One line per name; x as given, y in per cent."""
    xs = [p[0] for points in curves.values() for p in points]
    ys = [100 * p[1] for points in curves.values() for p in points]
    low, high = 10 * int(min(ys) // 10), 100.0
    most = max(xs)
    wide, tall = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM

    def at(x: float, y: float) -> str:
        return f"{LEFT + wide * x / most:.1f},{TOP + tall * (high - y) / (high - low):.1f}"

    out = [_grid(low, high, tall), _text(LEFT + wide / 2, height - 4, across, "middle")]
    out += [_text(LEFT + wide * t / most, TOP + tall + 14, f"{t:g}", "middle") for t in _ticks(most)]
    for i, (name, points) in enumerate(curves.items()):
        colour, dash = COLOURS[i % len(COLOURS)], "" if i < len(COLOURS) else ' stroke-dasharray="5 3"'
        path = " ".join(at(x, 100 * y) for x, y in points)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{path}"/>')
        y = TOP + 10 + 17 * i
        out.append(f'<path d="M{LEFT + wide + 14} {y}h22" stroke="{colour}" stroke-width="3"{dash}/>')
        out.append(_text(LEFT + wide + 42, y + 4, f"{name}, {100 * points[-1][1]:.1f}"))
    return _svg(max(height, TOP + 20 + 17 * len(curves)), [_text(4, 10, up), *out])


def spreads(values: Mapping[str, Sequence[float]]) -> str:
    """One strip per name: a dot per client, and their mean; in per cent."""
    height = TOP + 22 * len(values) + BOTTOM
    low = 10 * int(min(100 * v for found in values.values() for v in found) // 10)
    left, wide = 300, WIDTH - 300 - 30

    def x(value: float) -> float:
        return left + wide * (100 * value - low) / (100 - low)

    out = []
    for tick in range(low, 101, 10):
        at = x(tick / 100)
        out.append(f'<path d="M{at:.1f} {TOP}V{height - BOTTOM}" stroke="#8886" stroke-width="0.6"/>')
        out.append(_text(at, height - 18, f"{tick} %", "middle"))
    for i, (name, found) in enumerate(values.items()):
        y, colour = TOP + 22 * i + 12, COLOURS[i % len(COLOURS)]
        out.append(_text(left - 10, y + 4, name, "end"))
        out += [f'<circle cx="{x(v):.1f}" cy="{y}" r="3" fill="{colour}" fill-opacity="0.25"/>' for v in sorted(found)]
        mean = x(sum(found) / len(found))
        out.append(f'<path d="M{mean:.1f} {y - 8}v16" stroke="{colour}" stroke-width="2.5"/>')
    return _svg(height, out)


def _ticks(most: float) -> list[float]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if most / s <= 8)
    return [t * step for t in range(int(most // step) + 1)]


def _grid(low: float, high: float, tall: float) -> str:
    out = []
    for tick in range(int(low), int(high) + 1, 10):
        y = TOP + tall * (high - tick) / (high - low)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8886" stroke-width="0.6"/>')
        out.append(_text(LEFT - 6, y + 4, f"{tick} %", "end"))
    return "\n".join(out)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    # grey reads on a light page and on a dark one
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="11" fill="#777">', *parts, "</svg>"]) + "\n"
