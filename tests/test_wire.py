"""Messages as bytes, and everything a server must not believe."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.engine import parcel, wire
from fedtailor.engine.parcel import Parcel, Refused, pack, unpack
from fedtailor.engine.wire import Evaluate, Evaluated, Request, Response, Work, Worked
from fedtailor.fleet.budget import Budget
from fedtailor.fleet.profile import shipped
from fedtailor.method import Reply, Seat, Task
from fedtailor.nets.base import FixedNet
from fedtailor.spaces.tiny import Tiny
from tools import Three, three

SPACE: FixedNet = Three((1, 1, 1), 2)
PROFILE = shipped().get("phone-high")
SEAT = Seat(3, "hospital-3", 40, PROFILE, Budget(flops=1e6), True, SPACE, 8, 40)
TASK = Task(three(1, 2, 3), extra={"alpha": torch.zeros(2), "asked": torch.tensor([[1, 0]])}, facts={"phase": "search"})
REQUEST = Request("run-1", "n1", "rounds = 3", ("a", "b"), SEAT, 3, None, Work(2, TASK, 1))
REPLY = Reply(three(4, 5, 6), extra={"alpha": torch.ones(2)}, facts={"loss": 0.5, "accuracy": 0.25})


def respond(reply: Reply = REPLY, **changes: object) -> Parcel:
    return dataclasses.replace(Response("run-1", "n1", "hospital-3", worked=Worked(reply, 10, True)), **changes).pack()


def read(parcel: Parcel, request: Request = REQUEST) -> Response:
    return wire.read_response(parcel, request, "hospital-3")


def replaced(**changes: object) -> Parcel:
    return respond(dataclasses.replace(REPLY, **changes))


@pytest.mark.parametrize("dtype", parcel.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)], ids=str)
def test_tensors_keep_type_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    before = (torch.randn(shape) * 100).to(dtype)
    value = {"first": torch.ones(1, dtype=torch.uint8), "it": [before, {"deep": (1, None, "text", 2.5)}]}
    after = unpack(pack(value))
    assert after["it"][0].dtype == dtype
    assert after["it"][0].shape == before.shape
    assert torch.equal(after["it"][0].reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))
    assert after["it"][1] == {"deep": (1, None, "text", 2.5)}


def test_everything_lies_in_one_array() -> None:
    parcel = pack({str(i): torch.full((3,), float(i)) for i in range(400)})
    assert len(parcel.data) == 400 * 16  # twelve bytes each, and four so that the next one is aligned
    assert unpack(parcel)["399"].tolist() == [399.0] * 3


def test_a_request_and_a_response_survive_the_way() -> None:
    order = Evaluate(1, Task(three(7, 8, 9), (1, 2)), 1, Task(three(1, 1, 1)), True)
    seat = dataclasses.replace(SEAT, arch=(0, 1))
    request = dataclasses.replace(REQUEST, seat=seat, evaluate=order)
    again = wire.read_request(unpack(request.pack()), lambda config, shape, classes: SPACE)
    assert again.seat == seat
    assert again.evaluate is not None
    assert again.work is not None
    assert again.evaluate.offer.arch == (1, 2)
    assert torch.equal(again.work.task.weights["head.weight"], TASK.weights["head.weight"])
    assert (again.run, again.number, again.classes, again.keep) == ("run-1", "n1", ("a", "b"), 3)
    scores = Evaluated({"val": 0.5, "test": 0.25}, {"val": 0.125}, {"parameters": 7})
    found = read(respond(evaluated=scores), request)
    assert found.evaluated == scores
    assert found.worked is not None
    assert found.worked.reply.facts == REPLY.facts
    assert torch.equal(found.worked.reply.extra["alpha"], REPLY.extra["alpha"])
    assert found.worked.remembers


@pytest.mark.parametrize(
    ("parcel", "why"),
    [
        (Parcel("", b""), "no message"),
        (Parcel("[" * 100_000, b""), "no message"),
        (Parcel("{}" + " " * parcel.LAYOUT_LIMIT, b""), "layout has"),
        (Parcel(json.dumps({"format": 99, "tree": {}, "tensors": {}}), b""), "format 99"),
        (Parcel(pickle.dumps({"run": "run-1"}).hex(), pickle.dumps({"run": "run-1"})), "no message"),
        (Parcel(json.dumps({"format": 1, "tree": {}, "tensors": {"/x": ["float32", 4]}}), b"1234"), "beyond"),
        (Parcel(json.dumps({"format": 1, "tree": {}, "tensors": {"/x": ["float32", -1]}}), b"1234"), "impossible"),
        (Parcel(json.dumps({"format": 1, "tree": {}, "tensors": {"/x": ["object", 1]}}), b"12345678"), "unknown type"),
        (Parcel(json.dumps({"format": 1, "tree": {}, "tensors": {"/x": ["bool", 1]}}), b"\x07" + bytes(7)), "neither"),
        (Parcel(json.dumps({"format": 1, "tree": {}, "tensors": {}}), bytes(8)), "8 bytes"),
        (Parcel(json.dumps({"format": 1, "tree": {"$tensor": "/x"}, "tensors": {}}), b""), "no message"),
    ],
)
def test_broken_messages_are_refused(parcel: Parcel, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read(parcel)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_sound(data: st.DataObject) -> None:
    """Whatever a client changes in its layout, nothing but a refusal or a reply within its task comes of it."""
    layout = respond().layout
    at = data.draw(st.integers(0, len(layout) - 1))
    damaged = layout[:at] + data.draw(st.text(max_size=3)) + layout[at + data.draw(st.integers(0, 6)) :]
    try:
        found = read(Parcel(damaged, respond().data))
    except Refused:
        return
    if found.worked:
        wire.check_reply(found.worked.reply, TASK, SPACE)


NAN, INFINITE = three(float("nan"), 0, 0), three(0, float("inf"), 0)


@pytest.mark.parametrize(
    ("parcel", "why"),
    [
        (replaced(weights=NAN), "body.weight.*NaN"),
        (replaced(weights=INFINITE), "head.weight.*infinite"),
        (replaced(extra={"alpha": torch.tensor([1.0, float("nan")])}), "alpha.*NaN"),
        (replaced(weights={"body.weight": torch.zeros(2, 1)}), r"was torch.float32 \(1, 1\) and came back"),
        (replaced(weights={"body.weight": torch.zeros(1, 1, dtype=torch.float64)}), "came back as torch.float64"),
        (replaced(weights={"other.weight": torch.zeros(1)}), "was not given 'other.weight'"),
        (replaced(extra={"alpha": torch.zeros(3)}), "extra: 'alpha'"),
        (replaced(arch=(1, 2)), "arch"),
        (replaced(facts={"loss": float("nan")}), "'loss'"),
        (replaced(facts={"loss": 1e308}), "'loss'"),
        (replaced(facts={"accuracy": 1.5}), "no accuracy"),
        (replaced(facts={"accuracy": -0.5}), "no accuracy"),
        (replaced(facts={"note": "x" * 100_000}), "letters"),
        (replaced(facts={str(i): i for i in range(200)}), "200 facts"),
        (replaced(extra={"more": torch.zeros(1 << 19)}), "more than"),
        (replaced(facts={"loss": 10**400}), "'loss'"),
        (replaced(facts={"loss": [0.5]}), "'loss'"),
        (replaced(facts={"loss": 0.5, "phase": "deploy"}), "'phase' was 'search'"),
        (replaced(extra={"asked": torch.tensor([[1, 7]])}), "'asked' are whole numbers"),
        (respond(number="n0"), "replayed"),
        (respond(run="run-0"), "replayed, or of another run"),
        (respond(client="hospital-4"), "comes from 'hospital-4'"),
        (respond(evaluated=Evaluated({"val": 0.5}, {}, {})), "nobody asked"),
        (respond(worked=Worked(REPLY, -1, True)), "operations"),
    ],
)
def test_hostile_replies_are_refused(parcel: Parcel, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read(parcel)


@pytest.mark.parametrize("part", ["about", "evaluated", "worked", "run", "problem"])
@pytest.mark.parametrize("content", [torch.ones(2), [], [[1]], 10**400, "x", {"reply": torch.ones(2)}], ids=repr)
def test_parts_of_another_kind_are_refused_or_mean_nothing(part: str, content: object) -> None:
    """A server that stops at a client's message is one that any client can stop."""
    value = unpack(respond())
    value[part] = content
    hello = dataclasses.replace(REQUEST, seat=None, work=None)
    for request in (REQUEST, hello, dataclasses.replace(REQUEST, evaluate=Evaluate(1, TASK, 0))):
        try:
            found = read(pack(value), request)
        except Refused:
            continue
        assert part != "run"  # of another run: nothing of it counts
        assert not found.evaluated
        assert isinstance(found.worked, Worked) if part != "worked" else not found.worked
        assert isinstance(found.about, dict)
        assert isinstance(found.problem, str)


@pytest.mark.parametrize(
    "facts", [{"arch": "1\n9,0,test,personal_accuracy,1.0"}, {"arch": "1,2"}, {"accuracy": 1.0}, {"flops": [1, 2]}]
)
def test_what_a_network_is_writes_no_rows_of_its_own(facts: dict[str, object]) -> None:
    request = dataclasses.replace(REQUEST, work=None, evaluate=Evaluate(1, TASK, 0))
    assert read(respond(worked=None, evaluated=Evaluated({}, {}, {"arch": "1-0+2-x", "flops": 7})), request).evaluated
    with pytest.raises(Refused, match=r"nothing that a network is|no number"):
        read(respond(worked=None, evaluated=Evaluated({}, {}, facts)), request)  # type: ignore[arg-type]


def test_scores_are_between_zero_and_one() -> None:
    request = dataclasses.replace(REQUEST, work=None, evaluate=Evaluate(1, TASK, 0))
    for scores in ({"val": 1.5}, {"val": -0.5}, {"val": float("nan")}, {"train": 0.5}, {"val": 1}):
        with pytest.raises(Refused, match="no accuracy"):
            read(respond(worked=None, evaluated=Evaluated(scores, {}, {})), request)
    with pytest.raises(Refused, match="nobody asked"):
        read(respond(), request)


def test_a_client_may_choose_its_part_of_a_supernet_but_not_more() -> None:
    space = Tiny((1, 8, 8), 10)
    weights = space.new_weights(0)
    task, arch = Task(weights), space.smallest
    part = space.cut(weights, arch)
    wire.check_reply(Reply(part, arch), task, space)
    with pytest.raises(Refused, match="came back"):
        wire.check_reply(Reply(weights, arch), task, space)
    with pytest.raises(Refused, match="the client was given"):
        wire.check_reply(Reply(part, arch), Task(part, space.largest), space)


@pytest.mark.parametrize("kind", [float, bool])
def test_an_arch_is_whole_numbers_even_where_it_equals_the_tasks(kind: type) -> None:
    """Methods index with it: the client's word for 1 would end the server's round."""
    space = Tiny((1, 8, 8), 10)
    arch = tuple(min(1, i) for i in space.largest)
    part = space.cut(space.new_weights(0), arch)
    wire.check_reply(Reply(part, arch), Task(part, arch), space)
    with pytest.raises(Refused, match="whole numbers"):
        wire.check_reply(Reply(part, tuple(map(kind, arch))), Task(part, arch), space)


def test_changes_of_a_large_network_may_travel_beside_it() -> None:
    """SCAFFOLD's control variates and pFedHN's differences are as large as the network."""
    large = {"body.weight": torch.zeros(1 << 19)}
    wire.check_reply(Reply(large, extra={"dc:body.weight": torch.ones(1 << 19)}), Task(large), SPACE)
    with pytest.raises(Refused, match="was not given"):
        wire.check_reply(Reply(large, extra={"dc:body.weight": torch.ones(1 << 20)}), Task(large), SPACE)
