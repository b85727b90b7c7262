"""The class by client picture of a partition, as SVG text and for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_RAMP = np.array([(0xE3, 0xEE, 0xF9), (0x9F, 0xC9, 0xE2), (0x4B, 0x97, 0xC9), (0x1D, 0x62, 0xA8), (0x08, 0x2F, 0x66)])
_INK, _QUIET, _EMPTY = "#141c26", "#5f6b7a", "#f5f7fa"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_BLOCKS = "·▁▂▃▄▅▆▇█"
_LETTER = 6.6  # width of a letter, near enough to lay out labels without a font
_BARS = 44  # height of the strip with the clients' sizes


def _colour(share: float) -> str:
    """Light to dark blue; the square root keeps small counts apart."""
    at = np.sqrt(share) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    red, green, blue = np.rint(_RAMP[low] + (_RAMP[low + 1] - _RAMP[low]) * (at - low)).astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _ink(share: float) -> str:
    return "#ffffff" if share > 0.28 else _INK


def _shorter(name: str, length: int = 18) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def class_by_client_svg(counts: np.ndarray, classes: Sequence[str], names: Sequence[str]) -> str:
    """A stand-alone SVG: a column per client, a row per class, the darker the more images; sizes as bars above."""
    n_clients, n_classes = counts.shape
    wide, high = float(np.clip(900 / n_clients, 2.5, 64)), float(np.clip(420 / n_classes, 7, 30))
    gap = 1.5 if wide >= 12 else 0.6 if wide >= 5 else 0.0
    left, top = round(26 + _LETTER * max(6, *(len(_shorter(name)) for name in classes))), 84 + _BARS
    width, height = wide * n_clients, high * n_classes
    below, axis = _client_axis(names, left, top + height, wide)
    full_width, full_height = max(left + width + 28, 560.0), top + height + below + 50
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width:.0f} {full_height:.0f}" '
        f'width="{full_width:.0f}" height="{full_height:.0f}" role="img" font-family="{_FONT}" font-size="12" '
        f'fill="{_INK}">',
        "<title>Images per class and client</title>",
        '<rect width="100%" height="100%" rx="10" fill="#ffffff"/>',
        _text(20, 32, "Images per class and client", ' font-size="17" font-weight="600"'),
        _text(20, 52, _summary(counts), f' fill="{_QUIET}"'),
        *_size_bars(counts.sum(1), names, left, top - 8, wide, gap),
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{_EMPTY}"/>',
    ]
    most = max(int(counts.max()), 1)
    numbers = wide >= 8 + _LETTER * len(f"{most:,}") and high >= 14
    for client, label in np.argwhere(counts > 0).tolist():
        count = int(counts[client, label])
        share, x, y = count / most, left + client * wide, top + label * high
        out.append(
            f'<rect x="{x + gap / 2:.2f}" y="{y + min(gap, 1) / 2:.2f}" width="{wide - gap:.2f}" '
            f'height="{high - min(gap, 1):.2f}" rx="{min(gap * 2, 3):g}" fill="{_colour(share)}">'
            f"<title>{escape(names[client])}, {escape(classes[label])}: {count:,}</title></rect>"
        )
        if numbers:
            style = f' text-anchor="middle" font-size="11" fill="{_ink(share)}" pointer-events="none"'
            out.append(_text(x + wide / 2, y + high / 2 + 4, f"{count:,}", style))
    out += [
        _text(left - 8, top + (label + 0.5) * high + 4, _shorter(classes[label]), ' text-anchor="end"')
        for label in range(0, n_classes, _step(12 / high))
    ]
    return "\n".join([*out, *axis, *_legend(left, top + height + below + 14, most), "</svg>"]) + "\n"


def _step(least: float) -> int:
    """Label every 1st, 2nd, 5th, 10th, ... so that the labels have room."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if step >= least)


def _client_axis(names: Sequence[str], left: float, bottom: float, wide: float) -> tuple[float, list[str]]:
    """The clients' labels and the height they take: level where they fit, else slanted."""
    numbered = all(re.match(r"client-\d", name) for name in names)
    labels = [re.sub(r"^client-0*(?=\d)", "", _shorter(name)) for name in names]
    longest = max(len(label) for label in labels) * _LETTER
    level = numbered or longest + 6 <= wide
    step = _step((longest + 6 if level else 14) / wide)
    out = [_text(left - 8, bottom + 17, "client", f' text-anchor="end" fill="{_QUIET}"')] if numbered else []
    for client in range(0, len(labels), step):
        x, y = left + (client + 0.5) * wide, bottom + 17
        turn = ' text-anchor="middle"' if level else f' text-anchor="end" transform="rotate(-45 {x:.1f} {y - 6:.1f})"'
        out.append(_text(x, y, labels[client], f'{turn} font-size="11"'))
    return (26 if level else 18 + 0.72 * longest), out


def _summary(counts: np.ndarray) -> str:
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    spread = f"{sizes.min():,}" if sizes.min() == sizes.max() else f"{sizes.min():,} to {sizes.max():,}"
    kinds = f"{held.min()}" if held.min() == held.max() else f"{held.min()} to {held.max()}"
    whole = f"{len(sizes)} clients · {counts.shape[1]} classes · {sizes.sum():,} images"
    return f"{whole} · {spread} images and {kinds} classes per client"


def _size_bars(sizes: np.ndarray, names: Sequence[str], left: float, base: float, wide: float, gap: float) -> list[str]:
    most = max(int(sizes.max()), 1)
    end = f'text-anchor="end" font-size="11" fill="{_QUIET}"'
    out = [
        _text(left - 8, base - _BARS + 8, f"{most:,}", f" {end}"),
        _text(left - 8, base, "images", f" {end}"),
        f'<line x1="{left:.1f}" x2="{left + wide * len(sizes):.1f}" y1="{base}" y2="{base}" stroke="#c9d1db"/>',
    ]
    for client, size in enumerate(sizes.tolist()):
        tall, bar = _BARS * size / most, min(wide - gap, 36)
        x = left + (client + 0.5) * wide - bar / 2
        out.append(
            f'<rect x="{x:.2f}" y="{base - tall:.2f}" width="{bar:.2f}" height="{tall:.2f}" fill="#b4bfcc">'
            f"<title>{escape(names[client])}: {size:,} images</title></rect>"
        )
    return out


def _legend(x: float, y: float, most: int) -> list[str]:
    steps, step = 60, 3
    out = [
        f'<rect x="{x + i * step:.1f}" y="{y}" width="{step + 0.3}" height="10" fill="{_colour(i / (steps - 1))}"/>'
        for i in range(steps)
    ]
    marks = [(1 / most, "1"), (0.25, f"{most // 4:,}"), (1.0, f"{most:,}")] if most >= 8 else [(1.0, f"{most}")]
    for share, words in marks:
        at = x + steps * step * share
        out.append(_text(at, y + 24, words, f' text-anchor="middle" font-size="11" fill="{_QUIET}"'))
    out.append(_text(x + steps * step + 14, y + 9, "images in a cell", f' font-size="11" fill="{_QUIET}"'))
    return out


def class_by_client_text(counts: np.ndarray, classes: Sequence[str], names: Sequence[str], rows: int = 40) -> Table:
    """A table for the terminal: numbers on shades for few classes, one small bar per class for many."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    most = max(int(counts.max()), 1)
    few, digits = len(classes) <= 12, len(str(most))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1) if not few else (0, 0), caption=_summary(counts))
    table.add_column("client", no_wrap=True)
    table.add_column(" images", justify="right", no_wrap=True)
    if few:
        for name in classes:
            # the columns that give way in a narrow terminal, down to what the numbers need
            table.add_column(_shorter(name, 10), justify="right", overflow="ellipsis", min_width=digits)
    else:
        table.add_column(f"classes 0 to {len(classes) - 1}, taller: more images", overflow="fold")
    for name, row in list(zip(names, counts.tolist(), strict=True))[:rows]:
        if few:
            cells = [_shade(f"{count:>{digits}}", count / most) if count else Text("·", style="dim") for count in row]
        else:
            cells = [Text("".join(_BLOCKS[int(np.ceil(np.sqrt(count / most) * 8))] for count in row), style="cyan")]
        table.add_row(f"{_shorter(name)} ", f"{sum(row):,} ", *cells)
    if len(names) > rows:
        table.add_row(f"… and {len(names) - rows} more")
    return table


def _shade(words: str, share: float) -> Text:
    from rich.text import Text

    return Text(words, style=f"{_ink(share)} on {_colour(share)}")
