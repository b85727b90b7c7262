"""Flower: the transport between a server and its clients. No other room knows of it.

`apps` holds the ServerApp and the ClientApp, `link` the server's side of a deployment (SuperLink), `node` the client's
(SuperNode); `__main__` is what their child processes run.
"""

from __future__ import annotations


def quicken() -> None:
    """A part of a message that is not there yet is asked for again after 50 ms, not after a second: a message makes
    four hops, and at each of them the receiver begins while the sender is still busy."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    assert pull_objects.__kwdefaults__ is not None
    pull_objects.__kwdefaults__.update(initial_backoff=0.05, backoff_cap=1.0)
