"""Clients with parts of one network: uniform widths, HeteroFL and FedRolex."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtailor.fleet import fleet as fleets
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.methods.fedrolex import FedRolex
from fedtailor.methods.feduniform import FedAvgUniform, FedUniform
from fedtailor.methods.heterofl import HeteroFL, owned_part
from fedtailor.registry import lookup
from fedtailor.search.partial import learnt
from fedtailor.search.rolling import average_at, cut_at, grid, window
from fedtailor.search.uniform import ladder, ordered, uniform
from fedtailor.seeds import rng_of
from fedtailor.spaces.mobilenetv2 import MobileNetV2
from fedtailor.spaces.tiny import Tiny
from test_fedcs import DATA, PLAIN, Wide, wide
from tools import by_hand, one_round, personal

# uniform networks ---------------------------------------------------------------------------------------------------


def test_tiers_get_the_papers_widths() -> None:
    space = MobileNetV2((3, 32, 32), 10)
    for quantity in ("flops", "parameters"):
        rules = FleetConfig("capacity-high", quantity=quantity)
        federation = by_hand(FedUniform(), DATA * 5, PLAIN, space, 1, rules)
        found = {federation.method.choose(federation.job, seat) for seat in federation.job.seats}  # type: ignore
        assert found == {space.uniform(w) for w in (1.0, 0.75, 0.5)}


@pytest.mark.parametrize("name", ["tiny", "mobilenetv2", "mobilenetv3", "vit"])
def test_the_ladder_goes_down_in_all_dimensions(name: str) -> None:
    space = lookup("space", name)((3, 32, 32), 10)
    assert ordered(type(space))
    archs = ladder(space)
    assert archs[0] == space.largest
    assert archs[-1] == space.smallest
    for a, b in itertools.pairwise(archs):
        assert all(x >= y for x, y in zip(a, b, strict=True))
        assert space.cost(a).flops > space.cost(b).flops
    for arch in archs:  # in step: no dimension is ahead of another by more than a place
        if name != "mobilenetv2":
            ends = [len(d.options) - 1 for d in space.dimensions]
            low = max((i - 1) / n for i, n in zip(arch, ends, strict=True))
            high = min((i + 1) / n for i, n in zip(arch, ends, strict=True))
            assert low <= high
    assert uniform(space, 1.0) == space.largest


def test_fedavg_with_one_width_averages_statistics_where_the_run_does() -> None:
    space = Tiny((1, 8, 8), 3)
    data = [[(20 * i + j, j % 3) for j in range(6)] for i in range(2)]
    for bn in ("average", "local"):
        federation = by_hand(FedAvgUniform(), data, replace(PLAIN, bn=bn), space)
        state = one_round(federation)
        assert any(not learnt(n) for n in state.server.weights) == (bn == "average")
        shared = federation.method.shared(state.server)
        assert shared is not None
        assert shared.arch == uniform(space, 0.5)


# HeteroFL and FedRolex ----------------------------------------------------------------------------------------------


def test_heterofl_counts_clients_and_only_those_with_the_class() -> None:
    """Client 0 has one image of label 0, client 1 two images of each label.

    Client 0 masks the logit of label 1, so its row 1 gets no gradient and has no part in the average. Row 0 is the mean
    of both clients, although one has four times the samples.
    """
    data = [[(255, 0)], [(255, 1), (255, 1), (255, 0), (255, 0)]]
    space = Wide((1, 1, 1), 2)
    state = one_round(by_hand(HeteroFL(), data, PLAIN, space), weights=wide([1, 2], [0, 0], [0, 0.7]))
    # client 1's logits: 0 and 2 * 0.7; its gradient in row 1 is (p - 1/2) * (1, 2)
    p = 1 / (1 + np.exp(-1.4))
    row = np.array([0, 0.7]) - 0.2 * (p - 0.5) * np.array([1, 2])
    assert state.server.weights["head.weight"][1].tolist() == pytest.approx(row.tolist())
    # client 0's logits: 0 and, masked, 0: gradient -1/2 * (1, 2); client 1's: (1/2 - p) * (1, 2)
    moved = -0.2 * np.array([-0.5 * np.array([1, 2]), -(p - 0.5) * np.array([1, 2])])
    assert state.server.weights["head.weight"][0].tolist() == pytest.approx(moved.mean(0).tolist())


def test_heterofl_without_a_mask_is_a_plain_mean() -> None:
    state = one_round(
        by_hand(HeteroFL(mask=False), DATA, PLAIN, Wide((1, 1, 1), 2)), weights=wide([1, 2], [0, 0], [0, 0])
    )
    assert state.server.weights["head.weight"].flatten().tolist() == pytest.approx([0, 0, 0, 0], abs=1e-7)


def test_a_personal_network_of_heterofl_has_no_opinion_on_absent_classes() -> None:
    federation = by_hand(HeteroFL(), DATA, PLAIN, Wide((1, 1, 1), 2))
    state = one_round(federation, weights=wide([1, 2], [0.5, 0.5], [0.5, 0.5]))
    head = personal(federation, state, 0)["head.weight"]
    assert head[1].tolist() == [0, 0]
    assert head[0].tolist() != [0, 0]


def test_windows_roll_by_one_each_round_and_wrap() -> None:
    space = Wide((1, 1, 1), 2, widths=(3, 5))
    for shift, channels in ((0, [0, 1, 2]), (1, [1, 2, 3]), (3, [3, 4, 0]), (5, [0, 1, 2]), (9, [4, 0, 1])):
        found = window(space, (0,), shift)
        assert [a.tolist() for a in found["body.weight"]] == [channels, [0]]
        assert [a.tolist() for a in found["head.weight"]] == [[0, 1], channels]  # classes stay where they are
    whole = window(space, (1,), 3)
    assert whole["head.weight"][1].tolist() == [0, 1, 2, 3, 4]


def test_a_rolled_network_is_the_supernet_with_the_rest_at_zero() -> None:
    """Tied axes are in step: otherwise outputs of one layer would meet other layers' zeros."""
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for name in ("tiny", "mobilenetv2", "mobilenetv3"):
        space = lookup("space", name)((3, 16, 16), 5)
        weights = {n: t + 0.1 * torch.rand_like(t) for n, t in space.new_weights(0).items()}
        for shift in (1, 13):
            arch = space.sample(rng_of("rolled", name, shift))
            places = window(space, arch, shift)
            part = cut_at(weights, places)
            masked = {n: torch.zeros_like(t) for n, t in weights.items()}
            for n, axes in places.items():
                masked[n][grid(axes)] = part[n]
            small, large = space.build(arch).eval(), space.supernet().eval()
            small.load_state_dict(part, strict=False)
            large.load_state_dict(masked, strict=False)
            assert torch.allclose(small(x), large(x), atol=1e-4, rtol=1e-4)
            back = average_at({n: torch.zeros_like(t) for n, t in weights.items()}, [(part, places, 2.0)])
            assert all(torch.allclose(back[n], masked[n]) for n in masked)


def test_fedrolex_trains_every_entry_in_as_many_rounds_as_channels() -> None:
    space = Wide((1, 1, 1), 2, widths=(2, 5))
    fleet = FleetConfig(budget=fleets.Limits(parameters=float(space.cost((0,)).parameters)))
    federation = by_hand(FedRolex(), DATA, PLAIN, space, 5, fleet)
    seen, state = torch.zeros(5), federation.begin()
    state.server = state.server.replace(weights=wide([1] * 5, [0] * 5, [0] * 5))
    was = state.server.weights["head.weight"]
    for t, _ in enumerate(federation.rounds(state, lambda event: None)):
        now = state.server.weights["head.weight"]
        moved = (now != was).any(0)
        assert moved.nonzero().flatten().tolist() == sorted({t % 5, (t + 1) % 5})
        seen += moved
        was = now
    assert seen.tolist() == [2] * 5


def test_average_at_places_by_hand() -> None:
    old = {"w": torch.tensor([[1.0, 2.0], [3.0, -0.0]])}
    first = ({"w": torch.tensor([[5.0]])}, {"w": (torch.tensor([0]), torch.tensor([1]))}, 1.0)
    second = ({"w": torch.tensor([[8.0], [0.0]])}, {"w": (torch.tensor([0, 1]), torch.tensor([1]))}, 3.0)
    third = ({"w": torch.tensor([[9.0]])}, {"w": (torch.tensor([1]), torch.tensor([0]))}, 2.0)
    merged = average_at(old, [first, second, third])
    assert merged["w"].tolist() == [[1.0, (5 + 3 * 8) / 4], [9.0, 0.0]]
    kept = average_at(old, [third])
    assert kept["w"][1, 1].view(torch.int32) == old["w"][1, 1].view(torch.int32)  # not even -0.0 changes
    part, places = owned_part({"head.weight": torch.eye(2)}, {"head.weight": (torch.arange(2), torch.arange(2))},
                              torch.tensor([False, True]))  # fmt: skip
    assert part["head.weight"].tolist() == [[0.0, 1.0]]
    assert places["head.weight"][0].tolist() == [1]
