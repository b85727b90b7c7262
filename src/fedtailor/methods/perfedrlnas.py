"""PerFedRLNAS: Yao & Li, AAAI 2024, Algorithm 1. One supernet, one policy per client, trained by REINFORCE.

The server draws a sub-network for each participant from the client's own policy p_i = softmax(alpha_i). The client
trains it and reports its accuracy. The server averages the pieces into the supernet and moves alpha_i along
r_i * (onehot - p_i), with the reward r_i = Acc_i - mean(Acc) - lambda_time * (RT_i - min RT) of eq. 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import Count, NonNegative, Positive
from ..registry import register
from ..search.ascent import ascend, no_moments
from ..search.policy import log_gradient, most_likely, probabilities, uniform_logits
from ..search.rewards import assemble, no_accuracies, outcomes, remember
from ..search.supernet import Deploy, affords, keep, refusal, refused, require_room, sub_network, train


@register("method", "perfedrlnas")
@dataclass(frozen=True)
class PerFedRLNAS(Method):
    paper: ClassVar[str] = "Yao & Li, AAAI 2024, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "the reward reads val, never test",
        "round time comes from the fleet's cost model, so that a search can be repeated",
        "networks see images as large as they are; the authors' code enlarges them to 224 pixels and more",
        "owners' entries are averaged by samples; the paper counts owners, which is the same for equal clients",
        "under a hard budget only archs that fit are drawn; eq. 6 is used as it is",
        "a client keeps its most likely arch that fits, be the budget hard or soft",
        "that arch trains for local.epochs before it is kept; the paper's does not, which is deploy = 'as-is'",
        "policies move by Adam with steps of 0.1, the authors' by 0.5; eq. 5 as printed is policy_optimizer = 'ascent'",
        "clients that join are compared with each other, not with clients that trained",
    )
    needs = "space"
    staleness = 10  # as the authors' asynchronous code bounds it: a policy only moves when its own client replies
    card: ClassVar[Card] = Card(
        shared="supernet",
        personal="architecture, and the weights cut for it",
        policy="a policy per client, learnt by REINFORCE",
        search="server",
        handles=("statistical", "system", "model"),
        down=Message("sub-network"),
        up=Message("sub-network", facts=LOSS | {"accuracy": "on val", "refused": "the arch does not fit the device"}),
        holds={
            "weights": "the supernet",
            "alpha": "the policy of every client",
            "moments": "of the policies' optimiser",
            "accuracy": "every client's latest",
        },
    )

    rewards: tuple[str, ...] = ("accuracy", "time")  # eq. 8; with "memory" eq. 9; also energy, bytes, file.py:function
    weights: dict[str, NonNegative] = field(default_factory=dict)  # of rewards, by name: `time` is lambda_time (0.001)
    policy_optimizer: Literal["adam", "ascent"] = "adam"  # the authors' code uses Adam, eq. 5 is plain ascent
    policy_lr: Positive = 0.1  # step of eq. 5; the authors' code has 0.5, with which policies settle too soon
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network
    onboard_rounds: Count = 20  # R: rounds of search, without training, for a client that joins later (Figure 5)

    def check(self, job: Job) -> None:
        assemble(self.rewards, self.weights)
        require_room(job)

    def start(self, job: Job) -> Server:  # line 2
        alpha = uniform_logits(job.space, len(job.seats))
        return Server(
            job,
            weights=job.space.new_weights(job.seed),
            alpha=alpha,
            moments=no_moments(alpha),
            accuracy=no_accuracies(len(job.seats)),  # of each client, its latest
        )

    def ask(self, server: Server, client: Seat) -> Task:  # line 6
        chances = probabilities(server.space, server.alpha[client.id])  # eq. 4
        return sub_network(server, server.space.sample(server.rng("arch", client.id), chances, client.fits))

    async def work(self, task: Task, client: Client) -> Reply:  # lines 8-11
        return await train(task, client)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:  # lines 13-17
        weights = server.paste([r for r in replies if not refused(r)])
        return self.learn(server.replace(weights=weights), replies, remember(server.accuracy, replies))

    def learn(self, server: Server, replies: Sequence[Reply], accuracy: Tensor) -> Server:
        """Lines 13 and 15-17: the participants' policies move by their rewards."""
        reward = assemble(self.rewards, self.weights)
        alpha, moments = server.alpha, server.moments
        for outcome in outcomes(server.job, replies, accuracy):
            i = outcome.seat.id
            gradient = reward(outcome) * log_gradient(server.space, alpha[i], outcome.arch)  # eq. 5-7
            alpha, moments = ascend(alpha, moments, i, gradient, self.policy_lr, self.policy_optimizer)
        return server.replace(alpha=alpha, moments=moments, accuracy=accuracy)

    def offer(self, server: Server, client: Seat) -> Task:
        fitting = lambda arch: affords(client, arch)  # noqa: E731
        return sub_network(server, most_likely(server.space, server.alpha[client.id], fitting))

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await keep(task, client, self.deploy)

    def onboarding(self) -> tuple[Method, int]:
        return SearchOnly(**vars(self)), self.onboard_rounds


@dataclass(frozen=True)
class SearchOnly(PerFedRLNAS):
    """How clients join (Figure 5): the supernet stays as it is, they only test what their policies draw."""

    async def work(self, task: Task, client: Client) -> Reply:
        if not affords(client.seat, task.arch):
            return refusal(task)
        return Reply(arch=task.arch, facts={"accuracy": await client.score(client.build(task))})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        accuracy = remember(server.accuracy, replies)
        accuracy[: server.job.clients] = float("nan")  # networks that were trained locally would make it a lost race
        return self.learn(server, replies, accuracy)
