"""Direct FedNAS: one sampled path at a time (DSNAS)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtailor.evaluate import evaluate
from fedtailor.methods.direct_fednas import DirectFedNAS
from fedtailor.nets.darts import ALPHA, Mixture, mixture_of
from fedtailor.search.dsnas import chances, dsnas_step, path_of
from fedtailor.seeds import torch_seed
from fedtailor.spaces.darts_ops import EDGES
from fedtailor.spaces.measure import tensors_of
from test_fednas import LOCAL, SPACE, client_of, federation


def test_dsnas_gradient_by_hand() -> None:
    """Two edges, one per cell type, two operations each: L = w * (3 Z_n0 + 5 Z_r1) with the path (0, 1) at w = 2."""
    w = nn.Parameter(torch.tensor(2.0))
    alpha = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])  # p = (1/4, 3/4) and (1/2, 1/2)
    path = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    step = dsnas_step(
        lambda x, y, z: w * (x * z[0][0, 0] + y * z[1][0, 1]),
        path,
        [w],
        torch.optim.SGD([w], 0.1),
        alpha,
        torch.optim.SGD(alpha, 1.0),
    )
    loss = step(torch.tensor(3.0), torch.tensor(5.0))
    assert loss.item() == 16
    # rewards dL/dZ: 2 * 3 = 6 for the normal edge, 2 * 5 = 10 for the reduction edge; times Z - p, each with its own p
    torch.testing.assert_close(alpha[0], torch.tensor([[-6 * 0.75, math.log(3.0) + 6 * 0.75]]))
    torch.testing.assert_close(alpha[1], torch.tensor([[10 * 0.5, -10 * 0.5]]))
    assert w.item() == pytest.approx(2 - 0.1 * 8)


def test_dsnas_clips_w_and_not_alpha() -> None:
    w, alpha = nn.Parameter(torch.tensor(2.0)), (torch.zeros(1, 2), torch.zeros(1, 2))
    path = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    optimisers = torch.optim.SGD([w], 0.1), torch.optim.SGD(alpha, 1.0)
    step = dsnas_step(lambda x, y, z: w * x * z[0][0, 0], path, [w], optimisers[0], alpha, optimisers[1], clip=0.5)
    step(torch.tensor(3.0), torch.tensor(0.0))
    assert w.item() == pytest.approx(2 - 0.1 * 0.5)
    torch.testing.assert_close(alpha[0], torch.tensor([[-3.0, 3.0]]))
    assert not alpha[1].any()  # an edge without influence has no reward


def test_decided_edges_keep_their_operation_and_their_alpha() -> None:
    p = chances(torch.tensor([[2.0, 0.0], [0.1, 0.0]]), freeze=0.3)
    assert p[0].tolist() == [1, 0]
    assert p[1].tolist() == pytest.approx([0.525, 0.475], abs=1e-3)
    alpha = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.1, 0.0]])
    path = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    w = nn.Parameter(torch.tensor(1.0))
    optimisers = torch.optim.SGD([w], 0.1), torch.optim.SGD(alpha, 1.0)
    step = dsnas_step(
        lambda x, y, z: w * x * z[0][0, 0] * z[1][0, 0], path, [w], optimisers[0], alpha, optimisers[1], freeze=0.3
    )
    step(torch.tensor(1.0), torch.tensor(0.0))
    assert alpha[0].tolist() == [[2.0, 0.0]]
    assert alpha[1][0, 0] < 0.1


def test_a_path_is_a_view_of_the_supernet() -> None:
    space = replace(SPACE, norm="batch")
    net = mixture_of(space).build(())
    assert isinstance(net, Mixture)
    weights = space.new_weights(2)
    net.load_state_dict({**weights, **dict(zip(ALPHA, space.new_alpha(2), strict=True))}, strict=False)
    arch = tuple(i % 3 for i in range(28))
    path, gates = path_of(net, space, arch), space.gates_of(space.keep_of(arch))
    with torch_seed("path"):
        x, y = torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 0, 1, 1])
    plain = space.build(arch)
    plain.load_state_dict(space.cut(weights, arch), strict=False)
    torch.testing.assert_close(path(x, gates), plain(x))
    assert len(list(net.cells[0].edges[0])) == 2  # type: ignore[index]  # the supernet itself is whole
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    step_alpha = torch.optim.SGD(net.alpha, 1.0)
    before, alpha = {n: t.clone() for n, t in tensors_of(net).items()}, [a.clone() for a in net.alpha]
    loss = lambda x, y, z: F.cross_entropy(path(x, z), y)  # noqa: E731
    dsnas_step(loss, gates, list(path.parameters()), optimiser, net.alpha, step_alpha)(x, y)
    on_path = {n for n, _ in path.named_parameters()}
    for name, tensor in tensors_of(net).items():
        if name not in on_path and not name.endswith(("running_mean", "running_var")) and name not in ALPHA:
            assert torch.equal(tensor, before[name]), name
    assert not torch.equal(net.head.weight, before["head.weight"])
    # rows of edges whose path is `none` get no reward, the others' change sums to zero over an edge's operations
    for now, old, kept in zip(net.alpha, alpha, space.keep_of(arch), strict=True):
        change = now - old
        torch.testing.assert_close(change.sum(1), torch.zeros(14), atol=1e-5, rtol=0)
        silent = [e for e in range(len(EDGES)) if kept[e] == (0,)]
        assert not change[silent].any()
        assert change.any()


def test_direct_fednas_searches_then_trains_the_child_it_inherits() -> None:
    method = DirectFedNAS(search_share=0.5, alpha_lr=0.05)
    found = federation(method, rounds=2)
    state = found.begin()
    events: list = []
    rounds = found.rounds(state, events.append)
    start_alpha = state.server.alpha
    next(rounds)
    alpha = state.server.alpha
    assert not any(torch.equal(alpha[n], start_alpha[n]) for n in ALPHA)
    child = tuple(torch.cat(list(alpha.values())).argmax(1).tolist())
    task = method.ask(state.server, found.job.seats[0])
    assert task.arch == child
    assert all(torch.equal(t, state.server.weights[n]) for n, t in task.weights.items())  # inherited, not new
    searched = state.server.weights
    next(rounds)
    assert state.server.alpha is alpha
    changed = {n for n, t in state.server.weights.items() if not torch.equal(t, searched[n])}
    assert changed <= task.weights.keys()
    assert "head.weight" in changed
    flops = {(e.round, e.client): e.value for e in events if e.metric == "flops"}
    assert flops[1, 0] < 2 * 2 * mixture_of(SPACE).cost(()).train_flops  # paths, not the whole supernet
    assert flops[2, 0] == 2 * 2 * SPACE.cost(child).train_flops
    found_events, kept = evaluate(found, state, None)
    assert len([e for e in found_events if e.metric == "global_accuracy"]) == 2
    assert kept == []


def test_direct_fednas_draws_a_new_path_as_often_as_asked() -> None:
    local = replace(LOCAL, epochs=4.0)
    for every, jobs in ((1, 4), (3, 2), (9, 1)):
        found = federation(DirectFedNAS(search_share=1.0, draw_every=every), rounds=1, local=local)
        client, server = client_of(found), found.begin().server
        lengths: list[int] = []
        original = client.loop

        async def loop(step, nets, *, steps, lengths=lengths, original=original):
            lengths.append(steps)
            return await original(step, nets, steps=steps)

        client.loop = loop  # type: ignore[method-assign]
        found.engine.run([("", found.method.work(found.method.ask(server, found.job.seats[0]), client))])
        assert len(lengths) == jobs
        assert sum(lengths) == 4
