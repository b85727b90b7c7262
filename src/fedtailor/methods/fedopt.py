"""FedOpt: Reddi et al., ICLR 2021, Algorithm 2. The server treats the clients' mean change as a gradient.

Delta = sum p_k (x_k - x),   m <- beta_1 m + (1 - beta_1) Delta,   x <- x + eta m / (sqrt(v) + tau)
v:  Adagrad  v + Delta^2      Yogi  v - (1 - beta_2) Delta^2 sign(v - Delta^2)
    Adam     beta_2 v + (1 - beta_2) Delta^2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..method import Card, Job, Reply, Server
from ..options import Fraction, Positive
from ..owners import where_owned
from ..parts import choose, learnt
from ..registry import register
from .fedavg import FedAvg


@register("method", "fedopt")
@dataclass(frozen=True)
class FedOpt(FedAvg):
    paper: ClassVar[str] = "Reddi et al., ICLR 2021, Algorithm 2 (FedAdagrad, FedAdam, FedYogi)"
    deviations: ClassVar[tuple[str, ...]] = (
        "clients count by their samples",
        "normalisation statistics are averaged",
        "with archs given to clients, entries that nobody in the round owns rest, m and v too",
    )
    card: ClassVar[Card] = replace(
        FedAvg.card,
        policy="an adaptive optimiser at the server",
        handles=("statistical",),
        holds={"weights": "the network x", "m": "mean of the changes", "v": "mean of their squares"},
    )

    optimizer: Literal["adam", "yogi", "adagrad"] = "adam"
    server_lr: Positive = 0.01  # eta
    beta1: Fraction = 0.9  # beta_1; the authors take 0 for adagrad
    beta2: Fraction = 0.99  # beta_2, of adam and yogi
    tau: Positive = 1e-3  # degree of adaptivity; v starts at tau^2

    def start(self, job: Job) -> Server:
        server = super().start(job)
        x = choose(server.weights, learnt)
        zeros = {n: torch.zeros_like(t) for n, t in x.items()}
        return server.replace(m=zeros, v={n: torch.full_like(t, self.tau**2) for n, t in x.items()})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        x, mean, archs = server.weights, server.paste(replies), [r.arch for r in replies]
        delta = {n: mean[n] - x[n] for n in server.m}  # line 10
        m = {n: torch.lerp(d, server.m[n], self.beta1) for n, d in delta.items()}  # line 11
        v = {n: self.second(server.v[n], d**2) for n, d in delta.items()}  # lines 12-14
        moved = {n: x[n] + self.server_lr * m[n] / (v[n].sqrt() + self.tau) for n in m}  # line 15
        owned = lambda old, new: where_owned(server.space, old, new, archs)  # noqa: E731
        return server.replace(
            weights=mean | owned(choose(x, learnt), moved), m=owned(server.m, m), v=owned(server.v, v)
        )

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "yogi":
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return torch.lerp(square, v, self.beta2)
