"""`DirectLane`: ranged GETs straight into the caller's memory, past the transport.

The transport gathers the pieces of a body and joins them, which for large ranges is most of what
a download costs. This lane has it sign a URL and then receives the body where it is wanted, with
the standard library's HTTP client: 0.6 instead of 0.9 CPU-seconds per GiB (2 cores, loopback).
Over plain HTTP only, as storage within a cluster often is: Python takes TLS apart in records of
16 KiB, at 2.4 CPU-seconds per GiB where the transport needs 1.8.

It only ever tries: an answer that is not exactly the bytes asked for, a refusal, a lost or slow
connection, and what it cannot do at all (a proxy, a request that needs more than a signed URL)
are left to the transport, which knows how to retry and what to say. So nothing depends on it.
"""

from __future__ import annotations

import http.client
import logging
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.stores.errors import THROTTLING_STATUSES

logger = logging.getLogger("dcp_objstore")

# Signed for longer than it is used: the clocks of client and store may differ by minutes.
SIGNED_FOR_SECONDS = 1800.0
_USED_FOR_SECONDS = 600.0
# Servers close connections that they have not heard of for a while; AWS after about 20 s.
_IDLE_SECONDS = 10.0
_MOST_FAILURES = 3  # in a row, after which we stop trying
# Below this the transport costs no more than signing and Python's HTTP client.
WORTHWHILE_BYTES = 256 * 1024


class _UnusableError(Exception):
    """The lane cannot reach this server at all; nothing was sent."""


class PutOffError(Exception):
    """The store is throttling: wait before the next request, whichever way it takes."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


_Connection = http.client.HTTPConnection


@dataclass
class Asked:
    """A request that was sent and whose answer was not read yet. Read it or `close` it."""

    connection: _Connection
    url: str
    start: int
    end: int

    def close(self) -> None:
        """It is not wanted any more."""
        self.connection.close()


class DirectLane:
    """Reads ranges of one bucket's objects over connections of its own. Safe from many threads.

    Args:
        sign: the URL of a GET of an object, by its key in the bucket.
        timeout_seconds: to connect, and between bytes that arrive.
    """

    def __init__(self, sign: Callable[[str], str], timeout_seconds: float) -> None:
        self._sign = sign
        self._timeout_seconds = timeout_seconds
        self._signed: dict[str, tuple[str, float]] = {}
        self._idle: list[tuple[_Connection, str, float]] = []
        self._lock = threading.Lock()
        self._failures = 0

    @property
    def is_used(self) -> bool:
        """Whether it still tries."""
        return self._failures < _MOST_FAILURES

    def ask(self, path: str, start: int, end: int) -> Asked | None:
        """Send the request for a range that is to be read later; None if that goes wrong.

        The answer comes into the connection's buffer meanwhile.
        """
        if end - start < WORTHWHILE_BYTES or not self.is_used:
            return None
        try:
            url = self._url(path)
            connection, _ = self._connection(_origin(url))
            try:
                _send(connection, url, start, end)
            except BaseException:
                connection.close()
                raise
        except Exception as error:  # noqa: BLE001  the read sends it again, and reports it
            logger.debug("a range was not asked for directly: %s", type(error).__name__)
            return None
        return Asked(connection, url, start, end)

    def read(
        self, path: str, cuts: Sequence[int], into: memoryview, asked: Asked | None = None
    ) -> Iterator[memoryview]:
        """Bytes of an object with one request, piece by piece; fewer pieces if that goes wrong.

        Args:
            cuts: where the range begins, where each piece ends and the next one begins.
            into: writable bytes, as many as the largest piece has. Each piece is put here, over
                the one before. Without a piece it may hold anything.
            asked: the request, where it was sent already.

        Raises:
            PutOffError: before the first piece; the lane is as good as before.
        """
        if cuts[-1] - cuts[0] < WORTHWHILE_BYTES or not self.is_used:
            if asked is not None:
                asked.close()
            return
        began_at = time.monotonic()
        try:
            url = self._url(path) if asked is None else asked.url
            yield from self._receive(path, url, cuts, into, asked)
        except PutOffError:
            raise
        # Whatever goes wrong here, signing included, the transport is asked next and reports it.
        except Exception as error:  # noqa: BLE001
            with self._lock:
                self._failures += 1
                self._signed.pop(path, None)
            # Not its text, which may hold the signature.
            logger.debug("a range was not read directly: %s", type(error).__name__)
            if not isinstance(error, _UnusableError):
                emit_retry(path, 2, type(error).__name__, began_at)
        else:
            self._failures = 0

    def _url(self, path: str) -> str:
        with self._lock:
            known = self._signed.get(path)
        now = time.monotonic()
        if known is not None and now < known[1]:
            return known[0]
        url = self._sign(path)
        with self._lock:
            self._signed[path] = (url, now + _USED_FOR_SECONDS)
        return url

    def _receive(
        self, path: str, url: str, cuts: Sequence[int], into: memoryview, asked: Asked | None
    ) -> Generator[memoryview, None, None]:
        origin, began_at = _origin(url), time.monotonic()
        # One that was asked may have been an idle one before.
        connection, reused = self._connection(origin) if asked is None else (asked.connection, True)
        try:
            connected = connection.sock  # which http.client forgets where the server will close it
            try:
                if asked is None:
                    _send(connection, url, cuts[0], cuts[-1])
                answer = connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                if not reused:
                    raise
                # Most likely, the server closed it while it was idle.
                connection.close()
                emit_retry(path, 2, type(error).__name__, began_at)
                connection = self._new(origin)
                connected = connection.sock
                _send(connection, url, cuts[0], cuts[-1])
                answer = connection.getresponse()
            _check(answer, cuts[0], cuts[-1])
            ahead = memoryview(answer.peek())  # of the body: http.client received it with the head
            for start, end in pairwise(cuts):
                piece = into[: end - start]
                count = min(len(piece), len(ahead))
                piece[:count], ahead = ahead[:count], ahead[count:]
                _fill(piece[count:], connected)
                yield piece
            answer.close()  # tells http.client that the body has ended
        except BaseException:  # the generator was closed, too
            connection.close()
            raise
        if connection.sock is not None:
            with self._lock:
                self._idle.append((connection, origin, time.monotonic()))

    def _connection(self, origin: str) -> tuple[_Connection, bool]:
        """An idle connection, or a new one; and which."""
        latest = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            kept, self._idle = self._idle, []
            found = None
            for connection, where, since in kept:
                if since < latest:
                    connection.close()
                elif found is None and where == origin:
                    found = connection
                else:
                    self._idle.append((connection, where, since))
        return (found, True) if found is not None else (self._new(origin), False)

    def _new(self, origin: str) -> _Connection:
        parts = urlsplit(origin)
        assert parts.hostname is not None
        if parts.scheme != "http":
            raise _UnusableError("not over plain HTTP")
        if "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass(
            parts.hostname
        ):
            raise _UnusableError("there is a proxy between us and the store")
        connection = _Connection(parts.hostname, parts.port, timeout=self._timeout_seconds)
        connection.connect()
        # From here on the kernel keeps the time, so that one call can wait for a whole body: under
        # a time-out of its own, Python polls and receives piece by piece.
        timeout = struct.pack("ll", *divmod(round(self._timeout_seconds * 1_000_000), 1_000_000))
        connection.sock.settimeout(None)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        return connection


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _send(connection: _Connection, url: str, start: int, end: int) -> None:
    parts = urlsplit(url)
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)


def _fill(piece: memoryview, connected: socket.socket) -> None:
    """Receive bytes.

    Raises:
        OSError, http.client.HTTPException: it broke off, or nothing came for the time-out.
    """
    while piece:
        count = connected.recv_into(piece, 0, socket.MSG_WAITALL)
        if count == 0:
            raise http.client.IncompleteRead(b"", len(piece))
        piece = piece[count:]


def _check(answer: http.client.HTTPResponse, start: int, end: int) -> None:
    """Raise unless the body is exactly bytes `[start, end)`, as they are (RFC 9110, section 14)."""
    if answer.status in THROTTLING_STATUSES:
        raise PutOffError(answer.status)
    given = answer.getheader("Content-Range", "")
    if (
        answer.status != http.client.PARTIAL_CONTENT
        or not given.startswith(f"bytes {start}-{end - 1}/")
        or answer.getheader("Content-Encoding", "identity") != "identity"
        or answer.length != end - start
    ):
        raise http.client.HTTPException(f"answered with status {answer.status}, {given or 'whole'}")
