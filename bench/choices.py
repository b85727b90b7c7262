"""What a learnt choice of architectures is worth: other choices, cut out of the very same trained supernet.

    python bench/choices.py RUN --data-dir DIR [--device cpu] [--out choices.json]

RUN is the folder of a PerFedRLNAS run, such as those that bench/cifar.py keeps under --work. Every client gets the
network that its policy holds most likely, the one of its neighbour's policy, one drawn from its policy, one drawn at
random, and the largest; each as it is and with the client's label prior. Prints means over clients on val and test, and
the difference to the client's own policy with its standard error over clients. Nothing is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtailor.config import load
from fedtailor.data.federation import Store
from fedtailor.engine.loop import Federation, State
from fedtailor.evaluate import keep_networks
from fedtailor.method import Job, Seat, Server
from fedtailor.runs import checkpoint
from fedtailor.runs.execute import choose_device, prepare
from fedtailor.search.policy import most_likely, probabilities
from fedtailor.search.supernet import affords, sub_network
from fedtailor.seeds import rng_of
from fedtailor.spaces.base import Arch

USES = {"as it is": {"prior": False}, "prior": {"prior": True, "prior_tau": 1.0}}
Accuracies = dict[str, list[float]]  # of all clients, by split


def choices(server: Server, seats: Sequence[Seat]) -> Mapping[str, Callable[[Seat], Arch]]:
    """An arch for every client, by the name of the choice."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-dir", default="")
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
    if loaded is None or "alpha" not in loaded[0].server.values:
        raise SystemExit(f"{args.run} has no checkpoint of a search with policies")
    state, seats = loaded[0], setup.job.seats[: setup.job.clients]
    print(json.dumps(certainty(state.server, seats)), flush=True)
    found: dict[str, Accuracies] = {}
    for name, arch_of in choices(state.server, seats).items():
        if args.only and name not in args.only:
            continue
        for use, local in USES.items():
            began = time.monotonic()
            job = dataclasses.replace(setup.job, local=dataclasses.replace(setup.job.local, **local))
            kept, flops = keep(federation, job, state, arch_of, test)
            found[f"{name}, {use}"] = kept
            apart = 100 * (np.array(kept["test"]) - np.array(found.get(f"policy, {use}", kept)["test"]))
            says = ", ".join(f"{split} {100 * np.mean(values):.2f}" for split, values in kept.items())
            says += f"; test {apart.mean():+.2f} (se {np.std(apart, ddof=1) / np.sqrt(len(seats)):.2f}) against policy"
            print(f"{name}, {use}: {says}; {flops / 1e6:.1f} MFLOPs; {time.monotonic() - began:.0f} s", flush=True)
            if args.out:
                args.out.write_text(json.dumps(found))


def keep(
    federation: Federation, job: Job, state: State, arch_of: Callable[[Seat], Arch], test: Store
) -> tuple[Accuracies, float]:
    """Accuracies with the archs of a choice, and the archs' mean arithmetic."""
    before, seats = federation, job.seats[: job.clients]
    federation = Federation(job, before.method, before.store, before.engine, before.fleet, before.rules)
    server = Server(job, state.round, **state.server.values)
    archs = {seat.id: arch_of(seat) for seat in seats}
    offers = ((seat, federation.sent(sub_network(server, archs[seat.id]))) for seat in seats)
    events, _ = keep_networks(federation, state.round, offers, state.memories, test, "personal")
    found: Accuracies = {"val": [], "test": []}
    for event in events:
        if event.metric == "personal_accuracy":
            found[event.split].append(float(event.value))
    return found, float(np.mean([job.space.cost(arch).flops for arch in archs.values()]))


if __name__ == "__main__":
    main()
