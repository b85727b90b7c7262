"""Flower: the transport between a server and its clients. No other room knows of it.

`apps` holds the ServerApp and the ClientApp, `link` the server's side of a deployment (SuperLink), `node` the client's
(SuperNode); `__main__` is what their child processes run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_allowed = threading.local()  # bytes that this thread's message may still have


class TooLarge(Exception):
    """A message that is not fetched to its end."""


class _Unopened(dict[str, bytes]):
    """In place of a large message's parts. Flower confirms a message and then opens it: so the SuperLink deletes this
    one from its disk, too, before it turns out that there is nothing in it."""

    def __init__(self, why: TooLarge) -> None:
        self.why = why

    def __missing__(self, object_id: str) -> bytes:
        raise self.why


def quicken() -> None:
    """A part of a message that is not there yet is asked for again after 50 ms, not after a second: a message makes
    four hops, and at each of them the receiver begins while the sender is still busy."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    assert pull_objects.__kwdefaults__ is not None
    pull_objects.__kwdefaults__.update(initial_backoff=0.05, backoff_cap=1.0)


def watch_sizes() -> None:
    """Messages that are larger than `at_most` says are not fetched: they could fill this machine's memory."""
    from flwr.superlink.grid import http_grid

    fetch = http_grid.pull_objects
    if getattr(fetch, "watched", False):
        return

    def fetch_some(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> Any:
        budget = getattr(_allowed, "bytes", None)
        if budget is None:
            return fetch(object_ids, pull_object_fn, **options)
        lock, left = threading.Lock(), [budget]

        def pull(object_id: str) -> bytes:
            found = pull_object_fn(object_id)
            with lock:
                left[0] -= len(found)
                if left[0] < 0:
                    raise TooLarge(f"it has more than the {budget} bytes that were to be expected")
            return found

        try:
            return fetch(object_ids, pull, **options)
        except TooLarge as error:
            return _Unopened(error)

    fetch_some.watched = True  # type: ignore[attr-defined]
    http_grid.pull_objects = fetch_some


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """In the block, this thread fetches no message of more bytes."""
    _allowed.bytes = size
    try:
        yield
    finally:
        _allowed.bytes = None
