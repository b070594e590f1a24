"""`DirectLane`: ranged GETs straight into the caller's memory, without obstore.

obstore gathers the pieces of a body and joins them, which for large ranges is most of what a
download costs. This lane sends a signed request and receives the body into the caller's memory,
with the standard library's HTTP client and TLS (figures: docs/design/direct-reads.md).

It tries each request once. The caller asks obstore, which retries and reports errors, if the answer
is not exactly the requested bytes, the request is refused, the connection is lost or slow, the
certificate is not valid, or there is a proxy, which the lane does not support. So nothing depends
on the lane.
"""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import urlsplit

from typing_extensions import Buffer

from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.errors import THROTTLING_STATUSES
from dcp_objstore.stores.obstore.tls import TlsSocket
from dcp_objstore.stores.protocol import Version
from dcp_objstore.stores.ranges import Answer

# A signed URL is used for this long, though it may be valid for longer.
_USED_FOR_SECONDS = 600.0
# The number of objects of which a signed URL is kept, less than 1 KiB each. To sign takes 50 us.
_MOST_SIGNED = 1024
# Servers close connections that they have not heard of for a while; AWS after about 20 s.
_IDLE_SECONDS = 10.0
_MOST_FAILURES = 3  # after so many in a row it is not tried any more
# Below this the transport costs no more than signing and Python's HTTP client.
WORTHWHILE_BYTES = 256 * 1024


class LaneError(Exception):
    """The lane did not give the bytes.

    Attributes:
        broke_off: the connection was lost or silent. Otherwise the answer was another one, or
            nothing was sent.
        status: the status by which the store asks for patience, whichever way the next request
            takes; None for every other failure, after which the transport has to be asked.
    """

    def __init__(self, what: str, *, broke_off: bool = False, status: int | None = None) -> None:
        super().__init__(what)
        self.broke_off = broke_off
        self.status = status


@dataclass(frozen=True, slots=True, repr=False)
class SignedGet:
    """A GET that needs nothing more but a range. It holds a secret, so nothing shows it.

    Attributes:
        url: the URL of the object; host, path and query are sent as they are.
        headers: the headers to send.
        until: the time after which it is not used any more (monotonic).
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    until: float = math.inf

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


_Connection = http.client.HTTPConnection


class _IdleConnection(NamedTuple):
    connection: _Connection
    origin: str
    idle_since: float


class DirectLane:
    """Reads ranges of one bucket's objects over its own connections. Safe from many threads.

    Args:
        sign: a function that makes the GET of an object, by its key in the bucket.
        timeout_seconds: the time-out to connect, and between bytes that arrive.
        trust: a function that makes the context of TLS. It is called once, and only if there is
            TLS.

    Attributes:
        answered: whether the server has ever answered, in whatever way.
    """

    def __init__(
        self,
        sign: Callable[[str], SignedGet],
        timeout_seconds: float,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._sign = sign
        self._timeout_seconds = timeout_seconds
        self._trust = trust
        self._tls: ssl.SSLContext | None = None
        # The sessions by origin. A session that is resumed saves most of the next handshake.
        self._sessions: dict[str, ssl.SSLSession | None] = {}
        self._signed: dict[str, SignedGet] = {}  # by the object's key in the bucket
        self._idle: list[_IdleConnection] = []
        self._lock = threading.Lock()
        self._failures = 0  # since the last success
        self.answered = False

    @property
    def is_used(self) -> bool:
        """Whether it still tries."""
        return self._failures < _MOST_FAILURES

    def ask(self, path: str, start: int, end: int) -> DirectAnswer | None:
        """Send the request for bytes `[start, end)`, and return before its answer has come.

        Returns:
            The answer, to be read or closed. None if obstore is to be asked at once: the range is
            small, or the lane has failed too often.

        Raises:
            LaneError: it could not be sent.
        """
        if end - start < WORTHWHILE_BYTES or not self.is_used:
            return None
        try:
            signed = self._signed_get(path)
            connection, is_new = self._idle_or_new_connection(signed.origin)
            try:
                _send(connection, signed, start, end)
            except BaseException:
                connection.close()
                raise
        # Whatever goes wrong here, signing included: obstore is asked next, and reports it.
        except Exception as error:
            self.failed(path)
            raise LaneError(type(error).__name__) from error
        return DirectAnswer(self, connection, path, signed, start=start, end=end, is_new=is_new)

    def failed(self, path: str) -> None:
        """Count a failure, and sign the next URL of the object afresh."""
        with self._lock:
            self._failures += 1
            self._signed.pop(path, None)

    def succeeded(self, connection: _Connection, origin: str) -> None:
        """Keep a connection whose answer was read to its end."""
        self._failures = 0
        sock = connection.sock
        if sock is not None:  # else `http.client` has closed it, as the answer's headers demand
            with self._lock:
                if isinstance(sock, TlsSocket):
                    self._sessions[origin] = sock.session
                self._idle.append(_IdleConnection(connection, origin, time.monotonic()))

    def _signed_get(self, path: str) -> SignedGet:
        """Return the signed GET of an object: the last one while it is valid, else a new one."""
        now = time.monotonic()
        known = self._signed.get(path)
        if known is not None and now < known.until:
            return known
        signed = self._sign(path)  # not under the lock: it may have to ask for a token
        signed = replace(signed, until=min(signed.until, now + _USED_FOR_SECONDS))
        with self._lock:
            self._signed.pop(path, None)
            self._signed[path] = signed  # the newest comes last, so the first is the oldest
            if len(self._signed) > _MOST_SIGNED:
                del self._signed[next(iter(self._signed))]
        return signed

    def _idle_or_new_connection(self, origin: str) -> tuple[_Connection, bool]:
        """Return a connection to the origin and whether it is new; close those idle too long."""
        earliest = time.monotonic() - _IDLE_SECONDS
        reused = None
        with self._lock:
            all_idle, self._idle = self._idle, []
            for idle in all_idle:
                if idle.idle_since < earliest:
                    idle.connection.close()
                elif reused is None and idle.origin == origin:
                    reused = idle.connection
                else:
                    self._idle.append(idle)
        if reused is not None:
            return reused, False
        return self.connect(origin), True

    def connect(self, origin: str) -> _Connection:
        """Make a new connection; one with TLS resumes the last session where it can."""
        parts = urlsplit(origin)
        host, is_secure = parts.hostname, parts.scheme == "https"
        assert host is not None
        proxies = urllib.request.getproxies()
        has_proxy = parts.scheme in proxies or "all" in proxies
        if has_proxy and not urllib.request.proxy_bypass(host):
            raise LaneError("there is a proxy between us and the store")
        port = parts.port or (http.client.HTTPS_PORT if is_secure else http.client.HTTP_PORT)
        connection = _Connection(host, port, timeout=self._timeout_seconds)
        connection.connect()
        # So that one call of the kernel waits for a whole body, the kernel keeps the time-out, in
        # seconds and microseconds. If Python kept it, it would poll and receive piece by piece.
        seconds = self._timeout_seconds
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.sock = _Socket(fileno=connection.sock.detach())
        connection.sock.settimeout(None)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        if is_secure:
            with self._lock:
                self._tls = tls = self._tls or self._trust()
                session = self._sessions.get(origin)
            connection.sock = TlsSocket(connection.sock, tls, host, session)
        return connection


class _Socket(socket.socket):
    """A blocking socket, connected, whose time-outs are the kernel's."""

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Receive bytes.

        Raises:
            TimeoutError: none came in time. As a `BlockingIOError`, `http.client` would take it
                for the end of the head, and we the rest of the head for the body.
        """
        try:
            return super().recv_into(buffer, nbytes, flags)
        except BlockingIOError as error:
            raise TimeoutError("the server is silent") from error


class DirectAnswer(Answer):
    """The `Answer` to a request that a lane has sent."""

    def __init__(
        self,
        lane: DirectLane,
        connection: _Connection,
        path: str,
        signed: SignedGet,
        start: int,
        end: int,
        *,
        is_new: bool,
    ) -> None:
        self._lane = lane
        self._connection = connection
        self._path = path
        self._signed = signed
        self._start, self._end = start, end
        self._is_new = is_new  # whether no other request was sent over the connection before
        self._sent_at = time.monotonic()
        self._left_bytes = end - start  # the bytes of the body that were not read yet
        self._answer: http.client.HTTPResponse | None = None  # None until its head was read
        # Kept here, because the connection drops it if the answer says that it will be closed.
        self._socket: socket.socket = connection.sock
        self._cancelled = False
        # The beginning of the body, which http.client received with the head, once that is read.
        self._body_ahead: memoryview

    def readinto(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many.

        Raises:
            LaneError: the lane did not give the bytes. If it has a status, the lane is as good as
                before.
        """
        try:
            if self._answer is None:
                self._answer = self._read_head()
            count = self._receive(self._answer, into)
        except Exception as error:
            if isinstance(error, LaneError) and error.status is not None:
                raise  # the store is throttling, and would answer obstore in the same way
            if self._cancelled:
                raise LaneError("cancelled") from error  # no failure of the lane
            self._lane.failed(self._path)
            # The error's text is not logged, because it may hold the signature.
            logger.debug("a range was not read directly: %s", type(error).__name__)
            if isinstance(error, LaneError):
                raise  # the answer was another one than was asked for
            raise LaneError(type(error).__name__, broke_off=True) from error
        self._left_bytes -= count
        return count

    def version(self) -> Version | None:
        """Return the state of the object that the bytes are of: its ETag."""
        e_tag = None if self._answer is None else self._answer.getheader("ETag")
        return None if e_tag is None else Version(e_tag)

    def descriptor_to_poll(self) -> int | None:
        """Return the descriptor of the connection, until the answer has begun."""
        return self._socket.fileno() if self._answer is None and not self._cancelled else None

    def cancel(self, *, at_once: bool) -> bool:  # noqa: ARG002  it ends at once in any case
        """End a read that another thread is in, by a shutdown of its connection; return True."""
        self._cancelled = True
        with suppress(OSError):  # the server has closed the connection already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        return True

    def close(self) -> None:
        """Keep the connection for the next request; close it if more of this answer is to come."""
        # After the last byte of a body in chunks the server sends an empty chunk, which is unread.
        if self._answer is None or self._answer.chunked or self._left_bytes or self._cancelled:
            self._connection.close()
            return
        self._answer.close()  # tells http.client that the body has ended
        self._lane.succeeded(self._connection, self._signed.origin)

    def _read_head(self) -> http.client.HTTPResponse:
        """Read the answer's head; if an idle connection was lost, ask once more over a new one."""
        try:
            answer = self._respond()
        except ConnectionError as error:
            if self._is_new or self._cancelled:
                raise
            # Most likely, the server closed the connection while it was idle.
            self._connection.close()
            emit_retry(self._path, 2, type(error).__name__, self._sent_at)
            self._connection = self._lane.connect(self._signed.origin)
            self._socket = self._connection.sock
            _send(self._connection, self._signed, self._start, self._end)
            answer = self._respond()
        self._lane.answered = True
        _check_answer(answer, self._start, self._end)
        # A body in chunks is read by `http.client` alone, with the bytes that it has received.
        self._body_ahead = memoryview(b"" if answer.chunked else answer.peek())
        return answer

    def _respond(self) -> http.client.HTTPResponse:
        """Wait for the answer's head, unless nobody wants it any more."""
        if self._cancelled:
            raise LaneError("cancelled")
        return self._connection.getresponse()

    def _receive(self, answer: http.client.HTTPResponse, into: memoryview) -> int:
        """Receive some bytes of the body to the front of `into`; return how many.

        The bytes that `http.client` received with the head come first, then those of the socket.
        """
        if self._body_ahead:
            some = self._body_ahead[: len(into)]
            into[: len(some)] = some
            self._body_ahead = self._body_ahead[len(some) :]
            return len(some)
        if answer.chunked:
            count = answer.readinto(into)  # it takes the chunks apart
        else:
            count = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
        if not count:  # the server closed the connection before the end of the body
            raise http.client.IncompleteRead(b"", self._left_bytes)
        return count


def _send(connection: _Connection, signed: SignedGet, start: int, end: int) -> None:
    """Send the request for bytes `[start, end)`."""
    parts = urlsplit(signed.url)
    # The `Host` header is signed, too, so it is sent as it stands in the signed URL.
    headers = {
        "Host": parts.netloc,
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
        **signed.headers,
    }
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    connection.request("GET", target, headers=headers)


def _check_answer(answer: http.client.HTTPResponse, start: int, end: int) -> None:
    """Raise `LaneError` unless the body is exactly bytes `[start, end)`, not encoded.

    See RFC 9110, section 14.
    """
    if answer.status in THROTTLING_STATUSES:
        raise LaneError(f"the store answered with status {answer.status}", status=answer.status)
    content_range = answer.getheader("Content-Range", "")
    is_range = content_range.startswith(f"bytes {start}-{end - 1}/")
    is_encoded = answer.getheader("Content-Encoding", "identity") != "identity"
    # A body in chunks has no length in its head.
    has_length = answer.chunked or answer.length == end - start
    is_partial = answer.status == http.client.PARTIAL_CONTENT
    if is_encoded or not (is_partial and is_range and has_length):
        raise LaneError(f"answered with status {answer.status}, {content_range or 'whole'}")
