"""The sink's end of one connection: plain or TLS, at a given rate, with little work in Python.

Without TLS, bodies that are not kept are dropped by the kernel: `recv` with MSG_TRUNC takes them
off the socket without copying them anywhere, and MSG_WAITALL makes that one call for a whole part.
Kept bodies are sent from memory, a whole range in one call. (Linux only.) With TLS, each record
that arrives is one call, because OpenSSL hands out one at a time; what is sent is one call for each
block of memory. The interpreter lock is free while OpenSSL works.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

_SCRATCH_BYTES = 64 << 20
_SOME_BYTES = 1 << 16
# At a rate, so much passes at a time: 4 ms at 60 MiB/s.
_PACED_BYTES = 1 << 18
_MOST_BUFFERS = 1024  # of one call of sendmsg (Linux: IOV_MAX)
_DISCARD = socket.MSG_TRUNC | socket.MSG_WAITALL  # Linux: tcp(7)
# How late a thread may wake without the others losing what would have passed meanwhile.
_LATE_SECONDS = 0.005
_SSL_CTRL_SET_MAX_SEND_FRAGMENT = 52  # openssl/ssl.h


class Throttle:
    """Passes bytes at a given rate, all connections together.

    Args:
        bytes_per_second: the rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, size_bytes: int) -> None:
        """Wait until these bytes, and those before them, have passed."""
        with self._lock:
            now = time.monotonic()
            begun_at = max(now - _LATE_SECONDS, self._free_at)
            self._free_at = begun_at + size_bytes / self._bytes_per_second
            wait_seconds = self._free_at - now
        if wait_seconds > 0:
            time.sleep(wait_seconds)


class Wire:
    """Plain TCP. Closes the connection at the end of a `with` block.

    Args:
        connection: accepted.
        bytes_per_second: of bodies, in each direction. Default None: as fast as they come.
        shared: limits all connections that have it. Default None.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        bytes_per_second: float | None = None,
        shared: Throttle | None = None,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._bytes_per_second = bytes_per_second
        self._shared = shared
        limited = bytes_per_second is not None or shared is not None
        self._most_bytes = _PACED_BYTES if limited else _SCRATCH_BYTES
        self._scratch = mmap.mmap(-1, _SCRATCH_BYTES)  # never touched, but by TLS
        self._body_began_at, self._factor = 0.0, 1.0
        self._passed_bytes = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._scratch.close()

    def receive(self) -> bytes:
        """Return what has arrived of a head; empty if the client has closed."""
        return self._socket.recv(_SOME_BYTES)

    def send(self, data: bytes) -> None:
        """Send a head or a short answer."""
        self._socket.sendall(data)

    def begin_body(self, factor: float = 1.0) -> None:
        """Start the clock of a body's rate.

        Args:
            factor: how many times as long as usual the body takes.
        """
        self._factor = factor
        self._body_began_at = time.monotonic()
        self._passed_bytes = 0

    def receive_body(self, view: memoryview) -> None:
        """Fill memory with the next bytes of a body."""
        while view:
            view = view[self._arrived(self._fill(view[: self._most_bytes])) :]

    def discard_body(self, size_bytes: int) -> None:
        """Drop the next bytes of a body."""
        while size_bytes:
            size_bytes -= self._arrived(self._discard(min(size_bytes, self._most_bytes)))

    def send_body(self, views: Iterable[memoryview]) -> None:
        """Send the next bytes of a body."""
        if self._most_bytes == _SCRATCH_BYTES:
            self._send_all(views)
            return
        for view in views:
            for at in range(0, len(view), self._most_bytes):
                piece = view[at : at + self._most_bytes]
                self._wait(len(piece))
                self._send_all([piece])

    def _arrived(self, size_bytes: int) -> int:
        if not size_bytes:
            raise ConnectionError("the client closed in the middle of a body")
        self._wait(size_bytes)
        return size_bytes

    def _wait(self, size_bytes: int) -> None:
        """Wait until so much more of the body has passed at the rate, since its beginning."""
        if self._bytes_per_second is not None:
            self._passed_bytes += size_bytes
            passed_at = (
                self._body_began_at + self._passed_bytes * self._factor / self._bytes_per_second
            )
            time.sleep(max(0.0, passed_at - time.monotonic()))
        if self._shared is not None:
            self._shared.take(size_bytes)

    def _fill(self, view: memoryview) -> int:
        """Fill memory; return fewer bytes only if the client closes."""
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def _discard(self, size_bytes: int) -> int:
        """Drop bytes; return fewer only if the client closes."""
        return self._socket.recv_into(self._scratch, size_bytes, _DISCARD)

    def _send_all(self, views: Iterable[memoryview]) -> None:
        """Send them in one call if they fit it.

        Not with `sendfile`: its socket buffers are scattered pages, which cost the receiver, whose
        processor time is what is measured, twice as much as those that a network card fills.
        """
        left = deque(views)
        while left:
            sent = self._socket.sendmsg(list(islice(left, _MOST_BUFFERS)))
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]


class TlsWire(Wire):
    """TLS; the handshake is made here, so make it in the connection's own thread.

    Args:
        connection: accepted.
        context: from `tls_context`.
        bytes_per_second, shared: see `Wire`; of bodies before they are encrypted.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        *,
        bytes_per_second: float | None = None,
        shared: Throttle | None = None,
    ) -> None:
        tls = context.wrap_socket(connection, server_side=True)
        super().__init__(tls, bytes_per_second=bytes_per_second, shared=shared)

    def _fill(self, view: memoryview) -> int:
        at = 0
        while at < len(view) and (count := self._socket.recv_into(view[at:])):
            at += count
        return at

    def _discard(self, size_bytes: int) -> int:
        left_bytes = size_bytes
        while left_bytes:
            count = self._socket.recv_into(self._scratch, min(left_bytes, _SOME_BYTES))
            if not count:
                break
            left_bytes -= count
        return size_bytes - left_bytes

    def _send_all(self, views: Iterable[memoryview]) -> None:
        for view in views:
            self._socket.sendall(view)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and localhost that signs itself; needs `openssl`.

    Returns:
        Its path and its key's, in `folder`.
    """
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    # webpki (rustls) refuses a server whose certificate may sign others.
    leaf = "basicConstraints=critical,CA:FALSE"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = ["openssl", "req", "-x509", "-days", "2", "-subj", "/CN=localhost", *curve]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        [*command, "-addext", names, "-addext", leaf, *files], check=True, capture_output=True
    )
    return certificate, key


def tls_context(certificate: Path, key: Path, record_bytes: int) -> ssl.SSLContext:
    """Make a server's context.

    Args:
        certificate, key: PEM files.
        record_bytes: the largest record that is sent, of up to 16384 (RFC 8446, 5.1).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if record_bytes < 16384:
        _limit_records(context, record_bytes)
    return context


def _limit_records(context: ssl.SSLContext, size_bytes: int) -> None:
    """Call OpenSSL's SSL_CTX_set_max_send_fragment, for which the ssl module has no name.

    A CPython context is an object's head and then the SSL_CTX pointer (Modules/_ssl.c).
    """
    import _ssl

    openssl = ctypes.CDLL(_ssl.__file__)
    control = openssl.SSL_CTX_ctrl
    control.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p]
    control.restype = ctypes.c_long
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    if control(pointer, _SSL_CTRL_SET_MAX_SEND_FRAGMENT, size_bytes, None) != 1:
        raise ValueError(f"OpenSSL does not send records of {size_bytes} bytes")
