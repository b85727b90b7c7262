"""kNN-Per against numbers worked out by hand: features are body * pixel, one number each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedtailor.config import Local
from fedtailor.engine.loop import Federation, State
from fedtailor.methods.knn_per import KnnPer
from fedtailor.nets.knn import _KNN
from fedtailor.registry import lookup
from fedtailor.runs.execute import open_space, read_networks, start
from tools import by_hand, kept, one_round, small_config, three

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0), (0, 1)], [(255, 1), (255, 1), (255, 1)]]  # pixels 1 and 0 after normalisation


def at(federation: Federation, weights: dict[str, torch.Tensor]) -> State:
    state = federation.begin()
    state.server = state.server.replace(weights=weights)
    return state


@pytest.mark.parametrize("lamda", [0.0, 0.25, 1.0])
def test_probabilities_are_mixed_with_probabilities(lamda: float) -> None:
    federation = by_hand(KnnPer(lamda=lamda), DATA, PLAIN)
    net = kept(federation, at(federation, three(1, 2, 0)), 0)
    near = 1 / (1 + math.exp(-1))  # of pixel 1: key 1 at distance 0, key 0 at distance 1
    model = 1 / (1 + math.exp(-2))  # logits 2 and 0
    out = net(torch.ones(1, 1, 1, 1)).exp()[0].tolist()
    assert out == pytest.approx([lamda * near + (1 - lamda) * model, 1 - lamda * near - (1 - lamda) * model])


def test_only_the_nearest_vote_and_the_kernel_has_a_scale() -> None:
    one = by_hand(KnnPer(lamda=1.0, neighbours=1), DATA, PLAIN)
    assert kept(one, at(one, three(1, 0, 0)), 0)(torch.ones(1, 1, 1, 1)).argmax() == 0
    wide = by_hand(KnnPer(lamda=1.0, scale=4.0), DATA, PLAIN)
    net = kept(wide, at(wide, three(2, 0, 0)), 0)  # features 2 and 0: d^2 = 4, over scale 4 is 1
    assert net(torch.ones(1, 1, 1, 1)).exp()[0].tolist()[0] == pytest.approx(1 / (1 + math.exp(-1)))


class _Two(nn.Module):
    """Its two pixels are its features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def test_squared_distances_are_over_the_number_of_features() -> None:
    net = _KNN(_Two(), 2, 2, 1.0)
    net.keys.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))  # from (1, 1): d^2 = 0 and 2, over two features 1
    net.labels.copy_(torch.tensor([0, 1]))
    net.lamda.fill_(1.0)
    assert net(torch.ones(1, 1, 1, 2)).exp()[0].tolist()[0] == pytest.approx(1 / (1 + math.exp(-1)))


def test_lambda_is_chosen_on_val() -> None:
    # a network that is wrong about both of client 0's images, and whose neighbours are right: lambda is large
    federation = by_hand(KnnPer(grid=10), [[(255, 0), (0, 1)]], PLAIN)
    wrong = kept(federation, at(federation, three(1, -1, 1)), 0)
    # pixel 1: neighbours give label 0 0.731 and the network 0.119, so lambda * 0.731 + (1 - lambda) * 0.119 > 0.5 from
    # 0.7 on (of pixel 0 the network knows nothing, any neighbour decides): of 0.7 .. 1 the upper middle is 0.9
    assert float(wrong.lamda) == pytest.approx(0.9)  # type: ignore[arg-type]
    # neighbours that agree with the network leave every lambda equal: the middle
    other = by_hand(KnnPer(grid=10), [[(255, 0), (255, 0)]], PLAIN)
    assert float(kept(other, at(other, three(1, 1, 0)), 0).lamda) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_the_datastore_never_leaves_the_client() -> None:
    federation = by_hand(KnnPer(), DATA, PLAIN)
    state = one_round(federation, weights=three(1, 0, 0))
    assert set(state.server.values) == {"weights"}
    assert set(state.server.weights) == {"body.weight", "head.weight"}
    assert not state.memories


def test_the_kept_network_stands_alone(tmp_path: Path) -> None:
    folder = start(small_config("knn-per", rounds=1, local__prior=True), tmp_path / "run", "cpu", workers=1)
    space, arch, weights = read_networks(folder, open_space(folder))[0]
    net = space.build(arch).eval()
    net.load_state_dict(weights)
    assert len(weights["keys"]) == 36
    out = net(torch.zeros(3, 1, 8, 8)).exp()
    assert out.sum(1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_the_memory_is_counted() -> None:
    plain, with_memory = (lookup("net", name)((1, 8, 8), 10) for name in ("cnn", "knn"))
    assert with_memory.cost(()).parameters == plain.cost(()).parameters
    assert with_memory.cost(()).buffers == 100 * 128 + 100 + 1  # keys, labels, lambda
    assert with_memory.cost(()).flops == plain.cost(()).flops + 2 * 100 * 128  # one product with every key
