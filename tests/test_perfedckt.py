"""PerFed-CKT against numbers worked out by hand; and its public set, which is nobody's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedtailor.config import Local
from fedtailor.data.sources import load
from fedtailor.engine.loop import Federation
from fedtailor.errors import UserError
from fedtailor.kit.clusters import means
from fedtailor.methods.perfedckt import PerFedCKT
from fedtailor.runs.execute import prepare, start
from tools import by_hand, numbers, one_round, rows, small_config, three

PLAIN = Local(epochs=1.0, batch=4, lr=0.2, momentum=0.0, weight_decay=0.0)
DATA = [[(255, 0)], [(255, 1), (255, 1), (255, 1)]]


def with_pixels(method: PerFedCKT, pixels: list[int], data: list[list[tuple[int, int]]] = DATA) -> Federation:
    """A federation whose public set is these pixels."""
    federation = by_hand(method, data, PLAIN, public=pixels)
    federation.engine.initial = lambda space, seed: three(1, 0, 0)  # type: ignore[method-assign]
    return federation


def test_the_first_round_is_labels_alone_and_sends_only_logits() -> None:
    federation = with_pixels(PerFedCKT(lamda=1.0), [255, 0])
    state = one_round(federation)
    assert numbers(state.memories[0]["v"]) == pytest.approx([1, 0.1, -0.1])
    # client 0 on pixels 1 and 0: head (0.1, -0.1) and nothing
    assert state.server.logits[0].tolist() == [pytest.approx([0.1, -0.1]), [0, 0]]
    assert state.server.masses.tolist() == [1, 3]
    assert set(state.server.values) == {"logits", "masses", "clusters"}
    seat = federation.job.seats[0]
    work = federation.method.work(federation.method.ask(state.server, seat), federation.client(seat, {}, 2))
    reply = federation.engine.run([("", work)])[0]
    assert not reply.weights
    assert list(reply.extra) == ["logits"]


def test_a_client_is_pulled_towards_its_clusters_predictions() -> None:
    federation = with_pixels(PerFedCKT(lamda=0.5), [255])
    state = federation.begin()
    logits, masses = torch.tensor([[[0.0, 0.0]], [[3.0, 1.0]]]), torch.tensor([1.0, 3.0])
    state.server = state.server.replace(logits=logits, masses=masses)  # both in cluster 0
    task = federation.method.ask(state.server, federation.job.seats[0])
    assert task.extra["target"].tolist() == [pytest.approx([2.25, 0.75])]  # by samples
    state = next(federation.rounds(state, lambda event: None))
    # from logits (0, 0): cross-entropy (-1/2, 1/2), and lambda * (0 - 2.25, 0 - 0.75)
    head = [0.2 * (0.5 + 0.5 * 2.25), 0.2 * (-0.5 + 0.5 * 0.75)]
    assert numbers(state.memories[0]["v"]) == pytest.approx([1, *head])


def test_other_clusters_do_not_teach() -> None:
    federation = with_pixels(PerFedCKT(), [255])
    server = federation.begin().server
    server = server.replace(
        logits=torch.tensor([[[1.0, 0.0]], [[0.0, 9.0]]]),
        masses=torch.tensor([1.0, 3.0]),
        clusters=torch.tensor([0, 1]),
    )
    asked = [federation.method.ask(server, seat).extra["target"].tolist() for seat in federation.job.seats]
    assert asked == [[[1.0, 0.0]], [[0.0, 9.0]]]


def test_clusters_by_hand() -> None:
    points = torch.tensor([[0.0], [10.0], [1.0], [11.0], [0.5]])
    member = means(points, 2, np.random.default_rng(0)).tolist()
    assert member[0] == member[2] == member[4]
    assert member[1] == member[3] != member[0]
    assert len(set(means(points[:2], 5, np.random.default_rng(0)).tolist())) == 2
    assert set(means(points, 1, np.random.default_rng(0)).tolist()) == {0}


def test_a_public_set_must_be_given() -> None:
    with pytest.raises(UserError, match="must be given"):
        prepare(small_config("perfedckt", public__name=""))
    with pytest.raises(UserError, match="deals every image"):
        prepare(small_config("perfedckt", public__name="rest", partition__samples=0))


def test_the_rest_is_nobodys(tmp_path: Path) -> None:
    setup = prepare(small_config("perfedckt", public__images=100))
    assert setup.public is not None
    held = {image.tobytes() for image in setup.dataset.images[setup.partition.owner >= 0]}
    assert len(setup.public) == setup.job.public == 100
    assert not any(image.tobytes() in held for image in setup.public)


def test_public_pictures_are_read_as_the_clients_are(tmp_path: Path) -> None:
    for i, size in enumerate(((8, 8), (20, 16), (9, 30))):
        (tmp_path / "street" / "any").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (90 * i, 0, 0)).save(tmp_path / "street" / "any" / f"{i}.png")
    reading = {"data__size": 8, "data__colour": "grey", "public__images": 0}
    setup = prepare(small_config("perfedckt", public__name=f"folder:{tmp_path / 'street'}", **reading))
    assert setup.public is not None
    assert setup.public.shape == (3, 8, 8, 1)


def test_a_clients_image_is_never_public(tmp_path: Path) -> None:
    digits = load("digits")
    np.savez(tmp_path / "own.npz", images=digits.images[:5], labels=digits.labels[:5])
    with pytest.raises(UserError, match="5 of its 5 images are clients' own"):
        prepare(small_config("perfedckt", public__name=f"npz:{tmp_path / 'own.npz'}", partition__samples=0))
    np.savez(tmp_path / "large.npz", images=np.zeros((4, 9, 9, 1), np.uint8), labels=np.zeros(4, int))
    with pytest.raises(UserError, match="have to be the same"):
        prepare(small_config("perfedckt", public__name=f"npz:{tmp_path / 'large.npz'}"))
    np.savez(tmp_path / "noise.npz", images=np.full((4, 8, 8, 1), 77, np.uint8), labels=np.zeros(4, int))
    noise = small_config("perfedckt", public__name=f"npz:{tmp_path / 'noise.npz'}", public__images=0)
    folder = start(noise, tmp_path / "run", "cpu", workers=1)
    sent = {float(r.split(",")[-1]) for r in rows(folder) if r.split(",")[3] == "bytes_up"}
    assert sent == {4 * 4 * 10}  # logits of four images, ten classes


def test_distillation_reads_the_right_image() -> None:
    # pixel 1 has target (1, 0), pixel 0 no influence on anything: its logits are 0 whatever the head is
    federation = with_pixels(PerFedCKT(lamda=1.0), [0, 255], [DATA[0]])
    state = federation.begin()
    logits = torch.tensor([[[5.0, 5.0], [1.0, 0.0]]])
    state.server = state.server.replace(logits=logits, masses=torch.tensor([1.0]))
    state = next(federation.rounds(state, lambda event: None))
    # mean over both images: (-1/2, 1/2) + (0 - 1, 0) / 2
    assert numbers(state.memories[0]["v"])[1:] == pytest.approx([0.2 * 1.0, -0.1])
    assert math.isfinite(float(state.server.logits.sum()))
