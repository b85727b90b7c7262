"""FedMN: Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks, ICDM 2022.

The server holds a pool of modules for every layer. First all clients train all of them together. Then each client
learns a routing of its own, which modules it opens, along with the modules; every module is averaged over the clients
that have it open. The routing stays at the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.jobs import Measured
from ..errors import UserError
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..nets.modular import ROUTING, UNIT, Modular
from ..options import Fraction, Positive
from ..parts import choose, layers, rest
from ..registry import register
from ..search.supernet import Deploy
from ..spaces.base import Space, Weights
from ..split import start_shared

routing = layers(ROUTING)
LOGITS, TEMPERATURE = f"{ROUTING}.logits", f"{ROUTING}.temperature"
OPEN = 20.0  # a logit that no noise closes


@register("method", "fedmn")
@dataclass(frozen=True)
class FedMN(Method):
    paper: ClassVar[str] = "Wang et al., Personalized FL via Heterogeneous Modular Networks, ICDM 2022"
    deviations: ClassVar[tuple[str, ...]] = (
        "a client's routing is a logit per module, learnt directly, not the output of a policy network on its data",
        "routing and modules are trained in turn, half of local.epochs each, the routing with a rate of its own",
        "gates are open or closed (straight-through); the paper's code weighs outputs by soft gates",
        "modules are linear layers on a convolutional body that all clients share",
        "a client trains local.epochs before it keeps its network; the paper does not say so (deploy = 'as-is')",
    )
    card: ClassVar[Card] = Card(
        shared="body, head and a pool of modules",
        personal="routing",
        policy="a routing per client, learnt by gradients",
        down=Message("network"),
        up=Message("network", facts=LOSS | {"modules": "how many modules the client has open"}),
        keeps={"routing": "the client's logits"},
        holds={"weights": "the network without a routing"},
    )
    one_network: ClassVar[str] = "its modules are those of one modular network"

    pretrain: Fraction = 0.5  # share of the rounds in which all modules are open
    cold: Positive = 0.5  # temperature of the relaxation in the last round; it falls from 1 to this
    routing_lr: Positive = 1.0  # of the logits, whose gradients are small
    deploy: Deploy = "trained"  # whether clients train local.epochs before they keep a network

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Modular)

    def check(self, job: Job) -> None:
        if LOGITS not in job.space.full_shapes:
            raise UserError(
                f"method.name = 'fedmn' needs a network of modules, and net '{job.space.name}' is none. Use "
                "net.name = 'modular'."
            )

    def start(self, job: Job) -> Server:
        return start_shared(job, rest(routing))

    def ask(self, server: Server, client: Seat) -> Task:
        return Task(server.weights)

    async def work(self, task: Task, client: Client) -> Reply:
        first = round(self.pretrain * client.rounds)  # rounds of pre-training
        if client.round <= first:
            net = self._build(task, client, OPEN)
            loss = await client.fit(net, only=rest(routing))
            return _reply(net, client, loss)
        done = (client.round - first - 1) / max(1, client.rounds - first - 1)
        net = self._build(task, client, temperature=1 + done * (self.cold - 1))
        half = client.local.epochs / 2
        await client.fit(net, epochs=half, only=routing, lr=self.routing_lr)
        loss = await client.fit(net, epochs=half, only=rest(routing))
        client.memory["routing"] = {LOGITS: client.take(net, only=routing)[LOGITS]}
        return _reply(net, client, loss)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        return server.replace(weights=server.paste(replies))  # over the clients that sent a module

    async def personal(self, task: Task, client: Client) -> nn.Module:
        routed = client.round >= round(self.pretrain * client.rounds)
        net = self._build(task, client, 0.0 if routed else OPEN)
        if routed and "routing" not in client.memory:
            await client.fit(net, only=routing, lr=self.routing_lr)  # a client that no round of routing has called
        if self.deploy == "trained":
            await client.fit(net, only=rest(routing))
        return net

    def _build(self, task: Task, client: Client, logit: float = 0.0, temperature: float = 1.0) -> nn.Module:
        """The network with the client's routing, or with all modules open."""
        first = choose(client.initial, routing)
        kept: Weights = client.memory.get("routing", {LOGITS: torch.full_like(first[LOGITS], logit)})
        return client.build(Task(task.weights | kept | {TEMPERATURE: torch.full_like(first[TEMPERATURE], temperature)}))


def _reply(net: nn.Module, client: Client, loss: Measured) -> Reply:
    """What all clients share, and the modules that this one has open."""
    gates: list[list[float]] = net.routing.eval()().tolist()  # type: ignore[operator,union-attr]

    def sent(name: str) -> bool:
        unit = UNIT.match(name)
        return not routing(name) and (unit is None or gates[int(unit[1])][int(unit[2])] > 0)

    return Reply(client.take(net, only=sent), facts={"loss": loss, "modules": sum(map(sum, gates))})
