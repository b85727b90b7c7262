"""PerFedRLNAS: Yao & Li, AAAI 2024, Algorithm 1. One supernet, one policy per client, trained by REINFORCE.

The server draws a sub-network for each participant from the client's own policy, the client trains it and reports its
accuracy, the server averages the pieces into the supernet and moves the policy by the reward (eq. 8)
r_i = Acc_i - mean(Acc) - lambda_time * (RT_i - min RT).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from ..engine.client import Client
from ..method import Job, Method, Reply, Seat, Server, Task
from ..options import NonNegative, Positive
from ..registry import register
from ..search.ascent import ascend, no_moments
from ..search.policy import log_gradient, most_likely, probabilities, uniform_logits


@register("method", "perfedrlnas")
@dataclass(frozen=True)
class PerFedRLNAS(Method):
    paper: ClassVar[str] = "Yao & Li, AAAI 2024, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "the reward reads val, never test",
        "round time comes from the fleet's cost model, so that a search can be repeated",
        "owners' entries are averaged by samples",
    )
    needs = "space"

    policy_lr: Positive = 0.5  # step of the policy gradient, eq. 5
    policy_optimizer: Literal["adam", "ascent"] = "adam"  # the authors' code uses Adam, eq. 5 is plain ascent
    time_weight: NonNegative = 0.001  # lambda_time of eq. 8, per second
    deploy: Literal["trained", "as-is"] = "trained"  # whether clients train local.epochs before they keep a network

    def start(self, job: Job) -> Server:  # line 2
        alpha = uniform_logits(job.space, len(job.seats))
        return Server(
            job,
            weights=job.space.new_weights(job.seed),
            alpha=alpha,
            moments=no_moments(alpha),
            accuracy=torch.full((len(job.seats),), float("nan"), dtype=torch.float64),  # each client's latest
        )

    def ask(self, server: Server, client: Seat) -> Task:  # line 6
        chances = probabilities(server.space, server.alpha[client.id])
        arch = server.space.sample(server.rng("arch", client.id), chances, client.fits)
        return Task(server.space.cut(server.weights, arch), arch)

    async def work(self, task: Task, client: Client) -> Reply:  # lines 8-11
        net = client.build(task)
        loss = await client.fit(net)
        return Reply(client.take(net), task.arch, facts={"loss": loss, "accuracy": await client.score(net)})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:  # lines 13-17
        weights = server.paste(replies)
        accuracy = server.accuracy.clone()
        for r in replies:
            accuracy[r.client] = r.facts["accuracy"]
        baseline, fastest = float(accuracy.nanmean()), min(r.seconds for r in replies)
        alpha, moments = server.alpha, server.moments
        for r in replies:
            reward = float(r.facts["accuracy"]) - baseline - self.time_weight * (r.seconds - fastest)  # eq. 8
            gradient = reward * log_gradient(server.space, alpha[r.client], r.arch)  # eq. 5-7
            alpha, moments = ascend(alpha, moments, r.client, gradient, self.policy_lr, self.policy_optimizer)
        return server.replace(weights=weights, alpha=alpha, moments=moments, accuracy=accuracy)

    def offer(self, server: Server, client: Seat) -> Task:
        arch = most_likely(server.space, server.alpha[client.id], client.fits)
        return Task(server.space.cut(server.weights, arch), arch)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        net = client.build(task)
        if self.deploy == "trained":
            await client.fit(net)
        return net
