"""FedMN against numbers worked out by hand: one modular layer of two modules of one weight, pixel 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedtailor.config import Local
from fedtailor.engine.loop import Federation
from fedtailor.errors import UserError
from fedtailor.methods.fedmn import LOGITS, FedMN
from fedtailor.nets.modular import Modular, Routing
from tools import by_hand, kept, one_round

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]
SPACE = Modular((1, 1, 1), 2, width=0, hidden=(1,), units=2)


def weights(one: float, two: float, *head: float) -> dict[str, Tensor]:
    found = {f"layers.0.{u}.0.weight": torch.tensor([[float(w)]]) for u, w in enumerate((one, two))}
    found |= {f"layers.0.{u}.0.bias": torch.zeros(1) for u in range(2)}
    return found | {"head.weight": torch.tensor([[float(h)] for h in head]), "head.bias": torch.zeros(2)}


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def routed(federation: Federation, *logits: list[float]):
    """One round from unit weights 1 and 3 and head (1, 0), with these routings in the clients' memories."""
    state = federation.begin()
    state.server = state.server.replace(weights=weights(1, 3, 1, 0))
    state.memories = {i: {"routing": {LOGITS: torch.tensor([row])}} for i, row in enumerate(logits)}
    return next(federation.rounds(state, lambda event: None))


def test_a_module_is_averaged_over_the_clients_that_have_it_open() -> None:
    state = routed(by_hand(FedMN(pretrain=0.0), DATA, PLAIN, SPACE), [20.0, -20.0], [-20.0, 20.0])
    # client 0: h = 1, the first logit's gradient is sigmoid(1) - 1; client 1: h = 3, gradient sigmoid(3)
    a, b = sigmoid(1) - 1, sigmoid(3)
    found = state.server.weights
    assert found["layers.0.0.0.weight"].item() == pytest.approx(1 - 0.2 * a)  # client 0's alone, not diluted
    assert found["layers.0.1.0.weight"].item() == pytest.approx(3 - 0.2 * b)
    assert found["head.weight"][0].item() == pytest.approx(0.25 * (1 - 0.2 * a * 1) + 0.75 * (1 - 0.2 * b * 3))


def test_in_pre_training_all_modules_are_open_and_the_routing_rests() -> None:
    federation = by_hand(FedMN(pretrain=1.0), [DATA[0]], PLAIN, SPACE)
    state = one_round(federation, weights=weights(1, 3, 1, 0))
    a = sigmoid(2) - 1  # h = (1 + 3) / 2
    for unit, start in ((0, 1), (1, 3)):
        assert state.server.weights[f"layers.0.{unit}.0.weight"].item() == pytest.approx(start - 0.2 * a / 2)
    assert not state.memories


def test_networks_kept_in_pre_training_are_trained_with_all_modules_open() -> None:
    """With logits of 0 noise would close half of them in a step, and units would move by a instead of a / 2."""
    for seed in range(4):
        federation = by_hand(FedMN(pretrain=1.0), [DATA[0]], PLAIN, SPACE, rounds=2)
        federation.job = replace(federation.job, seed=seed)
        state = federation.begin()
        state.server, state.round = state.server.replace(weights=weights(1, 3, 1, 0)), 1
        a = sigmoid(2) - 1  # h = (1 + 3) / 2
        found = kept(federation, state, 0).state_dict()
        assert [found[f"layers.0.{u}.0.weight"].item() for u in (0, 1)] == pytest.approx([1 - 0.1 * a, 3 - 0.1 * a])


def test_the_routing_gets_a_gradient() -> None:
    net = SPACE.build(()).eval()
    net.load_state_dict(weights(1, 3, 1, 0) | {LOGITS: torch.zeros(1, 2), "routing.temperature": torch.tensor(0.5)})
    net(torch.ones(1, 1, 1, 1))[0, 0].backward()
    # out = sum(g f) / sum(g): d out / d g_u = (f_u - out) / 2 = -+1/2, times sigmoid'(0) / temperature = 1/2
    assert net.routing.logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.25])  # type: ignore[union-attr]
    state = routed(by_hand(FedMN(pretrain=0.0), [DATA[0]], PLAIN, SPACE), [0.5, 0.5])
    after = state.memories[0]["routing"][LOGITS].flatten().tolist()
    assert after != [0.5, 0.5]


def test_modules_are_separate() -> None:
    net = SPACE.build(())
    assert len({p.data_ptr() for p in net.parameters()}) == len(list(net.parameters())) == 7
    first, second = (net.get_parameter(f"layers.0.{u}.0.weight") for u in (0, 1))
    with torch.no_grad():
        first.add_(1.0)
    assert first.item() != second.item()


def test_gates_open_and_close() -> None:
    routing = Routing(2, 3).eval()
    routing.logits.data = torch.tensor([[1.0, -1.0, 0.0], [-3.0, -1.0, -2.0]])
    assert routing().tolist() == [[1, 0, 1], [0, 1, 0]]  # the best of a layer is always open, also the first layer's
    routing.train()
    drawn = torch.stack([routing() for _ in range(400)]).mean(0)
    assert drawn[0, 0].item() == pytest.approx(sigmoid(1), abs=0.08)  # open with probability sigmoid(logit), or best
    assert torch.stack([routing() for _ in range(50)]).amax(2).min() == 1


def test_the_temperature_falls() -> None:
    federation = by_hand(FedMN(pretrain=0.0, cold=0.5), [DATA[0]], PLAIN, SPACE, rounds=3)
    seen: list[float] = []
    real = federation.method._build  # type: ignore[attr-defined]
    object.__setattr__(
        federation.method,
        "_build",
        lambda task, client, *a, **k: seen.append(k["temperature"]) or real(task, client, *a, **k),
    )
    for _ in federation.rounds(federation.begin(), lambda event: None):
        pass
    assert seen == pytest.approx([1.0, 0.75, 0.5])


def test_the_routing_stays_at_the_client() -> None:
    federation = by_hand(FedMN(pretrain=0.0), DATA, PLAIN, SPACE)
    state = routed(federation, [20.0, -20.0], [-20.0, 20.0])
    assert not any("routing" in name for name in state.server.weights)
    net = kept(federation, state, 1).eval()
    assert net.routing().tolist() == [[0, 1]]  # type: ignore[operator]


def test_other_networks_are_refused() -> None:
    with pytest.raises(UserError, match=r"net\.name = 'modular'"):
        by_hand(FedMN(), DATA, PLAIN)
    with pytest.raises(UserError, match="hidden = 0 is too small"):
        Modular((1, 8, 8), 2, hidden=())
