"""Keys and certificates: who may come in, and what no other side would take."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedtailor import certificates
from fedtailor.certificates import make_certificates, node_folder, node_keys, server_folder
from fedtailor.errors import UserError

pytest.importorskip("flwr")


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
