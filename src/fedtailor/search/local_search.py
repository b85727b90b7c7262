"""The client's half of FedNAS (Algorithm 1, lines 10-14), which its variants share: MiLeNAS on its own images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import Local
from ..engine.client import Client
from ..engine.jobs import Made, Measured, Recipe, Value
from ..engine.steps import objective, states
from ..method import Job, Method
from ..nets.darts import Mixture
from ..options import NonNegative, Positive
from ..spaces.base import Space
from ..spaces.darts import Darts
from .milenas import PASSES, Cosine, alpha_optimiser, milenas_step
from .mixture import require_room


@dataclass(frozen=True)
class LocalSearch(Method):
    """A method whose clients search by moving the supernet's w and alpha."""

    paper: ClassVar[str] = "He et al., FedNAS, arXiv:2004.08546, Algorithm 1"
    deviations: ClassVar[tuple[str, ...]] = (
        "alpha moves before w in every step, as in the authors' code; Algorithm 1 lists w first",
        "alpha is averaged over all clients and the gradient of w is clipped, as meant; their code does neither",
        "val is the partition's val split; their code halves what a client has",
        "clients are averaged by their training images",
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
        end = min(lr, self.lr_end)
        schedule = (lr, end, client.steps(epochs)) if end else None
        step = SearchStep(client.local, self.lamda, self.alpha_lr, self.alpha_decay, schedule)
        over = ("train", "val" if client.size("val") else "train")
        loss = await client.loop(step, [net], (lr, client.log_prior), epochs=epochs, over=over, passes=PASSES)
        net.searched(False)
        return loss


@dataclass(frozen=True)
class SearchStep(Recipe):
    """MiLeNAS of one network, given eta_w and the client's log prior."""

    local: Local
    lamda: float
    alpha_lr: float
    alpha_decay: float
    schedule: tuple[float, float, int] | None  # of eta_w in the round: its first value, its last, steps

    def make(self, nets: Sequence[nn.Module], values: Sequence[Value]) -> Made:
        (net,), (lr, prior) = nets, values
        assert isinstance(net, Mixture)
        assert lr is not None
        alpha, weights = net.searched().alpha, list(net.parameters())
        shift = prior if isinstance(prior, Tensor) else None
        rate = torch.as_tensor(lr, device=alpha[0].device) if self.schedule else lr
        moves = Cosine(torch.as_tensor(rate), *self.schedule) if self.schedule else None
        both = self.local.optimiser(weights, rate), alpha_optimiser(alpha, self.alpha_lr, self.alpha_decay)
        step = milenas_step(
            lambda x, y: objective(net(x), y, self.local.label_smoothing, shift),
            weights,
            both[0],
            alpha,
            both[1],
            lamda=self.lamda,
            clip=self.local.clip,
            before=moves,
            net=net,
        )
        return Made(step, lambda: states(*both) if moves is None else [*states(*both), moves.done])
