"""The only reader of test data.

Numbers are over all clients: `personal` is what `Method.personal` returns for each client, `global` the server's model
on each client's data, `new` the personal network of clients that were held out of training. Val is read at any time;
the test store is opened once, after the last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .data.batches import Split
from .data.federation import Store
from .data.partition import TEST, VAL
from .engine.client import Client
from .engine.jobs import Score
from .engine.loop import Event, Federation, Memory, Rounds, State
from .errors import Diverged, UserError
from .method import Fact, Method, Seat, Server, Task, returned
from .nets.base import table_for
from .parts import learnt
from .spaces.base import Arch, Space, Weights
from .spaces.measure import Cost, parameters_of

TUNE = 10  # epochs, at most, for newcomers to methods that leave clients nothing of their own


@dataclass(frozen=True)
class Kept:
    """The network a client keeps."""

    client: int
    space: Space  # the run's own, or that of a network that is no point of it
    arch: Arch
    weights: Weights
    cost: Cost

    @property
    def facts(self) -> dict[str, int | str]:
        """What the network is, in a few words."""
        word = self.space.word(self.arch)
        return {"parameters": self.cost.parameters, "flops": self.cost.flops} | ({"arch": word} if word else {})


def evaluate(federation: Federation, state: State, test: Store | None) -> tuple[list[Event], list[Kept]]:
    """Accuracies of the state on val and, where the test store is given, on test; and the networks clients keep."""
    method, job = federation.method, federation.job
    trained, held_out = job.seats[: job.clients], job.seats[job.clients :]
    offers = offers_of(federation, state.server, trained)
    events, kept = keep_networks(federation, state.round, offers, state.memories, test, "personal")
    shared = method.shared(state.server)
    if shared is not None:
        shared = federation.sent(shared)
        if test is not None:
            _require_numbers(shared.weights, filter(learnt, shared.weights), "the global model")
        clients = [federation.client(seat, state.memories.get(seat.id, {}), state.round) for seat in trained]
        work = [
            (
                f"global model on client {c.name}",
                scores_of(method, shared, c, _splits(federation, c.id, test)),
            )
            for c in clients
        ]
        for client, found in zip(clients, federation.engine.run(work), strict=True):
            events += [Event(state.round, client.id, s, "global_accuracy", v) for s, v in found.items()]
    if held_out and test is not None:
        server, memories = onboard(federation, state, held_out)
        offers = offers_of(federation, server, held_out)
        more, more_kept = keep_networks(federation, state.round, offers, memories, test, "new")
        events, kept = events + more, kept + more_kept
    return events, kept


def onboard(federation: Rounds, state: State, seats: Sequence[Seat]) -> tuple[Server, dict[int, Memory]]:
    """Lets clients that never trained join, as the method says. The run's own state is left as it is."""
    method, rounds = federation.method.onboarding()
    server, memories = state.server.replace(), {}
    for number in range(rounds):
        server.round = state.round + number
        server, changed = federation.exchange(
            method, server, memories, state.round + number + 1, [s.id for s in seats], events=[]
        )
        memories |= changed
    server.round = state.round
    return server, memories


def offers_of(federation: Federation, server: Server, seats: Sequence[Seat]) -> Iterator[tuple[Seat, Task]]:
    """What the server has for these clients to make their networks of, made when it is asked for: of many, few are
    there at once."""
    method = federation.method
    return ((seat, federation.sent(returned(method.offer(server, seat), Task, method, "offer"))) for seat in seats)


def keep_networks(
    federation: Federation,
    round: int,
    offers: Iterable[tuple[Seat, Task]],
    memories: Mapping[int, Memory],
    test: Store | None,
    kind: str,
    epochs: float = 0.0,
    tune: int = 0,
) -> tuple[list[Event], list[Kept]]:
    """The networks that clients keep of what they are offered after a round, and their accuracies. With `epochs` each
    trains on for these, in the end, and with `tune` for as many of these as val likes best."""
    method, last = federation.method, test is not None
    clients = ((federation.client(seat, memories.get(seat.id, {}), round, keeping=True), o) for seat, o in offers)
    work = (
        (
            f"personal network of client {client.name} after round {round}",
            finish(method, offer, client, _splits(federation, client.id, test), last, epochs, tune),
        )
        for client, offer in clients
    )
    events: list[Event] = []
    kept: list[Kept] = []
    for found, net in federation.engine.run(work):
        events += personal_rows(round, net.client, kind, found, net.facts if last else {})
        kept += [net] if last else []
    return events, kept


async def finish(
    method: Method,
    offer: Task,
    client: Client,
    splits: dict[str, Split],
    last: bool,
    epochs: float = 0.0,
    tune: int = 0,
) -> tuple[dict[str, float], Kept]:
    """Makes a client's personal network, trains it on for some epochs, or up to some, and scores it.

    Its weights are kept when the run is over.
    """
    net = returned(await method.personal(offer, client), nn.Module, method, "personal")
    if epochs:
        await client.fit(net, epochs=epochs)
    if tune and client.size("val"):
        await _tune(net, client, tune)
    await client.refresh(net)
    fold_prior(net, client)
    found = await scores(client, net, splits)
    weights = {n: t.cpu() for n, t in client.copy(net).items()} if last else {}
    _require_numbers(weights, parameters_of(net), "the network that it keeps")
    return found, Kept(client.id, net.space, net.arch, weights, client.cost(net))  # type: ignore[arg-type]


def _require_numbers(weights: Weights, trained: Iterable[str], whose: str) -> None:
    """Raises where training left the numbers in its last step, which no later loss has told: a network that answers
    nothing would be given the accuracy of its first class. What is not trained may be infinite, as masks are."""
    known = set(trained)
    for name, t in weights.items():
        if t.is_floating_point() and bool((~t.isfinite() if name in known else t.isnan()).any()):
            raise Diverged(
                f"{whose} holds what is not a number, in '{name}': try a smaller local.lr, or local.clip = 5."
            )


async def _tune(net: nn.Module, client: Client, epochs: int) -> None:
    """Fine-tunes a network epoch by epoch, at a tenth of the learning rate, and goes back to where val was best."""
    best, kept = await client.score(net), client.copy(net)
    for _ in range(epochs):
        await client.fit(net, epochs=1, lr=client.local.lr / 10)
        found = await client.score(net)
        if found > best:
            best, kept = found, client.copy(net)
    client.load(net, kept)


def tuning(method: Method) -> int:
    """For how many epochs a newcomer fine-tunes at most: not at all where the method has a way of its own."""
    return TUNE if method.card.personal == "none" else 0


def personal_rows(
    round: int, client: int, kind: str, found: Mapping[str, float], facts: Mapping[str, Fact]
) -> list[Event]:
    """The rows on one client's personal network: its accuracies, and at the end what it is."""
    rows = [Event(round, client, split, f"{kind}_accuracy", value) for split, value in found.items()]
    return rows + [Event(round, client, "", f"{kind}_{name}", value) for name, value in facts.items()]


def network_value(net: Kept, space: Space) -> dict[str, Any]:
    """A client's network as a value: its arch and weights, enough to build it again.

    A network that is no point of the run's space comes with the [net] table that builds it.
    """
    value = {"space": net.space.name, "arch": list(net.arch), "weights": net.weights}
    if net.space != space:
        value["net"] = table_for(net.space)
    return value


def fold_prior(net: nn.Module, client: Client) -> None:
    """Adds tau times the client's log prior to the bias of the last layer, so that the network stands alone."""
    if client.shift is None:
        return
    head = getattr(net, "head", None)
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise UserError("local.prior needs a network whose last layer 'head' is linear and has a bias.")
    with torch.no_grad():
        head.bias.add_(client.shift)


def _splits(federation: Federation, client: int, test: Store | None) -> dict[str, Split]:
    found = {"val": federation.store.split(client, VAL)}
    if test is not None:
        found["test"] = test.split(client, TEST)
    return {name: split for name, split in found.items() if split.size}


async def scores(client: Client, net: nn.Module, splits: dict[str, Split]) -> dict[str, float]:
    """Accuracies of a network as it stands on some splits."""
    await client.refresh(net)
    return {name: await Score(net, split) for name, split in splits.items()}


async def scores_of(method: Method, task: Task, client: Client, splits: dict[str, Split]) -> dict[str, float]:
    """Accuracies of a task's network as it comes. It is built when its turn comes: of many, few are there at once."""
    return await scores(client, method.build(task, client), splits)


async def test_accuracy(client: Client, net: nn.Module, test: Store) -> float:
    """A network's accuracy on a client's test images, for studies after a run; nothing may be chosen by it."""
    await client.refresh(net)
    split = test.split(client.id, TEST)
    return await Score(net, split, client.shift) if split.size else float("nan")


def pictures(store: Store, client: int, which: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's pictures of a split as bytes [number, height, width, channels] and their labels: what the file of a
    finished network is checked with. Nothing may be chosen by test pictures."""
    split = store.split(client, which)
    rows = slice(split.start, split.start + split.size)
    return split.images[rows].permute(0, 2, 3, 1).contiguous().cpu().numpy(), split.labels[rows].cpu().numpy()


def mean_accuracy(events: Iterable[Event], metric: str, split: str = "val") -> float | None:
    """Mean over clients of one metric, for the progress line."""
    values = [float(e.value) for e in events if e.metric == metric and e.split == split]
    return sum(values) / len(values) if values else None
