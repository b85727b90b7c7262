"""A client's training of a slimmable network (US-Net): many widths in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data.batches import steps_for
from ..engine.client import Client
from ..engine.halved import lending
from ..engine.jobs import Made, Measured, Recipe, Value
from ..engine.steps import states
from ..errors import UserError
from ..method import Job
from ..spaces.base import Arch, Space
from ..spaces.layers import Counted
from ..spaces.measure import parameters_of, tensors_of
from ..spaces.slim import Slim, slimmable
from ..spaces.usnet import distilled, forward_at, sandwich, usnet_losses
from ..values import sent
from .supernet import affords

if TYPE_CHECKING:
    from ..config import Local

ROOM = 64  # steps; clients with a little more or fewer share a captured step


def require_trainer(job: Job, name: str) -> None:
    """Raises a UserError where no client that trains can afford the largest network."""
    if not any(affords(seat, job.space.largest) for seat in job.seats[: job.clients]):
        raise UserError(
            f"method '{name}' warms the supernet up on clients that can afford the largest arch, but none of the "
            f"{job.clients} that train can. Use fleet.name = 'capacity-high', more clients, a higher fleet.budget, or "
            "method.warm_up = 0."
        )


async def train_usnet(net: nn.Module, client: Client, widths: int) -> Measured:
    """Trains the largest, the smallest and some uniform networks between, all in every step; returns the mean loss."""
    rng, images = client.rng("sandwich"), client.size("train")
    batch = min(client.local.batch, images)
    steps = steps_for(images, batch, client.local.epochs)
    drawn = [(sandwich(client.space, rng, widths), int(rng.integers(1 << 40))) for _ in range(steps)]
    client.flops += batch * sum(client.space.cost(arch).train_flops for archs, _ in drawn for arch in archs[1:])
    if slimmable(client.space):
        values = client.lr, sent(table([archs[1:] for archs, _ in drawn]), client.device)
        return await client.loop(SandwichStep(client.space, client.local, client.captures), [net], values, steps=steps)
    optimiser = client.local.optimiser(list(net.parameters()), client.lr)
    total = 0.0
    for archs, seed in drawn:

        def step(x: Tensor, y: Tensor, archs=archs, seed=seed) -> Tensor:
            losses = usnet_losses(client.space, tensors_of(net), archs, x, y, client.local.label_smoothing, seed)
            return learn(losses, optimiser, net, client.local.clip) / len(archs)

        # a job of one step (less than a batch is one), because an engine may capture a job's step and repeat it
        total += await client.loop(step, [net], epochs=0.5 * batch / images)
    return total / steps


def learn(losses: Iterable[Tensor], optimiser: torch.optim.Optimizer, net: nn.Module, clip: float) -> Tensor:
    """A step down the sum of some losses; returns the sum."""
    optimiser.zero_grad()
    weights, total = list(net.parameters()), list[Tensor]()
    with lending(net) as halved:
        sums = list[Tensor | None]([None] * len(weights))
        for loss in losses:  # a pass keeps four times as much where one gradient is taken of the sum
            loss.backward()
            if halved is not None:
                halved.hand_over()
            sums = summed(sums, weights)
            total.append(loss.detach())
    for weight, slope in zip(weights, sums, strict=True):
        weight.grad = slope
    if clip:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimiser.step()
    return torch.stack(total).sum()


def summed(sums: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor | None]:
    """The sums with the weights' gradients, which are taken from them: one operation adds up what backward() would add
    tensor by tensor."""
    slopes = [w.grad for w in weights]
    for weight in weights:
        weight.grad = None
    both = [(a, b) for a, b in zip(sums, slopes, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(sums, slopes, strict=True)]


def table(archs: Sequence[Sequence[Arch]]) -> Tensor:
    """The archs beside the largest of every step, with room for more steps."""
    rows = torch.tensor(archs, dtype=torch.float32)
    room = torch.zeros(-len(rows) % ROOM, *rows.shape[1:])
    return torch.cat([rows, room])


@dataclass(frozen=True)
class SandwichStep(Recipe):
    """A step of US-Net in a slimmable space, given the learning rate and a table of archs.

    With `masks` narrow networks are the supernet with channels held at zero, which a GPU can capture; without they are
    networks of their own, which take less arithmetic.
    """

    space: Space
    local: Local
    masks: bool

    def make(self, nets: Sequence[nn.Module], values: Sequence[Value]) -> Made:
        (net,), (lr, archs) = nets, values
        assert lr is not None
        assert isinstance(archs, Tensor)
        optimiser = self.local.optimiser(list(net.parameters()), lr)
        done = torch.zeros(1, dtype=torch.int64, device=archs.device)
        narrow = (masked if self.masks else cut)(self.space, net)

        def logits(rows: Tensor, x: Tensor) -> Iterator[Tensor]:
            yield net(x)
            yield from (narrow(row, x) for row in rows)

        def step(x: Tensor, y: Tensor) -> Tensor:
            rows = archs.index_select(0, done)[0]
            losses = distilled(logits(rows, x), y, self.local.label_smoothing)
            loss = learn(losses, optimiser, net, self.local.clip)
            done.add_(1)
            return loss / (1 + len(rows))

        return Made(step, lambda: [*states(optimiser), done])


def masked(space: Space, net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits of an arch, given as a tensor, by the supernet's own structure."""
    slim, own = Slim(space, next(net.parameters()).device), parameters_of(net)
    return lambda arch, x: functional_call(net, slim.lend(own, arch), (x,))


def cut(space: Space, net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The same by networks that are cut out of it. Their dropout goes on where the supernet's is."""
    own, counters = tensors_of(net), [m.counter for m in net.modules() if isinstance(m, Counted)]

    def logits(arch: Tensor, x: Tensor) -> Tensor:
        seed = int(counters[0]) if counters else 0
        for counter in counters:
            counter.add_(1)
        return forward_at(space, own, tuple(map(int, arch)), x, seed)

    return logits
