"""FedorAS: Dudziak, Laskaridis & Fernandez-Marques, arXiv:2206.11239. One network per tier of devices, in three stages.

1. supernet: clients train single paths of a supernet, a new one every `draw_every` batches, drawn at random within
   their tier's FLOPs. The server averages op-aware: an operation counts by the examples that it saw on each client.
2. search: for every tier the server evolves archs within the tier's bracket of FLOPs; clients score them on val.
3. tune: the best arch of each tier inherits its weights and is trained by FedAvg, by clients of that tier and above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import AtLeastOne, Count, Fraction, NonNegative
from ..registry import register
from ..search.paths import (
    average,
    entries,
    every_option,
    op_aware,
    pack_options,
    pack_paths,
    score_paths,
    some_options,
    tensors_for,
    train_paths,
    unpack_options,
    unpack_paths,
)
from ..search.supernet import Deploy, keep
from ..search.tiers import Bracket, assigned, edges, noted, offspring, ranked
from ..seeds import rng_of
from ..spaces.base import Arch, Weights

Stage = Literal["supernet", "search", "tune"]


@register("method", "fedoras")
@dataclass(frozen=True)
class FedorAS(Method):
    paper: ClassVar[str] = "Dudziak et al., FedorAS: Federated Architecture Search under System Heterogeneity, 2022"
    deviations: ClassVar[tuple[str, ...]] = (
        "no client hands images to the server: candidates are scored by clients, on their own val",
        "a client scores candidates of its own tier, and tunes one network at or below its tier, drawn at random",
        "evolution by accuracy alone (the authors' second metric is constant); no child is outside its bracket",
        "paths are drawn at random and changed at random until they fit, in place of layer by layer",
        "every path starts with fresh momenta",
        "the spaces of this package, of which a network's tensors are leading entries; OPA works on entries",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet, then one network per tier",
        personal="none; the network is the tier's",
        policy="evolution within the tier's FLOPs",
        search="server and clients",
        handles=("system", "model"),
        down=Message(
            ("supernet", "sub-network"),
            {"options": "that may be drawn, 1 or 0 for each", "candidates": "archs to score"},
            {"stage": "of the three", "tier": "that the client works for", "flops": "a path's most"},
        ),
        up=Message(
            ("supernet", "sub-network"),
            {
                "paths": "archs that were trained",
                "examples": "that each saw",
                "candidates": "archs that were scored",
                "accuracies": "of the candidates",
            },
            LOSS | {"tier": "that the client worked for", "images": "that candidates were scored on"},
        ),
        holds={
            "weights": "the supernet",
            "tiers": "of the clients",
            "edges": "of the tiers' FLOPs",
            "pools": "scored archs of each tier",
            "archs": "of the tiers, once the search is over",
            "tuned": "weights of the tiers' networks",
        },
    )

    tiers: AtLeastOne = 4
    assign: Literal["random", "device"] = "random"  # equal shares at random, as the authors; or by the devices' speed
    probes: AtLeastOne = 1000  # archs sampled to place the brackets; the authors sample 100 000
    search: Fraction = 0.1  # share of the rounds in stage 2
    tune: Fraction = 0.2  # share of the rounds in stage 3; what is left is stage 1
    draw_every: AtLeastOne = 1  # batches on one path
    max_parameters: Count = 0  # of the part of the supernet that is sent, drawn anew in every round; 0: all of it
    pool: AtLeastOne = 8  # candidates of a tier in a round
    parents: AtLeastOne = 4  # the best so far: they are scored again and have children
    mutation: Fraction = 0.1
    tune_lr: NonNegative = 0.0  # 0: local.lr
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    # tiers and stages -------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        if job.rounds < 2:
            raise UserError(f"rounds = {job.rounds}: method.name = 'fedoras' needs one to train and one to search.")
        least = entries(job.space, list(job.space.index(job.space.smallest))) if self.max_parameters else 0
        if least > self.max_parameters:
            raise UserError(f"method.max_parameters = {self.max_parameters}: the smallest arch's tensors have {least}.")
        server = Server(job, **self._layout(job))
        for tier in range(self.tiers):
            self.bracket(server, tier).sample(rng_of(job.seed, "check", tier))

    def stages(self, rounds: int) -> tuple[int, int]:
        """The last rounds of stages 1 and 2."""
        tune = min(round(self.tune * rounds), rounds - 2)
        search = min(max(1, round(self.search * rounds)), rounds - tune - 1)
        return rounds - tune - search, rounds - tune

    def stage(self, server: Server) -> Stage:
        trained, searched = self.stages(server.job.rounds)
        return "supernet" if server.round < trained else "search" if server.round < searched else "tune"

    def bracket(self, server: Server, tier: int) -> Bracket:
        """What a tier's network may cost, for all clients that work on it."""
        seats = {(s.budget, s.profile): s for s, t in zip(server.job.seats, server.tiers, strict=True) if t >= tier}
        fits = lambda arch: all(seat.fits(arch) for seat in seats.values())  # noqa: E731
        return Bracket(server.space, server.edges[tier], server.edges[tier + 1], fits)

    def serves(self, server: Server, client: Seat) -> int:
        """The tier whose network the client tunes in this round."""
        return int(server.rng("serves", client.id).integers(server.tiers[client.id] + 1))

    # the server -------------------------------------------------------------------------------------------------

    def start(self, job: Job) -> Server:
        return Server(
            job,
            **self._layout(job),
            weights=job.space.new_weights(job.seed),
            pools=[[] for _ in range(self.tiers)],
            archs=[],
            tuned={},
        )

    def _layout(self, job: Job) -> dict[str, Any]:
        tiers = assigned(job, self.tiers, self.assign)
        return {"tiers": tiers, "edges": edges(job.space, self.tiers, self.probes, job.seed)}

    def ask(self, server: Server, client: Seat) -> Task:
        stage, space = self.stage(server), server.space
        if stage == "supernet":
            options, sent = every_option(space), server.weights
            if self.max_parameters:  # the same part for all clients of a round
                options = some_options(space, self.max_parameters, server.rng("options"))
                sent = {n: server.weights[n] for n in tensors_for(space, options)}
            flops = server.edges[server.tiers[client.id] + 1]
            return Task(sent, extra={"options": pack_options(space, options)}, facts={"stage": stage, "flops": flops})
        if stage == "search":
            tier = server.tiers[client.id]
            archs = self.candidates(server, tier)
            sent = {name: server.weights[name] for arch in archs for name in space.index(arch)}
            return Task(sent, extra={"candidates": torch.tensor(archs)}, facts={"stage": stage, "tier": tier})
        tier = self.serves(server, client)
        return Task(self.network(server, tier), self.arch_of(server, tier), facts={"stage": stage, "tier": tier})

    def candidates(self, server: Server, tier: int) -> list[Arch]:
        """The best archs so far, and children of theirs."""
        rng, bracket = server.rng("candidates", tier), self.bracket(server, tier)
        best = ranked(server.pools[tier])[: self.parents]
        again = best[: self.pool - 1]
        return again + [offspring(bracket, best, self.mutation, rng) for _ in range(self.pool - len(again))]

    def arch_of(self, server: Server, tier: int) -> Arch:
        """The tier's arch: the best that was found so far; any of its bracket where nothing was scored."""
        known = [tuple(server.archs[tier])] if server.archs else ranked(server.pools[tier])
        return known[0] if known else self.bracket(server, tier).sample(rng_of(server.job.seed, "unscored", tier))

    def network(self, server: Server, tier: int) -> Weights:
        return server.tuned.get(str(tier)) or server.space.cut(server.weights, self.arch_of(server, tier))

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        stage = self.stage(server)
        if stage == "supernet":
            parts = [(r.weights, unpack_paths(r.extra)) for r in replies]
            return server.replace(weights=op_aware(server.space, server.weights, parts))
        if stage == "search":
            pools = list(server.pools)
            for r in replies:
                tier, images = int(r.facts["tier"]), float(r.facts["images"])
                archs, accuracies = r.extra["candidates"].tolist(), r.extra["accuracies"].tolist()
                for arch, accuracy in {tuple(a): x for a, x in zip(archs, accuracies, strict=True)}.items():
                    pools[tier] = noted(pools[tier], arch, accuracy, images)
            return server.replace(pools=pools)
        tuned = {
            str(tier): average(
                self.network(server, tier), [(r.weights, r.samples) for r in replies if r.facts["tier"] == tier]
            )
            for tier in range(self.tiers)
        }
        return server.replace(tuned=tuned, archs=[list(self.arch_of(server, t)) for t in range(self.tiers)])

    def offer(self, server: Server, client: Seat) -> Task:
        tier = server.tiers[client.id]
        return Task(self.network(server, tier), self.arch_of(server, tier), facts={"tier": tier})

    # the client -------------------------------------------------------------------------------------------------

    async def work(self, task: Task, client: Client) -> Reply:
        trained, searched = self.stages(client.rounds)
        if task.facts["stage"] == "supernet":
            options = unpack_options(client.space, task.extra["options"])
            bracket = Bracket(client.space, -1.0, float(task.facts["flops"]), client.fits)
            draw = lambda first: bracket.sample(client.rng(f"path {first}"), options)  # noqa: E731
            lr = client.local.lr_at(client.round, trained)
            weights, paths, loss = await train_paths(task.weights, client, draw, self.draw_every, lr)
            return Reply(weights, extra=pack_paths(paths), facts={"loss": loss})
        if task.facts["stage"] == "search":
            archs = task.extra["candidates"]
            accuracies = await score_paths(task.weights, client, [tuple(arch) for arch in archs.tolist()])
            facts = {"tier": task.facts["tier"], "images": client.size("val")}
            return Reply(extra={"candidates": archs, "accuracies": torch.tensor(accuracies)}, facts=facts)
        net = client.build(task)
        lr = self.tune_lr or client.local.lr_at(client.round - searched, client.rounds - searched)
        loss = await client.fit(net, lr=lr)
        return Reply(client.take(net), task.arch, facts={"loss": loss, "tier": task.facts["tier"]})

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await keep(task, client, self.deploy)
