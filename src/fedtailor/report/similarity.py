"""The theorem of PerFedRLNAS as a picture: do clients with similar data end with similar policies?

Theorem 1 (Yao & Li, AAAI 2024): clients of equal distributions have equal expected policies, and <E[p_1], E[p_2]> falls
as the divergence of their distributions grows. Here, for every pair of clients:

- across: 1 - the Jensen-Shannon divergence (in bits) of their label frequencies. The theorem's Kullback-Leibler
  divergence is infinite as soon as a client lacks a class; this one is its bounded, symmetric relative.
- up: <p_i^d, p_j^d>, mean over the dimensions d. It is the probability that draws for the two agree in a dimension.

Pairs share clients, so their correlation is judged by dealing the policies to the clients anew (Mantel's test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UserError
from ..runs.columns import Floats, Ints
from .plots import BLUE, HALF, INK, drawing

DEALS = 999
BINS = 8


@dataclass(frozen=True, eq=False)
class Similarity:
    """Every pair of clients: how similar their data and their policies are."""

    clients: int
    pairs: Ints  # [pairs, 2]: the two clients
    labels: Floats  # 1 - Jensen-Shannon divergence
    policies: Floats  # mean inner product
    correlation: float  # Pearson's; nan where one side does not vary
    chance: float  # share of random deals with a correlation as high: small means that it is no accident

    def __str__(self) -> str:
        if np.isnan(self.correlation):
            return f"{len(self.pairs)} pairs of {self.clients} clients; labels or policies do not differ at all"
        return (
            f"{len(self.pairs)} pairs of {self.clients} clients; correlation {self.correlation:+.2f}, as high in "
            f"{100 * self.chance:.1f} % of random deals"
        )


def compare_clients(
    label_counts: ArrayLike, policies: Sequence[ArrayLike], of: Sequence[int] | None = None
) -> Similarity:
    """`label_counts` is [clients, classes]; `policies` has one table of probabilities [clients, options] per dimension.

    `of` gives the clients' numbers where these are not 0, 1, ...
    """
    counts = np.asarray(label_counts, dtype=np.float64)
    tables = [np.asarray(table, dtype=np.float64) for table in policies]
    clients = len(counts)
    if clients < 3 or not tables or any(len(table) != clients for table in tables):
        raise UserError("comparing policies needs three clients or more, each with labels and a policy.")
    data = _shared_labels(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    agree = cast(Floats, sum(table @ table.T for table in tables) / len(tables))
    i, j = np.triu_indices(clients, 1)
    found = _correlation(data[i, j], agree[i, j])
    rng = np.random.default_rng(0)
    deals = [rng.permutation(clients) for _ in range(DEALS)]
    higher = sum(_correlation(data[i, j], agree[deal[i], deal[j]]) >= found - 1e-12 for deal in deals)
    numbers = np.arange(clients) if of is None else np.asarray(of)
    pairs = np.stack([numbers[i], numbers[j]], axis=1)
    return Similarity(clients, pairs, data[i, j], agree[i, j], found, (higher + 1) / (DEALS + 1))


def similarity_svg(label_counts: ArrayLike, policies: Sequence[ArrayLike]) -> str:
    """The scatter of all pairs of clients as SVG; the arguments are those of `compare_clients`."""
    return picture(compare_clients(label_counts, policies))


def policy_similarity(folder: Path) -> str | None:
    """The picture for a run; None where the method has no policy per client, or fewer than three have one yet."""
    found = read_similarity(folder)
    return found if found is None else picture(found)


def read_similarity(folder: Path) -> Similarity | None:
    """From a run's last checkpoint and its run.json. Clients whose policies never moved do not count."""
    import torch

    from ..method import Job
    from ..runs import checkpoint
    from ..runs.facts import read_facts

    facts = read_facts(folder)
    # the job is what a method needs to go on; reading needs none
    loaded = checkpoint.load(folder / "checkpoints", cast(Job, None), torch.device("cpu"), lambda _: None)
    values: dict[str, Any] = loaded[0].server.values if loaded else {}
    alpha = values.get("alpha")
    sizes = [len(d["options"]) for d in facts["dimensions"]]
    if not isinstance(alpha, torch.Tensor) or alpha.ndim != 2 or alpha.shape[1] != sum(sizes):
        return None
    searched = [c for c in range(len(alpha)) if alpha[c].any()]
    if len(searched) < 3:
        return None
    policies = [torch.softmax(part, 1).numpy() for part in alpha[searched].double().split(sizes, dim=1)]
    return compare_clients(np.asarray(facts["train_counts"])[searched], policies, searched)


def picture(found: Similarity) -> str:
    """All pairs as dots, with the mean in equal shares of them as a line, which Theorem 1 expects to rise; as SVG."""
    parts = equal_shares(found.labels)
    with drawing("similarity", HALF) as (_, (axes,), out):
        faint = float(np.clip(300 / len(found.pairs), 0.08, 0.6))
        axes.scatter(found.labels, found.policies, s=12, color=BLUE, alpha=faint, linewidth=0)
        axes.plot(*np.array([(found.labels[p].mean(), found.policies[p].mean()) for p in parts]).T, color=INK)
        axes.set_xlabel("similarity of label distributions")
        axes.set_ylabel("similarity of policies")
        axes.grid()
    return out[0]


def equal_shares(values: Floats) -> list[Ints]:
    """Places of the values in shares of like size, from low to high; equal values stay together."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, BINS + 1)[1:-1]))
    share = np.searchsorted(edges, values, side="left")
    return [part for k in range(len(edges) + 1) if len(part := np.flatnonzero(share == k))]


def _shared_labels(frequencies: Floats) -> Floats:
    """1 - Jensen-Shannon divergence, for every pair of rows."""

    def entropy(p: Floats) -> Floats:
        return -(p * np.log2(np.where(p > 0, p, 1))).sum(-1)

    own = entropy(frequencies)
    both = np.stack([entropy((frequencies + row) / 2) for row in frequencies])
    return 1 - (both - (own[:, None] + own) / 2)


def _correlation(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-12 else float("nan")
