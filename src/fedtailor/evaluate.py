"""The only reader of test data.

Numbers are over all clients: `personal` is what `Method.personal` returns for each client, `global` the server's model
on each client's data, `new` the personal network of clients that were held out of training. Val is read at any time;
the test store is opened once, after the last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .data.batches import Split
from .data.federation import Store
from .data.partition import TEST, VAL
from .engine.client import Client
from .engine.jobs import Score
from .engine.loop import Event, Federation, Memory, State, outgoing
from .errors import UserError
from .method import Method, Seat, Server
from .spaces.base import Arch, Space, Weights
from .spaces.measure import Cost, tensors_of


@dataclass(frozen=True)
class Kept:
    """The network a client keeps."""

    client: int
    space: Space  # the run's own, or that of a network that is no point of it
    arch: Arch
    weights: Weights
    cost: Cost


def evaluate(federation: Federation, state: State, test: Store | None) -> tuple[list[Event], list[Kept]]:
    """Accuracies of the state on val and, where the test store is given, on test; and the networks clients keep."""
    method, job = federation.method, federation.job
    trained, held_out = job.seats[: job.clients], job.seats[job.clients :]
    events, kept = _personal(federation, method, state.server, trained, state.memories, test, "personal")
    shared = method.shared(state.server)
    if shared is not None:
        shared = outgoing(shared, job.local)
        clients = [federation.client(seat, state.memories.get(seat.id, {}), state.round) for seat in trained]
        work = [
            (
                f"global model on client {c.name}",
                _scores(c, method.build(shared, c), _splits(federation, c.id, test), None),
            )
            for c in clients
        ]
        for client, found in zip(clients, federation.engine.run(work), strict=True):
            events += [Event(state.round, client.id, s, "global_accuracy", v) for s, v in found.items()]
    if held_out and test is not None:
        server, memories = onboard(federation, state, held_out)
        more, more_kept = _personal(federation, method, server, held_out, memories, test, "new")
        events, kept = events + more, kept + more_kept
    return events, kept


def onboard(federation: Federation, state: State, seats: Sequence[Seat]) -> tuple[Server, dict[int, Memory]]:
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


def _personal(
    federation: Federation,
    method: Method,
    server: Server,
    seats: Sequence[Seat],
    memories: dict[int, Memory],
    test: Store | None,
    kind: str,
) -> tuple[list[Event], list[Kept]]:
    round, last = server.round, test is not None
    clients = [federation.client(seat, memories.get(seat.id, {}), round, keeping=True) for seat in seats]

    async def finish(seat: Seat, client: Client) -> tuple[dict[str, float], Kept]:
        net = await method.personal(outgoing(method.offer(server, seat), client.local), client)
        await client.refresh(net)
        fold_prior(net, client)
        found = await _scores(client, net, _splits(federation, client.id, test), None)
        weights = {n: t.detach().cpu().clone() for n, t in tensors_of(net).items()} if last else {}
        return found, Kept(client.id, net.space, net.arch, weights, client.cost(net))  # type: ignore[arg-type]

    work = [
        (f"personal network of client {c.name} after round {round}", finish(s, c))
        for s, c in zip(seats, clients, strict=True)
    ]
    events: list[Event] = []
    kept: list[Kept] = []
    for found, net in federation.engine.run(work):
        events += [Event(round, net.client, split, f"{kind}_accuracy", value) for split, value in found.items()]
        if last:
            kept.append(net)
            events.append(Event(round, net.client, "", f"{kind}_parameters", net.cost.parameters))
            events.append(Event(round, net.client, "", f"{kind}_flops", net.cost.flops))
            if word := net.space.word(net.arch):
                events.append(Event(round, net.client, "", f"{kind}_arch", word))
    return events, kept


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


async def _scores(
    client: Client, net: nn.Module, splits: dict[str, Split], shift: torch.Tensor | None
) -> dict[str, float]:
    await client.refresh(net)
    return {name: await Score(net, split, shift) for name, split in splits.items()}


async def test_accuracy(client: Client, net: nn.Module, test: Store) -> float:
    """A network's accuracy on a client's test images, for studies after a run; nothing may be chosen by it."""
    await client.refresh(net)
    split = test.split(client.id, TEST)
    return await Score(net, split, client.shift) if split.size else float("nan")


def mean_accuracy(events: Iterable[Event], metric: str, split: str = "val") -> float | None:
    """Mean over clients of one metric, for the progress line."""
    values = [float(e.value) for e in events if e.metric == metric and e.split == split]
    return sum(values) / len(values) if values else None
