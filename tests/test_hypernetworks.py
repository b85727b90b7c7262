"""pFedHN and FedTP against numbers worked out by hand: hypernetworks with one unit, networks with a few weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.errors import UserError
from fedtailor.evaluate import onboard
from fedtailor.kit.hypernet import descend, generate, gradient, new_hypernet
from fedtailor.methods.fedtp import FedTP
from fedtailor.methods.pfedhn import PFedHN
from fedtailor.nets.base import FixedNet
from fedtailor.spaces.base import Weights
from tools import by_hand, numbers, one_round, personal, three

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]
ONE = {"embedding": 1, "hidden": 1, "layers": 1, "momentum": 0.0, "decay": 0.0, "clip": 0.0, "lr": 0.5}


def one_unit(embeddings: list[float], **tensors: tuple[list[float], list[float]]) -> Weights:
    """h = relu(2 e), and for each tensor the factors of h and the constants."""
    phi = {"embeddings": torch.tensor(embeddings)[:, None]}
    phi |= {"hidden.0.weight": torch.tensor([[2.0]]), "hidden.0.bias": torch.tensor([0.0])}
    for name, (factors, constants) in tensors.items():
        n = name.replace("_", ".")
        phi |= {f"to.{n}.weight": torch.tensor(factors)[:, None], f"to.{n}.bias": torch.tensor(constants)}
    return phi


PHI = one_unit([0.5, 1.0], body_weight=([0.0], [1.0]), head_weight=([0.1, -0.1], [-0.1, 0.1]))
# h = 1 and 2: client 0's head is (0, 0), client 1's (0.1, -0.1); both bodies are 1


def test_pfedhn_moves_the_hypernetwork_by_the_chain_rule() -> None:
    federation = by_hand(PFedHN(**ONE), DATA[:1], PLAIN)
    state = one_round(federation, phi=PHI)
    # from head (0, 0) a step of client 0 goes to (0.1, -0.1): Delta = (-0.1, 0.1), and 0 for the body
    phi = state.server.phi
    assert phi["to.head.weight.bias"].tolist() == pytest.approx([-0.1 + 0.05, 0.1 - 0.05])  # - lr * Delta
    assert phi["to.head.weight.weight"].flatten().tolist() == pytest.approx([0.1 + 0.05, -0.1 - 0.05])  # times h = 1
    # d/dh = 0.1 * -0.1 + -0.1 * 0.1 = -0.02; h = 2 e: d/dW = -0.02 e, d/de = -0.02 * 2
    assert phi["hidden.0.weight"].tolist() == [[pytest.approx(2 + 0.5 * 0.02 * 0.5)]]
    assert phi["hidden.0.bias"].tolist() == [pytest.approx(0.5 * 0.02)]
    assert phi["embeddings"].flatten().tolist() == pytest.approx([0.5 + 0.5 * 0.04, 1.0])


def test_pfedhn_averages_the_gradients_of_several_clients() -> None:
    federation = by_hand(PFedHN(**ONE), [DATA[0], DATA[0]], PLAIN)
    state = one_round(
        federation,
        phi=one_unit([0.5, 0.5], body_weight=([0.0], [1.0]), head_weight=([0.1, -0.1], [-0.1, 0.1])),
    )
    alone = one_round(by_hand(PFedHN(**ONE), DATA[:1], PLAIN), phi=PHI)  # equal clients: the same step for phi
    assert torch.allclose(state.server.phi["to.head.weight.bias"], alone.server.phi["to.head.weight.bias"])
    assert state.server.phi["embeddings"].flatten().tolist() == pytest.approx([0.51, 0.51])  # half each


def test_pfedhn_keeps_what_is_generated_and_sends_only_differences() -> None:
    federation = by_hand(PFedHN(**ONE), DATA, PLAIN)
    state = federation.begin()
    state.server = state.server.replace(phi=PHI)
    assert numbers(personal(federation, state, 0)) == pytest.approx([1, 0, 0])
    assert numbers(personal(federation, state, 1)) == pytest.approx([1, 0.1, -0.1])
    seat = federation.job.seats[0]
    client = federation.client(seat, {}, 1)
    reply = federation.engine.run([("", federation.method.work(federation.method.ask(state.server, seat), client))])[0]
    assert not reply.weights
    assert reply.extra["head.weight"].flatten().tolist() == pytest.approx([-0.1, 0.1])


def test_pfedhn_pc_keeps_the_head_at_the_client() -> None:
    federation = by_hand(PFedHN(**ONE, head="private"), DATA, PLAIN)
    federation.engine.initial = lambda space, seed: three(9, 0, 0)  # type: ignore[method-assign]
    state = one_round(federation, phi=one_unit([0.5, 0.5], body_weight=([0.0], [1.0])))
    assert numbers(state.memories[0]["head"]) == pytest.approx([0.1, -0.1])
    assert not any("head" in name for name in state.server.phi)
    assert numbers(personal(federation, state, 1)) == pytest.approx([1, -0.1, 0.1])


def test_gradient_is_autograds_and_the_server_clips_decays_and_remembers() -> None:
    first = {"a": torch.randn(3, 2), "b": torch.zeros(3)}
    phi = new_hypernet(first, 2, 3, 4, 2, seed=0)
    made = generate(phi, 1, {"a": (3, 2), "b": (3,)})
    assert torch.equal(made["b"], first["b"])  # a tensor of zeros starts as zeros
    assert 0 < float((made["a"] - first["a"]).abs().max()) < 3 * float(first["a"].std())
    slopes = gradient(phi, [(1, {"a": torch.ones(3, 2)}, 0.5)])
    assert slopes["embeddings"][0].tolist() == [0, 0, 0]
    moved = phi | {"embeddings": phi["embeddings"] + torch.tensor([[0.0] * 3, [1e-3, 0, 0]])}
    rise = (generate(moved, 1, {"a": (3, 2)})["a"] - generate(phi, 1, {"a": (3, 2)})["a"]).sum() * 0.5 / 1e-3
    assert slopes["embeddings"][1, 0].item() == pytest.approx(rise.item(), rel=1e-2, abs=1e-4)
    at, m = {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 0.0])}
    new, kept = descend(at, m, {"x": torch.tensor([3.0, 4.0])}, lr=0.1, momentum=0.5, decay=0.1, clip=1.0)
    assert kept["x"].tolist() == pytest.approx([0.5 + 0.6 + 0.1, 0.8 + 0.2])
    assert new["x"].tolist() == pytest.approx([1 - 0.12, 2 - 0.1])


def test_clients_join_by_their_embedding_alone() -> None:
    federation = by_hand(PFedHN(**ONE, onboard_rounds=1), [DATA[0], DATA[0]], PLAIN)
    federation.job = replace(federation.job, clients=1, participants=1)
    state = federation.begin()
    state.server = state.server.replace(phi=PHI | {"embeddings": torch.tensor([[0.5], [0.5]])})
    server, _ = onboard(federation, state, federation.job.seats[1:])
    assert server.phi["embeddings"].flatten().tolist() == pytest.approx([0.5, 0.52])
    assert all(torch.equal(server.phi[n], PHI[n]) for n in PHI if n != "embeddings")
    assert state.server.phi["embeddings"].flatten().tolist() == [0.5, 0.5]


def test_a_client_that_joins_learns_as_much_in_company_as_alone() -> None:
    federation = by_hand(PFedHN(**ONE, onboard_rounds=1), [DATA[0]] * 3, PLAIN)
    federation.job = replace(federation.job, clients=1, participants=1)
    state = federation.begin()
    state.server = state.server.replace(phi=PHI | {"embeddings": torch.full((3, 1), 0.5)})
    server, _ = onboard(federation, state, federation.job.seats[1:])
    assert server.phi["embeddings"].flatten().tolist() == pytest.approx([0.5, 0.52, 0.52])  # not half of it each


def test_a_schedule_leaves_clients_that_join_a_learning_rate() -> None:
    """Cosine is at 0 when the rounds are over: a client would learn nothing then, and its embedding would stay."""
    local = replace(PLAIN, schedule="cosine", lr=2.0)  # of which a tenth is left
    federation = by_hand(PFedHN(**ONE, onboard_rounds=1), [DATA[0], DATA[0]], local)
    federation.job = replace(federation.job, clients=1, participants=1)
    state = federation.begin()
    state.round = federation.job.rounds
    state.server = state.server.replace(phi=PHI | {"embeddings": torch.tensor([[0.5], [0.5]])})
    server, _ = onboard(federation, state, federation.job.seats[1:])
    assert server.phi["embeddings"].flatten().tolist() == pytest.approx([0.5, 0.52])


def test_a_hypernetwork_too_large_for_any_server_is_an_error() -> None:
    with pytest.raises(UserError, match="more than a server holds"):
        new_hypernet({"a": torch.empty(1).expand(30_000_000)}, 2, 3, 100, 2, seed=0)


class _Attending(nn.Module):
    """logits = head * (q * x): one projection and two weights of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(1, 1, bias=False)})
        self.head = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention["q"](x.flatten(1)))


@dataclass(frozen=True)
class Attending(FixedNet):
    name = "attending"

    def module(self) -> nn.Module:
        return _Attending()


def test_fedtp_averages_the_shared_part_and_generates_the_projections() -> None:
    federation = by_hand(FedTP(**ONE), DATA, PLAIN, Attending((1, 1, 1), 2))
    phi = one_unit([0.5, 0.5], attention_q_weight=([0.0], [1.0]))
    state = one_round(federation, weights={"head.weight": torch.tensor([[0.0], [0.0]])}, phi=phi)
    # the server holds weights, not the mean of the changes; by samples: 1/4 * (0.1, -0.1) + 3/4 * (-0.1, 0.1)
    assert state.server.weights["head.weight"].flatten().tolist() == pytest.approx([-0.05, 0.05])
    assert list(state.server.weights) == ["head.weight"]
    # at head (0, 0) the projection has no gradient: the hypernetwork rests
    assert torch.equal(state.server.phi["to.attention.q.weight.bias"], torch.tensor([1.0]))
    state = one_round(federation, weights={"head.weight": torch.tensor([[1.0], [0.0]])}, phi=phi)
    # gradient of q: (p_0 - 1[y = 0]) * 1, with p_0 = 1 / (1 + e^-1): -0.2689 and 0.7311; Delta = lr * gradient
    delta = 0.2 * (0.25 * -0.268941 + 0.75 * 0.731059)
    assert state.server.phi["to.attention.q.weight.bias"].tolist() == pytest.approx([1 - 0.5 * delta], abs=1e-6)


def test_fedtp_evaluates_shared_weights_with_generated_projections_and_no_tuning() -> None:
    federation = by_hand(FedTP(**ONE), DATA, PLAIN, Attending((1, 1, 1), 2))
    state = federation.begin()
    phi = one_unit([0.5, 1.0], attention_q_weight=([3.0], [1.0]))
    state.server = state.server.replace(weights={"head.weight": torch.tensor([[1.0], [0.5]])}, phi=phi)
    assert numbers(personal(federation, state, 0)) == [4, 1, 0.5]
    assert numbers(personal(federation, state, 1)) == [7, 1, 0.5]


def test_fedtp_says_which_networks_it_can_use() -> None:
    with pytest.raises(UserError, match=r"net\.name = 'vit'"):
        by_hand(FedTP(), DATA, PLAIN)
