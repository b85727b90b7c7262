"""FedNAS, its personalised variant and Direct FedNAS: steps by hand, a slow plain reference, phases, saved networks.

The faults of the public code that ours must not have: alpha taken from the first client instead of averaged, alpha of
the normal cell used for reduction cells, and clipping that acts on alpha instead of w.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.config import Local
from fedtailor.data.partition import TRAIN, VAL
from fedtailor.errors import UserError
from fedtailor.fleet.budget import Budget
from fedtailor.method import Reply
from fedtailor.methods.direct_fednas import DirectFedNAS
from fedtailor.methods.fednas import FedNAS
from fedtailor.methods.fednas_personal import FedNASPersonal, strongest
from fedtailor.nets.darts import ALPHA, DartsCell, Mixture, mixture_of
from fedtailor.options import read
from fedtailor.registry import lookup
from fedtailor.runs.execute import Watcher, prepare, resume, start
from fedtailor.search.milenas import PASSES
from fedtailor.search.mixture import averaged
from fedtailor.spaces.darts import Darts
from fedtailor.spaces.darts_ops import Cell
from fedtailor.spaces.measure import count, tensors_of
from fedtailor.values import read_value
from tools import by_hand, one_round, rows, small_config

SPACE = Darts((1, 4, 4), 2, channels=2, cells=3, variant="s3", norm="group")
PIXELS = [[(250, 0), (40, 1)], [(90, 1), (160, 0), (20, 1), (220, 1)]]  # (pixel, label) of two clients
LOCAL = Local(epochs=2.0, batch=8, lr=0.1, momentum=0.9, weight_decay=1e-3, clip=0.5)
DARTS = {"space__name": "darts", "space__channels": 2, "space__cells": 3, "space__variant": "s2"}


def federation(method, rounds: int = 2, local: Local = LOCAL, **options):
    """Two clients with two and four images; each one's val is the other's train, so that val tells."""
    found = by_hand(method, PIXELS, local, SPACE, rounds=rounds, **options)
    ranges = found.store.ranges
    ranges[0, VAL], ranges[1, VAL] = ranges[1, TRAIN], ranges[0, TRAIN]
    return found


def client_of(found, seat: int = 0):
    return found.client(found.job.seats[seat], {}, 1)


# a round against a plain reference --------------------------------------------------------------------------------


class PlainFedNAS:
    """Algorithm 1 written out slowly: no modules of ours but the supernet's forward, every formula by hand."""

    def __init__(self, weights: dict[str, Tensor], alpha: dict[str, Tensor], local: Local, method: FedNAS) -> None:
        self.weights = {n: t.double() for n, t in weights.items()}
        self.alpha = [alpha[n].double() for n in ALPHA]
        self.local, self.method, self.net = local, method, SPACE.supernet().double()

    def loss(self, w: dict[str, Tensor], alpha: list[Tensor], pixels) -> Tensor:
        x = torch.stack([torch.full(SPACE.input, p / 255, dtype=torch.float64) for p, _ in pixels])
        y = torch.tensor([label for _, label in pixels])
        gates = tuple(a.exp() / a.exp().sum(1, keepdim=True) for a in alpha)
        logits = functional_call(self.net, w, (x, gates))
        return -(logits - logits.exp().sum(1, keepdim=True).log())[torch.arange(len(y)), y].mean()

    def client(self, train, val) -> tuple[dict[str, Tensor], list[Tensor]]:
        w = {n: t.clone().requires_grad_() for n, t in self.weights.items()}
        alpha = [a.clone().requires_grad_() for a in self.alpha]
        velocity = {n: torch.zeros_like(t) for n, t in w.items()}
        moments = [(torch.zeros_like(a), torch.zeros_like(a)) for a in alpha]
        for t in range(1, int(self.local.epochs) + 1):  # a batch holds all images: one step is one epoch
            objective = self.loss(w, alpha, train) + self.method.lamda * self.loss(w, alpha, val)
            for i, slope in enumerate(torch.autograd.grad(objective, alpha)):
                g = slope + self.method.alpha_decay * alpha[i].detach()
                first, second = moments[i]
                moments[i] = first, second = 0.5 * first + 0.5 * g, 0.999 * second + 0.001 * g * g
                change = (first / (1 - 0.5**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
                alpha[i] = (alpha[i].detach() - self.method.alpha_lr * change).requires_grad_()
            slopes = torch.autograd.grad(self.loss(w, alpha, train), list(w.values()))
            norm = math.sqrt(sum(float((s * s).sum()) for s in slopes))
            for (name, tensor), slope in zip(list(w.items()), slopes, strict=True):
                clipped = slope * min(1.0, self.local.clip / norm) + self.local.weight_decay * tensor.detach()
                velocity[name] = self.local.momentum * velocity[name] + clipped
                w[name] = (tensor.detach() - self.local.lr * velocity[name]).requires_grad_()
        return w, alpha

    def round(self) -> None:
        shares = [len(p) / sum(map(len, PIXELS)) for p in PIXELS]
        found = [self.client(PIXELS[0], PIXELS[1]), self.client(PIXELS[1], PIXELS[0])]
        self.weights = {
            n: sum(s * w[n].detach() for s, (w, _) in zip(shares, found, strict=True)) for n in self.weights
        }
        self.alpha = [sum(s * a[i].detach() for s, (_, a) in zip(shares, found, strict=True)) for i in range(2)]


def test_two_rounds_match_a_plain_reference() -> None:
    method = FedNAS(stage="search", lamda=0.5, alpha_lr=0.02)
    found = federation(method)
    state = found.begin()
    reference = PlainFedNAS(state.server.weights, state.server.alpha, LOCAL, method)
    start_alpha = {n: t.clone() for n, t in state.server.alpha.items()}
    for _ in found.rounds(state, lambda event: None):
        reference.round()
        for name, expected in zip(ALPHA, reference.alpha, strict=True):
            torch.testing.assert_close(state.server.alpha[name].double(), expected, atol=2e-4, rtol=0)
        for name, expected in reference.weights.items():
            torch.testing.assert_close(state.server.weights[name].double(), expected, atol=2e-4, rtol=1e-3)
    moved = [(state.server.alpha[n] - start_alpha[n]).abs().max().item() for n in ALPHA]
    assert min(moved) > 0.02  # far beyond the tolerance, in both cell types


def test_alpha_is_averaged_by_samples_over_all_clients_not_taken_from_the_first() -> None:
    server = federation(FedNAS()).begin().server
    zero = {n: torch.zeros_like(t) for n, t in server.weights.items()}

    def reply(normal: float, reduce: float, samples: int) -> Reply:
        alpha = {n: torch.full((14, 3), v) for n, v in zip(ALPHA, (normal, reduce), strict=True)}
        return Reply(zero, extra=alpha, samples=samples)

    after = averaged(server, [reply(1.0, -1.0, 1), reply(5.0, 3.0, 3)])
    torch.testing.assert_close(after.alpha[ALPHA[0]], torch.full((14, 3), 4.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(after.alpha[ALPHA[1]], torch.full((14, 3), 2.0), atol=1e-5, rtol=0)
    assert all(t.abs().max() < 1e-6 for t in after.weights.values())


def test_reduction_cells_use_their_own_alpha() -> None:
    net, supernet = mixture_of(SPACE).build(()), SPACE.supernet()
    assert isinstance(net, Mixture)
    weights = SPACE.new_weights(1)
    normal, reduce = 3 * torch.randn(2, 14, 3, generator=torch.Generator().manual_seed(0))
    net.load_state_dict({**weights, **dict(zip(ALPHA, (normal, reduce), strict=True))}, strict=False)
    supernet.load_state_dict(weights, strict=False)
    x = torch.linspace(-1, 1, 48).reshape(3, 1, 4, 4)
    own = supernet(x, (normal.softmax(1), reduce.softmax(1)))
    torch.testing.assert_close(net(x), own)
    assert not torch.allclose(own, supernet(x, (normal.softmax(1), normal.softmax(1))), atol=1e-3)
    slopes = torch.autograd.grad(net.searched()(x).square().sum(), net.alpha)
    assert not torch.allclose(slopes[0], slopes[1], atol=1e-4)
    # the first cell is a normal one: with only reduction cells' alpha moved, what it sees and does stays the same
    seen: list[Tensor] = []
    net.cells[0].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    net(x)
    with torch.no_grad():
        net.alpha_reduce.add_(torch.linspace(0, 5, 42).reshape(14, 3))
    net(x)
    assert torch.equal(seen[0], seen[1])


def test_search_rounds_cost_more_than_ordinary_ones_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "_leaving", lambda *_: {})  # joined filters would count as if every image had them
    found = federation(FedNAS(stage="search"), rounds=1)
    events: list = []
    next(found.rounds(found.begin(), events.append))
    cost = mixture_of(SPACE).cost(())
    flops = {e.client: e.value for e in events if e.metric == "flops"}
    assert flops == {i: int(2 * len(p) * cost.train_flops * PASSES) for i, p in enumerate(PIXELS)}
    alphas = 4 * 2 * 14 * 3
    sent = {e.value for e in events if e.metric == "bytes_up"}
    assert sent == {4 * sum(t.numel() for t in SPACE.new_weights(0).values()) + alphas}
    exact = count(lambda: mixture_of(SPACE).module().searched(), [SPACE.input]).cost
    assert (cost.parameters, cost.flops, cost.buffers) == (exact.parameters, exact.flops, exact.buffers)
    assert exact.activations <= cost.activations < 1.2 * exact.activations


# phases -----------------------------------------------------------------------------------------------------------


def test_search_then_genotype_then_training_from_scratch() -> None:
    method = FedNAS(search_rounds=1, alpha_lr=0.05)
    found = federation(method, rounds=3)
    state = found.begin()
    rounds = found.rounds(state, lambda event: None)
    next(rounds)
    searched = state.server
    assert searched.keep == ()
    keep = SPACE.genotype(*searched.alpha.values())
    assert isinstance(method.build(method.shared(searched), client_of(found)), Mixture)  # still the better model
    task = method.ask(searched, found.job.seats[0])
    assert json.loads(str(task.facts["genotype"])) == json.loads(json.dumps(keep))
    cell = DartsCell((1, 4, 4), 2, 2, 3, "s3", "group", *keep)
    fresh = cell.new_weights(0, "evaluation")
    assert task.weights.keys() == fresh.keys() == tensors_of(SPACE.derived(keep)).keys()
    assert all(torch.equal(task.weights[n], fresh[n]) for n in fresh)  # nothing is inherited
    assert any(n.endswith("norm.bias") and n.startswith("cells") for n in fresh)  # affine, unlike the search network
    next(rounds)
    assert state.server.keep == keep
    assert state.server.alpha is searched.alpha
    second = state.server.weights
    next(rounds)
    assert not any(torch.equal(state.server.weights[n], t) for n, t in second.items() if n.endswith("conv.weight"))
    net = method.build(method.shared(state.server), client_of(found))
    assert net.space == cell  # type: ignore[comparison-overlap]
    assert client_of(found).cost(net).parameters == sum(p.numel() for p in net.parameters())


def test_the_evaluation_stage_is_fedavg_with_a_schedule_of_its_own() -> None:
    local = replace(LOCAL, schedule="cosine")
    method = FedNAS(search_rounds=1)
    found = federation(method, rounds=3, local=local)
    state = found.begin()
    rates: list[float] = []

    async def fit(net: nn.Module, *, lr: float) -> float:
        rates.append(lr)
        return 0.0

    original = found.client

    def client(*args):
        made = original(*args)
        made.fit = fit  # type: ignore[method-assign]
        return made

    found.client = client  # type: ignore[method-assign]
    list(found.rounds(state, lambda event: None))
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])  # two rounds from the full rate, two clients each


def test_evaluation_network_may_be_larger() -> None:
    method = FedNAS(search_rounds=1, channels=4, cells=5, drop_path=0.2)
    found = federation(method, rounds=2)
    state = found.begin()
    list(found.rounds(state, lambda event: None))
    net = method.build(method.shared(state.server), client_of(found))
    assert len(net.cells) == 5  # type: ignore[arg-type]
    assert net.head.in_features == 4 * 16  # type: ignore[union-attr]


def test_a_round_that_nobody_finishes_does_not_lose_the_switch() -> None:
    method = FedNAS(search_rounds=1)
    found = federation(method, rounds=3)
    server = found.begin().server
    server.round = 2  # the last search round and the first evaluation round passed without a reply
    task = method.ask(server, found.job.seats[0])
    assert json.loads(str(task.facts["genotype"])) == json.loads(json.dumps(SPACE.genotype(*server.alpha.values())))
    merged = method.merge(server, [Reply({n: t + 1 for n, t in task.weights.items()}, samples=2)])
    torch.testing.assert_close(merged.weights["head.bias"], task.weights["head.bias"] + 1)


class Crash(Exception):
    """Stands for a power cut."""


class CrashAt(Watcher):
    def __init__(self, number: int) -> None:
        self.number = number

    def round(self, number: int, facts: dict[str, float]) -> None:
        if number == self.number:
            raise Crash


def test_resume_across_the_phase_switch_saved_networks_and_global_accuracy(tmp_path: Path) -> None:
    config = small_config("fednas", **DARTS, rounds=3, checkpoint_every=1, evaluate_every=3, method__search_rounds=1)
    whole = start(config, tmp_path / "whole", "cpu", workers=1)
    with pytest.raises(Crash):
        start(config, tmp_path / "cut", "cpu", workers=1, watch=CrashAt(2))
    assert rows(whole) == rows(resume(tmp_path / "cut", "cpu", workers=2))
    found = [r.split(",") for r in rows(whole)]
    for split in ("val", "test"):
        assert len([r for r in found if r[2:4] == [split, "global_accuracy"]]) == config.clients
    words = {r[4] for r in found if r[3] == "personal_arch"}
    assert len(words) == 1  # one architecture for all
    check_saved_networks(whole, config)


def check_saved_networks(folder: Path, config) -> None:
    """Every client's network, built again from its file alone, labels the client's val images as the run says."""
    setup = prepare(config, folder / "partition.npz")
    learn, _ = setup.federation(torch.device("cpu"), 1)
    said = {
        int(r.split(",")[1]): float(r.split(",")[4])
        for r in rows(folder)
        if r.startswith("3,") and ",val,personal" in r
    }
    assert len(said) == config.clients
    for client, accuracy in said.items():
        saved = read_value(folder / "nets" / f"{client:06d}.safetensors")
        table = {k: v for k, v in saved["net"].items() if k != "name"}
        given = {"input": setup.dataset.shape, "classes": len(setup.dataset.classes)}
        net = read(lookup("net", saved["net"]["name"]), json.loads(json.dumps(table)), "net", given).build(())
        assert tensors_of(net).keys() == saved["weights"].keys()
        net.load_state_dict(saved["weights"], strict=False)
        split = learn.store.split(client, VAL)
        x, y = split.at(torch.arange(split.start, split.start + split.size))
        assert (net.eval()(x).argmax(1) == y).float().mean().item() == pytest.approx(accuracy)


# the personalised variant -----------------------------------------------------------------------------------------


def test_personal_networks_are_adapted_from_the_received_w_and_alpha() -> None:
    method = FedNASPersonal(alpha_lr=0.02, epochs=2.0, lr=0.1)
    found = federation(method, rounds=1)
    state = one_round(found)
    reference = PlainFedNAS(state.server.weights, state.server.alpha, LOCAL, FedNAS(alpha_lr=0.02))
    seat = found.job.seats[0]
    net = found.engine.run([("", method.personal(method.offer(state.server, seat), client_of(found)))])[0]
    w, alpha = reference.client(PIXELS[0], PIXELS[1])
    kept = tensors_of(net)
    for name, expected in zip(ALPHA, alpha, strict=True):
        torch.testing.assert_close(kept[name].double(), expected.detach(), atol=2e-4, rtol=0)
    torch.testing.assert_close(kept["head.weight"].double(), w["head.weight"].detach(), atol=2e-4, rtol=1e-3)
    assert not kept[ALPHA[0]].requires_grad
    assert set(state.server.values) == {"weights", "alpha"}
    assert not any(state.memories.values())  # clients keep nothing between rounds


def test_personal_run_keeps_mixtures_that_can_be_built_again(tmp_path: Path) -> None:
    config = small_config("fednas-personal", **DARTS, evaluate_every=3, method__alpha_lr=0.05, local__prior=True)
    folder = start(config, tmp_path / "run", "cpu", workers=1)
    found = [r.split(",") for r in rows(folder)]
    assert {r[4] for r in found if r[3] == "personal_arch"} == {"mixture"}
    assert len([r for r in found if r[2:4] == ["test", "global_accuracy"]]) == config.clients
    check_saved_networks(folder, config)
    alphas = [read_value(folder / "nets" / f"{i:06d}.safetensors")["weights"][ALPHA[0]] for i in range(2)]
    assert not torch.equal(*alphas)  # an architecture of each client's own


def test_discretised_networks_have_the_strongest_operation_of_every_edge() -> None:
    method = FedNASPersonal(keep="path", alpha_lr=0.02)
    found = federation(method, rounds=1)
    server = found.begin().server
    client = client_of(found)
    net = found.engine.run([("", method.personal(method.offer(server, found.job.seats[0]), client))])[0]
    arch = tuple(net.arch)  # type: ignore[arg-type]
    assert len(arch) == 28
    assert 0 not in arch  # `none` is never kept
    alpha = torch.zeros(2, 14, 3)
    alpha[:, :, 0], alpha[0, 3, 2], alpha[1, 5, 1] = 9.0, 1.0, -1.0
    assert strongest((alpha[0], alpha[1]), client) == (1,) * 3 + (2,) + (1,) * 10 + (1,) * 5 + (2,) + (1,) * 8


# errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fednas", "fednas-personal", "direct-fednas"])
def test_other_spaces_are_refused_by_name(method: str) -> None:
    kind = lookup("method", method)
    assert kind.runs_on(Darts)
    assert not kind.runs_on(lookup("space", "tiny"))
    with pytest.raises(UserError, match=f"'{method}'.*space 'tiny'.*space with gates is darts"):
        prepare(small_config(method, space__name="tiny"))


def test_stages_that_do_not_fit_the_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="3 of 3 rounds would search"):
        federation(FedNAS(search_rounds=3), rounds=3)
    with pytest.raises(UserError, match="0 of 2 rounds would search"):
        federation(FedNAS(search_share=0.0), rounds=2)
    with pytest.raises(UserError, match="channels = 3 must be even"):
        federation(FedNAS(channels=3))


def test_a_hard_budget_below_the_supernet_is_refused() -> None:
    found = federation(FedNAS(), rounds=2)
    seats = tuple(replace(s, hard=True, budget=Budget(parameters=100.0)) for s in found.job.seats)
    with pytest.raises(UserError, match=r"client-0.*whole supernet.*parameters"):
        FedNAS().check(replace(found.job, seats=seats))
    DirectFedNAS().check(replace(found.job, seats=seats))  # draws only paths that fit


def test_published_cell_is_a_network_any_method_can_use() -> None:
    net = lookup("net", "darts-cell")((3, 32, 32), 10)
    assert net.describe(()).startswith("normal: 0>2 sep_conv_3x3, 1>2 sep_conv_3x3, 0>3 sep_conv_5x5, 2>3 sep_conv_3x3")
    assert net.cost(()).parameters == sum(p.numel() for p in net.build(()).parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [FedNAS(search_rounds=1, lr_end=0.01), DirectFedNAS(search_share=0.5, draw_every=2)])
def test_captured_steps_equal_eager_ones(method) -> None:
    from fedtailor.engine.cuda import CudaEngine
    from fedtailor.engine.local import LocalEngine

    states = []
    for engine in (CudaEngine(torch.device("cuda")), LocalEngine(torch.device("cuda"))):
        found = federation(method, local=replace(LOCAL, epochs=4.0))
        cuda = {
            key: replace(s, **{f: getattr(s, f).cuda() for f in ("images", "labels", "mean", "std")})
            for key, s in found.store.ranges.items()
        }
        found.store.ranges.clear()
        found.store.ranges.update(cuda)
        found.engine = engine
        state = found.begin()
        list(found.rounds(state, lambda event: None))
        states.append(state.server)
    for name in ALPHA:
        torch.testing.assert_close(states[0].alpha[name], states[1].alpha[name], atol=1e-3, rtol=0)
    torch.testing.assert_close(states[0].weights["head.weight"], states[1].weights["head.weight"], atol=1e-3, rtol=1e-2)
