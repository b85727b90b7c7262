"""A client's side of a deployment: a SuperNode as a child process, and the one worker that answers its messages.

Flower starts a new process for every message, which imports everything anew, and runs in it whatever code the server
sent. This worker stays, with the data in its memory, and runs the package that is installed here, whatever came along.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from ..site import Site
from . import quicken
from .apps import to_content, to_parcel
from .link import environment, free_port, keep_quiet

POLL = 0.1  # seconds between looks for a message
HEARTBEAT = 10.0
RESTART = 10.0  # seconds until a SuperNode that ended is started again
WAIT = 10.0  # seconds for a server to answer
REFUSED = "Failed to activate SuperNode"


def start_supernode(address: str, port: int, tls: Path | None, home: Path, log: Path) -> subprocess.Popen[bytes]:
    """The process that talks to the server. `tls` is the folder with this node's key, or None for plain HTTP."""
    keys = ["--insecure"]
    if tls:
        keys = ["--root-certificates", str(tls / "ca.crt"), "--auth-supernode-private-key", str(tls / "node.key")]
    command = [sys.executable, "-m", "fedtailor.engine.flower", "supernode", str(os.getpid())]
    command += [*keys, "--superlink", address, "--host", "127.0.0.1", "--port", str(port), "--isolation", "process"]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment(home))


def join(
    address: str, site: Site, tls: Path | None, say: Callable[[str], None], take_home: Callable[[Path], None]
) -> None:
    """Answers a server's messages until interrupted; starts the SuperNode again whenever it ends.

    `take_home` gets the client's own folder of every run that is over.
    """
    keep_quiet()
    site.folder.mkdir(parents=True, exist_ok=True)
    log, told = site.folder / "supernode.log", ""
    while True:
        why = unanswered(address, tls)
        if why:
            if why != told:
                say(f"no connection to {address}: {why}. Trying until there is one")
            told = why
            time.sleep(RESTART)
            continue
        told, port = "", free_port()
        length = log.stat().st_size if log.exists() else 0
        process = start_supernode(address, port, tls, site.folder / "flower", log)
        try:
            attend(f"127.0.0.1:{port}", site, lambda p=process: p.poll() is None, take_home)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        with log.open("rb") as file:
            file.seek(length)
            text = file.read().decode(errors="replace")
        if REFUSED in text:
            say(
                "the server does not let this node in: its key is not registered, or the server still counts an "
                f"earlier connection with it, which takes a minute. Trying again; details are in {log}"
            )
        else:
            say(f"the connection ended; trying again. Details are in {log}")
        time.sleep(RESTART)


def unanswered(address: str, tls: Path | None) -> str:
    """Why a server cannot be talked to; empty where it answers. It is called the way that the SuperNode takes."""
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls:
            trusted.load_verify_locations(tls / "ca.crt")
        httpx.get(f"{'https' if tls else 'http'}://{address}/", verify=trusted, timeout=WAIT)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = str(error).strip().rstrip(".") or type(error).__name__
        if "WRONG_VERSION_NUMBER" in why:
            return f"{why}: what answers there speaks no TLS"
        if not tls and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
            return f"{why}: it may want TLS, --tls DIR"
        return why
    return ""


def attend(address: str, site: Site, alive: Callable[[], bool], take_home: Callable[[Path], None]) -> None:
    """Takes one message after another from a SuperNode, as long as it lives."""
    quicken()
    client, lock = _client(address), threading.Lock()
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    try:
        while alive():
            try:
                found = client.AcquireTask(request)
            except httpx.HTTPError:
                time.sleep(POLL)  # it is still starting, or about to end
                continue
            if found.HasField("task") and found.token:
                # its own thread: a message whose server died while sending it never arrives whole
                work = (address, found.token, site, lock, take_home)
                threading.Thread(target=_one, args=work, daemon=True).start()
            time.sleep(POLL)
    finally:
        client.close()


def _one(address: str, token: str, site: Site, lock: threading.Lock, take_home: Callable[[Path], None]) -> None:
    """Takes one message, answers it when it is its turn, and sends the answer."""
    client = _client(address, token)
    try:
        with _heartbeat(client):
            message, context, _, _ = pull_task_input(client)
            with lock:
                reply = Message(_answered(site, message), reply_to=message)
            push_message(client, reply, context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
        while not site.over.empty():
            take_home(site.over.get())
    except Exception as error:  # the SuperNode takes it as failed, tells the server and goes on
        site.say(f"a message could not be answered: {type(error).__name__}: {error}")
    finally:
        client.close()


def _answered(site: Site, message: Message) -> RecordDict | Error:
    try:
        return to_content(site.answer(to_parcel(message.content)))
    except Exception as error:
        site.say(f"{type(error).__name__}: {error}")
        return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the client failed")


@contextlib.contextmanager
def _heartbeat(client: RuntimeHttpClient) -> Iterator[None]:
    """Tells the SuperNode that the message is being worked on. Flower's own ends the process when that fails."""
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            with contextlib.suppress(httpx.HTTPError):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            done.wait(HEARTBEAT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _client(address: str, token: str = "") -> RuntimeHttpClient:
    version = RuntimeVersionHttpInterceptor(component_name="fedtailor")
    interceptors = [version, RuntimeTokenHttpInterceptor(token)] if token else [version]
    return RuntimeHttpClient.from_server_address(address, True, None, interceptors)
