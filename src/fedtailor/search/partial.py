"""Sub-networks that go out without normalisation statistics, which never leave a client (Luo et al., FedPA)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..engine.client import Client
from ..method import Task
from ..parts import learnt
from ..spaces.base import Arch, Space, Weights


def without_statistics(weights: Weights) -> Weights:
    return {n: t for n, t in weights.items() if learnt(n)}


def part_of(space: Space, weights: Weights, arch: Arch) -> Weights:
    """The arch's own copy of its entries, as `Space.cut`, of a supernet that may have no statistics."""
    return space.part(weights, arch)


def build_own(task: Task, client: Client) -> nn.Module:
    """The network of a task with the statistics that the client kept, whatever the run's policy for them."""
    own = {} if client.local.bn == "recalibrate" else client.memory.get("statistics", {})
    return client.build(replace(task, weights=task.weights | own))


def take_learnt(net: nn.Module, client: Client) -> Weights:
    """The network's weights, to send; its statistics go into the client's memory."""
    taken = client.take(net)
    statistics = {n: t for n, t in taken.items() if not learnt(n)}
    if statistics:  # the run's policy is to average them
        client.memory["statistics"] = statistics
    return without_statistics(taken)
