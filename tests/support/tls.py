"""Certificates of servers on loopback, and TLS around a server's socket."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socketserver import TCPServer
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """PEM files of a certificate that signs itself, and of its key."""

    path: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """A server's context."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self)
        return context


def make_certificate(
    folder: Path, host: str = "127.0.0.1", *, lasting: timedelta = timedelta(days=1)
) -> Certificate:
    """Make a certificate.

    Args:
        folder: where to write it.
        host: an address or a name.
        lasting: from now on; negative: it has expired.
    """
    # Comes with azure-identity's own needs.
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.now(UTC)
    try:
        named: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        named = x509.DNSName(host)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + lasting)
        .add_extension(x509.SubjectAlternativeName([named]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    found = Certificate(folder / "cert.pem", folder / "key.pem")
    found.path.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found.key.write_bytes(private)
    return found


def speak_tls(server: TCPServer, context: ssl.SSLContext) -> None:
    """Have a server speak TLS; each handshake is made where the first request is read."""
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
