"""How long a server waits for clients that answer nothing of use, hang, or are lost at the wrong moment."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtailor.engine import remote
from fedtailor.engine.crowd import Waiting
from fedtailor.engine.parcel import Parcel, pack, unpack
from fedtailor.errors import UserError
from fedtailor.runs.facts import read_facts
from fedtailor.runs.serve import serve
from fedtailor.runs.welcome import welcome
from grid import MemoryPost
from test_join import write_digits
from test_remote import NAMES, Listener, config_of, hurry, network_of  # noqa: F401, used by every test
from tools import rows


class Impatient(MemoryPost):
    """Ends a test that would wait for ever."""

    began = 0.0

    def receive(self, ids: Collection[str]) -> Sequence[tuple[str, Parcel | str]]:
        self.began = self.began or time.monotonic()
        assert time.monotonic() < self.began + 60, "the server waits for ever"
        return super().receive(ids)


def spoilt(response: Parcel) -> Parcel:
    value = unpack(response)
    value["worked"]["reply"]["weights"]["tensors"][0].fill_(float("nan"))
    return pack(value)


def lossy(folder: Path) -> list[list[str]]:
    """Rounds and clients whose replies were used."""
    return [row.split(",")[:2] for row in rows(folder) if ",train,loss," in row]


# clients that answer nothing of use ---------------------------------------------------------------------------------


def test_a_client_that_is_no_use_does_not_end_the_run(tmp_path: Path) -> None:
    tries = list[int]()

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        if name != "client-003" or not unpack(response)["worked"]:
            return response
        tries.append(unpack(request)["work"]["round"])
        return spoilt(response)

    listener = Listener()
    config = config_of("fedavg", participants=1, rounds=8)
    folder = serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, twist), NAMES, watch=listener)
    assert read_facts(folder)["status"] == "done"
    rounds = sorted(set(tries))
    assert len(rounds) > 1  # it is asked again when its turn is there, but only once
    assert [tries.count(number) for number in rounds] == [remote.TRIES] + [1] * (len(rounds) - 1)
    assert f"round {rounds[0]} goes by without client-003: no answer could be used" in listener.said
    assert [row for row in rows(folder) if ",missing_" in row] == [f"{n},3,,missing_refused,1" for n in rounds]
    assert [int(number) for number, _ in lossy(folder)] == [n for n in range(1, 9) if n not in rounds]


def test_a_client_that_is_of_use_again_counts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TRIES", 2)

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        work = unpack(request)["work"]
        return spoilt(response) if name == "client-001" and work and work["round"] < 3 else response

    config = config_of("fedavg", participants=4, rounds=3)
    post = MemoryPost(tmp_path / "s", NAMES, twist)
    folder = serve(config, tmp_path / "run", post, NAMES, waiting=Waiting(quorum=4))
    assert [client for number, client in lossy(folder) if number == "3"] == ["0", "1", "2", "3"]
    assert [row for row in rows(folder) if ",missing_" in row] == ["1,1,,missing_refused,1", "2,1,,missing_refused,1"]


def test_a_run_without_a_client_of_any_use_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TRIES", 2)

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        return spoilt(response) if unpack(response)["worked"] else response

    post = MemoryPost(tmp_path / "s", NAMES, twist)
    post.away.add("client-003")  # it has never been here
    with pytest.raises(UserError, match="round 1: clients answered 2 times, but nothing that could be used"):
        serve(config_of("fedavg", participants=4), tmp_path / "run", post, NAMES, start_with=3)


def test_rounds_wait_for_those_that_are_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all others are away, a client that answers nothing of use must not see the rounds go by."""
    monkeypatch.setattr(remote, "TRIES", 2)
    spoils = set[int]()

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel:
        if name != "client-003" or not unpack(response)["worked"]:
            return response
        spoils.add(unpack(request)["work"]["round"])
        return spoilt(response)

    class Night(Listener):
        def say(self, text: str) -> None:
            super().say(text)
            if self.said.count("0 of 1 clients are here") == 1:
                post.away.clear()

    post, listener = MemoryPost(tmp_path / "s", NAMES, twist), Night()
    listener.at, listener.do = 1, lambda: post.away.update(NAMES[:3])
    folder = serve(config_of("fedavg", participants=4, rounds=6), tmp_path / "run", post, NAMES, watch=listener)
    assert {int(number) for number, _ in lossy(folder)} == {1, 3, 4, 5, 6}  # round 2 showed that it is no use


def test_a_newcomer_that_is_no_use_does_not_keep_a_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TRIES", 2)
    clients = (*NAMES, "client-004")

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel | str:
        return "gone" if unpack(response)["worked"] and name == "client-004" else response

    config = config_of("perfedrlnas", partition__new_clients=1, partition__samples=40, method__onboard_rounds=2)
    folder = serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", clients, twist), clients)
    assert read_facts(folder)["status"] == "done"
    assert not [row for row in rows(folder) if ",new_accuracy," in row]  # what never joined has no network of the run


# clients that hang --------------------------------------------------------------------------------------------------


def test_the_deadline_counts_the_replies_that_are_there(tmp_path: Path) -> None:
    """Of three replies that the round needs two are there, one comes at the second try, and one never."""
    lost = set[str]()

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel | str | None:
        if not unpack(response)["worked"] or name not in NAMES[1:3]:
            return response
        if name not in lost:
            lost.add(name)
            return "gone"
        return response if name == "client-001" else None

    post = Impatient(tmp_path / "s", NAMES, twist)
    config = config_of("fedavg", participants=4, rounds=1)
    folder = serve(config, tmp_path / "run", post, NAMES, waiting=Waiting(0.05, 3))
    assert lossy(folder) == [["1", "0"], ["1", "1"], ["1", "3"]]
    assert [row for row in rows(folder) if ",missing_" in row] == ["1,2,,missing_late,1"]


def test_a_newcomer_that_hangs_does_not_keep_the_next_one_waiting(tmp_path: Path) -> None:
    config = config_of("pfedhn", clients=2, rounds=1, method__onboard_rounds=2)
    served = serve(config, tmp_path / "served", MemoryPost(tmp_path / "sites", NAMES[:2]), NAMES[:2])
    photos = write_digits(tmp_path / "photos", np.arange(1500, 1560), scale=2)

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel | None:
        return None if name == "berlin" and unpack(response)["worked"] else response

    listener = Listener()
    post = Impatient(tmp_path / "sites", ("berlin", "paris"), twist, data=f"folder:{photos}")
    assert welcome(served, post, 2, watch=listener, deadline=0.2) == ["berlin", "paris"]
    assert "berlin has not finished" in listener.said
    assert "paris has its network" in listener.said


# the last evaluation ------------------------------------------------------------------------------------------------


def last(request: Parcel) -> bool:
    order: dict[str, Any] | None = unpack(request)["evaluate"]
    return order is not None and order["last"]


def test_a_client_that_dies_while_it_makes_its_network_makes_it_when_it_is_back(tmp_path: Path) -> None:
    class Dying(MemoryPost):
        died = False

        def send(self, parcels: Any) -> Any:
            dies = [node for node in parcels if self.sites[node].name == "client-002" and last(parcels[node])]
            ids = super().send({node: p for node, p in parcels.items() if self.died or node not in dies})
            if dies and not self.died:
                self.died, ids = True, {**ids, dies[0]: "never"}
                self._replies["never"] = "the node died"
            return ids

    sites = tmp_path / "sites"
    config = config_of("ditto", participants=4)
    post = Dying(sites, NAMES)
    folder = serve(config, tmp_path / "run", post, NAMES)
    assert post.died
    assert len([row for row in rows(folder) if ",test,personal_accuracy," in row]) == 4
    assert all(network_of(sites, name) for name in NAMES)


def test_who_has_no_network_at_the_end_is_named(tmp_path: Path) -> None:
    """client-001 has lost its memory, and makes its network without; client-002 never answers."""
    asked = list[int]()

    def twist(name: str, request: Parcel, response: Parcel) -> Parcel | str:
        if name == "client-001" and last(request):
            asked.append(unpack(request)["evaluate"]["memory"])
            if len(asked) == 1:
                value = unpack(response)
                return pack({**value, "evaluated": None, "problem": "memory"})
        return "gone" if name == "client-002" and last(request) else response

    listener = Listener()
    config = config_of("ditto", participants=4)
    folder = serve(config, tmp_path / "run", MemoryPost(tmp_path / "s", NAMES, twist), NAMES, watch=listener)
    assert asked == [2, 0]
    assert read_facts(folder)["status"] == "done"
    assert "nobody knows whether they have their networks: client-002\n" in listener.said
    scored = [row.split(",")[1] for row in rows(folder) if ",test,personal_accuracy," in row]
    assert scored == ["0", "1", "3"]
