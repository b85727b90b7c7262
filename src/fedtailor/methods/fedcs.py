"""FedCS + FedPA: Luo et al., NFFL workshop at NeurIPS 2021, Algorithm 1 and section 4.2. A supernet cut to each client.

Three phases in one run. Warm-up (lines 1-10): clients that can afford the supernet train it as a US-Net. Pruning (lines
11-22): every client cuts it greedily to its budget, by accuracy on its own training images, without back-propagation.
FedPA: the sub-networks are trained together, from the supernet's weights or from scratch.

The authors call the whole APFL. The adaptive mixing of Deng et al., which has the same name, is another method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt
from torch import nn

from ..card import Message
from ..engine.client import SCORE_BATCH, Client
from ..method import Card, Job, Reply, Seat, Server, Task
from ..options import Fraction
from ..registry import register
from ..search.partial import learnt, part_of, without_statistics
from ..search.pruning import candidates, prune
from ..search.supernet import affords
from ..search.uniform import widest
from ..search.usnet import require_trainer, train_usnet
from .fedpa import FedPA
from .feduniform import FedUniform


@register("method", "fedcs")
@dataclass(frozen=True)
class FedCS(FedUniform):
    paper: ClassVar[str] = "Luo et al., NFFL workshop at NeurIPS 2021, Algorithm 1 (FedCS) and section 4.2 (FedPA)"
    deviations: ClassVar[tuple[str, ...]] = (
        *FedPA.deviations,
        "a round's participants are drawn from all clients: in warm-up those without the capacity receive, train and "
        "send nothing",
        "a client prunes at its first participation after warm-up, on the supernet as warm-up left it, and trains then",
        "candidates are judged on at most 256 training images, the paper's on all; and with batch statistics of these "
        "images, where the paper does not say",
        "sub-networks inherit the supernet's weights; in the paper's Table 1 they do not (inherit = false)",
        "warm-up takes its rounds from the run's: a sub-network has the others to train in",
        "layers tied by shortcuts are cut together; equal accuracies are decided by the larger saving",
        "channel counts stay multiples of 8: a cut goes to the nearest of them below",
        "what a cut is undone by is the old arch itself, not the inverse of the rounding",
    )
    card: ClassVar[Card] = replace(
        FedUniform.card,
        policy="channels pruned to the budget by accuracy on train",
        search="clients",
        down=Message(
            "learnt sub-network",
            {"*": "the supernet as warm-up left it, for a client that has not pruned yet"},
            {"warm-up": "whether the supernet is still being warmed up"},
        ),
        keeps=FedUniform.card.keeps | {"arch": "what pruning found"},
        holds=FedUniform.card.holds | {"warm": "the supernet as warm-up left it"},
    )

    warm_up: Fraction = 0.3  # share of the rounds
    widths: Annotated[int, Ge(2)] = 4  # n of US-Net's sandwich rule: networks trained in each step of warm-up
    ratio: Annotated[float, Gt(0), Lt(1)] = 0.25  # R, the share of a layer's channels that one cut removes
    images: Annotated[int, Ge(2), Le(SCORE_BATCH)] = 256  # of the client's training images, to judge candidates on
    inherit: bool = True  # the supernet's weights; false: train the sub-networks from scratch, as in Table 1

    def check(self, job: Job) -> None:
        super().check(job)
        if self.warm_up:
            require_trainer(job, self.name)

    def start(self, job: Job) -> Server:
        weights = without_statistics(job.space.new_weights(job.seed))
        archs = [job.space.largest if affords(seat, job.space.largest) else () for seat in job.seats]  # (): not yet
        return Server(job, weights=weights, warm={}, archs=archs)

    def warm_rounds(self, rounds: int) -> int:
        return round(self.warm_up * rounds)

    def lr_of(self, client: Client) -> float:
        """Sub-networks that start from scratch have the schedule from its beginning."""
        warm = self.warm_rounds(client.rounds)
        if self.inherit or not warm < client.round <= client.rounds:
            return client.lr
        return client.local.lr_at(client.round - warm, client.rounds - warm)

    def warmed(self, server: Server) -> Server:
        """The server, with the supernet put aside for pruning once warm-up is over."""
        if server.warm or server.round < self.warm_rounds(server.job.rounds):
            return server
        first = server.weights if self.inherit else without_statistics(server.space.new_weights(server.job.seed))
        first = {n: t.to(server.weights[n].device) for n, t in first.items()}
        return server.replace(warm=server.weights, weights=first)

    def ask(self, server: Server, client: Seat) -> Task:
        if server.round < self.warm_rounds(server.job.rounds):  # line 3
            arch = server.archs[client.id]
            return Task(server.weights, arch, facts={"warm-up": True}) if arch else Task()
        server = self.warmed(server)
        arch = server.archs[client.id]
        if arch:
            return Task(part_of(server.space, server.weights, arch), arch)
        # line 12, and the weights to train from, of which the server cannot know the client's part yet
        same = self.inherit and server.round == self.warm_rounds(server.job.rounds)
        return Task(server.weights, extra={} if same else server.warm)

    async def work(self, task: Task, client: Client) -> Reply:
        if not task.weights:
            return Reply()
        if "warm-up" in task.facts:
            net = client.build(task)
            loss = await train_usnet(net, client, self.widths)  # line 5
            return Reply(client.take(net, only=learnt), task.arch, facts={"loss": loss})
        return await super().work(await self.cut(task, client), client)

    async def cut(self, task: Task, client: Client) -> Task:
        """Lines 13-21: the client finds its arch, once, and cuts the weights it was sent for all archs."""
        if task.arch:
            return task
        if "arch" not in client.memory:
            seat, look = client.seat, candidates(client.space, task.extra or task.weights, client.captures)
            client.memory["arch"] = await prune(
                client.space,
                self.ratio,
                fits=lambda arch: affords(seat, arch),
                need=lambda arch: max(seat.use(arch).values()),
                score=lambda arch, whole: client.score(look(arch, whole), on="train", images=self.images),
            )
        arch = client.memory["arch"]
        return Task(part_of(client.space, task.weights, arch), arch)

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        server = self.warmed(server)
        archs = list(server.archs)
        for r in replies:
            archs[r.client] = r.arch or archs[r.client]
        # lines 8-9, and FedPA: in warm-up all owners own everything, which is the plain mean by samples
        return server.replace(weights=server.paste([r for r in replies if r.weights]), archs=archs)

    def offer(self, server: Server, client: Seat) -> Task:
        """Between rounds a client that has not pruned yet shows the widest uniform network: pruning is for keeps."""
        server = self.warmed(server)
        arch = server.archs[client.id]
        if not arch and server.round < server.job.rounds:
            arch = widest(server.space, lambda arch: affords(client, arch))
        return Task(part_of(server.space, server.weights, arch), arch) if arch else self.ask(server, client)

    async def personal(self, task: Task, client: Client) -> nn.Module:
        return await super().personal(await self.cut(task, client), client)

    def shared(self, server: Server) -> Task | None:
        return super().shared(self.warmed(server))
