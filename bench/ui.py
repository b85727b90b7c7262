"""How quick the page is with 1,000 clients x 500 rounds, and what watching costs a run.

    python bench/ui.py big    a run folder of that size (its values are made up, its format is real): time until the
                              page can be used, sorting, scrolling, size of the report
    python bench/ui.py watch  a real run, watched in a browser: what the run spends on being watched, and the server
    python bench/ui.py shots  the pictures of README and docs, from real runs (docs/assets/demo.png and ui-*.png)

Needs the extras `ui` and `report`, playwright and Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor.config import load
from fedtailor.engine.loop import Event
from fedtailor.runs.events import EventLog
from fedtailor.runs.execute import make_job
from fedtailor.runs.facts import common_facts, write_facts
from fedtailor.runs.live import Live
from fedtailor.values import write_bytes

CLIENTS, ROUNDS, CLASSES = 1000, 500, [str(i) for i in range(10)]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def make(folder: Path, participants: int) -> Path:
    """A finished run of PerFedRLNAS on DARTS cells with made-up numbers, and says so in its run.json."""
    space = {"space.name": "darts", "space.variant": "full", "space.channels": 8, "space.cells": 6}
    sizes = {"clients": CLIENTS, "participants": participants, "rounds": ROUNDS, "evaluate_every": 25}
    config = load("demo", {"method.name": "perfedrlnas", "fleet.name": "uniform-memory", **space, **sizes})
    rng = np.random.default_rng(0)
    counts = np.rint(rng.dirichlet(np.full(10, 0.4), CLIENTS) * rng.lognormal(5.5, 0.6, (CLIENTS, 1))).astype(int) + 1
    names = [f"client-{i:04d}" for i in range(CLIENTS)]
    job, _ = make_job(config, names, counts.sum(1).tolist(), (1, 32, 32), 10)
    write_bytes(folder / "config.toml", config.to_toml().encode())
    facts = common_facts(config.make_method(), job, CLASSES, torch.device("cpu"), "python bench/ui.py (made-up values)")
    told = {
        "status": "done",
        "rounds_done": ROUNDS,
        "seconds": 3600.0,
        "train_counts": counts.tolist(),
        "new_clients": 0,
    }
    write_facts(folder, {**facts, **told, "synthetic": True})
    log, live = EventLog(folder / "events.csv"), Live(folder, ROUNDS, 0)
    options = [len(d.options) for d in job.space.dimensions]
    alpha, level = torch.zeros(CLIENTS, sum(options), dtype=torch.float64), rng.normal(0.8, 0.08, CLIENTS)
    drift = torch.from_numpy(rng.normal(0, 0.02, tuple(alpha.shape)))
    for r in range(1, ROUNDS + 1):
        gone = 1 - np.exp(-4 * r / ROUNDS)
        for c in np.sort(rng.choice(CLIENTS, participants, replace=False)).tolist():
            alpha[c] += drift[c] * 5
            arch = "-".join(map(str, rng.integers(0, options).tolist()))
            rows = {"bytes_down": 431080, "bytes_up": 431080, "seconds": rng.random(), "flops": 9e9}
            for metric, value in rows.items():
                log.add(Event(r, c, "", metric, value))
            log.add(Event(r, c, "train", "loss", float(2.3 - 2 * gone + rng.gamma(2, 0.05))))
            log.add(Event(r, c, "val", "accuracy", float(level[c] * gone)))
            log.add(Event(r, c, "", "arch", arch))
        for metric in ("round_seconds", "measured_seconds"):
            log.add(Event(r, None, "", metric, rng.random()))
        for split in ("val", "test") if r == ROUNDS else ("val",) if r % 25 == 0 else ():
            for c in range(CLIENTS):
                own = float(np.clip(level[c] * gone + rng.normal(0, 0.02), 0, 1))
                log.add(Event(r, c, split, "personal_accuracy", own))
                log.add(Event(r, c, split, "global_accuracy", float(np.clip(own - 0.08, 0, 1))))
        live.policies(r, {"alpha": alpha}, options)
    for c in range(CLIENTS):
        kept = "-".join(str(int(part.argmax())) for part in alpha[c].split(options))
        for metric, value in {"parameters": 250_000, "flops": 12_000_000, "arch": kept}.items():
            log.add(Event(ROUNDS, c, "", f"personal_{metric}", value))
    log.flush()
    log.close()
    return folder


def fedtailor(*words: str, **kept: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "fedtailor", *words], text=True, **kept)


@contextmanager
def served(root: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    server = fedtailor("ui", str(root), "--port", "0", stdout=subprocess.PIPE)
    assert server.stdout
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found
    try:
        yield found[0], server
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


@contextmanager
def tab(width: int = 1366, height: int = 820) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        browser.close()


SORT = """async () => {
  const times = [];
  for (const key of ["samples", "personal", "bytes", "name", "curve"]) {
    const button = document.querySelector(`[data-sort="${key}"]`), began = performance.now();
    button.click();
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    times.push(performance.now() - began);
  }
  return times;
}"""
SCROLL = """async () => {
  const grid = document.querySelector(".grid"), frames = [];
  let before = performance.now();
  for (let i = 0; i < 120; i++) {
    grid.scrollTop = i * 280;
    await new Promise(done => requestAnimationFrame(done));
    const now = performance.now();
    frames.push(now - before);
    before = now;
  }
  return frames;
}"""


def busy(work: Any) -> float:
    """CPU seconds of the page's main thread."""
    return {m["name"]: m["value"] for m in work.send("Performance.getMetrics")["metrics"]}["TaskDuration"]


def big(participants: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = make(Path(place) / "big", participants)
        rows = (folder / "events.csv").read_bytes().count(b"\n") - 1
        megabytes = (folder / "events.csv").stat().st_size / 1e6
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{CLIENTS} clients x {ROUNDS} rounds, {participants} each: {rows:,} rows, {megabytes:.0f} MB")
        with tab() as page:
            for name, wanted in (("", '[data-figure="big-accuracy"] .drawing svg'), ("/clients", ".grid-row")):
                with served(Path(place)) as (address, server):  # a server that has read nothing yet
                    before, began = cpu_seconds(server.pid), time.perf_counter()
                    page.goto(f"{address}#/run/big{name}")
                    page.wait_for_selector(wanted, timeout=60_000)
                    wall, spent = time.perf_counter() - began, cpu_seconds(server.pid) - before
                    print(
                        f"{name or '/overview'}: usable after {wall:.2f} s, of which the server computes {spent:.2f} s"
                    )
            with served(Path(place)) as (address, _):
                page.goto(f"{address}#/run/big/clients")
                page.wait_for_selector("text=device", timeout=120_000)  # what needs torch has come too
                page.wait_for_timeout(2000)
                work = page.context.new_cdp_session(page)
                work.send(
                    "Performance.enable", {"timeDomain": "threadTicks"}
                )  # what the page computes, whoever else does
                before = busy(work)
                times = page.evaluate(SORT)
                each = 1000 * (busy(work) - before) / len(times)
                print(f"sorting: {np.median(times):.0f} ms, of which the page computes {each:.0f} ms")
                before = busy(work)
                frames = np.array(page.evaluate(SCROLL))
                each, most = 1000 * (busy(work) - before) / len(frames), np.percentile(frames, 95)
                told = f"{np.median(frames):.0f} ms a frame, 95 % within {most:.0f} ms"
                print(f"scrolling eight rows a frame: {told}; the page computes {each:.1f} ms a frame")
        began = time.perf_counter()
        from fedtailor.report.html import write_report

        report = write_report(folder)
        print(f"report: {report.stat().st_size / 1e6:.2f} MB, written in {time.perf_counter() - began:.1f} s")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch() -> None:
    """A real run in this process, its own extra work timed, and a page that watches it."""
    from fedtailor.runs.execute import start

    spent = {"seconds": 0.0}

    def timed(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def run(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(*args)
            finally:
                spent["seconds"] += time.thread_time() - began

        setattr(owner, name, run)

    for owner, name in ((Live, "working"), (Live, "policies"), (EventLog, "show")):
        timed(owner, name)
    config = load("demo", {"method.name": "perfedrlnas", "rounds": 40, "fleet.name": "uniform-memory"})
    with tempfile.TemporaryDirectory() as place, served(Path(place)) as (address, server), tab() as page:
        page.goto(f"{address}#/")
        page.wait_for_timeout(500)
        page.goto(f"{address}#/run/watched")
        before, began = cpu_seconds(server.pid), time.perf_counter()
        start(config, Path(place) / "watched", "cpu", 0)
        wall = time.perf_counter() - began
        server_cpu = cpu_seconds(server.pid) - before
    cores = os.cpu_count() or 1
    notes, crowd = spent["seconds"], os.getloadavg()[0]
    print(f"load {crowd:.1f}; run: {wall:.1f} s, of it {notes:.3f} CPU seconds ({notes / wall:.2%}) for watchers")
    print(f"server: {server_cpu:.2f} CPU seconds = {server_cpu / wall / cores:.2%} of the machine's {cores} cores")


def shots() -> None:
    """Real runs of the demo's data, then pictures of the page."""
    assets = Path(__file__).parent.parent / "docs" / "assets"
    sizes = ["--set", "clients=24", "--set", "participants=8", "--set", "rounds=60", "--set", "evaluate_every=5"]
    setting = ["--set", "partition.name=dirichlet-client", "--set", "partition.alpha=0.4", "--set", "fleet.name=mixed"]
    root = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("runs") / "ui-shots"
    for method in ("perfedrlnas", "fedavg-ft", "local"):
        if not (root / f"digits-{method}" / "nets").is_dir():
            out = ["--out", str(root / f"digits-{method}"), "-q"]
            assert fedtailor("run", "demo", "--set", f"method.name={method}", *sizes, *setting, *out).wait() == 0
    pages = {
        "ui-clients": ("#/run/digits-perfedrlnas/clients", "text=budget use", 720),
        "ui-archs": ("#/run/digits-perfedrlnas/archs", "text=Memory against budget", 1080),
        "ui-client": ("#/run/digits-perfedrlnas/clients/4", ".shot img", 1120),
        "ui-compare": ("#/compare/digits-perfedrlnas/digits-fedavg-ft/digits-local", "text=Pareto front", 900),
    }
    with served(root) as (address, _), tab(1280) as page:
        for name, (where, wanted, height) in pages.items():
            page.set_viewport_size({"width": 1280, "height": height})
            page.goto(address + where)
            page.wait_for_selector(wanted, timeout=60_000)
            page.wait_for_timeout(1500)
            _small(page.screenshot(), assets / f"{name}.png")
    if not (root / "demo" / "report.html").is_file():
        assert fedtailor("demo", "--out", str(root / "demo")).wait() == 0
    with tab(1100, 1255) as page:
        page.goto((root / "demo" / "report.html").resolve().as_uri())
        page.wait_for_selector('[data-figure="comparison-curves"] .drawing svg')
        page.wait_for_timeout(500)
        _small(page.screenshot(), assets / "demo.png")


def _small(png: bytes, path: Path) -> None:
    """Without transparency and well packed: pictures should weigh little in the repository."""
    import io

    from PIL import Image

    Image.open(io.BytesIO(png)).convert("RGB").save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "big":
        big(int(sys.argv[2]) if len(sys.argv) > 2 else CLIENTS // 10)
    elif what in ("watch", "shots"):
        {"watch": watch, "shots": shots}[what]()
    else:
        print(__doc__)
