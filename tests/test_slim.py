"""Narrow networks as their supernet with channels held at zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import test_gpu
from fedtailor.config import Local
from fedtailor.engine.jobs import Made
from fedtailor.engine.local import ready
from fedtailor.search.pruning import Candidate, candidates, shrink
from fedtailor.search.usnet import SandwichStep, table
from fedtailor.seeds import rng_of
from fedtailor.spaces.layers import Norm
from fedtailor.spaces.measure import parameters_of, tensors_of
from fedtailor.spaces.mobilenetv2 import MobileNetV2
from fedtailor.spaces.slim import Slim, choosers, slimmable
from fedtailor.spaces.tiny import Tiny
from fedtailor.spaces.usnet import distilled, forward_at, sandwich
from tools import Counted

HERE = torch.device("cpu")


def supernet(space: MobileNetV2) -> torch.nn.Module:
    """In double precision, because statistics of few images amplify errors, with norms that are not all alike."""
    torch.manual_seed(0)
    net = ready(space.supernet()).double().train()
    for name, parameter in net.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1.0, 0.3)
    return net


def batch(images: int = 6) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(images, 1, 8, 8, generator=gen).double(), torch.randint(3, (images,), generator=gen)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_supernet_with_channels_at_zero_is_the_narrow_network(norm: Norm) -> None:
    space = MobileNetV2((1, 8, 8), 3, norm=norm)
    net, (x, _) = supernet(space), batch()
    rng, slim = rng_of("slim"), Slim(space, HERE)
    for arch in (space.smallest, space.uniform(0.6), space.sample(rng), space.sample(rng)):
        own = parameters_of(net)
        towards = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(2)).double()
        found = []
        held = functional_call(net, slim.lend(own, torch.tensor(arch, dtype=torch.float32)), (x,))
        for logits in (held, forward_at(space, tensors_of(net), arch, x)):
            slopes = torch.autograd.grad(logits, list(own.values()), towards, materialize_grads=True)
            found.append([logits, *slopes])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


def test_every_width_is_chosen_by_the_dimension_that_narrows_it() -> None:
    space = MobileNetV2((1, 8, 8), 3)
    assert slimmable(space)
    assert not slimmable(Tiny((1, 8, 8), 3))
    names = [d.name for d in space.dimensions]
    assert choosers(space)["body.stem.norm"] == names.index("stem")
    assert choosers(space)["body.stage1.0.depthwise.norm"] == names.index("stem")
    assert choosers(space)["body.stage4.2.expand.norm"] == names.index("stage4.expand2")
    assert choosers(space)["body.stage4.2.project.norm"] == names.index("stage4")
    assert "body.last.norm" not in choosers(space)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_steps_with_masks_are_those_of_networks_that_are_cut_out(dropout: float) -> None:
    space, rng = MobileNetV2((1, 8, 8), 3, dropout=dropout), rng_of("steps")
    local = Local(lr=0.01, momentum=0.9, clip=1.0, label_smoothing=0.1)
    archs = [sandwich(space, rng, 4)[1:] for _ in range(3)]
    x, y = batch()
    ends = []
    for masks in (True, False):
        net = supernet(space)
        made = SandwichStep(space, local, masks).make([net], (0.01, table(archs)))
        losses = [made.step(x, y) for _ in archs]
        ends.append((torch.stack(losses), *(p.detach() for p in net.parameters())))
        assert isinstance(made, Made)
        assert int(made.state()[-1]) == 3  # the next job starts at the first row again
    for mine, other in zip(*ends, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_added_up_at_once_and_to_the_bit(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several networks of one supernet, as backward() adds them up tensor by tensor."""
    space, rng = MobileNetV2((1, 8, 8), 3), rng_of("sums")
    archs, (x, y) = sandwich(space, rng, 4)[1:], batch()
    half, real = precision == "bf16", torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: half if kind == "cuda" else real(kind))

    def lowered() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False)

    one, other = supernet(space).float(), supernet(space).float()
    made = SandwichStep(space, Local(lr=0.1), True).make([one], (0.1, table([archs])))
    with lowered(), Counted() as ours:
        loss = made.step(x.float(), y)

    slim, own = Slim(space, HERE), parameters_of(other)

    def logits() -> Iterator[Tensor]:
        yield other(x.float())
        for arch in archs:
            lent = slim.lend({n: own[n].detach() for n in slim.names}, torch.tensor(arch, dtype=torch.float32))
            there = {n: own[n] * (t != 0) for n, t in lent.items()}
            yield functional_call(other, there, (x.float(),))

    with lowered(), Counted() as theirs:
        losses = [loss.backward() or loss.detach() for loss in distilled(logits(), y)]
    assert torch.equal(loss, torch.stack(losses).sum() / 4)
    for mine, their in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert their.grad is not None
        assert torch.equal(mine.grad, their.grad)
    tensors = len(own)
    assert theirs.many["add_"] >= 3 * tensors
    assert ours.many["add_"] <= 3
    assert ours.many["mul"] < tensors < theirs.many["mul"]
    if half:
        assert ours.many["_to_copy"] < theirs.many["_to_copy"] / 2


def test_candidates_by_masks_are_networks_of_their_own() -> None:
    """Whatever is kept of the arch that they are cuts of."""
    space = MobileNetV2((1, 8, 8), 3)
    weights, (x, _) = tensors_of(supernet(space)), batch(20)
    learnt = {n: t.detach() for n, t in weights.items() if "running" not in n}
    look, seen = candidates(space, learnt, captures=True), set()
    for whole in (space.largest, space.uniform(0.8), space.sample(rng_of("look"))):
        cuts = [c for d in range(len(whole)) if (c := shrink(space, whole, d, 0.25)) is not None]
        for arch in (*cuts[::5], cuts[1], cuts[-1], whole):
            slim, cut = look(arch, whole).eval(), Candidate(space, learnt, arch).eval()
            torch.testing.assert_close(slim(x), cut(x), rtol=1e-7, atol=1e-9)
            assert slim.cost == cut.cost == space.cost(arch)
            seen.add(id(slim))
    assert len(seen) <= 10  # whose passes can be captured: one that looks at the whole too, and one from each part on
    assert isinstance(candidates(space, learnt, captures=False)(space.largest, space.largest), Candidate)


def test_a_cut_is_looked_at_from_where_it_begins() -> None:
    space = MobileNetV2((1, 8, 8), 3)
    weights, (x, _) = tensors_of(supernet(space)), batch(20)
    look = candidates(space, {n: t.detach() for n, t in weights.items() if "running" not in n}, captures=True)
    many = {}
    for group in ("stem", "stem", "stage3.expand1", "stage7"):
        arch = shrink(space, space.largest, space.groups.index(group), 0.25)
        assert arch is not None
        net = look(arch, space.largest).eval()
        with Counted() as found:
            net(x)
        many[group, len(many)] = found.many["convolution"]
    assert list(many.values()) == [104, 52, 52 - 1 - 2 - 6, 1 + 3]


@pytest.mark.parametrize("place", ["pretence", pytest.param("cuda", marks=test_gpu.on_a_gpu)])
@pytest.mark.parametrize("warm_up", [1.0, 0.0])
def test_engines_agree_where_one_of_them_has_masks(warm_up: float, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training a slimmable supernet, and pruning it."""
    there = test_gpu.pretend(monkeypatch) if place == "pretence" else torch.device("cuda")
    monkeypatch.setattr(test_gpu, "device", there)
    few = {"method__ratio": 0.7, "method__images": 16}  # large cuts, judged on few images
    how = {"method__warm_up": warm_up, "fleet__name": "capacity-high", **few}
    ends = [test_gpu.one_round("fedcs", "mobilenetv2", engine, **how) for engine in ("eager", "auto")]
    a, b = (test_gpu.tensors(state) for state, _, _ in ends)
    assert a.keys() == b.keys()
    apart, size = (sum(float(t.pow(2).sum()) for t in ts) for ts in ((a[n] - b[n] for n in a), a.values()))
    assert apart <= 1e-8 * size
    assert ends[0][0].server.archs == ends[1][0].server.archs
