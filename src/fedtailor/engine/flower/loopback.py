"""A federation on one machine in which every party is a process of its own, with TLS and keys as in earnest.

For the demo, the tests and the benchmarks: what they start here is what `fedtailor serve` and `fedtailor join` are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...certificates import make_certificates
from ...errors import UserError
from .link import free_port


class Loopback:
    """One server and some clients under a folder; `close` ends whatever still runs."""

    def __init__(self, folder: Path, names: Sequence[str], insecure: bool = False, port: int = 0) -> None:
        self.folder, self.names, self.insecure = folder, tuple(names), insecure
        self.port = port or free_port()
        self.keys, self.sites = folder / "keys", folder / "clients"
        if not insecure:
            make_certificates(self.keys, ["127.0.0.1"], self.names)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def serve(self, config: str, out: Path, changes: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        sets = [word for change in changes for word in ("--set", change)]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--out", str(out)]
        self._start("server", "serve", config, *where, *self._security(), *sets, *options)

    def join(self, name: str, *options: str) -> None:
        state = ["--name", name, "--state", str(self.sites / name), "--device", "cpu"]
        state += [] if "--export" in options else ["--no-export"]
        self._start(name, "join", f"127.0.0.1:{self.port}", *state, *self._security(), *options)

    def join_all(self) -> None:
        for name in self.names:
            self.join(name)

    def wait(self, seconds: float = 600) -> None:
        """Waits for the server to end well."""
        try:
            code = self.processes["server"].wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"the server did not end within {seconds:g} s:\n{self.log('server')[-4000:]}") from None
        if code:
            raise UserError(f"the server ended with code {code}:\n{self.log('server')[-4000:]}")

    def until(self, who: str, text: str, seconds: float = 120, count: int = 1) -> None:
        """Waits until a process has said something so many times."""
        ends = time.monotonic() + seconds
        while self.log(who).count(text) < count:
            if time.monotonic() > ends:
                raise UserError(f"{who} did not say '{text}' within {seconds:g} s:\n{self.log(who)[-4000:]}")
            time.sleep(0.1)

    def log(self, who: str) -> str:
        path = self.folder / f"{who}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, who: str, how: int = signal.SIGKILL) -> None:
        """Sends a signal to a party: the process and the ones it started."""
        process = self.processes[who]
        os.killpg(process.pid, how)
        if how in (signal.SIGKILL, signal.SIGTERM):
            process.wait(60)
            del self.processes[who]

    def close(self) -> None:
        running = [process for process in self.processes.values() if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()  # it ends its own children
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes.clear()

    def _security(self) -> list[str]:
        return ["--insecure"] if self.insecure else ["--tls", str(self.keys)]

    def _start(self, who: str, *words: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{who}.log").open("ab") as file:
            self.processes[who] = subprocess.Popen(
                [sys.executable, "-m", "fedtailor", *words],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
