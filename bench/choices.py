"""What a learnt choice of architectures is worth: other choices, cut out of the very same trained supernet.

    python bench/choices.py RUN --data-dir DIR [--pooled] [--device cpu] [--out choices.json]

RUN is the folder of a run with a supernet, such as those that bench/cifar.py keeps under --work. After PerFedRLNAS
every client gets the network that its policy holds most likely, the one of its neighbour's policy, one drawn from its
policy, one drawn at random, and the largest; after random-arch and largest-fit its own. Each is scored as it is and
with the client's label prior. With --pooled also with normalisation statistics of the images of all clients instead of
the client's own.

Prints means over clients on val and test, and how much the first choice is ahead on test, with the standard error of
the mean difference over clients. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import torch

from fedtailor.config import load
from fedtailor.data.federation import Store
from fedtailor.data.partition import TRAIN
from fedtailor.engine.local import recalibrate
from fedtailor.engine.loop import Federation, State
from fedtailor.evaluate import keep_networks
from fedtailor.method import Job, Seat, Server, Task
from fedtailor.runs import checkpoint
from fedtailor.runs.execute import choose_device, prepare
from fedtailor.search.policy import most_likely, probabilities
from fedtailor.search.supernet import affords, sub_network
from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch

USES = {"as it is": {"prior": False}, "prior": {"prior": True, "prior_tau": 1.0}}
BATCHES = 64  # of everybody's images
Choice = Callable[[Seat], Arch]
Accuracies = dict[str, list[float]]  # of all clients, by split


def choices(server: Server, seats: Sequence[Seat]) -> Mapping[str, Choice]:
    """An arch for every client, by the name of the choice; differences are to the first."""
    if "archs" in server.values:
        return {"own": lambda seat: server.archs[seat.id]}
    space, policies = server.space, server.alpha

    def likely(policy: int, seat: Seat) -> Arch:
        return most_likely(space, policies[policy], lambda arch: affords(seat, arch))

    def drawn(name: str, seat: Seat, chances: Sequence[np.ndarray] | None = None) -> Arch:
        rng = rng_of(server.job.seed, "choices", name, seat.id)
        return space.sample(rng, chances, lambda arch: affords(seat, arch))

    return {
        "policy": lambda seat: likely(seat.id, seat),
        "neighbour's policy": lambda seat: likely((seat.id + 1) % len(seats), seat),
        "drawn from policy": lambda seat: drawn("policy", seat, probabilities(space, policies[seat.id])),
        "random": lambda seat: drawn("random", seat),
        "largest": lambda _: space.largest,
    }


def certainty(server: Server, seats: Sequence[Seat]) -> dict[str, float]:
    """How far policies have settled: the likeliest option's probability, and the entropy as a share of the uniform."""
    found = [[p for p in probabilities(server.space, server.alpha[s.id]) if len(p) > 1] for s in seats]
    tops = [p.max() for policy in found for p in policy]
    entropies = [-(p * np.log(p)).sum() / np.log(len(p)) for policy in found for p in policy]
    uniform = [1 / len(p) for p in found[0]]
    return {"top": float(np.mean(tops)), "uniform top": float(np.mean(uniform)), "entropy": float(np.mean(entropies))}


def everybodys(server: Server, store: Store, arch: Arch) -> Task:
    """The sub-network with normalisation statistics of the training images of all clients."""
    task, some = sub_network(server, arch), store.split(0, TRAIN)
    images = [store.split(c, TRAIN).chunks(1 << 30)[0] for c in range(server.job.clients)]
    mixed = rng_of(server.job.seed, "choices", "statistics").permutation(sum(map(len, images)))
    batch = server.job.local.batch
    order = torch.cat(images)[torch.from_numpy(mixed).to(images[0].device)][: BATCHES * batch].split(batch)
    net = server.space.build(arch).to(some.labels.device)
    net.load_state_dict(task.weights, strict=False)
    with torch.no_grad():
        recalibrate(net, lambda i: some.at(order[i]), len(order))
    found = net.state_dict()
    return replace(task, weights={name: found[name] for name in task.weights})


def keep(
    federation: Federation, job: Job, state: State, choice: Choice, test: Store, pooled: bool
) -> tuple[Accuracies, float]:
    """Accuracies with the archs of a choice, and the archs' mean arithmetic."""
    before, seats = federation, job.seats[: job.clients]
    federation = Federation(job, before.method, before.store, before.engine, before.fleet, before.rules)
    server = Server(job, state.round, **state.server.values)
    archs = {seat.id: choice(seat) for seat in seats}
    cut = lru_cache(lambda arch: everybodys(server, before.store, arch) if pooled else sub_network(server, arch))
    offers = ((seat, federation.sent(cut(archs[seat.id]))) for seat in seats)
    events, _ = keep_networks(federation, state.round, offers, state.memories, test, "personal")
    found: Accuracies = {"val": [], "test": []}
    for event in events:
        if event.metric == "personal_accuracy":
            found[event.split].append(float(event.value))
    return found, float(np.mean([job.space.cost(arch).flops for arch in archs.values()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--pooled", action="store_true", help="also with statistics of everybody's images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=0, help="threads on a CPU")
    parser.add_argument("--only", nargs="+", help="some of the choices")
    parser.add_argument("--out", type=Path, help="accuracies of every client, as JSON")
    args = parser.parse_args()
    device = choose_device(args.device)
    changes = {"data.dir": args.data_dir} | ({"precision": "fp32"} if device.type == "cpu" else {})
    setup = prepare(load(args.run / "config.toml", changes), args.run / "partition.npz")
    federation, test = setup.federation(device, args.workers)
    loaded = checkpoint.load(args.run / "checkpoints", setup.job, device, print)
    if loaded is None or not loaded[0].server.values.keys() & {"alpha", "archs"}:
        raise SystemExit(f"{args.run} has no checkpoint of a supernet with policies or archs of clients")
    state, seats = loaded[0], setup.job.seats[: setup.job.clients]
    if "alpha" in state.server.values:
        print(json.dumps(certainty(state.server, seats)), flush=True)
    wanted = {n: c for n, c in choices(state.server, seats).items() if not args.only or n in args.only}
    found: dict[str, Accuracies] = {}
    for (name, choice), pooled, use in product(wanted.items(), (False, True)[: 1 + args.pooled], USES):
        began = time.monotonic()
        bn = "average" if pooled else setup.job.local.bn  # average: statistics are taken as they come
        job = replace(setup.job, local=replace(setup.job.local, **USES[use], bn=bn))
        kept, flops = keep(federation, job, state, choice, test, pooled)
        title = f"{name}, statistics of all, {use}" if pooled else f"{name}, {use}"
        found[title] = kept
        first = next(kept for title, kept in found.items() if title.endswith(use))
        ahead = 100 * (np.array(first["test"]) - np.array(kept["test"]))
        says = ", ".join(f"{split} {100 * np.mean(values):.2f}" for split, values in kept.items())
        says += f"; first {ahead.mean():+.2f} ahead on test (se {np.std(ahead, ddof=1) / np.sqrt(len(seats)):.2f})"
        print(f"{title}: {says}; {flops / 1e6:.1f} MFLOPs; {time.monotonic() - began:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
