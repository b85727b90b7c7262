"""The live page: reads run folders, answers with JSON, changes nothing.

Only GET is answered. On loopback the Host header must name this machine, so that a web page that points its own name at
127.0.0.1 reads nothing; on any other address every request must carry the token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import UserError
from ..runs.compare import compare
from ..runs.results import Results
from . import networks, searches, views
from .shelf import Shelf, readable

STATIC = Path(__file__).parent / "static"
FILES = {"app.js": "text/javascript", "app.css": "text/css"}
DEAR = {"devices", "drawing", "look"}  # what needs torch
_one_at_a_time = threading.Lock()  # threads that import the same modules at once see halves of them
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
COOKIE = "fedtailor"
PACE = 400  # a page asks for a view again after so many times what it cost: with its four, one hundredth of a core
GONE = "There is no such run here: it was deleted, moved or never was."
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedtailor</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/app.css">
<script src="static/app.js" defer></script>
</head>
<body><div id="app"><noscript>This page needs JavaScript; the report of a run reads without it.</noscript></div></body>
</html>
"""


def application(root: Path, token: str = "") -> Starlette:
    """The page over the runs below a folder."""
    shelf = Shelf(root)
    threading.Thread(target=shelf.warm, daemon=True).start()
    routes = [
        Route("/", _page),
        Route("/static/{name}", _static),
        Route("/api/runs", partial(_runs, shelf)),
        Route("/api/compare", partial(_compare, shelf)),
        Route("/api/{view}", partial(_view, shelf)),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(Guard, token=token)
    return app


class Guard:
    """Lets in who may read: by the Host on loopback, by the token elsewhere. Nobody may write."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        answer = self.refusal(request)
        if answer is None:

            async def with_headers(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [
                        *message["headers"],
                        *((k.lower().encode(), v.encode()) for k, v in HEADERS.items()),
                    ]
                await send(message)

            await self.app(scope, receive, with_headers)
            return
        answer.headers.update(HEADERS)
        await answer(scope, receive, send)

    def refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.", 405)
        if not self.token:
            if host_of(request.headers.get("host", "")) not in LOOPBACK:
                return PlainTextResponse("This page answers on this machine only, as localhost or 127.0.0.1.", 421)
            return None
        if request.url.path == "/" and self._right(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self._right(request.cookies.get(COOKIE, "")) or (scheme.lower() == "bearer" and self._right(given)):
            return None
        return PlainTextResponse("Open the address that `fedtailor ui` printed: it carries the token.", 401)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


async def _page(_: Request) -> Response:
    return Response(PAGE, media_type="text/html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return PlainTextResponse("There is no such file.", 404)
    return FileResponse(STATIC / name, media_type=FILES[name])


Work = Callable[[], Any]


async def _answer(shelf: Shelf, request: Request, version: Callable[[], str], work: Work) -> Response:
    """JSON, or 304 where the browser has it already. That a run cannot be read is an answer: {"error": why}."""
    known = request.headers.get("if-none-match")

    def answer() -> Response:
        began = time.thread_time()
        tag = f'"{shelf.born}-{version()}"'
        if known == tag:
            return Response(status_code=304, headers={"ETag": tag, **_wait(began)})
        found = _json(work(), 200)
        found.headers.update({"ETag": tag, **_wait(began)})
        return found

    try:
        return await run_in_threadpool(answer)
    except KeyError:
        return _json({"error": GONE}, 404)
    except UserError as error:
        return _json({"error": str(error)}, 200)
    except Exception as error:  # a page that goes on is worth more than a trace that nobody sees
        return _json({"error": f"This could not be read ({type(error).__name__}: {error})."}, 500)


def _wait(began: float) -> dict[str, str]:
    """How long the page should wait before it asks again, in seconds."""
    return {"X-Wait": f"{max(1.0, PACE * (time.thread_time() - began)):.1f}"}


def _json(found: Any, status: int) -> Response:
    text = json.dumps(found, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return Response(text.encode("utf-8", "backslashreplace"), status, media_type="application/json")


async def _runs(shelf: Shelf, request: Request) -> Response:
    told = lambda: {"root": readable(shelf.root.name), "runs": shelf.cards()}  # noqa: E731
    return await _answer(shelf, request, lambda: f"{time.monotonic_ns()}", told)


def _read(shelf: Shelf, run: str) -> Results:
    follower = shelf.follower(run)
    if follower.results is None:
        raise UserError(follower.problem)
    return follower.results


async def _compare(shelf: Shelf, request: Request) -> Response:
    names = list(dict.fromkeys(request.query_params.getlist("run")[:24]))

    def version(name: str) -> str:
        try:
            follower = shelf.follower(name)
        except KeyError:
            return "none"
        return f"{follower.version}{follower.status}"

    def work() -> Any:
        """Those that can be read; of the others why they cannot."""
        ids: dict[Results, str] = {}
        problems: list[tuple[str, str]] = []
        for name in names:
            try:
                ids[_read(shelf, name)] = name
            except KeyError:
                problems.append((name, GONE))
            except UserError as error:
                problems.append((name, str(error)))
        if not ids:
            raise UserError(" ".join(f"{name}: {text}" for name, text in problems) or "Choose runs to compare.")
        return {**views.comparison(compare(list(ids), order="given"), ids), "problems": problems}

    return await _answer(shelf, request, lambda: "-".join(map(version, names)), work)


async def _view(shelf: Shelf, request: Request) -> Response:
    name, query = request.query_params.get("run", ""), request.query_params
    whole = lambda key: int(query[key]) if query.get(key, "").isdecimal() else -1  # noqa: E731
    known: dict[str, Callable[[Results], Any]] = {
        "clients": views.clients,
        "client": lambda run: views.client(run, whole("client")),
        "archs": searches.archs,
        "policy": lambda run: searches.policy_frame(run, whole("round")),
        "gain": views.gain,
        "about": views.about,
        "devices": networks.devices,
        "drawing": lambda run: networks.drawing(run, whole("client")),
        "look": lambda run: networks.look(run, whole("client")),
    }
    view = request.path_params["view"]

    def work() -> Any:
        if view == "overview":
            follower = shelf.follower(name)
            if follower.results is None:
                raise UserError(follower.problem)
            return views.overview(follower.results, name, follower.status, follower.troubles(), follower.now)
        if view not in known:
            raise KeyError(view)
        with _one_at_a_time if view in DEAR else contextlib.nullcontext():
            return known[view](_read(shelf, name))

    def version() -> str:
        follower = shelf.follower(name)
        return f"{follower.version}-{follower.status}-{view}-{whole('client')}-{whole('round')}"

    return await _answer(shelf, request, version, work)
