"""What a method sends, keeps and learns, in words and as a diagram; and all methods in one table.

Everything comes from the methods' cards and from rehearsals, in which messages are built and counted but nothing is
trained.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import tomllib
from typing import Any

from ..card import Message, Names
from ..config import Config, load
from ..errors import UserError
from ..method import Method
from ..registry import lookup, names
from ..runs.rehearse import Rehearsal, rehearse

WIDTH = 100
SMALL = {"clients": 4, "participants": 2, "rounds": 6, "evaluate_every": 100}  # enough for every phase of a method
COLUMNS = (
    "method",
    "shared part",
    "personal part",
    "policy",
    "search at",
    "goes down",
    "goes up",
    "handles",
    "compute",
    "bytes",
    "server memory",
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a client's round and the server's state cost, as multiples of FedAvg's on the same networks."""

    compute: float
    bytes: float
    server_memory: float


def costs(config: Config, found: Rehearsal) -> Costs:
    """A rehearsal against FedAvg on the same network, or on archs of the same space where the method chooses them."""
    archs = config.archs or ("" if config.net else _given(found))
    base = _fedavg(dataclasses.replace(config, method={"name": "fedavg"}, archs=archs).to_toml())
    sent = (found.bytes_down + found.bytes_up) / (base.bytes_down + base.bytes_up)
    return Costs(found.flops / base.flops, sent, found.held / base.held)


def _given(found: Rehearsal) -> str:
    """The archs that FedAvg gets where the method chooses its own."""
    return "widest" if found.space.ordered() else "random"


def _beside(config: Config, found: Rehearsal) -> str:
    """What FedAvg trains in the comparison."""
    if config.net:
        return "on the same network"
    archs = {"widest": "the largest network", "random": "random networks"}[_given(found)]
    return f"on {archs} of the space {found.space.name}"


@functools.lru_cache(maxsize=16)
def _fedavg(toml: str) -> Rehearsal:
    """FedAvg's rehearsal of a resolved config: many methods are compared with the same one."""
    return rehearse(load(tomllib.loads(toml)))


def typical(method: str) -> Config:
    """The demo with the method, small."""
    return load("demo", {"method.name": method, **SMALL, **lookup("method", method).example})


# all methods ------------------------------------------------------------------------------------------------------


def row(name: str) -> dict[str, str]:
    """One line of the table of methods."""
    config = typical(name)
    found = rehearse(config)
    card, cost = found.method.card, costs(config, found)
    return dict(
        zip(
            COLUMNS,
            (
                name,
                card.shared,
                card.personal,
                card.policy,
                card.search,
                sent(card.down),
                sent(card.up),
                ", ".join(card.handles) or "none",
                *(times(value) for value in dataclasses.astuple(cost)),
            ),
            strict=True,
        )
    )


def table() -> list[dict[str, str]]:
    """Every method that ships, the ones that search last."""
    order = sorted(names("method"), key=lambda name: (lookup("method", name).needs, name))
    return [row(name) for name in order]


def markdown() -> str:
    """The table for a page of the documentation."""
    rows = table()
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| `{r['method']}` | {' | '.join(r[c] for c in COLUMNS[1:])} |" for r in rows]
    return "\n".join(lines)


def sent(message: Message) -> str:
    """A message in a few words; facts, which are small, are left out."""
    parts = [part for part in message.parts if part != "nothing"]
    words = ([" or ".join(parts)] if parts else []) + [plain(name) for name in message.extra]
    return " + ".join(words) or "nothing"


def plain(name: str) -> str:
    """A declared name without the pattern: tensors packed under one name are one thing."""
    return "all tensors" if name == "*" else name.removesuffix(":*")


def times(value: float) -> str:
    return "0" if value == 0 else f"{value:.2f}x" if value < 9.95 else f"{value:.0f}x"


def kilobytes(value: float) -> str:
    return "nothing" if not value else f"{value / 1e3:.1f} kB" if value < 1e6 else f"{value / 1e6:.1f} MB"


# one method -------------------------------------------------------------------------------------------------------


def explain(name: str) -> str:
    """A method on one page of text."""
    method: type[Method] = lookup("method", name)
    card = method.card
    if not card.shared:
        raise UserError(f"method '{name}' declares no card, so there is nothing to explain. See 'Write a method'.")
    try:
        config = typical(name)
        found = rehearse(config)
        measured, beside = costs(config, found), _beside(config, found)
    except UserError:  # a method of the user's own need not run on the demo
        found = measured = beside = None
    lines = [_about(method), f"paper: {method.paper}", ""]
    lines += columns(
        {
            "shared part": card.shared,
            "personal part": card.personal,
            "policy": card.policy,
            "search at": card.search,
            "handles": ", ".join(card.handles) + " heterogeneity" if card.handles else "no heterogeneity",
            "runs on": runs_on(method),
        }
    )
    lines += ["", *diagram(method, found)]
    if measured:
        lines += ["", f"compared with FedAvg {beside}:"]
        lines += columns({k.replace("_", " "): times(v) for k, v in dataclasses.asdict(measured).items()})
    options = {f.name: f"{_default(f)}" for f in dataclasses.fields(method) if f.init}  # type: ignore[arg-type]
    lines += ["", "options:", *(columns(options) if options else ["  none"])]
    lines += ["", "deviations from the paper:", *(_bullets(method.deviations) or ["  none"])]
    return "\n".join(lines)


def _about(method: type[Method]) -> str:
    """The first line on a method: its class's, where that has words of its own, or else its file's."""
    own = method.__doc__ or ""
    generated = own.startswith(f"{method.__name__}(")  # by the dataclass decorator
    text = own if own and not generated else inspect.getdoc(inspect.getmodule(method)) or ""
    return text.strip().split("\n", 1)[0]


def diagram(method: type[Method], found: Rehearsal | None) -> list[str]:
    """Server on the left, client on the right, messages between them."""
    card, half = method.card, WIDTH // 2
    left = ["SERVER holds", *columns(card.holds or {"nothing": ""}, half - 2)]
    right = ["CLIENT keeps between rounds", *columns(card.keeps or {"nothing": ""}, half - 2)]
    height = max(len(left), len(right))
    rows = [f"{a:<{half}}{b}" for a, b in zip(_padded(left, height), _padded(right, height), strict=True)]
    rows.append("")
    for way, message in (("down", card.down), ("up", card.up)):
        size = f"{kilobytes(getattr(found, f'bytes_{way}'))}" if found else ""
        arrow = f"{way}: {sent(message)}" + (f" ({size})" if size and size != "nothing" else "")
        rows.append(_arrow(arrow, way))
        rows += columns({plain(n): m for n, m in (message.extra | message.facts).items()}, WIDTH, "      ")
    return [line.rstrip() for line in rows]


def _arrow(text: str, way: str) -> str:
    line = f"  {text} ".ljust(WIDTH - 2, "-")
    return f"  | {line[2:]}>" if way == "down" else f"  < {line[2:]}|"


def runs_on(method: type[Method]) -> str:
    spaces = [s for s in names("space") if method.runs_on(lookup("space", s))]
    if method.needs == "space":
        return f"spaces {', '.join(spaces)}"
    nets = [n for n in names("net") if method.runs_on(lookup("net", n))]
    words = "any fixed network" if len(nets) == len(names("net")) else f"nets {', '.join(nets)}"
    if method.one_network:
        return f"{words}; no archs per client: {method.one_network}"
    return f"{words}, or archs given to the clients"


def columns(pairs: Names, width: int = WIDTH, indent: str = "  ") -> list[str]:
    """Names and texts in two columns, texts wrapped."""
    wide = max((len(n) for n in pairs), default=0) + 2
    found: list[str] = []
    for name, text in pairs.items():
        parts = textwrap.wrap(text, width - wide - len(indent)) or [""]
        found += [f"{indent}{n:<{wide}}{part}" for n, part in zip([name] + [""] * len(parts), parts, strict=False)]
    return found


def _bullets(texts: tuple[str, ...]) -> list[str]:
    return [
        line for text in texts for line in textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    ]


def _padded(lines: list[str], height: int) -> list[str]:
    return lines + [""] * (height - len(lines))


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return list(made) if isinstance(made, tuple) else made
