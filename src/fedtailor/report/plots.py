"""The report's figures: matplotlib drawings as inline SVG, without pyplot and without any global state.

Keys and captions are not drawn but handed to the page, which sets them in its own type and escapes them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtailor.errors import UserError
from fedtailor.report.words import percent
from fedtailor.runs.results import Floats, Results, Series, worst_tenth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; lines also differ in dash, dots also in shape.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, MUTED, RULE = "#1f2933", "#5f6c7b", "#e4e9ef"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, INK)
DASHES = {"-": "line", "--": "dash", ":": "dots", "-.": "dashdot"}  # as drawn, as named in the key
KIND_STYLE = {"personal": (BLUE, "-"), "global": (ORANGE, "--"), "new": (GREEN, ":")}
HALF, WIDE = (5.2, 3.1), (10.6, 3.3)

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


@dataclass(frozen=True)
class Key:
    """An entry of a figure's key, set by the page: line, dash, dots, dashdot, dot, ring, diamond, up or square."""

    label: str
    colour: str
    shape: str = "line"


@dataclass(frozen=True)
class Picture:
    """A figure for the page: the drawing, what it is called, how to read it, and its content in words."""

    title: str
    svg: str
    caption: str
    alt: str
    keys: tuple[Key, ...] = ()
    wide: bool = False


@contextmanager
def drawing(name: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[tuple[Any, Any, list]]:
    """A figure, its axes in one list, and a list that holds the SVG after the block."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the report needs matplotlib, which is not installed: pip install 'fedtailor[report]'"
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


def round_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    axes.set_xlabel("round")
    axes.grid(axis="y")


def _log_axis(axes: Axes) -> None:
    """Plain numbers at 1, 2 and 5: matplotlib's own labels for a log axis need math text, which user strings forbid."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _fit(axes: Axes, low: float, high: float) -> None:
    """Accuracy limits: near the data, never beyond 0 and 100 % by more than a dot."""
    room = max(0.02, 0.08 * (high - low))
    axes.set_ylim(max(-0.02, low - room), min(1.02, high + room))


# ---- one run


def accuracy_curves(run: Results) -> Picture | None:
    """Validation accuracy over the rounds, mean and a band of one std over clients."""
    found = {kind: run.series(f"{kind}_accuracy", "val") for kind in KIND_STYLE}
    found = {kind: series for kind, series in found.items() if len(series.rounds)}
    if not found:
        return None
    with drawing("accuracy", HALF) as (_, (axes,), out):
        for kind, series in found.items():
            colour, dash = KIND_STYLE[kind]
            low, high = np.clip(series.mean - series.std, 0, 1), np.clip(series.mean + series.std, 0, 1)
            axes.fill_between(series.rounds, low, high, color=colour, alpha=0.13, linewidth=0)
            _line(axes, series, colour, dash)
        percent_axis(axes)
        round_axis(axes)
    keys = tuple(Key(kind, KIND_STYLE[kind][0], DASHES[KIND_STYLE[kind][1]]) for kind in found)
    return Picture(
        "Validation accuracy",
        out[0],
        "Mean over clients; the band is one std over clients on either side.",
        "; ".join(_from_to(f"{kind} validation accuracy", series, percent) for kind, series in found.items()),
        keys,
    )


def _line(axes: Axes, series: Series, colour: str, dash: str) -> None:
    marker = "o" if len(series.rounds) < 4 else None  # a line through one point is invisible
    axes.plot(series.rounds, series.mean, color=colour, linestyle=dash, marker=marker, markersize=4)


def _from_to(what: str, series: Series, say: Callable[[float], str]) -> str:
    first, last = say(float(series.mean[0])), say(float(series.mean[-1]))
    return f"{what}: {first} in round {series.rounds[0]}, {last} in round {series.rounds[-1]}"


def loss_curve(run: Results) -> Picture | None:
    series = run.series("loss", "train")
    if not len(series.rounds):
        return None
    with drawing("loss", HALF) as (_, (axes,), out):
        low, high = series.mean - series.std, series.mean + series.std
        axes.fill_between(series.rounds, low, high, color=INK, alpha=0.1, linewidth=0)
        _line(axes, series, INK, "-")
        round_axis(axes)
    return Picture(
        "Training loss",
        out[0],
        "Mean over the round's participants, with one std over them on either side.",
        _from_to("training loss", series, lambda value: f"{value:.3g}"),
        (Key("train loss", INK),),
    )


def client_accuracy(run: Results) -> Picture | None:
    """Every client's accuracy at the end, worst first, with the worst decile marked."""
    split, at = run.reported_at()
    personal = known(run.per_client("personal_accuracy", split, at))
    if not personal:
        return None
    order = sorted(personal, key=lambda client: (personal[client], client))
    shared = run.per_client("global_accuracy", split, at)
    own = np.array([personal[client] for client in order])
    theirs = np.array([shared.get(client, np.nan) for client in order])
    worst, x = worst_tenth(len(order)), np.arange(1, len(order) + 1)
    dot = dot_size(len(order))
    with drawing("clients", WIDE) as (_, (axes,), out):
        axes.axvspan(0.5, worst + 0.5, color=RED, alpha=0.07, linewidth=0)
        axes.axhline(own.mean(), color=BLUE, linewidth=0.9, linestyle=(0, (5, 4)))
        if shared and len(order) <= 200:
            axes.vlines(x, np.minimum(own, theirs), np.maximum(own, theirs), color="#c9d2db", linewidth=1)
        if shared:
            axes.scatter(x, theirs, s=dot, facecolor="white", edgecolor=ORANGE, linewidth=1.1, zorder=3)
        axes.scatter(x[worst:], own[worst:], s=dot, color=BLUE, zorder=4, linewidth=0)
        axes.scatter(x[:worst], own[:worst], s=dot * 1.2, color=RED, marker="D", zorder=4, linewidth=0)
        axes.annotate(
            f"mean {percent(own.mean(), 1)}", (1, own.mean()), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", color=BLUE, fontsize=8, annotation_clip=False,
        )  # fmt: skip
        axes.set_xlim(0.5, len(order) + 0.5)
        _fit(axes, float(np.nanmin([own, theirs])), float(np.nanmax([own, theirs])))
        if len(order) <= 20:
            names = [cut(run.client_name(client), 14) for client in order]
            slanted = len(order) * max(map(len, names)) > 130
            axes.set_xticks(x, names, rotation=35 if slanted else 0, ha="right" if slanted else "center")
        else:
            axes.set_xlabel("clients, sorted by personal accuracy")
        percent_axis(axes)
        axes.grid(axis="y")
    keys = [Key("personal", BLUE, "dot"), Key("personal, worst decile", RED, "diamond")]
    keys += [Key("global, same client", ORANGE, "ring")] if shared else []
    caption = f"{split.capitalize()} accuracy of each client in round {at}, lowest first; the worst decile is shaded."
    alt = f"{len(order)} clients between {percent(own[0])} and {percent(own[-1])}, mean {percent(own.mean())}"
    return Picture("Accuracy, client by client", out[0], caption, alt, tuple(keys), wide=True)


def accuracy_by_samples(run: Results) -> Picture | None:
    """Does having more data go with a better network?"""
    split, at = run.reported_at()
    counts = run.facts.get("train_counts") or []
    groups = {kind: known(run.per_client(f"{kind}_accuracy", split, at)) for kind in ("personal", "new")}
    points = {
        kind: [(sum(counts[client]), value) for client, value in found.items() if client < len(counts)]
        for kind, found in groups.items()
    }
    if not points["personal"]:
        return None
    sizes, values = np.array([point for found in points.values() for point in found], dtype=float).T
    with drawing("samples", HALF) as (_, (axes,), out):
        for (kind, found), marker in zip(points.items(), "o^", strict=True):
            if found:
                look = {"s": dot_size(len(values)), "color": KIND_STYLE[kind][0], "marker": marker, "linewidth": 0}
                axes.scatter(*zip(*found, strict=True), alpha=0.8, **look)
        if sizes.min() > 0 and sizes.max() > 10 * sizes.min():
            _log_axis(axes)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        _fit(axes, float(values.min()), float(values.max()))
        percent_axis(axes)
        axes.set_xlabel("training samples of the client")
        axes.grid()
    own = np.array(points["personal"], dtype=float).T
    alt = f"{len(own[0])} clients with {own[0].min():.0f} to {own[0].max():.0f} training samples"
    if len(own[0]) >= 10 and own[0].max() > 2 * own[0].min() and own[1].std() > 0:  # else it is a play of chance
        alt += f"; correlation of accuracy with the number of samples {np.corrcoef(own)[0, 1]:.2f}"
    shapes = {"personal": "dot", "new": "up"}
    keys = tuple(Key(kind, KIND_STYLE[kind][0], shape) for kind, shape in shapes.items() if points[kind])
    return Picture("Accuracy against data", out[0], f"{alt}. Each dot is a client.", alt, keys)


def gain(run: Results) -> Picture | None:
    """What a client's own network is better by than the server's one model."""
    split, at = run.reported_at()
    own, shared = (known(run.per_client(f"{kind}_accuracy", split, at)) for kind in ("personal", "global"))
    both = np.array([100 * (own[client] - shared[client]) for client in own.keys() & shared.keys()])
    if not len(both) or not both.any():
        return None
    reach = max(1.0, float(np.abs(both).max()))
    edges = np.linspace(-reach, reach, 22)  # 21 bins: zero lies in the middle of one
    with drawing("gain", HALF) as (_, (axes,), out):
        axes.hist([both[both <= 0], both[both > 0]], edges, color=[RED, BLUE], stacked=True, rwidth=0.92)
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set_xlabel("personal − global, percentage points")
        axes.set_ylabel("clients")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
    gaining = int((both > 0).sum())
    alt = f"{gaining} of {len(both)} clients gain; the median gain is {np.median(both):+.1f} percentage points"
    keys = (Key("own network better", BLUE, "square"), Key("equal or worse", RED, "square"))
    return Picture("Gain over the global model", out[0], f"{alt}.", alt, keys)


def option_shares(names: Sequence[str], options: Sequence[int], edges: Floats, shares: list[Floats]) -> Picture:
    """How often each option of each dimension was sampled: one panel per dimension, one step per window of rounds."""
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    with drawing("options", (10.6, 0.3 + 1.5 * lines), lines, columns) as (_, panels, out):
        for axes, name, steps, share in zip(panels, names, options, shares, strict=False):
            colours = [step_colour(i, steps) for i in range(steps)]
            steady = np.concatenate([share, share[:, -1:]], axis=1)  # the last window too lasts until its right edge
            axes.stackplot(edges, steady, colors=colours, linewidth=0, step="post")
            axes.set_title(cut(name, 26), fontsize=9, color=INK, loc="left", pad=4)
            axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 1), yticks=(0, 0.5, 1))
            percent_axis(axes)
            round_axis(axes)
            axes.set_xlabel("")
        for axes in panels[len(names) :]:
            axes.set_visible(False)
    step = float(np.diff(edges).mean())
    caption = "Share of participants that were sent each option; the first option is the lightest and lowest. "
    caption += f"Each step is about {step:.0f} rounds." if step > 1 else "Each step is a round."
    return Picture("Options sampled over the rounds", out[0], caption, f"shares for {', '.join(names)}", wide=True)


def step_colour(step: int, steps: int) -> str:
    """A blue from light to dark, for the options of one dimension in their order."""
    at = step / max(1, steps - 1)
    light, dark = np.array([222, 235, 247]), np.array([8, 69, 128])
    red, green, blue = np.rint(light + at * (dark - light)).astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def dot_size(n: int) -> float:
    """Smaller dots for more clients."""
    return float(np.clip(1200 / max(n, 1), 13, 46))


def known(values: dict[int, float]) -> dict[int, float]:
    return {client: value for client, value in values.items() if not np.isnan(value)}


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
