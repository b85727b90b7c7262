"""A federation over messages when clients are hostile, late, lost or full, and when the server dies."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import values
from fedtailor.engine.crowd import Waiting
from fedtailor.engine.parcel import Parcel, pack, unpack
from fedtailor.errors import UserError
from fedtailor.registry import names
from fedtailor.runs.execute import start
from fedtailor.runs.serve import serve
from fedtailor.spaces.pasting import paste
from grid import MemoryPost
from test_remote import NAMES, Listener, config_of, crash, hurry, require_same, state_of  # noqa: F401, used by every test
from tools import rows


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[str, Parcel, Parcel], Parcel]:
    """A twist that alters client-001's reply."""

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if name != "client-001" or not value["worked"]:
            return response
        change(value)
        return pack(value)

    return twist


def _nan(value: dict[str, Any]) -> None:
    value["worked"]["reply"]["weights"]["tensors"][0].fill_(float("nan"))


def _rename(value: dict[str, Any]) -> None:
    value["worked"]["reply"]["weights"]["names"][0] = "nobody.weight"


def _other_method(value: dict[str, Any]) -> None:
    value["worked"]["reply"]["facts"] = {"accuracy": 7}


def _replay(value: dict[str, Any]) -> None:
    value["number"] = "0" * 16


def _impersonate(value: dict[str, Any]) -> None:
    value["client"] = "client-000"


def _huge(value: dict[str, Any]) -> None:
    value["worked"]["reply"]["weights"]["tensors"].append(torch.zeros(4_000_000))


def _undeclared(value: dict[str, Any]) -> None:
    value["worked"]["reply"]["facts"] = {"loss": 0.5, "patients": 12}


def last_of(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("server-*.safetensors"))[-1]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The server's state after a run to which client-001 has given nothing."""

    def lost(name: str, request: Parcel, response: Parcel) -> Parcel | str:
        return "gone" if name == "client-001" and unpack(response)["worked"] else response

    folder = tmp_path_factory.mktemp("without")
    post = MemoryPost(folder / "sites", NAMES, lost)
    return state_of(serve(config_of("fedavg", participants=4), folder / "run", post, NAMES))


@pytest.mark.parametrize("attack", [_nan, _rename, _other_method, _replay, _impersonate, _huge, _undeclared])
def test_a_hostile_reply_is_named_and_nothing_of_it_is_merged(attack: Any, without: bytes, tmp_path: Path) -> None:
    config = config_of("fedavg", participants=4)
    listener = Listener()
    attacked = serve(config, tmp_path / "b", MemoryPost(tmp_path / "sb", NAMES, changed(attack)), NAMES, watch=listener)
    assert "a message of client-001 is refused" in listener.said
    assert state_of(attacked) == without
    assert [r for r in rows(attacked) if ",missing_refused," in r] == [
        "1,1,,missing_refused,1",
        "2,1,,missing_refused,1",
    ]


def test_a_reply_that_a_method_cannot_merge_is_left_out(tmp_path: Path) -> None:
    def empty(value: dict[str, Any]) -> None:
        value["worked"]["reply"]["facts"] = {}  # PerFedRLNAS reads an accuracy from it

    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, changed(empty))
    serve(config_of("perfedrlnas", participants=4), tmp_path / "run", post, NAMES, watch=listener)
    assert "the reply of client-001 is refused" in listener.said


def test_a_reply_that_would_make_the_server_infinite_is_left_out(tmp_path: Path) -> None:
    """FedNova divides by what a client says of its steps."""

    def short(value: dict[str, Any]) -> None:
        value["worked"]["reply"]["facts"]["reach"] = 1e-38
        value["worked"]["reply"]["weights"]["tensors"][0].fill_(1e3)

    listener = Listener()
    config = config_of("fednova", participants=4, local__momentum=0.0)
    post = MemoryPost(tmp_path / "sites", NAMES, changed(short))
    folder = serve(config, tmp_path / "run", post, NAMES, watch=listener)
    assert "the reply of client-001 is refused: ValueError: it makes weights/" in listener.said
    assert all(t.isfinite().all() for _, t in values.tensors_in(values.read_value(last_of(folder))))


def test_scores_of_another_number_are_left_out(tmp_path: Path) -> None:
    def more(value: dict[str, Any]) -> None:
        extra = value["worked"]["reply"]["extra"]
        extra["tensors"] = [torch.cat([t, t]) for t in extra["tensors"]]

    listener = Listener()
    post = MemoryPost(tmp_path / "sites", NAMES, changed(more))
    changes: dict[str, Any] = {"participants": 4, "clients": 4, "rounds": 3}
    serve(config_of("global-perturbation", **changes), tmp_path / "run", post, NAMES, watch=listener)
    assert "the reply of client-001 is refused" in listener.said


def test_a_round_ends_at_the_deadline_and_a_late_reply_is_not_used(tmp_path: Path) -> None:
    held: list[Parcel] = []

    def slow(name: str, request: Parcel, response: Parcel) -> Parcel | None:
        if name == "client-002" and unpack(response)["worked"] and not held:
            held.append(response)
            return None
        return response

    listener, post = Listener(), MemoryPost(tmp_path / "sites", NAMES, slow)

    def release() -> None:
        number = next(f"m{i}" for i, (_, _, answer) in enumerate(post.sent) if answer is held[0])
        post._replies[number] = held[0]

    listener.at, listener.do = 1, release
    config = config_of("ditto", participants=4, rounds=3)
    folder = serve(config, tmp_path / "run", post, NAMES, waiting=Waiting(0.05, 2), watch=listener)
    assert "late: client-002" in listener.said
    assert "client-002 answered round 1 too late" in listener.said
    assert "the reply of client-002 to round 1 is not used" in listener.said
    assert any(states["client-002"] == "late" for states in listener.states)
    losses = [r.split(",")[:2] for r in rows(folder) if ",train,loss," in r]
    assert ["1", "2"] not in losses
    assert ["2", "2"] in losses


def test_a_late_reply_counts_less_where_the_method_allows_it(tmp_path: Path) -> None:
    """client-002's reply to round 1 comes in the midst of round 2, in which it is not asked."""
    held: list[tuple[str, Parcel]] = []

    def slow(name: str, request: Parcel, response: Parcel) -> Parcel | None:
        worked = unpack(response)["worked"]
        if name == "client-002" and worked and not held:
            held.append((f"m{len(post.sent) - 1}", response))
            return None
        if name == "client-003" and worked and unpack(request)["work"]["round"] == 2:
            post._replies[held[0][0]] = held[0][1]
        return response

    post = MemoryPost(tmp_path / "sites", NAMES, slow)
    config = config_of("perfedrlnas", participants=4, rounds=2, evaluate_every=2)
    folder = serve(config, tmp_path / "run", post, NAMES, waiting=Waiting(0.05, 2))
    assert [r for r in rows(folder) if ",stale," in r] == ["2,2,,stale,1"]
    before, after = (values.read_value(folder / "checkpoints" / f"server-00000{i}.safetensors") for i in (1, 2))
    parts = []
    for name in NAMES:  # everybody's last reply to a task; client-002 has given one, and counts by b / (b + 1), b = 10
        told = [(unpack(q)["seat"], unpack(a)["worked"]) for n, q, a in post.sent if n == name]
        seat, worked = [pair for pair in told if pair[1]][-1]
        samples = round(seat["samples"] * 10 / 11) if name == "client-002" else seat["samples"]
        weights = worked["reply"]["weights"]
        named = dict(zip(weights["names"], weights["tensors"], strict=True))
        parts.append((named, worked["reply"]["arch"], float(samples)))
    expected = paste(config.make_space((1, 8, 8), 10), before["weights"], parts)
    for name, tensor in after["weights"].items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)


def test_a_lost_client_is_asked_again_when_it_is_back(tmp_path: Path) -> None:
    listener, post = Listener(), MemoryPost(tmp_path / "sites", NAMES)
    post_names = {1: lambda: post.away.add("client-003"), 3: lambda: post.away.clear()}

    class Leaving(Listener):
        def round(self, number: int, facts: dict[str, float]) -> None:
            post_names.get(number, lambda: None)()

    listener = Leaving()
    folder = serve(config_of("ditto", participants=4, rounds=4), tmp_path / "run", post, NAMES, watch=listener)
    assert "client-003 is lost" in listener.said
    assert "client-003 is back" in listener.said
    losses = [r.split(",")[0] for r in rows(folder) if r.split(",")[1] == "3" and ",train,loss," in r]
    assert losses == ["1", "4"]


@pytest.mark.parametrize("method", ["ditto", "fedrep"])
def test_a_server_that_crashed_goes_on_to_the_same_result(method: str, tmp_path: Path) -> None:
    """Clients have worked on in the meantime: their memories go back with the server."""
    config = config_of(method, participants=3, rounds=4, checkpoint_every=2)
    local = start(config, tmp_path / "local", "cpu", 1)
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", MemoryPost(tmp_path / "sites", NAMES), NAMES, watch=Listener(3, crash))
    assert list((tmp_path / "sites").glob("*/*/memory-000003.safetensors"))
    served = serve(config, tmp_path / "run", MemoryPost(tmp_path / "sites", NAMES), NAMES)
    require_same(served, local, tmp_path / "sites")


def test_a_damaged_checkpoint_of_a_server_is_not_built_upon(tmp_path: Path) -> None:
    """Other clients are there when its rounds are run again, so that not every memory is written anew."""
    config = config_of("ditto", participants=4, rounds=8, checkpoint_every=2, evaluate_every=8)
    folder, sites = tmp_path / "run" / "checkpoints", tmp_path / "sites"
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", MemoryPost(sites, NAMES), NAMES, watch=Listener(5, crash))
    (folder / "memory-000001-000004.safetensors").write_bytes(b"rotten")
    post, listener = MemoryPost(sites, NAMES), Listener(7, crash)
    post.away.add("client-001")
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    assert "checkpoint 000004 is damaged" in listener.said
    assert sorted(path.name for path in folder.glob("*.json")) == ["000004.json", "000006.json"]
    for path in folder.glob("*.json"):
        for entry in json.loads(path.read_bytes())["memories"].values():
            assert hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]


def test_a_client_that_lost_its_disk_begins_anew(tmp_path: Path) -> None:
    def burn() -> None:
        for path in (tmp_path / "sites" / "client-001").glob("*/memory-*"):
            path.unlink()

    listener = Listener(1, burn)
    config = config_of("ditto", participants=4, rounds=3)
    serve(config, tmp_path / "run", MemoryPost(tmp_path / "sites", NAMES), NAMES, watch=listener)
    assert "client-001 has a problem: its memory is lost" in listener.said
    assert "client-001 begins without a memory" in listener.said


def test_lost_replies_cost_a_client_no_memory(tmp_path: Path) -> None:
    """Every round leaves a version at the client, of which the server names none but the last that came through."""

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel | str:
        work = unpack(request)["work"]
        return "connection lost" if name == "client-001" and work and 2 <= work["round"] <= 5 else response

    post, listener = MemoryPost(tmp_path / "sites", NAMES, twist), Listener()
    config = config_of("ditto", participants=4, rounds=7, checkpoint_every=1, evaluate_every=7)
    serve(config, tmp_path / "run", post, NAMES, watch=listener)
    assert "memory is lost" not in listener.said
    asked = [unpack(request)["work"] for name, request, _ in post.sent if name == "client-001"]
    assert [work["memory"] for work in asked if work] == [0, 1, 1, 1, 1, 1, 6]
    kept = sorted(path.name for path in (tmp_path / "sites" / "client-001").glob("*/memory-*"))
    assert kept == ["memory-000001.safetensors", "memory-000006.safetensors", "memory-000007.safetensors"]


def test_a_full_disk_at_a_client_costs_its_reply_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    full: list[bool] = []

    def fsync(descriptor: int) -> None:
        if full and "client-002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(values.os, "fsync", fsync)
    turns = {1: lambda: full.append(True), 2: full.clear}

    class Filling(Listener):
        def round(self, number: int, facts: dict[str, float]) -> None:
            turns.get(number, lambda: None)()

    listener = Filling()
    config = config_of("ditto", participants=4, rounds=3)
    folder = serve(config, tmp_path / "run", MemoryPost(tmp_path / "sites", NAMES), NAMES, watch=listener)
    assert "client-002 has a problem: its disk cannot be written" in listener.said
    assert [r for r in rows(folder) if ",missing_" in r] == ["2,2,,missing_disk,1"]
    assert not list((tmp_path / "sites").glob("**/.*.partial"))


def test_a_client_may_come_later(tmp_path: Path) -> None:
    post = MemoryPost(tmp_path / "sites", NAMES)
    post.away.add("client-003")
    listener = Listener(2, post.away.clear)
    config = config_of("fedavg", participants=4, rounds=4)
    folder = serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    losses = [r.split(",")[0] for r in rows(folder) if r.split(",")[1] == "3" and ",train,loss," in r]
    assert losses == ["3", "4"]
    assert len([r for r in rows(folder) if ",test,personal_accuracy," in r]) == 4


def test_a_late_client_that_can_afford_no_network_does_not_end_the_run(tmp_path: Path) -> None:
    def many(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"] and name == "client-003":
            value["about"]["samples"] = 10**8
        return pack(value)

    post = MemoryPost(tmp_path / "sites", NAMES, many)
    post.away.add("client-003")
    listener = Listener(1, post.away.clear)
    config = config_of("fedavg", participants=4, rounds=3, fleet__budget__seconds=60)
    folder = serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    assert "rounds go on without client-003: client 'client-003' (phone-high): no arch" in listener.said
    losses = [r.split(",")[:2] for r in rows(folder) if ",train,loss," in r]
    assert losses == [[str(r), str(c)] for r in (1, 2, 3) for c in range(3)]


def test_a_run_goes_on_without_a_client_that_was_shut_out(tmp_path: Path) -> None:
    config = config_of("fedavg", participants=4, rounds=3)
    post = MemoryPost(tmp_path / "sites", NAMES)
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", post, NAMES, watch=Listener(1, crash))
    post.away.add("client-003")
    folder = serve(config, tmp_path / "run", post, NAMES[:3])
    assert [r.split(",")[1] for r in rows(folder) if r.startswith("3,") and ",train,loss," in r] == ["0", "1", "2"]


def test_rounds_of_clients_that_were_shut_out_go_by(tmp_path: Path) -> None:
    config = config_of("fedavg", participants=1, rounds=8)
    post = MemoryPost(tmp_path / "sites", NAMES)
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", post, NAMES, watch=Listener(1, crash))
    post.away |= {"client-002", "client-003"}
    with pytest.raises(UserError, match="none of its clients has a key"):
        serve(config, tmp_path / "run", post, ["client-009"])
    folder = serve(config, tmp_path / "run", post, NAMES[:2])
    asked = [r.split(",")[1] for r in rows(start(config, tmp_path / "local", "cpu", 1)) if ",train,loss," in r][1:]
    assert {"2", "3"} & set(asked)
    came = [r.split(",")[1] for r in rows(folder) if ",train,loss," in r and not r.startswith("1,")]
    assert came == [client for client in asked if client in "01"]


def test_a_run_that_goes_on_knows_its_images(tmp_path: Path) -> None:
    """The first client to come back with other images must not shut the others out."""

    def other(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"]:
            assert unpack(request)["classes"]  # so that clients see whether theirs are among them
            value["about"]["shape"] = [3, 9, 9] if name == "client-000" else value["about"]["shape"]
        return pack(value)

    config = config_of("fedavg", participants=4, rounds=2)
    with pytest.raises(RuntimeError, match="power cut"):
        serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES), NAMES, watch=Listener(1, crash))
    listener = Listener()
    post = MemoryPost(tmp_path / "s", NAMES, other)
    folder = serve(config, tmp_path / "run", post, NAMES, start_with=3, watch=listener)
    assert "'client-000' is not taken in: its images are [3, 9, 9]" in listener.said
    assert "those of the run [1, 8, 8]" in listener.said
    assert [r.split(",")[1] for r in rows(folder) if r.startswith("2,") and ",train,loss," in r] == ["1", "2", "3"]


def test_who_is_not_taken_in(tmp_path: Path) -> None:
    def claims(value: dict[str, Any], name: str) -> None:
        about = value["about"]
        if name == "client-001":
            about["samples"] = 10**12
        elif name == "client-002":
            about["fedtailor"] = "0.0.0"
        elif name == "client-003":
            value["client"] = "client-000"

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"]:
            claims(value, name)
        return pack(value)

    listener = Listener()
    config = config_of("fedavg", participants=4, rounds=1)
    serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, twist), NAMES, start_with=1, watch=listener)
    assert "'client-001' is not taken in: 1000000000000 is no believable number of training images" in listener.said
    assert "'client-002' is not taken in: it runs fedtailor 0.0.0" in listener.said
    assert "'client-000' is not taken in: its key is registered for 'client-003'" in listener.said


@pytest.mark.parametrize("classes", [[1, "a"], ["\x1b[2J"], ["\ud800"], [""], ["a", "a"], "ab", []])
def test_classes_without_proper_names(classes: object, tmp_path: Path) -> None:
    """One client must not stop the others, nor write on the server's terminal."""

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"] and name == "client-001":
            value["about"]["classes"] = classes
        return pack(value)

    listener = Listener()
    config = config_of("fedavg", participants=4, rounds=1)
    serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, twist), NAMES, start_with=3, watch=listener)
    assert "'client-001' is not taken in: " in listener.said
    assert "client-002 is here" in listener.said


def test_what_a_client_says_does_not_write_on_the_servers_terminal(tmp_path: Path) -> None:
    """Half a letter of two would even end the server: no terminal can show it."""
    hostile = "\x1b[2J\ud800\nclient-000 is lost"

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        value = unpack(response)
        if value["about"] and name == "client-001":
            value["about"]["fedtailor"] = hostile + "x" * 60_000
        elif value["worked"] and name == "client-002":
            value["worked"]["reply"]["weights"]["names"][0] = hostile
        return pack(value)

    listener = Listener()
    config = config_of("fedavg", participants=4, rounds=1)
    serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, twist), NAMES, start_with=3, watch=listener)
    lines = listener.said.splitlines()
    assert all(line.isprintable() and len(line) < 5000 for line in lines)
    assert "client-000 is lost" not in lines
    assert "'client-001' is not taken in: it runs fedtailor ?[2J??client" in listener.said
    assert "a message of client-002 is refused: weights: the client was not given '?[2J??client" in listener.said


def test_a_server_that_waits_says_for_whom(tmp_path: Path) -> None:
    class Slow(MemoryPost):
        def nodes(self) -> dict[int, str]:  # type: ignore[override]
            if "not yet" in listener.said:
                self.away.clear()
            return dict(super().nodes())

    listener = Listener()
    post = Slow(tmp_path / "sites", NAMES)
    post.away |= {"client-001", "client-003"}
    serve(config_of("fedavg", rounds=1), tmp_path / "run", post, NAMES, watch=listener)
    assert "2 of 4 clients are here; not yet: client-001, client-003\n" in listener.said


def test_without_keys_a_second_node_of_a_name_is_refused(tmp_path: Path) -> None:
    class Open(MemoryPost):
        def nodes(self) -> dict[int, str]:  # type: ignore[override]
            return dict.fromkeys(super().nodes(), "")

    listener = Listener()
    post = Open(tmp_path / "sites", (*NAMES[:2], "client-001"))
    serve(config_of("fedavg", clients=2, rounds=1), tmp_path / "run", post, watch=listener)
    assert "'client-001' is not taken in: a client of this name is here already" in listener.said


def test_keys_and_clients_must_agree(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keys of 4 nodes, but clients = 3"):
        serve(config_of("fedavg", clients=3), tmp_path / "run", MemoryPost(tmp_path / "s", NAMES), NAMES)
    with pytest.raises(UserError, match="--start-with 5: there are only 4"):
        serve(config_of("fedavg"), tmp_path / "run", MemoryPost(tmp_path / "s", NAMES), NAMES, start_with=5)


def test_the_guide_says_of_every_method_what_the_server_sees() -> None:
    page = (Path(__file__).parent.parent / "docs" / "deployment.md").read_text()
    table = page.partition("## What the server sees")[2].partition("\n## ")[0]
    assert [m for m in names("method") if f"`{m}`" not in table] == []
