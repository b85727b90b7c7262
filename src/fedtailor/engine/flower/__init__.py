"""Flower: the transport between a server and its clients. No other room knows of it.

`apps` holds the ServerApp and the ClientApp, `link` the server's side of a deployment (SuperLink), `node` the client's
(SuperNode); `__main__` is what their child processes run.
"""
