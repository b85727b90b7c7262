"""Over Flower, with TLS and keys, clients and SuperLink as processes of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedtailor import values
from fedtailor.certificates import node_keys, server_folder
from fedtailor.engine.parcel import LAYOUT_LIMIT, Parcel, Refused, unpack
from fedtailor.runs.execute import start
from fedtailor.runs.serve import serve
from test_remote import FEW, NAMES, config_of, require_same

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedtailor.engine.flower import TooLarge, at_most, watch_sizes
from fedtailor.engine.flower.__main__ import LARGEST, Bounded, LocalOnly
from fedtailor.engine.flower.apps import WHOLE, GridPost, client_app, server_app, to_content, to_parcel
from fedtailor.engine.flower.link import SuperLink
from fedtailor.engine.flower.loopback import Loopback

TWO = NAMES[:2]
CONFIGS = {
    "fedrep": {"clients": 2, "local__epochs": 1.0},
    "perfedckt": {"clients": 2},
    "perfedrlnas": {"clients": 2},
    # two steps at least: after one, the shared and the personal weights are still the same numbers
    "spider": {**FEW, "participants": 2, "local__epochs": 0.7, "local__bn": "recalibrate"},
}


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it knows for which task."""
    for number in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, number, 1)


class Recorder(GridPost):
    """A post that remembers what came in."""

    def __init__(self, grid: Any, names: Mapping[int, str]) -> None:
        super().__init__(grid, names)
        self.out: list[Parcel] = []
        self.came: list[Parcel] = []

    def send(self, parcels: Mapping[int, Parcel]) -> Mapping[int, str]:
        self.out += parcels.values()
        return super().send(parcels)

    def receive(self, ids: Collection[str]) -> Sequence[tuple[str, Parcel | Refused | str]]:
        found = super().receive(ids)
        self.came += [content for _, content in found if isinstance(content, Parcel)]
        return found


def test_methods_give_the_same_numbers_over_flower(tmp_path: Path) -> None:
    configs = {method: config_of(method, **changes) for method, changes in CONFIGS.items()}
    federation = Loopback(tmp_path / "fl", TWO)
    keys = server_folder(federation.keys)
    link = SuperLink("127.0.0.1", federation.port, keys, tmp_path / "link", print)
    posts: dict[str, Recorder] = {}
    try:
        federation.join_all()
        link.start()
        names = link.register(node_keys(keys))
        assert sorted(names.values()) == list(TWO)
        for method, config in configs.items():
            with link.run() as grid:
                posts[method] = Recorder(grid, names)
                serve(config, tmp_path / method, posts[method], TWO)
    finally:
        federation.close()
        link.close()
    for method, config in configs.items():
        local = start(config, tmp_path / f"{method}-local", "cpu", 1)
        sites = tmp_path / "sites" / method
        sites.mkdir(parents=True)
        for name in TWO:
            (run,) = (federation.sites / name).glob(f"{method}-*")
            (sites / name).mkdir()
            run.rename(sites / name / run.name)
        require_same(tmp_path / method, local, sites, TWO)
    require_no_secrets(posts["spider"], tmp_path / "sites" / "spider")
    assert "sends" in federation.log(TWO[0])


def require_no_secrets(post: Recorder, sites: Path) -> None:
    """What came in from SPIDER's clients: shared weights, losses and scores; no arch, no weights of theirs, no BN."""
    sent = {value["number"]: value for value in map(unpack, post.out)}
    mine = [
        tensor.numpy().tobytes()
        for path in sites.glob("*/*/memory-*.safetensors")
        for tensor in values.read_value(path)["v"].values()
    ]
    assert mine
    worked = 0
    for parcel in post.came:
        value = unpack(parcel)
        if value["evaluated"]:
            assert value["evaluated"]["facts"] == {}
            assert value["evaluated"].keys() == {"personal", "shared", "facts"}
        if not value["worked"]:
            continue
        worked += 1
        reply, task = value["worked"]["reply"], sent[value["number"]]["work"]["task"]
        assert reply["arch"] == ()
        assert reply["facts"].keys() == {"loss"}
        assert reply["extra"]["names"] == []
        assert set(reply["weights"]["names"]) <= set(task["weights"]["names"])
        assert not any("running" in name for name in reply["weights"]["names"])
        assert not any(raw in parcel.data for raw in mine if len(raw) >= 64 and raw.strip(b"\0"))
    assert worked == 4


class Inside(Grid):
    """A grid in this process: every message goes to the ClientApp at once."""

    def __init__(self, nodes: dict[int, dict[str, Any]], run_config: dict[str, Any]) -> None:
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=run_config)
            for node, config in nodes.items()
        }
        self.replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        found = []
        for message in messages:
            number = message.object_id
            message.metadata.__dict__["_message_id"] = number
            self.replies[number] = client_app(message, self.contexts[message.metadata.dst_node_id])
            found.append(number)
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def test_the_plain_flower_app_gives_the_same_numbers(tmp_path: Path) -> None:
    config = config_of("ditto", clients=2)
    (tmp_path / "config.toml").write_text(config.to_toml())
    options: dict[str, Any] = {"config": str(tmp_path / "config.toml"), "set": "seed=3 rounds=1"}
    options |= {"out": str(tmp_path / "run"), "state": str(tmp_path / "sites"), "deadline": 0.0, "quorum": 1}
    grid = Inside({11: {"partition-id": 1}, 12: {"name": "client-000"}}, options)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=options)
    server_app(grid, context)
    local = start(config_of("ditto", clients=2, seed=3, rounds=1), tmp_path / "local", "cpu", 1)
    require_same(tmp_path / "run", local, tmp_path / "sites", TWO)


def test_a_parcel_survives_flowers_records() -> None:
    """A small one is a single record, a large one an array that Flower cuts into chunks."""
    small, large = Parcel('{"layout": 1}', bytes(range(256)) * 10), Parcel("{}", bytes(WHOLE + 1))
    for parcel, objects in ((small, 2), (large, 5)):
        content = to_content(parcel)
        assert to_parcel(content) == parcel
        assert len(get_all_nested_objects(content)) == objects
    content.array_records["data"]["data"].stype = "numpy.ndarray"
    assert to_parcel(content) == Parcel("", b"")
    assert to_parcel(RecordDict({"parcel": ConfigRecord({"layout": 1})})) == Parcel("", b"")


def test_a_message_that_is_too_large_is_not_fetched() -> None:
    """The real function that fetches a message's parts, with a store of parts that never ends."""
    from flwr.superlink.grid import http_grid

    watch_sizes()
    asked: list[str] = []

    def part(number: str) -> bytes:
        asked.append(number)
        return bytes(1_000_000)

    class Endless(Inside):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return ["m1" for _ in messages]

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            parts = http_grid.pull_objects([str(i) for i in range(1000)], part)
            raise AssertionError(f"opened: {len(parts['999'])} bytes")

    post = GridPost(Endless({1: {}}, {}))
    post.send({1: Parcel("{}", b"")})
    while not (found := post.receive(["m1"])):
        time.sleep(0.01)
    ((number, content),) = found
    assert number == "m1"
    assert isinstance(content, Refused)
    assert "more than the" in str(content)
    assert len(asked) < 100


def test_a_message_that_is_too_large_is_deleted_from_the_servers_disk() -> None:
    """The real function that pulls messages: what it does not confirm stays in the SuperLink's database for ever."""
    watch_sizes()
    reply = Message(to_content(Parcel("{}", os.urandom(20 << 20))), dst_node_id=1, message_type="train")
    number = reply.metadata.__dict__["_message_id"] = reply.object_id
    store = {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
    confirmed: list[str] = []

    class Client:
        def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
            bare = message_to_proto(remove_content_from_message(reply))
            return PullAppMessagesResponse(messages_list=[bare], message_object_trees=[get_object_tree(reply)])

        def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
            content = store[request.object_id]
            return PullObjectResponse(object_found=True, object_available=True, object_content=content)

        def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
            confirmed.append(request.message_object_id)

    grid: Any = HttpGrid(token="token")
    grid._client, grid._run = Client(), SimpleNamespace(run_id=1)
    with pytest.raises(TooLarge, match="more than the 1000000 bytes"), at_most(1_000_000):
        grid.pull_messages([number])
    assert confirmed == [number]
    with at_most(40 << 20):
        (found,) = grid.pull_messages([number])
    assert to_parcel(found.content) == to_parcel(reply.content)


def test_a_request_of_a_node_is_read_to_a_limit() -> None:
    def call(path: str, sizes: Sequence[int]) -> tuple[int, int, int]:
        """Status, bytes that reached Flower, and parts that were not even read."""
        parts = [{"type": "http.request", "body": bytes(size), "more_body": True} for size in sizes]
        parts.append({"type": "http.request", "body": b"end", "more_body": False})
        got, status = bytearray(), []

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                part = await receive()
                got.extend(part["body"])
                more = part["more_body"]
            await send({"type": "http.response.start", "status": 200})

        async def send(message: dict[str, Any]) -> None:
            status.append(message.get("status", 0))

        asyncio.run(Bounded(app)({"type": "http", "path": path}, receive, send))
        return status[0], len(got), len(parts)

    mega = 1 << 20
    assert call("/v1/fleet/push-object", [mega] * 17) == (200, 17 * mega + 3, 0)
    assert call("/v1/fleet/push-object", [mega] * 100) == (413, 0, 68)
    assert call("/v1/runtime/push-object", [mega] * 100) == (200, 100 * mega + 3, 0)  # of this machine
    honest = (LAYOUT_LIMIT, WHOLE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)  # what a single object may have
    assert max(honest) + mega < LARGEST


def test_other_machines_reach_only_what_nodes_need() -> None:
    def call(client: str, path: str) -> int:
        status: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})

        async def send(message: dict[str, Any]) -> None:
            status.append(message.get("status", 0))

        scope = {"type": "http", "client": (client, 1), "path": path}
        asyncio.run(LocalOnly(app)(scope, None, send))
        return status[0]

    assert call("10.0.0.7", "/v1/fleet/pull-messages") == 200
    assert call("127.0.0.1", "/v1/control/start-run") == 200
    assert call("10.0.0.7", "/v1/control/register-node") == 404
    assert call("10.0.0.7", "/v1/runtime/acquire-task") == 404
    assert call("10.0.0.7", "/docs") == 404
