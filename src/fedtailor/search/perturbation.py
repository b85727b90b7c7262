"""Perturbation search (DARTS-PT: Wang et al., ICLR 2021) in the progressive form of SPIDER's Algorithm 2.

An edge keeps the operation whose removal hurts validation accuracy most. When all edges are decided, each node with
more than two inputs loses, one after the other, the edge whose removal hurts least. Cells of a type share decisions.

A search is a value: `questions` says what is to be scored next, `answered` applies the scores. Who scores is up to the
method: a client alone (SPIDER), or all of them together (global-perturbation).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import cast

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..engine.client import Client
from ..errors import UserError
from ..method import Job, Task
from ..spaces.base import Arch, Space, Weights
from ..spaces.darts import Darts, Gates, Keep
from ..spaces.darts_ops import EDGES, EDGES_INTO
from ..values import sent
from .gated import Gated, by_images, gateable, gated_of, held, norms_of

NODES = tuple(node for node, edges in EDGES_INTO.items() if len(edges) > 2)  # node 2 has two inputs from the start
PAPER_ROUNDS, PAPER_WARM_UP, PAPER_TAU = 1000, 30, 20
Pair = tuple[tuple[int, ...], tuple[int, ...]]


# the space ----------------------------------------------------------------------------------------------------------


def cells_of(space: Space) -> Darts:
    """The space, which `require_supernet` has seen to be one of cells."""
    return cast(Darts, space)


def require_supernet(job: Job, method: str) -> None:
    """Raises `UserError` unless the space has cells, and every client's device can train the whole supernet."""
    if not isinstance(job.space, Darts):
        raise UserError(
            f"method.name = '{method}' deletes operations from DARTS cells, but the space is '{job.space.name}'. Use "
            "--set space.name=darts, for example with --set space.variant=s2."
        )
    supernet = cast(Arch, job.space.full_keep)
    for seat in job.seats:
        if not seat.fits(supernet):
            why = seat.budget.why_not(job.space.cost(supernet), seat.batch, seat.profile, seat.images)
            raise UserError(
                f"client '{seat.name}': method.name = '{method}' trains the whole supernet on every client, and its "
                f"budget does not allow {why}. Raise fleet.budget, lower local.batch, or choose a smaller space."
            )


def require_gentle(job: Job, pull: float) -> None:
    """Raises `UserError` where steps overshoot what a network is pulled towards; an infinite pull takes no steps."""
    bound = 2 * (1 + job.local.momentum) / job.local.lr  # where SGD on pull/2 * |v|^2 begins to diverge
    if bound <= pull < math.inf and job.local.optimizer == "sgd":
        raise UserError(
            f"method.lamda = {pull:g}: steps of local.lr = {job.local.lr:g} overshoot from {bound:g} on. Lower it, or "
            "take inf, which keeps v_k at the received weights."
        )


def require_val(client: Client) -> None:
    """Raises `UserError` where a client has nothing to score on."""
    if not client.size("val"):
        raise UserError(
            f"client '{client.name}' has no validation images, and the search reads nothing else. Raise partition.val."
        )


def network(client: Client, weights: Weights, keep: Keep, stale: bool = False) -> nn.Module:
    """The sub-network with these weights, of which it reads its own. `stale`: the statistics are another network's."""
    net = client.build(Task(weights, cast(Arch, keep)))
    if stale:
        net.stale = True  # type: ignore[assignment]
    return net


def searching(client: Client, weights: Weights, search: Search, before: nn.Module | None = None) -> nn.Module:
    """The sub-network of a search: where steps are captured it is gated while the search goes on, not cut.

    A gated one may be the network that it was `before` a decision.
    """
    space, keep = cells_of(client.space), search.keep
    if search.over or not (client.captures and gateable(space)):
        return network(client, weights, keep)
    whole = held(space, weights, keep, client.device)
    if isinstance(before, Gated):
        client.load(net := before, whole)
    else:
        net = cast(Gated, client.build(Task(whole), gated_of(space)))
    net.stale = False  # type: ignore[assignment]  # candidates go by the images
    return net.at(keep)


def share(client: Client, weights: Weights, net: nn.Module) -> Weights:
    """w_share: what a network has of the received weights, and zeros where it holds zeros."""
    return held(cells_of(client.space), weights, net.keep, client.device) if isinstance(net, Gated) else weights


def own(client: Client, net: nn.Module) -> Weights:
    """A copy of a network's tensors, for the client's own memory."""
    found = client.copy(net)
    return {n: found[n] for n in cells_of(client.space).names_of(net.keep)} if isinstance(net, Gated) else found


class Perturbed(nn.Module):
    """A network as if it had only the operations of `keep`, for scoring: the others' outputs count for nothing.

    Its norms use the statistics of the images before them, as DARTS-PT's and the authors' code do: the running ones
    belong to the network with all its operations. They stay as they are, which in that code they do not.
    """

    def __init__(self, net: nn.Module, space: Darts) -> None:
        super().__init__()
        self.net, self.cells_of = net, space

    @cached_property
    def norms(self) -> list[_BatchNorm]:
        return norms_of(self.net)

    @cached_property
    def gates(self) -> Gates:
        normal, reduce = self.cells_of.gates_of(self.cells_of.full_keep)
        device = next(self.net.parameters()).device
        return sent(normal, device), sent(reduce, device)

    def at(self, keep: Keep) -> Perturbed:
        """The same with other operations."""
        self.cost = self.cells_of.cost_keep(keep)
        for own, rows in zip(self.gates, self.cells_of.gates_of(keep), strict=True):
            own.copy_(sent(rows, own.device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        with by_images(self.norms, len(x)):
            return self.net(x, self.gates)


def candidates(client: Client, net: nn.Module) -> Gated | Perturbed:
    """A network's candidates, one at a time. Where passes are captured, one serves all of them."""
    return net if isinstance(net, Gated) else Perturbed(net, cells_of(client.space))


async def accuracy(client: Client, look: Gated | Perturbed, keep: Keep) -> float:
    """The network's accuracy on the client's val with the operations of `keep` alone."""
    return await client.score(look.at(keep), rough=True)


# when ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Algorithm 2, line 3: an event in every round t >= t_s that is a multiple of tau; rounds count from 0.

    An event decides one edge of each cell type; from the last of these events on, each also reduces one node. With
    t_s = 30 and tau = 20 that is rounds 40, 60, ... 300 for the edges and 300, 320, 340 for the nodes. Scaled down to
    a short run tau may be less than a round: then a round has several events.
    """

    warm_up: Fraction  # t_s
    tau: Fraction

    @staticmethod
    def of(warm_up: int, tau: int, rounds: int) -> Schedule:
        """Where 0 is given, the paper's value for 1000 rounds is scaled to the run's rounds."""
        scale = Fraction(rounds, PAPER_ROUNDS)
        return Schedule(Fraction(warm_up) or PAPER_WARM_UP * scale, Fraction(tau) or PAPER_TAU * scale)

    @property
    def first(self) -> Fraction:
        return -(-self.warm_up // self.tau) * self.tau

    @property
    def last(self) -> Fraction:
        """When the last decision is made."""
        return self.first + (len(EDGES) + len(NODES) - 2) * self.tau

    def due(self, t: int) -> tuple[int, int]:
        """How many edges and how many nodes of each cell type are decided by round t."""
        events = max(0, (t - self.first) // self.tau + 1)
        return min(events, len(EDGES)), min(max(0, events - len(EDGES) + 1), len(NODES))

    def over(self, t: int) -> bool:
        """Whether all is decided by round t."""
        return t >= self.last

    def check(self, rounds: int, more: int = 0) -> None:
        """Raises `UserError` where the run is too short, with so many rounds more for the last decision.

        A schedule scaled to the run never is.
        """
        last = self.last + more
        if last > rounds - 1 and rounds > 1:
            raise UserError(
                f"method.warm_up = {float(self.warm_up):g} and method.tau = {float(self.tau):g} put the last decision "
                f"of the search into round {float(last + 1):g} of {rounds}. Lower them (0: scaled to the run), or "
                "raise 'rounds'."
            )


# what ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """How far a search is. `edges` and `nodes` wait in random order, by cell type: the set E_s of Algorithm 2."""

    keep: Keep
    edges: Pair
    nodes: Pair

    @property
    def over(self) -> bool:
        """Whether nothing waits."""
        return not any(self.edges + self.nodes)

    def ended(self, keep: Keep) -> Search:
        """The search where somebody else has decided all of it."""
        return Search(keep, ((), ()), ((), ()))

    @staticmethod
    def begin(space: Darts, rng: np.random.Generator) -> Search:
        edges, nodes = (
            (_shuffled(things, rng), _shuffled(things, rng)) for things in (tuple(range(len(EDGES))), NODES)
        )
        return Search(space.full_keep, edges, nodes)


@dataclass(frozen=True)
class Question:
    """Which operation of an edge to keep, or which edge of a node to delete."""

    kind: int  # 0: normal cell, 1: reduction cell
    edge: int | None
    node: int | None
    removed: tuple[int, ...]  # the operation, or else the edge, that each candidate does without
    candidates: tuple[Keep, ...]


def questions(search: Search, due: tuple[int, int]) -> list[Question]:
    """What is open now. Of a node only one deletion is, since the next depends on it."""
    found: list[Question] = []
    for kind in (0, 1):
        edges, nodes = search.edges[kind], search.nodes[kind]
        for e in edges[: max(0, due[0] - len(EDGES) + len(edges))]:
            places = search.keep[kind][e]
            without = tuple(_with(search.keep, kind, e, tuple(j for j in places if j != i)) for i in places)
            found.append(Question(kind, e, None, places, without))
        for node in nodes[: max(0, due[1] - len(NODES) + len(nodes)) if not edges else 0]:
            alive = tuple(e for e in EDGES_INTO[node] if search.keep[kind][e])  # a deleted edge stays off
            found.append(Question(kind, None, node, alive, tuple(_with(search.keep, kind, e, ()) for e in alive)))
    return found


def answered(search: Search, question: Question, accuracies: Sequence[float], rng: np.random.Generator) -> Search:
    """The search after a question, given the accuracy of each candidate; chance decides between equals."""
    kind = question.kind
    if question.edge is not None:  # the text and the authors' code, not line 8: the largest drop marks the best one
        best = question.removed[_pick(accuracies, min(accuracies), rng)]
        keep = _with(search.keep, kind, question.edge, (best,))
        return replace(search, keep=keep, edges=_less(search.edges, kind, question.edge))
    assert question.node is not None
    worst = question.removed[_pick(accuracies, max(accuracies), rng)]
    keep = _with(search.keep, kind, worst, ())
    done = len(question.removed) - 1 <= 2
    return replace(search, keep=keep, nodes=_less(search.nodes, kind, question.node) if done else search.nodes)


async def decide(
    search: Search, due: tuple[int, int], score: Callable[[Keep], Awaitable[float]], rng: np.random.Generator
) -> Search:
    """The search after everything that is due, one decision after the other."""
    while asked := questions(search, due):
        search = answered(search, asked[0], [await score(keep) for keep in asked[0].candidates], rng)
    return search


def _with(keep: Keep, kind: int, edge: int, places: tuple[int, ...]) -> Keep:
    changed = (*keep[kind][:edge], places, *keep[kind][edge + 1 :])
    return (changed, keep[1]) if kind == 0 else (keep[0], changed)


def _less(pair: Pair, kind: int, gone: int) -> Pair:
    left = tuple(i for i in pair[kind] if i != gone)
    return (left, pair[1]) if kind == 0 else (pair[0], left)


def _shuffled(things: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.permutation(things))


def _pick(values: Sequence[float], wanted: float, rng: np.random.Generator) -> int:
    equals = [i for i, value in enumerate(values) if value == wanted]
    return equals[int(rng.integers(len(equals)))]
