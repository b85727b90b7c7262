"""The DARTS space: published counts, the three forwards against each other and against a plain reference, costs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.seeds import torch_seed
from fedtailor.spaces.base import Weights
from fedtailor.spaces.darts import Darts, Gates, Keep
from fedtailor.spaces.darts_ops import EDGES, EDGES_INTO, FULL, VARIANTS
from fedtailor.spaces.measure import tensors_of
from fedtailor.spaces.pasting import paste

VARIANT_NAMES = tuple(VARIANTS)
DIGITS = (1, 8, 8)


def small(variant: str = "full", norm: str = "batch", **options) -> Darts:
    return Darts(
        **{"input": DIGITS, "classes": 10, "channels": 4, "cells": 3, "variant": variant, "norm": norm} | options
    )


def loaded(net: nn.Module, weights: Weights) -> nn.Module:
    assert tensors_of(net).keys() == weights.keys()
    net.load_state_dict(weights, strict=False)
    return net


def images(space: Darts, n: int = 6) -> Tensor:
    with torch_seed("images"):
        return torch.randn(n, *space.input)


def random_keep(space: Darts, rng: np.random.Generator) -> Keep:
    def edge() -> tuple[int, ...]:
        return tuple(i for i in range(space.choices) if rng.random() < 0.4)

    return tuple(edge() for _ in EDGES), tuple(edge() for _ in EDGES)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "classes", "published"),
    [
        ({}, 10, 1_930_618),
        ({"channels": 24}, 10, 3_998_194),
        ({"variant": "s2"}, 10, 665_466),
        ({"variant": "s2"}, 100, 688_596),
    ],
)
def test_supernet_has_the_published_number_of_parameters(options, classes, published):
    space = Darts((3, 32, 32), classes, **options)
    with torch.device("meta"):
        assert parameters(space.supernet()) == published
    assert space.cost_keep(space.full_keep).parameters == published


def test_derived_network_has_the_published_number_of_parameters():
    """DARTS' second-order cell on CIFAR-10: 3.3 M at C = 36 and 20 cells, auxiliary head not counted."""
    space = Darts((3, 32, 32), 10, channels=36, cells=20)
    sep, dil, skip, pool = "sep_conv_3x3", "dil_conv_3x3", "skip_connect", "max_pool_3x3"
    cells = (
        ((sep, 0), (sep, 1), (sep, 0), (sep, 1), (sep, 1), (skip, 0), (skip, 0), (dil, 2)),
        ((pool, 0), (pool, 1), (skip, 2), (pool, 1), (pool, 0), (skip, 2), (skip, 2), (pool, 1)),
    )
    found = [[()] * 14, [()] * 14]
    for kind, cell in enumerate(cells):
        for i, (op, state) in enumerate(cell):
            found[kind][EDGES.index((state, 2 + i // 2))] = (FULL.index(op),)
    keep = space.check_keep(found)
    with torch.device("meta"):
        assert parameters(space.derived(keep)) == 3_349_342
    assert space.cost_keep(keep, affine=True).parameters == 3_349_342


def test_graph():
    assert EDGES_INTO == {2: (0, 1), 3: (2, 3, 4), 4: (5, 6, 7, 8), 5: (9, 10, 11, 12, 13)}
    assert [EDGES[e][0] for e in EDGES_INTO[4]] == [0, 1, 2, 3]
    space = Darts((3, 32, 32), 10)
    assert [k for k, cell in enumerate(space.plan) if cell.kind] == [2, 5]
    assert [cell.channels for cell in space.plan] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert [cell.halve for cell in space.plan] == [False, False, False, True, False, False, True, False]
    assert space.size == 8**28
    assert [d.name for d in space.dimensions][::13] == ["normal.edge0", "normal.edge13", "reduce.edge12"]


def test_s1_has_a_pair_of_its_own_on_every_edge():
    pairs = [edge for edges in VARIANTS["s1"] for edge in edges]
    assert all(len(set(pair)) == 2 and "none" not in pair for pair in pairs)
    assert all(a != b for edges in VARIANTS["s1"] for a, b in pairwise(edges))
    assert all(a != b for a, b in zip(*VARIANTS["s1"], strict=True))  # the two cell types differ on every edge


# forwards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "norm"), [*((v, "batch") for v in VARIANT_NAMES), ("s5", "group")])
def test_one_hot_gates_are_the_single_path(variant, norm):
    space = small(variant, norm)
    weights, rng, x = space.new_weights(1), np.random.default_rng(2), images(space)
    for training in (True, False):
        arch = space.sample(rng)
        supernet = loaded(space.supernet(), weights).train(training)
        single = loaded(space.build(arch), space.cut(weights, arch)).train(training)
        torch.testing.assert_close(single(x), supernet(x, space.gates_of(space.keep_of(arch))), atol=1e-5, rtol=1e-5)


def test_no_gates_are_gates_of_one():
    space = small("s2")
    net, x = loaded(space.supernet(), space.new_weights(0)), images(space)
    torch.testing.assert_close(net(x), net(x, space.gates_of(space.full_keep)), atol=1e-5, rtol=1e-5)


def reference(space: Darts, w: Weights, x: Tensor, gates: Gates) -> Tensor:
    """The mixture, written out from the paper's definitions: no modules, every operation by its own formula."""

    def norm(y: Tensor, name: str) -> Tensor:
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, unbiased=False)
        y = (y - mean) / torch.sqrt(var + 1e-5)
        scale, shift = w.get(f"{name}.weight"), w.get(f"{name}.bias")
        return y if scale is None or shift is None else y * scale[:, None, None] + shift[:, None, None]

    def halve(y: Tensor, name: str) -> Tensor:
        y = F.relu(y)
        even = F.conv2d(y[:, :, ::2, ::2], w[f"{name}.even.weight"])
        odd = F.conv2d(y[:, :, 1::2, 1::2], w[f"{name}.odd.weight"])
        return norm(torch.cat((even, odd), 1), f"{name}.norm")

    def convolutions(y: Tensor, name: str, i: int, stride: int, dilation: int) -> Tensor:
        kernel = w[f"{name}.depthwise{i}.weight"]
        pad = dilation * (kernel.shape[-1] - 1) // 2
        y = F.conv2d(F.relu(y), kernel, None, stride, pad, dilation, groups=len(kernel))
        return norm(F.conv2d(y, w[f"{name}.pointwise{i}.weight"]), f"{name}.norm{i}")

    def operation(op: str, y: Tensor, name: str, stride: int) -> Tensor:
        if op == "none":
            return 0 * y[:, :, ::stride, ::stride]
        if op == "skip_connect":
            return y if stride == 1 else halve(y, name)
        if op == "max_pool_3x3":
            return norm(F.max_pool2d(y, 3, stride, 1), f"{name}.norm")
        if op == "avg_pool_3x3":
            ones = torch.ones_like(y)
            mean = F.avg_pool2d(y, 3, stride, 1) / F.avg_pool2d(ones, 3, stride, 1)  # over the pixels that exist
            return norm(mean, f"{name}.norm")
        if op.startswith("dil"):
            return convolutions(y, name, 0, stride, 2)
        return convolutions(convolutions(y, name, 0, stride, 1), name, 1, 1, 1)

    before = last = norm(F.conv2d(x, w["stem.conv.weight"], padding=1), "stem.norm")
    reduced = False
    for k in range(space.cells):
        reduction = k in (space.cells // 3, 2 * space.cells // 3)
        pre = f"cells.{k}.pre"
        first = (
            halve(before, f"{pre}0")
            if reduced
            else norm(F.conv2d(F.relu(before), w[f"{pre}0.conv.weight"]), f"{pre}0.norm")
        )
        states = [first, norm(F.conv2d(F.relu(last), w[f"{pre}1.conv.weight"]), f"{pre}1.norm")]
        e = 0
        for _ in range(4):
            total = torch.zeros(())
            for state, y in enumerate(list(states)):
                stride = 2 if reduction and state < 2 else 1
                for i, op in enumerate(space.operations[reduction][e]):
                    total = total + gates[reduction][e, i] * operation(op, y, f"cells.{k}.edges.{e}.{op}", stride)
                e += 1
            states.append(total)
        before, last, reduced = last, torch.cat(states[2:], 1), reduction
    return F.linear(last.mean((2, 3)), w["head.weight"], w["head.bias"])


@pytest.mark.parametrize(("variant", "cells"), [("full", 3), ("s1", 4), ("s3", 5)])
def test_relaxed_forward_and_its_gradients_match_a_plain_reference(variant, cells):
    space = small(variant, cells=cells)
    weights, x = space.new_weights(3), images(space)
    alpha = [(300 * a).requires_grad_() for a in space.new_alpha(4)]
    expected = reference(space, weights, x, space.relaxed((alpha[0], alpha[1])))
    found = loaded(space.supernet(), weights)(x, space.relaxed((alpha[0], alpha[1])))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    ours = torch.autograd.grad(found.square().sum(), alpha)
    theirs = torch.autograd.grad(expected.square().sum(), alpha)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("variant", ["full", "s2", "s4"])
def test_kept_networks_are_the_gated_supernet(variant):
    space = small(variant)
    weights, rng, x = space.new_weights(5), np.random.default_rng(6), images(space)
    keep = random_keep(space, rng)
    keep = (
        tuple(() if e in EDGES_INTO[3] else edge for e, edge in enumerate(keep[0])),
        keep[1],
    )  # a node without input
    net = loaded(space.build_keep(keep), space.cut_keep(weights, keep))
    assert tuple(tensors_of(net)) == space.names_of(keep)
    supernet = loaded(space.supernet(), weights)
    torch.testing.assert_close(net(x), supernet(x, space.gates_of(keep)), atol=1e-5, rtol=1e-5)
    normal, reduce = space.gates_of(keep)  # SPIDER: one operation of one edge switched off
    e = next(e for e, edge in enumerate(keep[1]) if edge)
    reduce[e, keep[1][e][-1]] = 0
    torch.testing.assert_close(net(x, (normal, reduce)), supernet(x, (normal, reduce)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 14, 11), (1, 4, 4)])
def test_other_image_sizes(shape):
    space = small(input=shape)
    for net in (space.supernet(), space.build(space.largest), space.derived(space.genotype(*space.new_alpha(0)))):
        assert net(images(space, 2)).shape == (2, 10)


def test_cell_types_have_their_own_choices():
    space = small(cells=4)  # reductions at 1 and 2
    arch = (FULL.index("sep_conv_3x3"),) * 14 + (FULL.index("dil_conv_5x5"),) * 14
    ops = {(name.split(".")[1], name.split(".")[4]) for name in tensors_of(space.build(arch)) if ".edges." in name}
    assert ops == {("0", "sep_conv_3x3"), ("1", "dil_conv_5x5"), ("2", "dil_conv_5x5"), ("3", "sep_conv_3x3")}
    assert space.describe(arch) == "normal: 14 sep_conv_3x3; reduce: 14 dil_conv_5x5"


def test_group_norm_twin():
    space = small(norm="group")
    assert not any("running" in name for name in space.full_shapes)
    assert space.full_shapes.keys() == {n for n in small().full_shapes if "running" not in n}
    net, x = loaded(space.supernet(), space.new_weights(0)), images(space)
    torch.testing.assert_close(net(x)[:2], net(x[:2]), atol=1e-5, rtol=1e-5)  # images do not see each other


def test_affine_parameters_only_in_the_stem_and_in_derived_networks():
    space = small(norm="group")
    keep = space.genotype(*space.new_alpha(1))
    search = [n for n in tensors_of(space.build_keep(keep)) if "norm" in n]
    assert search == ["stem.norm.weight", "stem.norm.bias"]
    derived = tensors_of(space.derived(keep))
    assert any(n.startswith("cells.0.pre0.norm") for n in derived)
    assert not any("pool" in n for n in derived)


# weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["full", "s4"])
def test_cut_and_paste_are_inverse(variant):
    space = small(variant)
    weights, rng = space.new_weights(7), np.random.default_rng(8)
    for part in (space.sample(rng), random_keep(space, rng)):
        cut = space.cut(weights, part)
        same = paste(space, weights, [(cut, part, 3.0)])
        assert all(torch.equal(same[n], weights[n]) for n in weights)
        moved = paste(space, weights, [({n: t + 1 for n, t in cut.items()}, part, 3.0)])
        for name in weights:
            torch.testing.assert_close(moved[name], weights[name] + (name in cut))


@pytest.mark.parametrize("variant", ["full", "s2", "s4"])
def test_a_step_on_the_cut_pasted_back_is_the_step_on_the_supernet(variant):
    space = small(variant)
    weights, arch, x = space.new_weights(9), space.sample(np.random.default_rng(10)), images(space)
    target = torch.arange(len(x)) % space.classes

    def step(net: nn.Module, tensors: Weights, *args: Gates) -> tuple[Weights, dict[str, Tensor]]:
        trained = {n: tensors[n].clone().requires_grad_() for n, _ in net.named_parameters()}
        rest = {n: t.clone() for n, t in tensors.items() if n not in trained}
        loss = F.cross_entropy(functional_call(net, {**trained, **rest}, (x, *args)), target)
        slopes = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        return rest, {n: (t - 0.1 * g).detach() for (n, t), g in zip(trained.items(), slopes, strict=True)}

    statistics, small_step = step(space.build(arch), space.cut(weights, arch))
    pasted = paste(space, weights, [({**statistics, **small_step}, arch, 1.0)])
    gated_statistics, full_step = step(space.supernet(), weights, space.gates_of(space.keep_of(arch)))
    for name, value in full_step.items():
        torch.testing.assert_close(pasted[name], value, atol=1e-5, rtol=1e-4)
    for name, value in statistics.items():
        torch.testing.assert_close(value, gated_statistics[name], atol=1e-5, rtol=1e-4)
    moved = [n for n in small_step if not torch.equal(pasted[n], weights[n])]
    assert len(moved) > len(small_step) / 2


# derivation -------------------------------------------------------------------------------------------------------


def test_genotype_by_hand():
    """s3 has none, skip_connect, sep_conv_3x3. Probabilities are given, so α is their logarithm."""
    space = small("s3")
    rows = [(0.2, 0.3, 0.5)] * 14
    rows[0] = (0.98, 0.015, 0.005)  # node 2 keeps both its edges, however strong `none`
    rows[2] = (0.1, 0.6, 0.3)  # node 3: edges 2 (skip 0.6) and 4 (0.55) beat edge 3 (0.5)
    rows[4] = (0.4, 0.05, 0.55)
    rows[5] = (0.9, 0.05, 0.05)  # node 4: edge 5 is mostly none, 6 and 7 tie with 8 and come first
    rows[13] = (0.05, 0.9, 0.05)  # node 5: edge 13 first, then the lowest of the equals, 9
    alpha = torch.tensor(rows).log()
    kept, _ = space.genotype(alpha, alpha)
    assert kept == ((1,), (2,), (1,), (), (2,), (), (2,), (2,), (), (2,), (), (), (), (1,))
    other = alpha.clone()
    other[9] = alpha[5]
    normal, reduce = space.genotype(alpha + 3.0, other)  # a row's constant does not matter
    assert normal == kept
    assert reduce[9:] == ((), (2,), (), (), (1,))


def test_genotype_of_a_single_path():
    space = small("s3")
    arch = [0] * 28
    arch[1], arch[3], arch[4], arch[2], arch[12] = 1, 2, 1, 0, 2
    normal, reduce = space.genotype_of(tuple(arch))
    assert normal == ((), (1,), (), (2,), (1,), (), (), (), (), (), (), (), (2,), ())
    assert reduce == ((),) * 14
    busy = space.genotype_of((2,) * 28)
    assert [e for e, edge in enumerate(busy[0]) if edge] == [0, 1, 2, 3, 5, 6, 9, 10]


def test_random_genotypes_have_two_edges_per_node_and_no_none():
    space = small()
    for seed in range(5):
        for kept in space.genotype(*space.new_alpha(seed)):
            assert Counter(EDGES[e][1] for e, edge in enumerate(kept) if edge) == {2: 2, 3: 2, 4: 2, 5: 2}
            assert (0,) not in kept
