"""Direct FedNAS: Garg et al., arXiv:2010.06223. FedNAS with DSNAS as the local search: one sampled path at a time.

Search: the server holds the supernet w and alpha, clients draw paths from softmax(alpha) and move alpha and the path's
weights by one backward pass, the server averages both by samples. Nothing is trained again from scratch: the child,
the most likely path, inherits its weights and trains on alone by FedAvg for the rest of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..card import LOSS, Message
from ..engine.client import Client
from ..engine.jobs import Measured
from ..method import Card, Job, Method, Reply, Seat, Server, Task
from ..nets.darts import Mixture
from ..options import AtLeastOne, Fraction, NonNegative, Positive
from ..registry import register
from ..search.dsnas import chances, dsnas_step, path_of
from ..search.milenas import alpha_optimiser
from ..search.mixture import ALPHAS, averaged, begin, darts, mixture, reply_of, task_of
from ..search.policy import most_likely
from ..search.supernet import sub_network
from ..spaces.base import Space
from ..spaces.darts import Darts


@register("method", "direct-fednas")
@dataclass(frozen=True)
class DirectFedNAS(Method):
    paper: ClassVar[str] = "Garg et al., Direct Federated NAS, arXiv:2010.06223; Hu et al., DSNAS, CVPR 2020"
    deviations: ClassVar[tuple[str, ...]] = (
        "on the DARTS space with one operation per edge, not on ShuffleNet blocks",
        "no penalty on FLOPs: a hard budget is kept by drawing only paths that fit",
        "weights off the path rest: no momentum and no decay moves them",
        "no edge is decided early unless freeze says so, and then anew in every step; DSNAS decides for good at epochs",
        "every path draws its batches from a shuffle of its own",
        "alpha starts at 0.001 times standard normal, as in DARTS; DSNAS starts near 1, which is the same distribution",
    )
    needs = "space"
    card: ClassVar[Card] = Card(
        shared="supernet and alpha, then one path of it",
        policy="alpha averaged over the clients",
        search="clients",
        down=Message(("supernet", "sub-network"), ALPHAS),
        up=Message(("supernet", "sub-network"), ALPHAS, LOSS),
        holds={"weights": "the supernet", "alpha": "architecture parameters"},
    )

    search_share: Fraction = 1 / 3  # of the rounds: DSNAS searches for 80 of 240 epochs; then the child trains alone
    alpha_lr: Positive = 1e-3  # of Adam
    alpha_decay: NonNegative = 0.0
    draw_every: AtLeastOne = 1  # steps on one path
    freeze: Fraction = 1.0  # an edge is decided when its two best are this far apart in probability; DSNAS: 0.3

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Darts)

    def check(self, job: Job) -> None:
        darts(job.space, self.name)

    def start(self, job: Job) -> Server:
        return begin(job)

    def ask(self, server: Server, client: Seat) -> Task:
        if server.round < round(self.search_share * server.job.rounds):
            return task_of(server)
        return self.offer(server, client)

    async def work(self, task: Task, client: Client) -> Reply:
        if task.extra:
            net = mixture(task, client)
            return reply_of(net, client, await self.search(net, client))
        net = client.build(task)
        loss = await client.fit(net)
        return Reply(client.take(net), task.arch, facts={"loss": loss})

    async def search(self, net: Mixture, client: Client) -> Measured:
        space, local, steps = darts(client.space), client.local, client.steps()
        every = list(net.parameters())
        weights_optimiser = local.optimiser(every, client.lr)
        step_alpha = alpha_optimiser(net.alpha, self.alpha_lr, self.alpha_decay)
        total = 0.0
        for first in range(0, steps, self.draw_every):
            length = min(self.draw_every, steps - first)
            p = chances(torch.cat(net.alpha), self.freeze).double().cpu().numpy()
            arch = space.sample(client.rng(f"path {first}"), list(p), client.fits)
            path = path_of(net, space, arch)
            normal, reduce = (gates.to(every[0].device) for gates in space.gates_of(space.keep_of(arch)))
            step = dsnas_step(
                lambda x, y, gates, path=path: client.loss(path, x, y, gates),
                (normal, reduce),
                list(path.parameters()),
                weights_optimiser,
                net.alpha,
                step_alpha,
                clip=local.clip,
                freeze=self.freeze,
            )
            total += length * await client.loop(step, [path], steps=length)
        return total / steps

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        if server.round < round(self.search_share * server.job.rounds):
            return averaged(server, replies)
        return server.replace(weights=server.paste(replies))

    def offer(self, server: Server, client: Seat) -> Task:
        alpha = torch.cat(list(server.alpha.values())).flatten()
        return sub_network(server, most_likely(server.space, alpha, client.fits))

    def shared(self, server: Server) -> Task:
        alpha = torch.cat(list(server.alpha.values()))
        return sub_network(server, tuple(alpha.argmax(-1).tolist()))
