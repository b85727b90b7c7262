"""A client's training of a slimmable network (US-Net): many widths in one step."""

from __future__ import annotations

from torch import Tensor, nn

from ..data.batches import steps_for
from ..engine.client import Client
from ..engine.jobs import Measured
from ..spaces.measure import tensors_of
from ..spaces.usnet import sandwich, usnet_loss


async def train_usnet(net: nn.Module, client: Client, widths: int) -> Measured:
    """Trains the largest, the smallest and some uniform networks between, all in every step; returns the mean loss."""
    optimiser = client.local.optimiser(list(net.parameters()), client.lr)
    rng, images = client.rng("sandwich"), client.size("train")
    batch = min(client.local.batch, images)
    steps = steps_for(images, batch, client.local.epochs)
    total = 0.0
    for _ in range(steps):
        archs, seed = sandwich(client.space, rng, widths), int(rng.integers(1 << 40))

        def step(x: Tensor, y: Tensor, archs=archs, seed=seed) -> Tensor:
            optimiser.zero_grad()
            loss = usnet_loss(client.space, tensors_of(net), archs, x, y, client.local.label_smoothing, seed)
            loss.backward()
            if client.local.clip:
                nn.utils.clip_grad_norm_(net.parameters(), client.local.clip)
            optimiser.step()
            return loss.detach() / len(archs)

        # a job of one step (less than a batch is one), because an engine may capture a job's step and repeat it
        total += await client.loop(step, [net], epochs=0.5 * batch / images)
        client.flops += batch * sum(client.space.cost(arch).train_flops for arch in archs[1:])
    return total / steps
