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
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
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
        self.console.print(text)

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
        self.console.print(f"{title}: {rounds - done} rounds to go", soft_wrap=True)

    def round(self, number: int, facts: dict[str, float]) -> None:
        self.latest |= facts
        if number % max(1, self.rounds // 10) == 0 or number == self.rounds:
            spent = time.perf_counter() - self.began
            left = spent / max(1, number - self.first) * (self.rounds - number)
            line = f"{self.title}: round {number}/{self.rounds}  {_words(self.latest)}  {left:.0f} s left"
            self.console.print(line, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
