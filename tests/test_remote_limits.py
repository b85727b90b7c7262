"""What one client can cost a federation, whatever it sends: itself, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import values
from fedtailor.config import Local
from fedtailor.engine import crowd
from fedtailor.engine.parcel import Parcel, Refused, pack, unpack
from fedtailor.engine.remote import _reconciled
from fedtailor.engine.wire import Evaluate, Evaluated
from fedtailor.errors import UserError
from fedtailor.method import Reply, Server
from fedtailor.methods.fedavg import FedAvg
from fedtailor.runs.facts import read_facts
from fedtailor.runs.results import Results
from fedtailor.runs.serve import serve
from grid import MemoryPost
from test_remote import NAMES, Listener, config_of, crash, hurry  # noqa: F401, used by every test
from test_remote_faults import changed, last_of
from test_wire import REQUEST, TASK, read, respond
from tools import by_hand, numbers, rows, three

FEDORAS: dict[str, Any] = {"participants": 4, "rounds": 6, "evaluate_every": 6, "method__tiers": 1}


def tensor_of(value: dict[str, Any], name: str) -> torch.Tensor | None:
    extra = value["worked"]["reply"]["extra"]
    return extra["tensors"][extra["names"].index(name)] if name in extra["names"] else None


# replies that cannot be merged together -----------------------------------------------------------------------------


def test_replies_that_only_together_make_the_server_infinite_do_not_end_it(tmp_path: Path) -> None:
    def large(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if name in NAMES[1:3] and value["worked"]:
            for tensor in value["worked"]["reply"]["weights"]["tensors"]:
                tensor.fill_(8e36)  # times the images of one client it is a number still, of two no longer
        return pack(value)

    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, large)
    folder = serve(config_of("fedavg", participants=4, rounds=1), tmp_path / "run", post, NAMES, watch=listener)
    assert read_facts(folder)["status"] == "done"
    assert "the reply of client-002 is refused: ValueError: it makes weights/" in listener.said
    assert all(t.isfinite().all() for _, t in values.tensors_in(values.read_value(last_of(folder))))


class Alike(FedAvg):
    """Merges replies about the same tensors only."""

    def merge(self, server: Server, replies: Sequence[Reply]) -> Server:
        assert len({tuple(r.weights) for r in replies}) == 1, "of several kinds"
        assert "bad" not in replies[0].weights, "bad"
        return super().merge(server, replies)


@pytest.mark.parametrize(
    ("kinds", "left_out"),
    [
        (["other", "", "", ""], {0: "several"}),
        (["", "", "other", ""], {2: "several"}),
        (["other", "bad", "", ""], {0: "several", 1: "bad"}),
        (["bad", "bad"], {0: "bad", 1: "bad"}),
    ],
)
def test_of_replies_that_do_not_go_together_most_are_kept(kinds: list[str], left_out: dict[int, str]) -> None:
    federation = by_hand(Alike(), [[(255, 0)]] * len(kinds), Local())
    server = federation.begin().server.replace(weights=three(0, 0, 0))
    made = {"": three(2, 4, 6), "other": {"body.weight": torch.full((1, 1), 9.0)}, "bad": {"bad": torch.ones(1)}}
    merged, why = _reconciled(Alike(), server, [Reply(made[k], client=i, samples=1) for i, k in enumerate(kinds)])
    assert {client: reason for client, reason in left_out.items() if reason in why[client]} == left_out
    assert why.keys() == left_out.keys()
    assert numbers(merged.weights) == ([2, 4, 6] if "" in kinds else [0, 0, 0])


def _negative_examples(value: dict[str, Any]) -> None:
    if (examples := tensor_of(value, "examples")) is not None:
        examples.fill_(-10.0)


def _many_examples(value: dict[str, Any]) -> None:
    if (examples := tensor_of(value, "examples")) is not None:
        examples.fill_(1e6)


def _no_path(value: dict[str, Any]) -> None:
    if (paths := tensor_of(value, "paths")) is not None:
        paths.fill_(99)


def _many_paths(value: dict[str, Any]) -> None:
    if (paths := tensor_of(value, "paths")) is not None:
        extra = value["worked"]["reply"]["extra"]
        extra["tensors"][extra["names"].index("paths")] = paths[:1].repeat(40, 1)
        extra["tensors"][extra["names"].index("examples")] = torch.ones(40)


def _negative_images(value: dict[str, Any]) -> None:
    facts = value["worked"]["reply"]["facts"]
    if "images" in facts:
        facts["images"] = -facts["images"]


def _good_scores(value: dict[str, Any]) -> None:
    if (accuracies := tensor_of(value, "accuracies")) is not None:
        accuracies.fill_(7.0)


def _nested_scores(value: dict[str, Any]) -> None:
    extra = value["worked"]["reply"]["extra"]
    if "accuracies" in extra["names"]:
        at = extra["names"].index("accuracies")
        extra["tensors"][at] = extra["tensors"][at][:, None]


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (_negative_examples, "its paths saw"),
        (_many_examples, "its paths saw"),
        (_many_paths, "examples of "),
        (_no_path, "is not in 0.."),
        (_negative_images, "it says it scored on -"),
        (_good_scores, r"with accuracies [7.0"),
        (_nested_scores, "TypeError"),
    ],
)
def test_counts_and_scores_that_cannot_be_are_not_merged(
    attack: Callable[[dict[str, Any]], None], why: str, tmp_path: Path
) -> None:
    """With them a server divides by nothing, or ranks what has no order."""
    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, changed(attack))
    folder = serve(config_of("fedoras", **FEDORAS), tmp_path / "run", post, NAMES, watch=listener)
    assert read_facts(folder)["status"] == "done"
    refused = [line for line in listener.said.splitlines() if "the reply of client-001 is refused" in line]
    assert refused
    assert all(why in line for line in refused)
    assert "client-000 is refused" not in listener.said


# messages that are larger than they seem ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[10**9, 0], [0, 10**9], [300, 300, 0]])
def test_rows_of_nothing_are_refused(shape: list[int]) -> None:
    """They hold no byte, and become a thousand million lists where a method reads them."""
    layout = {"format": 1, "tree": {"$tensor": "/x"}, "tensors": {"/x": ["float32", *shape]}}
    with pytest.raises(Refused, match="too large for 0 bytes"):
        unpack(Parcel(json.dumps(layout), b""))
    assert unpack(pack(torch.zeros(0, 512, 3, 3))).shape == (0, 512, 3, 3)


def test_a_reply_that_says_much_about_little_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "LAYOUT", 10_000)

    def long(name: str, request: Parcel, response: Parcel) -> Parcel:
        worked = unpack(response)["worked"]
        if name == "client-001" and worked:
            return Parcel(response.layout + " " * 3 * len(request.layout) + " " * 10_000, response.data)
        return response

    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, long)
    folder = serve(config_of("fedavg", participants=4), tmp_path / "run", post, NAMES, watch=listener)
    assert "a message of client-001 is refused: its layout has" in listener.said
    assert len([r for r in rows(folder) if ",missing_refused," in r]) == 2


# scores and facts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts", [{"parameters": "x"}, {"flops": "7"}, {"flops": 0.5}, {"flops": True}, {"flops": -1}, {"flops": 1 << 62}]
)
def test_what_a_network_costs_is_a_number(facts: dict[str, Any], tmp_path: Path) -> None:
    """A text in its place would make the whole run unreadable."""

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if name == "client-001" and value["evaluated"] and value["evaluated"]["facts"]:
            value["evaluated"]["facts"] = facts
        return pack(value)

    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, twist)
    folder = serve(config_of("fedavg", rounds=1), tmp_path / "run", post, NAMES, watch=listener)
    assert "a message of client-001 is refused" in listener.said
    assert len(Results.read(folder).table().rows) > 0


def test_scores_that_nobody_asked_for_are_refused() -> None:
    order = Evaluate(1, TASK, 0, shared=TASK)
    for asked, scores in (
        (replace(order, shared=None), Evaluated({}, {"val": 0.5}, {})),
        (order, Evaluated({"test": 0.5}, {}, {})),
    ):
        request = replace(REQUEST, work=None, evaluate=asked)
        with pytest.raises(Refused, match=r"nobody sent|no accuracy"):
            read(respond(worked=None, evaluated=scores), request)
    request = replace(REQUEST, work=None, evaluate=replace(order, last=True))
    assert read(respond(worked=None, evaluated=Evaluated({"test": 0.5}, {"val": 0.5}, {})), request).evaluated


# before a run begins ------------------------------------------------------------------------------------------------


def hello(change: Callable[[str, dict[str, Any]], None]) -> Callable[[str, Parcel, Parcel], Parcel]:
    """A twist that alters what clients say of themselves."""

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"]:
            change(name, value["about"])
        return pack(value)

    return twist


@pytest.mark.parametrize("named", [True, False])
def test_the_run_is_for_the_images_that_most_clients_have(named: bool, tmp_path: Path) -> None:
    """The first client to come must not shut all others out, whether clients have keys or not."""

    class Post(MemoryPost):
        def nodes(self) -> dict[int, str]:  # type: ignore[override]
            return dict(super().nodes()) if named else dict.fromkeys(super().nodes(), "")

    said = list[int]()

    def odd(name: str, about: dict[str, Any]) -> None:
        if name == "client-000" and (named or not said):  # its owner helps it where all four are needed
            said.append(1)
            about["shape"] = [1, 9, 9]

    listener, post = Listener(), Post(tmp_path / "s", NAMES, hello(odd))
    clients, count = (NAMES, 3) if named else ((), 0)
    config = config_of("fedavg", participants=4, rounds=1)
    folder = serve(config, tmp_path / "run", post, clients, start_with=count, watch=listener)
    assert read_facts(folder)["input"] == [1, 8, 8]
    assert "client-001's images are [1, 8, 8] (channels, height, width), not as those of client-000" in listener.said
    assert "'client-000' is not taken in: its images are [1, 9, 9]" in listener.said
    losses = [row.split(",")[1] for row in rows(folder) if ",train,loss," in row]
    assert losses == (["1", "2", "3"] if named else ["0", "1", "2", "3"])


def test_of_shapes_that_equally_many_have_the_first_counts(tmp_path: Path) -> None:
    def odd(name: str, about: dict[str, Any]) -> None:
        if name in NAMES[2:]:
            about["shape"] = [1, 9, 9]

    config = config_of("fedavg", participants=4, rounds=1)
    post = MemoryPost(tmp_path / "s", NAMES, hello(odd))
    crowd_ = crowd.Crowd(post, "run", config.to_toml(), lambda _: None)
    crowd_.gather(4)
    crowd_.settle()
    assert crowd_.shape == (1, 8, 8)
    assert list(crowd_.members) == list(NAMES[:2])


def test_a_client_that_can_afford_no_network_does_not_keep_a_run_from_its_beginning(tmp_path: Path) -> None:
    def many(name: str, about: dict[str, Any]) -> None:
        if name == "client-003":
            about["samples"] = 10**8

    config = config_of("fedavg", participants=4, rounds=2, fleet__budget__seconds=60)
    listener, post = Listener(1, crash), MemoryPost(tmp_path / "s", NAMES, hello(many))
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    assert "'client-003' is not taken in: client 'client-003' (phone-high): no arch" in listener.said
    again = Listener()  # nor from going on, where nobody says how many are enough
    folder = serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, hello(many)), NAMES, watch=again)
    assert "'client-003' is not taken in: client 'client-003' (phone-high): no arch" in again.said
    assert {row.split(",")[1] for row in rows(folder) if ",train,loss," in row} == {"0", "1", "2"}


def test_a_budget_that_suits_nobody_is_the_servers_to_mend(tmp_path: Path) -> None:
    config = config_of("fedavg", rounds=1, fleet__budget__seconds=1e-9)
    with pytest.raises(UserError, match="no arch"):
        serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES), NAMES)


def test_a_client_with_more_classes_than_a_federation_may_have(tmp_path: Path) -> None:
    def many(name: str, about: dict[str, Any]) -> None:
        if name == "client-001":
            about["classes"] = [str(i) for i in range(20_000)]

    listener, post = Listener(), MemoryPost(tmp_path / "s", NAMES, hello(many))
    config = config_of("fedavg", participants=4, rounds=1)
    serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    assert "'client-001' is not taken in: it has 20000 classes; a federation has at most 10000" in listener.said
