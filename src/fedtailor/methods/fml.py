"""FML: Shen et al., Federated Mutual Learning, arXiv:2006.16765, Algorithm 1. A private network and a shared proxy.

Every client owns a network v of any architecture. The server averages a proxy g (the paper's meme model). On the
client both learn from the labels and from each other, on the same batches:

    L_v = alpha * CE(v) + (1 - alpha) * KL(g || v)
    L_g = beta  * CE(g) + (1 - beta)  * KL(v || g)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from ..engine.client import Client
from ..engine.jobs import Measured
from ..engine.steps import objective
from ..kit.distil import divergence
from ..kit.private import Tables, own_net, own_tables, require_own
from ..method import Card, Job, Method, Reply, Seat, Task
from ..options import Fraction
from ..registry import register
from .fedavg import FedAvg


@register("method", "fml")
@dataclass(frozen=True)
class FML(FedAvg):
    paper: ClassVar[str] = "Shen et al., Federated Mutual Learning, arXiv:2006.16765, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        *FedAvg.deviations,
        "private networks of one kind start from the same weights",
        "a client that was never called learns with the last proxy once, at the end",
    )

    card: ClassVar[Card] = replace(
        FedAvg.card,
        shared="a proxy network",
        personal="a private network of any kind",
        policy="mutual distillation of private network and proxy",
        handles=("statistical", "system", "model"),
        keeps={"v": "the private network"},
        holds={"weights": "the proxy g"},
    )

    alpha: Fraction = 0.5  # share of the labels in the private network's loss; the rest is the proxy's
    beta: Fraction = 0.5  # share of the labels in the proxy's loss; the rest is the private network's
    private: Tables = ()  # [net] tables of the private networks, dealt out; none: the run's net, which the proxy is

    def check(self, job: Job) -> None:
        require_own(self.private, job)

    async def work(self, task: Task, client: Client) -> Reply:
        proxy, private, loss = await self._learn(task, client)
        client.memory["v"] = client.copy(private)
        return Reply(client.take(proxy), task.arch, facts={"loss": loss})

    async def personal(self, task: Task, client: Client) -> nn.Module:
        if "v" in client.memory:
            return self._own(client)
        return (await self._learn(task, client))[1]

    def at_home(self, client: Seat) -> Method:
        return replace(self, private=own_tables(self.private, client))

    def _own(self, client: Client) -> nn.Module:
        return own_net(self.private, client.seat).build(client, client.memory.get("v"))

    async def _learn(self, task: Task, client: Client) -> tuple[nn.Module, nn.Module, Measured]:
        """Lines 6-9: proxy and private network, after a round of learning from each other."""
        local, nets = client.local, (client.build(task), self._own(client))
        parameters = [list(net.parameters()) for net in nets]
        optimisers = [local.optimiser(p, client.lr) for p in parameters]
        shares = (self.beta, self.alpha)

        def step(x: Tensor, y: Tensor) -> Tensor:
            logits = [net(x) for net in nets]
            if client.log_prior is not None:
                logits = [z + client.log_prior for z in logits]
            losses: list[Tensor] = []
            for mine, other, share in zip(logits, logits[::-1], shares, strict=True):
                labels = objective(mine, y, local.label_smoothing, None)
                losses.append(share * labels + (1 - share) * divergence(other, mine))
            for loss, weights, optimiser in zip(losses, parameters, optimisers, strict=True):
                optimiser.zero_grad()
                loss.backward(inputs=weights)
                if local.clip:
                    nn.utils.clip_grad_norm_(weights, local.clip)
                optimiser.step()
            return losses[1].detach()

        loss = await client.loop(step, nets)
        return *nets, loss
