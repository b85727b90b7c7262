"""Many clients as one network: a stacked step is every client's own step."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from fedtailor.config import load
from fedtailor.data.batches import joint_batches, joint_order
from fedtailor.engine.jobs import Fit
from fedtailor.engine.local import LocalEngine
from fedtailor.engine.replay import Step
from fedtailor.engine.stack import Stacked, clip_each_
from fedtailor.runs.execute import prepare
from fedtailor.spaces.measure import tensors_of

STEPS = 3


def fits(**changes: object) -> tuple[list[Fit], LocalEngine]:
    """Fits of three clients with equal nets and different weights, for so many steps."""
    table = {"clients": 3, "participants": 3, "rounds": 1, "local.batch": 8, "net.name": "cnn", "net.width": 2}
    setup = prepare(load({}, table | {"local.augment": "crop-flip", "method.name": "fedavg"} | changes))
    federation, _ = setup.federation(torch.device("cpu"), 1)
    server, jobs = federation.begin().server, []
    generator = torch.Generator().manual_seed(0)
    for seat in setup.job.seats:
        client = federation.client(seat, {}, 1)
        net = client.build(federation.method.ask(server, seat))
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
        anchor = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
        work = client.fit(net, steps=STEPS, lr=0.05, pull=(anchor, 0.1), push=anchor)
        jobs.append(work.send(None))
        work.close()
    return jobs, federation.engine


@pytest.mark.parametrize(
    "changes",
    [
        {"net.dropout": 0.5},
        {"net.norm": "batch", "local.clip": 0.5, "local.prior": True},
        {"local.optimizer": "adamw", "local.lr": 0.01},
    ],
)
def test_a_stack_trains_every_client_as_it_would_alone(changes: dict[str, object]) -> None:
    jobs, engine = fits(**changes)
    alone = [dataclasses.replace(job, net=copy.deepcopy(job.net)) for job in jobs]
    losses = [engine._fit(job) for job in alone]

    stacked = Stacked(Step.of(jobs[0]), copy.deepcopy(jobs[0].net), places=4)  # one place stays empty
    stacked.load(jobs)
    streams = [job.stream for job in jobs]
    images, labels = joint_batches(streams, joint_order(streams, STEPS), 0)
    total = torch.zeros(4)
    for x, y in zip(images, labels, strict=True):
        total += stacked.step(torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))
    stacked.unload(jobs)

    torch.testing.assert_close((total / STEPS)[:3].tolist(), losses, rtol=1e-4, atol=1e-5)
    for job, own in zip(jobs, alone, strict=True):
        for name, tensor in tensors_of(own.net).items():
            torch.testing.assert_close(tensors_of(job.net)[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def test_joint_batches_are_the_clients_own() -> None:
    jobs, _ = fits()
    streams = [job.stream for job in jobs]
    images, labels = joint_batches(streams, joint_order(streams, STEPS)[1:], 1)
    for i, stream in enumerate(streams):
        x, y = stream.batches(stream.order(STEPS)[1:], 1)
        assert torch.equal(images[:, i], x)
        assert torch.equal(labels[:, i], y)


def test_every_client_is_clipped_by_its_own_norm() -> None:
    gradients = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[4.0], [0.4]])]  # norms 5 and 0.5
    clip_each_(gradients, 1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6, 0.0], [0.3, 0.0]]))
    torch.testing.assert_close(gradients[1], torch.tensor([[0.8], [0.4]]))
