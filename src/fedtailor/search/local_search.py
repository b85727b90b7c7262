"""The client's half of FedNAS (Algorithm 1, lines 10-14), which its variants share: MiLeNAS on its own images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..engine.client import Client
from ..engine.jobs import Measured
from ..method import Job, Method
from ..nets.darts import Mixture
from ..options import NonNegative, Positive
from ..spaces.base import Space
from ..spaces.darts import Darts
from .milenas import PASSES, alpha_optimiser, cosine, milenas_step
from .mixture import require_room


@dataclass(frozen=True)
class LocalSearch(Method):
    """A method whose clients search by moving the supernet's w and alpha."""

    paper: ClassVar[str] = "He et al., FedNAS, arXiv:2004.08546, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "alpha moves before w in every step, as in the authors' code; Algorithm 1 lists w first",
        "alpha is averaged over all clients and the gradient of w is clipped, as meant; their code does neither",
        "val is the partition's val split; their code halves what a client has",
        "the result is the last round's; the paper's is of the round that is best on its validation data",
    )
    needs = "space"

    lamda: NonNegative = 1.0  # lambda of eq. 4: weight of the gradient on val
    alpha_lr: Positive = 3e-4  # eta_alpha, of Adam
    alpha_decay: NonNegative = 1e-3
    lr_end: NonNegative = 0.0  # eta_w falls from local.lr to this in every round of search; 0: follow local.schedule

    @classmethod
    def runs_on(cls, space: type[Space]) -> bool:
        return issubclass(space, Darts)

    def check(self, job: Job) -> None:
        require_room(job, self.name)

    def lr_of(self, client: Client, rounds: int) -> float:
        """eta_w at the start of a round of search, of which there are so many."""
        return client.local.lr if self.lr_end else client.local.lr_at(client.round, rounds)

    async def search(self, net: Mixture, client: Client, lr: float, epochs: float | None = None) -> Measured:
        """Lines 10-14: MiLeNAS over batches of train and val. The optimisers are new in every round."""
        alpha, weights, end = net.searched().alpha, list(net.parameters()), min(lr, self.lr_end)
        rate = torch.tensor(lr, device=alpha[0].device) if end else None
        step = milenas_step(
            lambda x, y: client.loss(net, x, y),
            weights,
            client.local.optimiser(weights, lr if rate is None else rate),
            alpha,
            alpha_optimiser(alpha, self.alpha_lr, self.alpha_decay),
            lamda=self.lamda,
            clip=client.local.clip,
            before=None if rate is None else cosine(rate, end, client.steps(epochs)),
        )
        over = ("train", "val" if client.size("val") else "train")
        loss = await client.loop(step, [net], epochs=epochs, over=over, passes=PASSES)
        net.searched(False)
        return loss
