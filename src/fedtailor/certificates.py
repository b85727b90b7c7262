"""Keys and certificates of a federation, made once by whoever runs the server.

A folder holds the authority that signs (keep `authority/` offline), what the server needs (`server/`) and one folder
per node to be handed to its owner. The certificate tells nodes that they talk to the right server and encrypts the way;
a node's key tells the server which client it is.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # what browsers and libraries still take for a certificate of a server


def make_certificates(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int = SERVER_DAYS) -> list[str]:
    """Makes what is missing: authority, server certificate for these hosts, keys of these nodes. Returns new names."""
    for name in nodes:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", name) or name in ("authority", "server"):
            raise UserError(f"'{name}' is no name for a node: use letters, digits, '-', '_' and '.'.")
    for host in hosts:
        _require_host(host)
    if not 0 < days <= AUTHORITY_DAYS:
        raise UserError(f"--days {days}: a certificate is valid for 1 to {AUTHORITY_DAYS} days.")
    authority, server = folder / "authority", folder / "server"
    there = (server / "server.crt").exists()
    if not hosts and not there:
        raise UserError("name the server's host, for example --host fl.example.org.")
    new: list[str] = []
    if there and hosts and not (authority / "ca.key").exists():  # another authority is one that no client trusts
        raise UserError(
            f"{authority} is not there, and only the authority that clients trust can sign a new certificate. Put the "
            "folder back for a moment. If it is lost, make all keys anew in another folder and hand them out again."
        )
    if not there and not (authority / "ca.key").exists():
        _make_authority(authority)
        new.append("authority")
    if hosts:  # a server that moved, or whose certificate runs out, gets a new one
        _make_server(authority, server, hosts, days)
        new.append("server")
    for name in nodes:
        # a key whose folder is gone is with its owner: another one would shut it out
        if not (folder / name / "node.key").exists() and not (server / "nodes" / f"{name}.pub").exists():
            _make_node(folder, name)
            new.append(name)
    return new


def node_keys(server: Path) -> dict[str, Path]:
    """The public keys that a server lets in, by name."""
    return {path.stem: path for path in sorted((server / "nodes").glob("*.pub"))}


def server_folder(folder: Path) -> Path:
    """The server's folder, given itself or the folder around it; its certificate is one that clients will trust."""
    found = folder / "server" if (folder / "server").is_dir() else folder
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (found / name).is_file():
            raise UserError(f"{found} has no {name}. Make certificates with 'fedtailor certs {folder} --host NAME'.")
    _require_trusted(found)
    return found


def node_folder(folder: Path, name: str) -> Path:
    """A node's folder, given itself or the folder around it."""
    from cryptography.hazmat.primitives import serialization

    found = folder / name if (folder / name).is_dir() else folder
    for file in ("ca.crt", "node.key"):
        if not (found / file).is_file():
            raise UserError(f"{found} has no {file}. The federation's server makes it with 'fedtailor certs'.")
    try:
        serialization.load_ssh_private_key((found / "node.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{found / 'node.key'} is no private key of 'fedtailor certs' ({error}).") from error
    return found


def _require_trusted(server: Path) -> None:
    """Raises where no client would trust the server's certificate."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    renew = "Renew it with 'fedtailor certs DIR --host NAME'; clients keep what they have."
    try:
        own, ca = (x509.load_pem_x509_certificate((server / name).read_bytes()) for name in ("server.crt", "ca.crt"))
        key = serialization.load_pem_private_key((server / "server.key").read_bytes(), None)
        own.verify_directly_issued_by(ca)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        why = str(error) or "ca.crt has not signed server.crt"
        raise UserError(f"{server} holds no certificate that clients would trust ({why}). {renew}") from error
    if key.public_key() != own.public_key():
        raise UserError(f"{server}: server.key does not belong to server.crt. {renew}")
    for name, certificate in (("server.crt", own), ("ca.crt", ca)):
        if certificate.not_valid_after_utc < datetime.now(UTC):
            what = renew if name == "server.crt" else "Make all keys anew in another folder and hand them out again."
            raise UserError(f"{server / name} was valid until {certificate.not_valid_after_utc:%Y-%m-%d}. {what}")


def _make_authority(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedtailor federation")
    made = (
        _begin(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write_key(folder / "ca.key", key)
    _write(folder / "ca.crt", _signed(made, key))


def _make_server(authority: Path, folder: Path, hosts: Sequence[str], days: int) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer: Any = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    known = dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])  # the server calls itself by the last ones
    made = (
        _begin(_name(hosts[0]), ca.subject, key, days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in known]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        # what verifies strictly, as Python does by default since 3.13, trusts none without these two
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    _write_key(folder / "server.key", key)
    _write(folder / "server.crt", _signed(made, signer))
    _write(folder / "ca.crt", (authority / "ca.crt").read_bytes())


def _make_node(folder: Path, name: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_key(folder / name / "node.key", key, openssh=True)
    _write(folder / name / "ca.crt", (folder / "server" / "ca.crt").read_bytes())  # the authority may be in a drawer
    _write(folder / "server" / "nodes" / f"{name}.pub", public + f" {name}\n".encode())


def _begin(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _usage(signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _require_host(text: str) -> None:
    """Raises unless clients could call a server by this: a name in letters that DNS knows, or an address; no port."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*", text) or len(text) > 253:
            raise UserError(
                f"--host '{text}' is no host: write a name such as fl.example.org, or an address, without a port. "
                "Names with other letters are written as DNS knows them, xn--..."
            ) from None


def _host(text: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write_key(path: Path, key: EllipticCurvePrivateKey, openssh: bool = False) -> None:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    _write(path, data, 0o600)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """A file that nobody else could read for a moment, in a folder of one's own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.partial")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
