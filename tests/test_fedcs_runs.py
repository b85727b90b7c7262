"""Runs of FedCS: budgets kept, a plain reference, and what is drawn and written of a finished one."""

from __future__ import annotations

import asyncio
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from fedtailor.config import Local
from fedtailor.data.partition import TRAIN
from fedtailor.errors import UserError
from fedtailor.fleet import fleet as fleets
from fedtailor.fleet.fleet import FleetConfig
from fedtailor.method import Job, Seat
from fedtailor.methods.fedcs import FedCS
from fedtailor.methods.fedpa import FedPA
from fedtailor.methods.feduniform import FedUniform
from fedtailor.runs.execute import start
from fedtailor.runs.milestones import bytes_to_reach
from fedtailor.runs.results import Results
from fedtailor.search.pruning import prune
from fedtailor.search.supernet import affords
from fedtailor.spaces.base import Arch, Space
from fedtailor.spaces.mobilenetv2 import MobileNetV2
from fedtailor.spaces.tiny import Tiny
from test_fedcs import PLAIN, Given
from tools import by_hand, small_config

# rounds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inherit", "last"), [(False, [0.2, 0.1]), (True, [0.1, 0.1 * (1 - 0.5**0.5)])])
def test_sub_networks_from_scratch_have_the_schedule_from_its_beginning(inherit: bool, last: list[float]) -> None:
    method = FedCS(warm_up=0.5, inherit=inherit)
    federation = by_hand(method, [[(0, 0), (9, 1)]], replace(PLAIN, schedule="cosine"), Tiny((1, 8, 8), 2), rounds=4)
    seat = federation.job.seats[0]
    rates = [method.lr_of(federation.client(seat, {}, number)) for number in (1, 2, 3, 4)]
    # the cosine over four rounds, two of them warm-up; then over two, from the full rate again
    assert rates == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), *last])
    joins = federation.client(seat, {}, 5)
    assert method.lr_of(joins) == joins.lr


# budgets ------------------------------------------------------------------------------------------------------------


def test_no_budget_is_exceeded_over_ten_thousand_draws() -> None:
    """What the methods give clients of every kind of fleet. Accuracies are drawn, so pruning takes any path."""
    rng, drawn = np.random.default_rng(0), 0
    cases = [(Tiny((1, 8, 8), 3), seed) for seed in range(140)] + [(MobileNetV2((3, 32, 32), 10), 0)]

    async def score(arch: Arch, whole: Arch) -> float:
        return float(rng.integers(4))

    for space, seed in cases:
        seats = seats_of(space, seed)
        job = Job(space, tuple(seats), len(seats), 1, 1, seed, PLAIN)
        for seat in seats:
            fits = lambda arch, seat=seat: affords(seat, arch)  # noqa: E731
            need = lambda arch, seat=seat: max(seat.use(arch).values())  # noqa: E731
            archs = [FedPA().choose(job, seat), FedUniform().choose(job, seat)]
            if space.name == "tiny" or seat.id == 0:
                archs += [asyncio.run(prune(space, float(rng.uniform(0.2, 0.9)), fits, need, score))]
            for arch in archs:
                cost, drawn = space.cost(arch), drawn + 1
                assert seat.fits(arch)
                assert all(getattr(cost, q) <= limit for q, limit in seat.budget.limits.items() if q != "memory")
                assert cost.training_memory(seat.batch) <= seat.budget.limits.get("memory", np.inf)
    assert drawn >= 10_000


def seats_of(space: Space, seed: int) -> list[Seat]:
    """Eight clients each of the capacity fleets and of one whose memory is short."""
    largest, least = space.cost(space.largest), space.cost(space.smallest).training_memory(32) / 1e9
    found = []
    for name in ("capacity-high", "capacity-low", "uniform-memory"):
        rules = FleetConfig(name, quantity=("flops", "parameters")[seed % 2], memory_gb=(least, 2 * least))
        for i, device in enumerate(fleets.make(rules, 8, seed)):
            budget = device.budget.absolute(largest, 32, device.profile, 100)
            found.append(Seat(i, str(i), 100, device.profile, budget, True, space, 32, 100))
    return found


@pytest.mark.parametrize("method", ["fedcs", "fedpa", "feduniform", "heterofl", "fedrolex"])
def test_archs_in_the_log_keep_to_the_budget(method: str, tmp_path: Path) -> None:
    options = {
        "clients": 6,
        "participants": 4,
        "rounds": 4,
        "partition__new_clients": 1,
        "fleet__name": "capacity-high",
    }
    config = small_config(method, **options)
    run = Results.read(start(config, tmp_path / "run", "cpu", workers=1))
    devices = fleets.make(config.make_fleet(), 7, config.seed)
    space = config.make_space((1, 8, 8), 10)
    largest = space.cost(space.largest).flops
    told = run.events.where("arch") | run.events.where("personal_arch") | run.events.where("new_arch")
    assert told.sum() >= 7
    for client, text in zip(run.events.client[told], run.events.text[told], strict=True):
        arch = tuple(int(i) for i in run.events.texts[text].split("-"))
        limits = devices[client].budget.of_largest
        assert limits is not None
        assert limits.flops is not None
        assert space.cost(arch).flops <= limits.flops * largest
    kept = run.per_client("personal_flops", "") | run.per_client("new_flops", "")
    assert len(kept) == 7


# against a slow plain reference -------------------------------------------------------------------------------------


def test_two_rounds_are_those_of_a_plain_reference() -> None:
    """FedPA on real sub-networks, written again with loops over entries, full supernets and torch's own optimiser."""
    space, local = Tiny((1, 8, 8), 3), Local(epochs=2.0, batch=4, lr=0.1, momentum=0.9, weight_decay=1e-3, bn="local")
    archs = ((1, 0, 1, 0, 1, 1), (0, 1, 0, 1, 0, 1))
    rng = np.random.default_rng(0)
    data = [[(int(rng.integers(256)), int(rng.integers(3))) for _ in range(n)] for n in (4, 2)]
    federation = by_hand(Given(archs=archs), data, local, space, 2)
    noise = torch.from_numpy(rng.integers(0, 256, (6, 1, 8, 8))).to(torch.uint8)
    for key, split in list(federation.store.ranges.items()):
        federation.store.ranges[key] = replace(split, images=noise)
    state = federation.begin()
    supernet = {n: t.clone() for n, t in state.server.weights.items()}
    for _ in federation.rounds(state, lambda event: None):
        pass

    for _ in range(2):
        parts = []
        for client, arch in enumerate(archs):
            split = federation.store.split(client, TRAIN)
            net = space.build(arch).train()
            named = dict(net.named_parameters())
            for name, parameter in named.items():
                off = offsets(parameter, supernet[name])
                for at in np.ndindex(*parameter.shape):  # entry by entry
                    parameter.data[at] = supernet[name][tuple(np.add(at, off))]
            optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            for _ in range(2):  # two epochs of one batch: these clients have no more images than that
                mine = slice(split.start, split.start + split.size)
                optimiser.zero_grad()
                F.cross_entropy(net(split.images[mine].float() / 255), split.labels[mine]).backward()
                optimiser.step()
            parts.append((len(data[client]), {n: p.detach() for n, p in named.items()}))
        merged = {n: t.clone() for n, t in supernet.items()}
        for name, tensor in supernet.items():
            for at in np.ndindex(*tensor.shape):
                owners = []
                for mass, part in parts:
                    if name not in part:
                        continue
                    inner = np.subtract(at, offsets(part[name], tensor))
                    if (inner >= 0).all() and (inner < part[name].shape).all():
                        owners.append((mass, float(part[name][tuple(inner)])))
                if owners:
                    merged[name][at] = sum(m * v for m, v in owners) / sum(m for m, _ in owners)
        supernet = merged
    assert state.server.weights.keys() == supernet.keys()
    for name, tensor in supernet.items():
        assert torch.allclose(state.server.weights[name], tensor, atol=2e-5), name


def offsets(part: Tensor, whole: Tensor) -> list[int]:
    """Where a sub-network's tensor begins in the supernet's: leading channels, centred kernels."""
    return [(w - s) // 2 if axis > 1 else 0 for axis, (s, w) in enumerate(zip(part.shape, whole.shape, strict=True))]


# pictures and milestones --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    parent = tmp_path_factory.mktemp("runs")
    options = {"clients": 5, "participants": 4, "rounds": 4, "fleet__name": "capacity-high", "evaluate_every": 1}
    return {
        m: Results.read(start(small_config(m, **options), parent / m, "cpu", workers=1))
        for m in ("fedcs", "feduniform")
    }


def test_shrinkage_of_a_run(runs: dict[str, Results], tmp_path: Path) -> None:
    from fedtailor.report.shrink import read_shrinkage

    found = read_shrinkage(runs["fedcs"])
    assert found.shares.shape == (5, 6)
    assert sum(map(len, found.groups.values())) == 5
    assert next(iter(found.groups)) == "flops ≤ 100 % of largest"
    assert (found.mean("flops ≤ 100 % of largest") == 1).all()
    assert found.distance("flops ≤ 100 % of largest") == 0
    # kernels of 3 are 0.6 of 5, widths and depths 0.5
    assert set(found.shares.flatten().tolist()) <= {0.5, 0.6, 1.0}
    found.to_svg(tmp_path / "shrink.svg")
    assert (tmp_path / "shrink.svg").read_text().startswith("<svg")
    found.to_csv(tmp_path / "shrink.csv")
    lines = list(csv.DictReader((tmp_path / "shrink.csv").read_text().splitlines()))
    assert len(lines) == 30
    assert {line["dimension"] for line in lines} == set(found.dimensions)


def test_bytes_to_reach_an_accuracy(runs: dict[str, Results]) -> None:
    run = runs["feduniform"]
    rounds, mean, _, _ = run.series("personal_accuracy", "val")
    reached = bytes_to_reach(run, float(mean[-1]))
    assert reached is not None
    first = int(np.flatnonzero(mean >= mean[-1])[0])
    assert reached.round == rounds[first]
    assert all(mean[:first] < mean[-1])
    total = sum(
        float(v) for r, m, v in zip(run.events.round, run.events.metric, run.events.value, strict=True)
        if r <= reached.round and run.events.metrics[m] in ("bytes_up", "bytes_down")
    )  # fmt: skip
    assert reached.bytes == total > 0
    assert bytes_to_reach(run, 1.1) is None
    with pytest.raises(UserError, match="personal"):
        bytes_to_reach(run, 0.5, "best")


def test_commands(runs: dict[str, Results], tmp_path: Path) -> None:
    import typer

    from fedtailor.cli.milestones import milestones_command
    from fedtailor.cli.shrink import shrink_command

    app = typer.Typer()
    app.command("shrink")(shrink_command)
    app.command("milestones")(milestones_command)
    folders = [str(run.folder) for run in runs.values()]
    out = CliRunner().invoke(app, ["shrink", folders[0], "--csv", str(tmp_path / "s.csv")])
    assert out.exit_code == 0, out.output
    assert (runs["fedcs"].folder / "shrink.svg").is_file()
    arguments = ["milestones", *folders, "-a", "0.05", "-a", "1.0", "--csv", str(tmp_path / "m.csv")]
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 0, out.output
    lines = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert [(line["run"], line["wanted"]) for line in lines] == [(m, a) for m in runs for a in ("0.05", "1.0")]
    assert all(line["round"] for line in lines if line["wanted"] == "0.05")
