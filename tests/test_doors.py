"""What serve and join say before anything runs: addresses, keys, folders and machines that would not do."""

from __future__ import annotations

import os
import ssl
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedtailor.certificates import make_certificates, node_keys
from fedtailor.cli import serving
from fedtailor.engine.site import Site
from fedtailor.errors import UserError

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListNodesRequest

from fedtailor.engine.flower import link
from fedtailor.engine.flower.link import SuperLink, free_port
from fedtailor.engine.flower.node import unanswered


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
