"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..runs.execute import Watcher


def watcher(console: Console, quiet: bool) -> Watcher:
    if quiet:
        return Watcher()
    return LiveWatcher(console) if console.is_terminal else PlainWatcher(console)


def _words(facts: dict[str, float]) -> str:
    parts = [f"loss {facts['loss']:.3f}"] if "loss" in facts else []
    parts += [f"{kind} {100 * facts[kind]:.1f} % (val)" for kind in ("personal", "global") if kind in facts]
    return "  ".join(parts)


class LiveWatcher(Watcher):
    """A bar with rounds done, rate, time left and the latest accuracies."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.latest: dict[str, float] = {}

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),  # names may hold brackets
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=self.console,
        )
        self.task = self.progress.add_task(title, total=rounds, completed=done, words="", rate="")
        self.began, self.first = time.perf_counter(), done
        self.progress.start()

    def round(self, number: int, facts: dict[str, float]) -> None:
        self.latest |= facts
        rate = (number - self.first) / max(1e-9, time.perf_counter() - self.began)
        pace = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        self.progress.update(self.task, completed=number, words=_words(self.latest), rate=pace)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def end(self) -> None:
        self.progress.stop()


class PlainWatcher(Watcher):
    """One line every tenth of the run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.latest: dict[str, float] = {}

    def begin(self, title: str, done: int, rounds: int) -> None:
        self.title, self.rounds, self.first = title, rounds, done
        self.began = time.perf_counter()
        self.console.print(f"{title}: {rounds - done} rounds to go", soft_wrap=True, markup=False)

    def round(self, number: int, facts: dict[str, float]) -> None:
        self.latest |= facts
        if number % max(1, self.rounds // 10) == 0 or number == self.rounds:
            spent = time.perf_counter() - self.began
            left = spent / max(1, number - self.first) * (self.rounds - number)
            line = f"{self.title}: round {number}/{self.rounds}  {_words(self.latest)}  {left:.0f} s left"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)


def crowd_watcher(console: Console, quiet: bool) -> Watcher:
    """Follows a server: rounds, and who of the clients is ready, working, late or lost."""
    if quiet:
        return Watcher()
    return LiveCrowdWatcher(console) if console.is_terminal else CrowdWatcher(console)


STATE_MARKS = {"ready": "○", "working": "●", "late": "◐", "lost": "✗", "not here yet": "·"}


def _crowd(states: dict[str, str]) -> str:
    return "  ".join(f"{STATE_MARKS.get(state, '?')} {name} {state}" for name, state in states.items())


class CrowdWatcher(PlainWatcher):
    """Every round is a line; so is every client that is late or lost."""

    trouble: dict[str, str] = {}  # noqa: RUF012

    def round(self, number: int, facts: dict[str, float]) -> None:
        self.latest |= facts
        self.say(f"{self.title}: round {number}/{self.rounds}  {_words(self.latest)}")

    def clients(self, states: dict[str, str]) -> None:
        trouble = {name: state for name, state in states.items() if state in ("late", "lost")}
        if trouble and trouble != self.trouble:
            self.say(_crowd(trouble))
        self.trouble = trouble

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


class LiveCrowdWatcher(LiveWatcher):
    """The bar of a run, and a line with the clients under it."""

    progress: Progress | None = None  # type: ignore[assignment]

    def begin(self, title: str, done: int, rounds: int) -> None:
        super().begin(title, done, rounds)
        assert self.progress is not None
        self.line = self.progress.add_task("", total=None, words="", rate="", visible=True)

    def clients(self, states: dict[str, str]) -> None:
        if self.progress is not None:
            self.progress.update(self.line, words=_crowd(states))

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def end(self) -> None:
        if self.progress is not None:
            super().end()
