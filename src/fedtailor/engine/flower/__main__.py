"""The child processes of `fedtailor serve` and `fedtailor join`: Flower's SuperLink and SuperNode, with a few changes.

    python -m fedtailor.engine.flower superlink PARENT ARGUMENTS...
    python -m fedtailor.engine.flower supernode PARENT ARGUMENTS...

They end when their parent ends, however it ends. The SuperLink answers other machines only where nodes talk to it: its
interface for starting runs and registering nodes has no password, so it is for this machine alone. Of a node's request
it reads no more than the largest honest one has. The SuperNode looks for messages twice a second when it has nothing to
do, not every three seconds. No module of ours that imports torch is loaded here: a process takes 100 MB less and starts
at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from fedtailor.engine.flower import quicken

IDLE = 0.5  # seconds between a SuperNode's looks for messages of the server
BUSY = 0.1  # and for the reply of its own client
OPEN = "/v1/fleet/"  # what other machines may call
LARGEST = 32 << 20  # bytes of a node's request: arrays travel in parts of 5 MB, a layout of up to 16 MB in one piece
HERE = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class LocalOnly:
    """ASGI middleware: calls from other machines reach the interface of the nodes, and nothing else."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        client = (scope.get("client") or ("",))[0]
        if scope["type"] != "http" or client in HERE or scope["path"].startswith(OPEN):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Bounded:
    """ASGI middleware: a node's request is read to a limit and refused beyond it. Flower reads it whole into memory."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(OPEN):
            await self.app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] != "http.request":
                return  # the node is gone
            body += part.get("body", b"")
            more = part.get("more_body", False)
            if len(body) > LARGEST:
                await send({"type": "http.response.start", "status": 413, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body.clear()

        async def received() -> Any:
            return whole.pop() if whole else await receive()

        await self.app(scope, received, send)


def superlink() -> None:
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    # Ctrl-C in a terminal reaches this process, too; it ends when the server has said farewell
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    extensions.get_middleware = lambda: (Middleware(LocalOnly), Middleware(Bounded))  # type: ignore[arg-type]
    flower_superlink()


def supernode() -> None:
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    start_client_internal.time = SimpleNamespace(  # type: ignore[attr-defined]
        **{**vars(time), "sleep": lambda seconds: time.sleep(IDLE if seconds > 1 else BUSY)}
    )
    flower_supernode()


def end_with(parent: int) -> None:
    """Ends this process when its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    kind, parent = sys.argv[1], int(sys.argv[2])
    sys.argv = [f"flower-{kind}", *sys.argv[3:]]
    end_with(parent)
    quicken()
    {"superlink": superlink, "supernode": supernode}[kind]()
