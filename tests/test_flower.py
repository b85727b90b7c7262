"""Over Flower, with TLS and keys, clients and SuperLink as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor
from fedtailor import certificates, values
from fedtailor.certificates import make_certificates, node_folder, node_keys, server_folder
from fedtailor.cli import serving
from fedtailor.engine.parcel import LAYOUT_LIMIT, Parcel, Refused, unpack
from fedtailor.engine.site import Site
from fedtailor.errors import UserError
from fedtailor.export.predict import open_model
from fedtailor.runs.execute import start
from fedtailor.runs.serve import serve
from test_join import write_digits
from test_remote import FEW, NAMES, config_of, require_same, state_of

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedtailor.engine.flower import TooLarge, at_most, link, watch_sizes
from fedtailor.engine.flower.__main__ import LARGEST, Bounded, LocalOnly
from fedtailor.engine.flower.apps import WHOLE, GridPost, client_app, server_app, to_content, to_parcel
from fedtailor.engine.flower.link import APP, SuperLink, environment, free_port
from fedtailor.engine.flower.loopback import Loopback
from fedtailor.engine.flower.node import unanswered

TWO = NAMES[:2]
CONFIGS = {
    "fedrep": {"clients": 2, "local__epochs": 1.0},
    "perfedckt": {"clients": 2},
    "perfedrlnas": {"clients": 2},
    # two steps at least: after one, the shared and the personal weights are still the same numbers
    "spider": {**FEW, "participants": 2, "local__epochs": 0.7, "local__bn": "recalibrate"},
}


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
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
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
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
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


def test_certificates(tmp_path: Path) -> None:
    from cryptography import x509

    assert make_certificates(tmp_path, ["fl.example.org", "10.1.2.3"], ["ash", "birch"]) == [
        *("authority", "server", "ash", "birch")
    ]
    for key in (tmp_path / "authority" / "ca.key", tmp_path / "server" / "server.key", tmp_path / "ash" / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    ca = x509.load_pem_x509_certificate((tmp_path / "ash" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    known = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert known.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert "10.1.2.3" in map(str, known.get_values_for_type(x509.IPAddress))
    assert 800 < (server.not_valid_after_utc - datetime.now(UTC)).days < 830
    before = (tmp_path / "ash" / "node.key").read_bytes()
    assert make_certificates(tmp_path, [], ["ash", "cedar"]) == ["cedar"]
    assert (tmp_path / "ash" / "node.key").read_bytes() == before
    assert list(node_keys(tmp_path / "server")) == ["ash", "birch", "cedar"]
    assert node_folder(tmp_path, "ash") == node_folder(tmp_path / "ash", "ash")
    with pytest.raises(UserError, match="no name for a node"):
        make_certificates(tmp_path, [], ["../evil"])
    with pytest.raises(UserError, match=r"no server\.crt"):
        server_folder(tmp_path / "ash")


def test_the_authority_may_lie_in_a_drawer(tmp_path: Path) -> None:
    """A node is added without it; a new certificate is signed by the authority that clients trust, or by none."""
    keys, drawer = tmp_path / "keys", tmp_path / "drawer"
    make_certificates(keys, ["127.0.0.1"], ["ash"])
    (keys / "authority").rename(drawer)
    assert make_certificates(keys, [], ["birch"]) == ["birch"]
    assert (keys / "birch" / "ca.crt").read_bytes() == (keys / "ash" / "ca.crt").read_bytes()
    before = (keys / "server" / "server.crt").read_bytes()
    with pytest.raises(UserError, match="Put the folder back"):
        make_certificates(keys, ["fl.example.org"], [])
    assert (keys / "server" / "server.crt").read_bytes() == before
    drawer.rename(keys / "authority")
    assert make_certificates(keys, ["fl.example.org"], []) == ["server"]
    assert (keys / "server" / "ca.crt").read_bytes() == (keys / "ash" / "ca.crt").read_bytes()


def test_a_key_that_was_handed_out_stays_the_one_that_is_let_in(tmp_path: Path) -> None:
    """Whoever types the whole command again, after the folders have gone to their owners, shuts nobody out."""
    make_certificates(tmp_path, ["127.0.0.1"], ["ash", "birch"])
    shutil.rmtree(tmp_path / "ash")
    public = tmp_path / "server" / "nodes" / "ash.pub"
    before = public.read_bytes()
    assert make_certificates(tmp_path, ["127.0.0.1"], ["ash", "birch", "cedar"]) == ["server", "cedar"]
    assert public.read_bytes() == before
    public.unlink()
    assert make_certificates(tmp_path, [], ["ash"]) == ["ash"]


def test_certificates_are_such_as_every_python_trusts(tmp_path: Path) -> None:
    """From Python 3.13 on, a default context is a strict one."""
    make_certificates(tmp_path, ["127.0.0.1"], [])
    server = tmp_path / "server"
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=server / "ca.crt")
    ours.load_cert_chain(server / "server.crt", server / "server.key")
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [theirs.wrap_bio(down, up, server_hostname="127.0.0.1"), ours.wrap_bio(up, down, server_side=True)]
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ends[0].version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["", "fl.example.org:8000", "a b", "bücher.example", "-x", "https://fl.example.org"])
def test_hosts_that_are_none(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no host"):
        make_certificates(tmp_path, ["127.0.0.1", host], [])
    with pytest.raises(UserError, match="valid for 1 to"):
        make_certificates(tmp_path, ["127.0.0.1"], [], days=0)
    assert not any(tmp_path.iterdir())


def test_keys_that_no_other_side_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certificates(tmp_path / "a", ["127.0.0.1"], ["ash"])
    make_certificates(tmp_path / "b", ["127.0.0.1"], [])
    good, other = tmp_path / "a" / "server", tmp_path / "b" / "server"
    assert server_folder(tmp_path / "a") == good
    for file, why in (("ca.crt", "would trust"), ("server.key", "does not belong"), ("server.crt", "would trust")):
        mixed = tmp_path / "mixed"
        shutil.copytree(good, mixed, dirs_exist_ok=True)
        shutil.copy(other / file, mixed)
        with pytest.raises(UserError, match=why):
            server_folder(mixed)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=900)

    monkeypatch.setattr(certificates, "datetime", Later)
    with pytest.raises(UserError, match=r"server\.crt was valid until 20.*Renew it"):
        server_folder(good)
    (tmp_path / "a" / "ash" / "node.key").write_text("no key")
    with pytest.raises(UserError, match="no private key"):
        node_folder(tmp_path / "a", "ash")


def test_who_is_shut_out_stays_out_and_may_be_let_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts as often as it likes, and no server takes the place of another at its port."""
    monkeypatch.setattr(link, "LEAVE", 0.0)
    keys, port, ash = tmp_path / "keys", free_port(), tmp_path / "keys" / "server" / "nodes" / "ash.pub"
    make_certificates(keys, ["127.0.0.1"], ["ash", "birch"])
    drawer = ash.rename(tmp_path / "ash.pub")

    def names() -> set[str]:
        server = SuperLink("127.0.0.1", port, keys / "server", tmp_path / "link", print)
        try:
            server.start()
            with pytest.raises(UserError, match="cannot listen on 127"):
                SuperLink("127.0.0.1", port, keys / "server", tmp_path / "other", print).start()
            found = server.register(node_keys(keys / "server"))
            with server._control() as control:
                inside = {n.node_id for n in control.ListNodes(ListNodesRequest()).nodes_info}
            assert inside == found.keys()
            return set(found.values())
        finally:
            server.close()

    assert names() == {"birch"}
    drawer.rename(ash)
    assert names() == {"ash", "birch"}
    ash.rename(drawer)
    assert names() == {"birch"}
    assert names() == {"birch"}
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o700


def test_a_proxy_of_the_site_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "intranet.example")
    monkeypatch.setenv("NO_PROXY", "")
    link.keep_quiet("10.1.2.3")
    for name in ("no_proxy", "NO_PROXY"):
        assert os.environ[name].split(",") == ["intranet.example", "127.0.0.1", "::1", "localhost", "10.1.2.3"]


def test_a_client_is_told_why_no_server_answers(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ["localhost"], ["ash"])
    make_certificates(tmp_path / "b", ["localhost"], ["ash"])
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted.load_cert_chain(tmp_path / "a" / "server" / "server.crt", tmp_path / "a" / "server" / "server.key")

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    server.socket = trusted.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        assert unanswered(address, tmp_path / "a" / "ash") == ""
        assert "certificate verify failed" in unanswered(address, tmp_path / "b" / "ash")
        assert unanswered(address, None).endswith(": it may want TLS, --tls DIR")
    finally:
        server.shutdown()
        server.server_close()
    assert "refused" in unanswered(address, tmp_path / "a" / "ash")
    plain = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    try:
        why = unanswered(f"127.0.0.1:{plain.server_port}", tmp_path / "a" / "ash")
        assert why.endswith(": what answers there speaks no TLS")
    finally:
        plain.shutdown()
        plain.server_close()
    assert unanswered("fl.example.invalid:x", None)


def test_a_clients_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with serving._alone(tmp_path / "clients" / "ash"):
        assert stat.S_IMODE((tmp_path / "clients" / "ash").stat().st_mode) == 0o700


def test_a_clients_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*ash"), serving._alone(tmp_path / "file" / "ash"):
        pass


def test_a_server_that_cannot_begin_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_certificates(tmp_path / "keys", ["127.0.0.1"], [])
    with pytest.raises(UserError, match="--log paper"):
        serving.serve_command("demo", tls=Path("keys"), log=["paper"])
    (tmp_path / "keys" / "server" / "server.crt").write_text("none")
    with pytest.raises(UserError, match="no certificate that clients would trust"):
        serving.serve_command("demo", tls=Path("keys"))
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    "address", ["fl.example.org", "fl.example.org:", "https://fl.example.org:8000", "a b:1", ":80"]
)
def test_addresses_that_are_none(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="write it as HOST:PORT"):
        serving.join_command(address, "ash", insecure=True, state=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("threads", "computes"), [(1, "1 of 4 cores, where nothing else"), (3, "3 of 4"), (0, "4 of 4")]
)
def test_a_client_says_on_how_many_cores_it_computes(
    threads: int, computes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedtailor.engine import local
    from fedtailor.engine.flower import node

    def joined(address: str, site: Site, *_: object) -> None:
        used = site.engine._pool.submit(torch.get_num_threads).result()
        assert used == (threads or 4)

    monkeypatch.setattr(local, "cores", lambda: 4)
    monkeypatch.setattr(node, "join", joined)
    serving.join_command("fl.example.org:8000", "ash", insecure=True, state=tmp_path, device="cpu", threads=threads)
    assert f"computes on {computes}" in capsys.readouterr().out


def test_no_client_computes_on_cores_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--threads 10000: this machine has"):
        serving.join_command("fl.example.org:8000", "ash", insecure=True, state=tmp_path / "ash", threads=10_000)
    assert not any(tmp_path.iterdir())


def test_no_protection_must_be_asked_for(tmp_path: Path) -> None:
    from fedtailor.cli.main import app

    for words in (["serve", "demo"], ["join", "127.0.0.1:8000", "--name", "ash"]):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, UserError)
        assert "--insecure" in str(result.exception)


# faults, with real processes; `make test-flower` runs them -----------------------------------------------------------


def served(federation: Loopback, out: Path, *options: str, rounds: int = 6) -> None:
    changes = {"method.name": "ditto", "clients": 3, "participants": 3, "rounds": rounds, "checkpoint_every": 2}
    changes |= {"evaluate_every": 2, "partition.name": "iid", "partition.samples": 60, "local.epochs": 1}
    federation.serve("demo", out, [f"{k}={v}" for k, v in changes.items()], options)


def losses(folder: Path, client: int) -> list[int]:
    """The rounds in which a client's reply was used."""
    table = [row.split(",") for row in (folder / "events.csv").read_text().splitlines()]
    return [int(row[0]) for row in table if row[1] == str(client) and row[3] == "loss"]


@pytest.mark.flower
def test_a_node_is_killed_and_returns(tmp_path: Path) -> None:
    """And one that is paused beyond the deadline, one whose key nobody knows, and a second one with a key in use."""
    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    try:
        federation.join_all()
        served(federation, out, "--deadline", "20", "--quorum", "1", rounds=24)
        federation.until("server", "round 2/24")
        federation.kill("client-000")
        federation.until("server", "round 4/24")
        federation.join("client-000")
        stranger = Loopback(tmp_path / "strange", ["client-009"], port=federation.port)
        (stranger.keys / "client-009" / "ca.crt").write_bytes((federation.keys / "client-000" / "ca.crt").read_bytes())
        stranger.join("client-009")
        twin = Loopback(tmp_path / "twin", [], port=federation.port)
        shutil.copytree(federation.keys / "client-002", twin.keys / "client-002")
        twin.join("client-002")
        stranger.until("client-009", "does not let this node in")
        twin.until("client-002", "does not let this node in")
        stranger.close()
        twin.close()
        pause(federation, "client-001", 30)
        federation.wait(400)
    finally:
        federation.close()
    log = federation.log("server")
    assert "late: client-001" in log or "late: client-000, client-001" in log
    assert "without a memory" not in log  # a client that returns goes on with what it knew
    assert "client-009" not in log
    assert 3 not in losses(out, 0) or 4 not in losses(out, 0)  # the rounds in which it was dead
    for client in range(3):  # and all are there at the end
        assert losses(out, client)[-1] == 24
    assert (federation.sites / "client-000" / next_run(federation) / "nets" / "000000.safetensors").exists()


def pause(federation: Loopback, who: str, seconds: float) -> None:
    federation.kill(who, signal.SIGSTOP)
    time.sleep(seconds)
    federation.kill(who, signal.SIGCONT)


def next_run(federation: Loopback) -> str:
    return next((federation.sites / "client-000").glob("ditto-*")).name


@pytest.mark.flower
def test_server_and_superlink_are_killed_and_go_on_to_the_same_result(tmp_path: Path) -> None:
    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    try:
        federation.join_all()
        served(federation, out)
        federation.until("server", "round 3/6")
        federation.kill("server")
        served(federation, out)
        federation.wait(300)
    finally:
        federation.close()
    from fedtailor.config import load

    local = start(load(out / "config.toml"), tmp_path / "local", "cpu", 1)
    require_same(out, local, federation.sites, NAMES[:3])


@pytest.mark.flower
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_server_ends_its_superlink_without_delay(how: int, tmp_path: Path) -> None:
    """Ctrl-C in a terminal and `systemctl stop` reach both processes at once."""
    federation = Loopback(tmp_path / "fl", NAMES[:3])
    try:
        served(federation, tmp_path / "run")
        federation.until("server", "0 of 3 clients are here")
        process = federation.processes["server"]
        os.killpg(process.pid, how)
        assert process.wait(20) == 130
    finally:
        federation.close()
    assert "Stopped. Continue with the same command" in federation.log("server")
    assert "started again" not in federation.log("server")


@pytest.mark.flower
def test_a_full_disk_and_a_broken_folder_at_clients(tmp_path: Path) -> None:
    """client-001 has a disk of 60 kB, client-002 an image that is none; client-000 finishes alone."""
    from PIL import Image

    federation, out = Loopback(tmp_path / "fl", NAMES[:3]), tmp_path / "run"
    for name in NAMES[:3]:
        for label in ("a", "b"):
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(10):
                pixels = np.full((8, 8), 20 * i + 5, np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / label / f"{i}.png")
    (tmp_path / "client-002" / "a" / "0.png").write_bytes(b"broken")
    try:
        for name in NAMES[:3]:
            options = ["--data", f"folder:{tmp_path / name}"]
            federation.join(name, *options)
        limit(federation.processes["client-001"].pid, 20_000)
        served(federation, out, "--start-with", "2", rounds=2)
        federation.wait(200)
    finally:
        federation.close()
    log = federation.log("server")
    assert "client-002 has a problem: its data cannot be used" in log
    assert "0.png" not in log
    assert "0.png" in federation.log("client-002")
    assert "client-001 has a problem: its disk cannot be written" in log
    assert losses(out, 0) == [1, 2]
    assert losses(out, 1) == []


@pytest.mark.flower
def test_a_newcomer_joins_over_flower_and_takes_its_network_home(tmp_path: Path) -> None:
    """With a key that was made after the run, its own data, its report and its ONNX file on its own disk."""
    federation, out = Loopback(tmp_path / "fl", TWO), tmp_path / "run"
    photos = write_digits(tmp_path / "photos", np.arange(1500, 1560), scale=2)
    changes = ["method.name=fedrep", "clients=2", "participants=2", "rounds=2", "partition.samples=60"]
    try:
        federation.join_all()
        federation.serve("demo", out, [*changes, "partition.name=iid", "local.epochs=1"])
        federation.wait(300)
        make_certificates(federation.keys, [], ["berlin"])
        federation.join("berlin", "--data", f"folder:{photos}", "--export")
        federation.serve(str(out), out, options=["--onboard", "1"])
        federation.wait(200)
        federation.until("berlin", "1 network with card.json")
    finally:
        federation.close()
    (home,) = (p.parent for p in (federation.sites / "berlin").glob("*/run.json"))
    assert (home / "report.html").exists()
    model = open_model(home / "export" / "berlin" / "network.onnx")
    assert model.about["client"] == "berlin"
    assert "berlin has its network: accuracy on" in federation.log("server")
    sends = [line for line in federation.log("berlin").splitlines() if "sends" in line]
    assert len(sends) == 2  # who it is, and its accuracy: the head never leaves
    assert "weights" not in "".join(sends)


@pytest.mark.flower
def test_a_network_of_40_megabytes_travels_whole(tmp_path: Path) -> None:
    config = config_of("fedavg", clients=2, rounds=1, net__hidden=72_000, partition__samples=20)
    (tmp_path / "config.toml").write_text(config.to_toml())
    federation, out = Loopback(tmp_path / "fl", TWO), tmp_path / "run"
    try:
        federation.join_all()
        federation.serve(str(tmp_path / "config.toml"), out)
        federation.wait(400)
    finally:
        federation.close()
    local = start(config, tmp_path / "local", "cpu", 1)
    require_same(out, local, federation.sites, TWO)
    assert len(state_of(out)) > 40_000_000


@pytest.mark.flower
def test_flwr_run_gives_the_same_numbers(tmp_path: Path) -> None:
    """Flower's own commands, as those use them who run Flower already."""
    config, port = config_of("fedrep", clients=2, evaluate_every=2), free_port()
    (tmp_path / "config.toml").write_text(config.to_toml())
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f"[superlink.here]\naddress = '127.0.0.1:{port}'\ninsecure = true\n")
    source = str(Path(fedtailor.__file__).parents[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**environment(home), "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def launch(*words: str) -> None:
        with (tmp_path / f"{words[0]}-{len(started)}.log").open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=env, start_new_session=True)
        started.append(process)

    try:
        launch("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        for i in range(2):
            node = f"partition-id={i} state='{tmp_path / 'sites' / TWO[i]}'"
            at = ["--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port())]
            launch("flower-supernode", "--insecure", *at, "--node-config", node)
        time.sleep(10)
        options = f"config='{tmp_path / 'config.toml'}' out='{tmp_path / 'run'}'"
        asked = ["flwr", "run", str(APP), "here", "--run-config", options, "--stream"]
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=400, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    local = start(config, tmp_path / "local", "cpu", 1)
    require_same(tmp_path / "run", local, tmp_path / "sites", TWO)


def limit(process: int, size: int) -> None:
    """No file of the process may grow beyond a size: to it, the disk is full there."""
    import resource

    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, size))
