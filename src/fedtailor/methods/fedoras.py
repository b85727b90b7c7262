"""FedorAS: Dudziak, Laskaridis & Fernandez-Marques, arXiv:2206.11239. One network per tier of devices, in three stages.

1. supernet: clients train single paths of a supernet, a new one every `draw_every` batches, drawn at random within
   their tier's FLOPs. The server averages op-aware: an operation counts by the examples that it saw on each client.
2. search: for every tier the server evolves archs within the tier's bracket of FLOPs; clients score them on val.
3. tune: the best arch of each tier inherits its weights and is trained by FedAvg, by clients of that tier and above.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import AtLeastOne, Count, Fraction, NonNegative
from ..registry import register
from ..search.evolution import absorbed, arch_of, generation, score_candidates
from ..search.paths import average, merge_paths, require_limit, sent_part
from ..search.supernet import Deploy, keep
from ..search.tiers import bracket_of, layout, require_archs, serves, train_within


@register("method", "fedoras")
@dataclass(frozen=True)
class FedorAS(Method):
    paper: ClassVar[str] = "Dudziak et al., FedorAS: Federated Architecture Search under System Heterogeneity, 2022"
    deviations: ClassVar[tuple[str, ...]] = (
        "no client hands images to the server: candidates are scored by clients, on their own val",
        "a client scores candidates of its own tier, and tunes one network at or below its tier, drawn at random",
        "evolution by accuracy alone (the authors' second metric is constant); no child is outside its bracket",
        "paths are drawn at random and changed at random until they fit, in place of layer by layer",
        "every path starts with fresh momenta, and with a shuffle of its own",
        "the spaces of this package, of which a network's tensors are leading entries; OPA works on entries",
        "a client trains its tier's network for local.epochs before it keeps it; the authors do not (deploy = 'as-is')",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet, then one network per tier",
        personal="weights, trained once more; the network is the tier's",
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
    tune_lr: NonNegative = 0.0  # of stage 3, which has local.schedule from its beginning; 0: local.lr
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    def check(self, job: Job) -> None:
        if job.rounds < 2:
            raise UserError(f"rounds = {job.rounds}: method.name = 'fedoras' needs one to train and one to search.")
        require_limit(job.space, self.max_parameters, "method.max_parameters")
        require_archs(Server(job, **layout(job, self.tiers, self.assign, self.probes)))

    def stages(self, rounds: int) -> tuple[int, int]:
        """The last rounds of stages 1 and 2."""
        tune = min(round(self.tune * rounds), rounds - 2)
        search = min(max(1, round(self.search * rounds)), rounds - tune - 1)
        return rounds - tune - search, rounds - tune

    def stage(self, server: Server) -> str:
        return ("supernet", "search", "tune")[bisect_right(self.stages(server.job.rounds), server.round)]

    def start(self, job: Job) -> Server:
        weights, known = job.space.new_weights(job.seed), layout(job, self.tiers, self.assign, self.probes)
        return Server(job, **known, weights=weights, pools=[[] for _ in range(self.tiers)], archs=[], tuned={})

    def ask(self, server: Server, client: Seat) -> Task:
        stage, space, tier = self.stage(server), server.space, server.tiers[client.id]
        if stage == "supernet":  # the same part for all clients of a round
            sent, options = sent_part(space, server.weights, self.max_parameters, server.rng("options"))
            return Task(sent, extra=options, facts={"stage": stage, "flops": server.edges[tier + 1]})
        if stage == "search":
            rng, bracket, pool = server.rng("candidates", tier), bracket_of(server, tier), server.pools[tier]
            archs = generation(bracket, pool, self.pool, self.parents, self.mutation, rng)
            sent = {name: server.weights[name] for arch in archs for name in space.index(arch)}
            return Task(sent, extra={"candidates": torch.tensor(archs)}, facts={"stage": stage, "tier": tier})
        return self.network(server, serves(server, client), stage=stage)

    async def work(self, task: Task, client: Client) -> Reply:
        trained, searched = self.stages(client.rounds)
        if task.facts["stage"] == "supernet":
            return await train_within(task, client, self.draw_every, client.local.lr_at(client.round, trained))
        if task.facts["stage"] == "search":
            return await score_candidates(task, client)
        net = client.build(task)
        local = replace(client.local, lr=self.tune_lr or client.local.lr)
        loss = await client.fit(net, lr=local.lr_at(client.round - searched, client.rounds - searched))
        return Reply(client.take(net), task.arch, facts={"loss": loss, "tier": task.facts["tier"]})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        stage, tiers = self.stage(server), range(self.tiers)
        if stage == "supernet":
            return server.replace(weights=merge_paths(server, replies))
        if stage == "search":
            return server.replace(pools=absorbed(server.pools, replies))
        parts = [[(r.weights, r.samples) for r in replies if r.facts["tier"] == t] for t in tiers]
        tuned = {str(t): average(self.network(server, t).weights, parts[t]) for t in tiers}
        return server.replace(tuned=tuned, archs=[list(arch_of(server, t)) for t in tiers])

    def offer(self, server: Server, client: Seat) -> Task:
        return self.network(server, server.tiers[client.id])

    def network(self, server: Server, tier: int, **facts: str) -> Task:
        """The tier's network: tuned, or as it comes out of the supernet."""
        arch = arch_of(server, tier)
        weights = server.tuned.get(str(tier)) or server.space.cut(server.weights, arch)
        return Task(weights, arch, facts={**facts, "tier": tier})

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await keep(task, client, self.deploy)
