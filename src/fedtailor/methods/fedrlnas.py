"""FedRLNAS: Yao et al., ICDCS 2021. One supernet, one policy for all clients, in three phases.

1. warm-up: every participant trains a sub-network drawn uniformly; the policy rests.
2. search: sub-networks are drawn from the policy p = softmax(alpha), which moves along
   mean over participants of (Acc_i - b) * (onehot_i - p), where b is a moving average of accuracies.
3. train: the most likely arch is trained alone, by FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..errors import UserError
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import Fraction, Positive
from ..registry import register
from ..search.ascent import ascend, no_moments
from ..search.policy import log_gradient, most_likely, probabilities, uniform_logits
from ..search.supernet import Deploy, affords, keep, refused, require_room, sub_network, train
from ..spaces.base import Arch

Phase = Literal["warm-up", "search", "train"]


@register("method", "fedrlnas")
@dataclass(frozen=True)
class FedRLNAS(Method):
    paper: ClassVar[str] = "Yao et al., Federated Model Search via Reinforcement Learning, ICDCS 2021"
    deviations: ClassVar[tuple[str, ...]] = (
        "the reward reads val, never test",
        "clients send weights after local.epochs, not the gradient of one batch",
        "no delay compensation and no matching of sub-networks to links: rounds are synchronous",
        "any space: the arch that is trained is the policy's most likely one that fits every client; of DARTS cells it "
        "is a path, where the authors' code derives two edges per node",
        "phases are shares of the run; the policy's step is larger than the authors', who have thousands of rounds",
        "the baseline moves after the rewards are formed, and slowly",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet, then one network",
        personal="weights, tuned",
        policy="one policy for all clients, learnt by REINFORCE",
        search="server",
        down=Message("sub-network"),
        up=Message("sub-network", facts=LOSS | {"accuracy": "on val", "refused": "the arch does not fit the device"}),
        holds={
            "weights": "the supernet, then the network",
            "fresh": "what the network is trained from",
            "alpha": "the policy",
            "moments": "of its optimiser",
            "baseline": "moving average of accuracies",
            "arch": "of the network",
        },
    )

    warmup: Fraction = 0.2  # share of the rounds in phase 1
    search: Fraction = 0.4  # share of the rounds in phase 2; the rest is phase 3
    policy_optimizer: Literal["adam", "ascent"] = "adam"
    policy_lr: Positive = 0.1
    baseline_decay: Fraction = 0.9  # of b, per round
    retrain: Literal["scratch", "supernet"] = "scratch"  # what phase 3 starts from
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    def check(self, job: Job) -> None:
        require_room(job)
        if self.warmup + self.search > 1:
            raise UserError(
                f"method.warmup = {self.warmup} and method.search = {self.search} are shares of the rounds: together "
                "they are at most 1, and what they leave is the training phase."
            )

    def ends(self, rounds: int) -> tuple[int, int]:
        """The last rounds of phases 1 and 2."""
        return round(self.warmup * rounds), round((self.warmup + self.search) * rounds)

    def phase(self, server: Server) -> Phase:
        """The phase of the round that is being run."""
        warm, searched = self.ends(server.job.rounds)
        return "warm-up" if server.round < warm else "search" if server.round < searched else "train"

    def lr_of(self, client: Client) -> float:
        """The learning rate of the round: a network that starts from scratch has the schedule from its beginning."""
        searched = self.ends(client.rounds)[1]
        if self.retrain == "supernet" or client.round <= searched:
            return client.lr
        return client.local.lr_at(client.round - searched, client.rounds - searched)

    def start(self, job: Job) -> Server:
        alpha = uniform_logits(job.space, 1)
        return Server(
            job,
            weights=job.space.new_weights(job.seed),
            fresh=job.space.new_weights(job.seed, "retrain") if self.retrain == "scratch" else None,  # until phase 3
            alpha=alpha,
            moments=no_moments(alpha),
            baseline=1 / job.space.classes,  # b: the accuracy of a guess
            arch=(),  # of phase 3
        )

    def ask(self, server: Server, client: Seat) -> Task:
        if self.phase(server) == "train":
            return sub_network(_retrained(server), self.derived(server))
        chances = probabilities(server.space, server.alpha[0])  # uniform in phase 1, where alpha is still 0
        return sub_network(server, server.space.sample(server.rng("arch", client.id), chances, client.fits))

    async def work(self, task: Task, client: Client) -> Reply:
        return await train(task, client, self.lr_of(client))

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        if self.phase(server) == "train":
            weights = _retrained(server).paste(replies)
            return server.replace(weights=weights, fresh=None, arch=self.derived(server))
        trained = [r for r in replies if not refused(r)]
        if not trained:
            return server.replace()
        alpha, moments = server.alpha, server.moments
        accuracies = [float(r.facts["accuracy"]) for r in trained]
        if self.phase(server) == "search":
            gradients = [
                (accuracy - server.baseline) * log_gradient(server.space, alpha[0], r.arch)
                for accuracy, r in zip(accuracies, trained, strict=True)
            ]
            step = torch.stack(gradients).mean(0)
            alpha, moments = ascend(alpha, moments, 0, step, self.policy_lr, self.policy_optimizer)
        baseline = server.baseline + (1 - self.baseline_decay) * (sum(accuracies) / len(accuracies) - server.baseline)
        return server.replace(weights=server.paste(trained), alpha=alpha, moments=moments, baseline=baseline)

    def derived(self, server: Server) -> Arch:
        """The policy's most likely arch that every client can hold."""
        if server.arch:
            return server.arch
        devices = {(s.budget, s.profile, s.images): s for s in server.job.seats}.values()
        return most_likely(server.space, server.alpha[0], lambda arch: all(affords(s, arch) for s in devices))

    def offer(self, server: Server, client: Seat) -> Task:
        return self.shared(server)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await keep(task, client, self.deploy)

    def shared(self, server: Server) -> Task:
        return sub_network(server, self.derived(server))


def _retrained(server: Server) -> Server:
    """The server with the weights of phase 3: new ones at its beginning, where it starts from scratch."""
    return server if server.fresh is None else server.replace(weights=server.fresh)
