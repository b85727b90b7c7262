"""Sixty rounds in which every few rounds a client is killed, paused or restarted, or the server is killed.

    python bench/flower_chaos.py [--rounds 60] [--seed 0]

A server and four clients as processes with TLS and keys. Says what happened, whose replies were used, whether every
client kept its memory and a network, and how much memory the processes took, every ten rounds. Ends with 1 where a
round, a memory or a network is missing, or a process has grown.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedtailor.engine.flower.loopback import Loopback

NAMES = [f"client-{i:03d}" for i in range(4)]
CHANGES = ["method.name=ditto", "clients=4", "participants=4", "evaluate_every=10", "checkpoint_every=5"]
CHANGES += ["partition.name=iid", "partition.samples=120", "local.epochs=1"]
TROUBLES = ("kill", "pause", "restart", "kill server")
GROWTH = 150  # megabytes that a party, of some 600, may have more at the end
OPTIONS = ["--deadline", "25", "--quorum", "2"]


def memory(federation: Loopback) -> dict[str, int]:
    """Megabytes of every party, its child processes included."""
    found = {}
    for who, process in federation.processes.items():
        listed = subprocess.run(["ps", "-g", str(process.pid), "-o", "rss="], capture_output=True, text=True)
        found[who] = sum(map(int, listed.stdout.split())) // 1024
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    rng, began, out = random.Random(options.seed), time.monotonic(), folder / "run"
    federation, changes = Loopback(folder / "fl", NAMES), [*CHANGES, f"rounds={options.rounds}"]
    seen: dict[int, dict[str, int]] = {}  # memory of every party, by round
    counts: dict[str, int] = {}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s, round {done(federation)}] {text}", flush=True)

    try:
        federation.join_all()
        federation.serve("demo", out, changes, OPTIONS)
        deck: list[str] = []
        trouble, gone = 4, ""
        while federation.processes["server"].poll() is None:
            time.sleep(0.2)
            number = done(federation)
            when = -1 if number == options.rounds - 1 else number // 10
            if number >= 2 and when not in seen:
                seen[when] = memory(federation)
                say(f"memory in MB: {seen[when]}")
            if number < trouble or (number > options.rounds - 6 and not gone):
                continue
            if gone:
                say(f"{gone} is started again")
                federation.join(gone)
                gone, trouble = "", number + rng.randint(2, 4)
                continue
            deck = deck or rng.sample(TROUBLES, len(TROUBLES))  # each kind as often as any other
            what, who = deck.pop(), rng.choice(NAMES)
            counts[what] = counts.get(what, 0) + 1
            say(f"{what} {who if 'server' not in what else ''}")
            if what == "kill":
                federation.kill(who)
                gone = who
            elif what == "pause":
                federation.kill(who, signal.SIGSTOP)
                time.sleep(30)
                federation.kill(who, signal.SIGCONT)
            elif what == "restart":
                federation.kill(who, signal.SIGTERM)
                federation.join(who)
            else:
                federation.kill("server")
                federation.serve("demo", out, changes, OPTIONS)
            trouble = done(federation) + rng.randint(2, 4)
        federation.wait(1)
        say(f"ended well; troubles: {counts}")
    finally:
        federation.close()
    table = [row.split(",") for row in (out / "events.csv").read_text().splitlines()]
    used = {name: sum(r[1] == str(i) and r[3] == "loss" for r in table) for i, name in enumerate(NAMES)}
    scored = [r[1] for r in table if r[2] == "test" and r[3] == "personal_accuracy"]
    kept = [name for name in NAMES if list((federation.sites / name).glob("*/nets/*.safetensors"))]
    rounds = {int(r[0]) for r in table if r[3] == "round_seconds"}
    lost = federation.log("server").count("begins without a memory")
    first, last = next(iter(seen.values())), list(seen.values())[-1]
    grown = {who: last[who] - first[who] for who in last if who in first}
    print(f"rounds in the log: {len(rounds)}; replies used of {options.rounds}: {used}; memories lost: {lost}")
    print(f"clients scored at the end: {len(scored)}; networks kept: {len(kept)}; logs: {folder}")
    print(f"memory at the end less that at the beginning, in MB: {grown}")
    whole = len(rounds) == options.rounds and len(kept) == len(scored) == len(NAMES) and not lost
    return 0 if whole and max(grown.values()) < GROWTH else 1


def done(federation: Loopback) -> int:
    found = re.findall(r"round (\d+)/", federation.log("server"))
    return int(found[-1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
