"""PerFed-CKT (COMET): Cho et al., arXiv:2109.08119. Clustered knowledge transfer between networks of any kind.

Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer. Clients never exchange
weights, only what their networks say about a public set.

Client k holds a network of any kind and minimises, with P the public set and s_k its logits,

    F_k(w_k) + lambda/2 * mean over x in P of |s_k(x) - S_c(k)(x)|^2

The server clusters the clients by their logits on P and sends each the mean S of its own cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.jobs import Measured
from ..errors import UserError
from ..kit.clusters import means
from ..kit.private import Tables, own_net, own_tables, require_own
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..options import AtLeastOne, NonNegative
from ..registry import register


@register("method", "perfedckt")
@dataclass(frozen=True)
class PerFedCKT(Method):
    """PerFed-CKT: Cho et al., arXiv:2109.08119. Clusters of clients teach each other by predictions on a public set."""

    paper: ClassVar[str] = "Cho et al., PerFed-CKT, arXiv:2109.08119"
    deviations: ClassVar[tuple[str, ...]] = (
        "lambda, the number of clusters and the size of the public set are ours: the paper's were not at hand",
        "a client that was not called counts with the logits it last sent",
        "a client without logits yet learns from the mean over all clients; in the first round from its labels alone",
        "images of the public set are not augmented: the target of an image is one prediction",
    )
    card: ClassVar[Card] = Card(
        shared="predictions on a public set",
        personal="whole network, of any kind",
        policy="clusters of clients by their predictions",
        handles=("statistical", "system", "model"),
        down=Message(extra={"target": "mean logits of the client's cluster on the public set"}),
        up=Message(extra={"logits": "the client's on the public set"}, facts=LOSS),
        keeps={"v": "the client's network"},
        holds={
            "logits": "of every client on the public set",
            "masses": "samples of the clients whose logits are known",
            "clusters": "of the clients",
        },
    )
    example: ClassVar[dict[str, Any]] = {"partition.samples": 120, "public.name": "rest", "public.images": 200}
    one_network: ClassVar[str] = ""

    lamda: NonNegative = 0.1  # lambda, weight of the cluster's predictions
    clusters: AtLeastOne = 3  # C
    private: Tables = ()  # [net] tables of the clients' networks, dealt out; none: the run's net

    def check(self, job: Job) -> None:
        if not job.public:
            raise UserError(
                "method.name = 'perfedckt' compares clients by their predictions on a public set, which must be given: "
                "public.name = 'npz:FILE' or another data set of equal shape; or public.name = 'rest' with a "
                "partition.samples that leaves images to nobody. Clients' own images are never taken."
            )
        require_own(self.private, job)

    def start(self, job: Job) -> Server:
        n = len(job.seats)
        return Server(
            job,
            logits=torch.zeros(n, job.public, job.space.classes),
            masses=torch.zeros(n),  # 0: nothing is known of the client
            clusters=torch.zeros(n, dtype=torch.int64),
        )

    def ask(self, server: Server, client: Seat) -> Task:
        known = server.masses > 0
        if not known.any():
            return Task()
        if known[client.id]:
            known = known & (server.clusters == server.clusters[client.id])
        shares = server.masses * known / (server.masses * known).sum()
        return Task(extra={"target": (shares @ server.logits.flatten(1)).reshape(server.logits.shape[1:])})

    async def work(self, task: Task, client: Client) -> Reply:
        net, loss = await self._learn(task, client)
        client.memory["v"] = client.copy(net)
        return Reply(extra={"logits": await client.predict(net, on="public")}, facts={"loss": loss})

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        logits, masses, clusters = server.logits.clone(), server.masses.clone(), server.clusters.clone()
        for reply in replies:
            logits[reply.client], masses[reply.client] = reply.extra["logits"], float(reply.samples)
        known = masses > 0
        clusters[known] = means(logits[known], self.clusters, server.rng("clusters"))
        return server.replace(logits=logits, masses=masses, clusters=clusters)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        if "v" in client.memory:
            return self._own(client)
        return (await self._learn(task, client))[0]

    def at_home(self, client: Seat) -> Method:
        return replace(self, private=own_tables(self.private, client))

    def _own(self, client: Client) -> nn.Module:
        return own_net(self.private, client.seat).build(client, client.memory.get("v"))

    async def _learn(self, task: Task, client: Client) -> tuple[nn.Module, Measured]:
        net, local, target = self._own(client), client.local, task.extra.get("target")
        if target is None or not self.lamda:
            return net, await client.fit(net)
        parameters = list(net.parameters())
        optimiser = local.optimiser(parameters, client.lr)

        def step(own: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor]) -> Tensor:
            optimiser.zero_grad()
            x, which = public
            apart = (net(x) - target[which]).pow(2).sum(1).mean()
            loss = client.loss(net, *own) + self.lamda / 2 * apart
            loss.backward()
            if local.clip:
                nn.utils.clip_grad_norm_(parameters, local.clip)
            optimiser.step()
            return loss.detach()

        return net, await client.loop(step, [net], over=("train", "public"), passes=2.0)
