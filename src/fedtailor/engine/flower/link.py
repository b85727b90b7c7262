"""The server's side of a deployment: a SuperLink as a child process, its nodes' keys, the grid that reaches them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from ...certificates import node_keys
from ...errors import UserError
from . import quicken, watch_sizes

APP = Path(__file__).parent / "app"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
HERE = ("127.0.0.1", "::1", "localhost")
START = 120.0  # seconds a SuperLink may take to start
LEAVE = 5.0  # seconds for the SuperLink of a server that was killed to end
HEARTBEAT = 10.0


def keep_quiet(*hosts: str) -> None:
    """For this process and its children: nothing is sent to anybody, nothing is installed, and what they say to each
    other or to these hosts does not go through the site's proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = ",".join(dict.fromkeys(filter(None, [*known.split(","), *HERE, *hosts])))
    os.environ.update(QUIET | {"no_proxy": direct, "NO_PROXY": direct})


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: nothing is sent to anybody, nothing is installed, all files lie in one folder."""
    home.mkdir(parents=True, exist_ok=True)
    return {**os.environ, **QUIET, "FLWR_HOME": str(home.resolve())}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SuperLink:
    """A SuperLink and everything the server asks of it."""

    def __init__(self, host: str, port: int, tls: Path | None, folder: Path, say: Callable[[str], None]) -> None:
        self.host, self.port, self.tls, self.folder, self.say = host, port, tls, folder, say
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        # a key that Flower once shut out is never let in again: other keys, other memory of who may come
        told = b"".join(sorted(path.read_bytes() for path in node_keys(tls).values())) if tls else b""
        self._database = folder / f"superlink-{hashlib.sha256(told).hexdigest()[:12]}.db"
        keep_quiet(host)
        quicken()
        watch_sizes()

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "127.0.0.1") else f"{self.host}:{self.port}"

    def start(self) -> None:
        self._await_port()
        for path in set(self.folder.glob("superlink*.db*")) - set(self.folder.glob(f"{self._database.name}*")):
            path.unlink()
        self._spawn()
        began = time.monotonic()
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() - began > START:
                self.close()
                raise UserError(f"the SuperLink did not start; its log is {self.folder / 'superlink.log'}.")
            time.sleep(0.2)
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        if self._process:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()

    def _await_port(self) -> None:
        """Raises where the port is taken: the SuperLink that answers there would be another server's."""
        ends = time.monotonic() + LEAVE
        while True:
            try:
                with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((self.host, self.port))
                return
            except (OSError, OverflowError) as error:
                if getattr(error, "errno", 0) != errno.EADDRINUSE or time.monotonic() > ends:
                    raise UserError(
                        f"cannot listen on {self.host}:{self.port} ({getattr(error, 'strerror', '') or error}). Is "
                        "another server running there? Choose another --port, or another --host of this machine."
                    ) from error
                time.sleep(0.2)

    def _spawn(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # messages pass through it
        keys = ["--insecure"]
        if self.tls:
            keys = ["--ssl-ca-certfile", str(self.tls / "ca.crt"), "--ssl-certfile", str(self.tls / "server.crt")]
            keys += ["--ssl-keyfile", str(self.tls / "server.key"), "--enable-supernode-auth"]
        command = [sys.executable, "-m", "fedtailor.engine.flower", "superlink", str(os.getpid()), *keys]
        command += ["--host", self.host, "--port", str(self.port), "--database", str(self._database)]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        with (self.folder / "superlink.log").open("ab") as file:
            home = environment(self.folder / "flower")
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=home)

    def _keep_alive(self) -> None:
        while not self._closing.wait(1.0):
            if self._process and self._process.poll() is not None:
                self.say("the SuperLink ended; it is started again")
                self._spawn()

    def _answers(self) -> bool:
        try:
            with self._control() as control:
                control.ListNodes(ListNodesRequest())
        except httpx.HTTPError:
            return False
        return True

    def _control(self) -> contextlib.closing[ControlHttpClient]:
        version = RuntimeVersionHttpInterceptor(component_name="fedtailor")
        return contextlib.closing(
            ControlHttpClient.from_server_address(self.address, self.tls is None, self._root(), [version])
        )

    def _root(self) -> bytes | None:
        return (self.tls / "ca.crt").read_bytes() if self.tls else None

    def register(self, keys: Mapping[str, Path]) -> dict[int, str]:
        """Lets the nodes with these public keys in; returns their ids with their names."""
        wanted = {name: _public(path) for name, path in keys.items()}
        with self._control() as control:
            there = {bytes(n.public_key): n.node_id for n in control.ListNodes(ListNodesRequest()).nodes_info}
            return {
                there.get(key) or control.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id: name
                for name, key in wanted.items()
            }

    @contextlib.contextmanager
    def run(self) -> Iterator[HttpGrid]:
        """A run of Flower's, driven by this process: the grid that reaches the nodes."""
        content = build_fab_from_disk(APP)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._control() as control:
            control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
        grid = HttpGrid(self.address, self.tls is None, self._root(), token=self._token())
        client: Any = grid._runtime_client
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        done = threading.Event()
        thread = threading.Thread(target=_beat, args=(client, done), daemon=True)
        thread.start()
        status, details = SubStatus.FAILED, "stopped"
        try:
            yield grid
            status, details = SubStatus.COMPLETED, ""
        finally:
            done.set()
            self._closing.set()  # whatever ended this process may have ended the SuperLink, too: let it be
            output = PushTaskOutputRequest(sub_status=status, details=details)
            _in_time(LEAVE, lambda: client.PushTaskOutput(output))  # Flower asks a SuperLink that is gone for ever
            grid.close()

    def _token(self) -> str:
        """The right to drive the run that was just started."""
        version = RuntimeVersionHttpInterceptor(component_name="fedtailor")
        client = RuntimeHttpClient.from_server_address(self.address, self.tls is None, self._root(), [version])
        began = time.monotonic()
        with contextlib.closing(client):
            while time.monotonic() - began < START:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if found.HasField("task") and found.token:
                    return found.token
                time.sleep(0.1)
        raise UserError(f"the SuperLink does not start a run; its log is {self.folder / 'superlink.log'}.")


def _beat(client: RuntimeHttpClient, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT):
        with contextlib.suppress(Exception):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def _in_time(seconds: float, do: Callable[[], object]) -> None:
    """Does something that may fail or never end, but waits only so long for it."""

    def tried() -> None:
        with contextlib.suppress(Exception):
            do()

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(seconds)


def _public(path: Path) -> bytes:
    try:
        key: Any = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no public key ({error}).") from error
    return public_key_to_bytes(key)
