"""A TCP proxy in front of an HTTP server that holds, cuts and throttles connections when told to.

It can also answer requests in the server's place: `Refuse`, and by a `SlowDown` above a rate.

with NetworkProxy(bucket.storage_options) as proxy:
    held = proxy.hold(lambda asked: asked.name == "_COMMIT" and asked.method == "PUT")
    ...  # a save with proxy.storage_options
    held.wait()
    held.release()

Bytes go through as they are. It looks at them only so far as to know where a request begins, so
that a test can say which one to stop and how far. `tampering` is the proxy that changes answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NoReturn
from urllib.parse import unquote, urlsplit

_CHUNK_BYTES = 256 * 1024
# No test waits longer for something that is to happen.
WAIT_SECONDS = 60.0


_SIGNED_BY = re.compile(r"Credential=([^/&]+)/")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_SIGNED_AT = re.compile(r"X-Amz-Date=(\w+)")


@dataclass(frozen=True)
class Asked:
    """A request, as its head says.

    Attributes:
        key: the path, bucket included.
        query: the query, as it came.
        headers: the fields as they came, their names in lower case.
        number: which of all requests it is, from 0.
    """

    method: str
    key: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    number: int = 0

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.query

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        return int(self.headers.get("content-length") or 0)

    @property
    def start(self) -> int | None:
        """The first byte of the range that is asked for; None for a whole object."""
        asked = _RANGE.match(self.headers.get("range", ""))
        return int(asked[1]) if asked else None

    @property
    def end(self) -> int | None:
        """The end of that range."""
        asked = _RANGE.match(self.headers.get("range", ""))
        return int(asked[2]) + 1 if asked else None

    def covers(self, name: str, at: int) -> bool:
        """Whether it is a ranged GET of that byte of the object whose key has `name` in it."""
        if self.method != "GET" or self.start is None or self.end is None:
            return False
        return name in self.key and self.start <= at < self.end

    @property
    def access_key(self) -> str:
        """The key that it is signed with, in a header or in the URL; empty if it is not signed."""
        signed = _SIGNED_BY.search(self.headers.get("authorization", "") or unquote(self.query))
        return signed[1] if signed else ""

    @property
    def signed_url(self) -> bool:
        """It carries its signature in the URL, as the direct lane's requests do."""
        return "X-Amz-Signature=" in self.query

    @property
    def signed_at(self) -> float:
        """When it was signed, in whole seconds since 1970."""
        in_url = _SIGNED_AT.search(self.query)
        date = in_url[1] if in_url else self.headers["x-amz-date"]
        return datetime.strptime(f"{date}+0000", "%Y%m%dT%H%M%SZ%z").timestamp()


def parse_asked(method: str, target: str, headers: Mapping[str, str], number: int) -> Asked:
    """What a request's first line and fields say."""
    parts = urlsplit(target)
    named = {name.lower(): value for name, value in headers.items()}
    return Asked(method, unquote(parts.path), parts.query, named, number)


Meant = Callable[[Asked], bool]
Side = Literal["request", "answer"]
How = Literal["rst", "fin"]


@dataclass(frozen=True)
class Cut:
    """Break the connection when so many bytes of the request or its answer have gone through.

    Attributes:
        side: of which the bytes are counted, its head included.
        how: `rst` as a crashed peer or a firewall does it, `fin` as one that closes.
    """

    side: Side
    after_bytes: int
    how: How


class Hold:
    """Stop the request, or the answer, after so many bytes, until `release`.

    Nothing is lost: what a client sent before it gave up arrives late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, side: Side, after_bytes: int) -> None:
        self.side: Side = side
        self.after_bytes = after_bytes
        self._loop = loop
        self._reached, self._left = threading.Event(), threading.Event()
        self._released = asyncio.Event()

    def wait(self) -> None:
        """Until something is held."""
        assert self._reached.wait(WAIT_SECONDS), "nothing came to be held"

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def release(self) -> None:
        """Let everything go on, also what comes later."""
        self._loop.call_soon_threadsafe(self._released.set)

    def wait_left(self) -> None:
        """Until the client has closed the connection of what was held."""
        assert self._left.wait(WAIT_SECONDS), "the client has not closed the connection"

    async def here(self) -> None:
        self._reached.set()
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            self._left.set()
            raise


@dataclass(frozen=True)
class Refuse:
    """Answer with an error in the server's place, which never hears of the request."""

    status: int
    code: str


Fault = Cut | Hold | Refuse
Plan = Callable[[Asked], Fault | None]


class SlowDown:
    """A plan: what a store does that is asked too often. It has a bucket of tokens.

    Args:
        per_second: requests that it answers; 0: none, after the first `burst`.
        burst: tokens that the bucket holds, and has at first.
        status: 503 as AWS, 429 as others.
        meant: only these requests.

    Attributes:
        refused: what was refused so far.
    """

    def __init__(
        self, per_second: float, burst: int, status: int = 503, meant: Meant = lambda asked: True
    ) -> None:
        self.per_second, self.burst, self.status, self.meant = per_second, burst, status, meant
        self.refused: list[Asked] = []
        self._tokens, self._at = float(burst), time.monotonic()

    def __call__(self, asked: Asked) -> Fault | None:
        if not self.meant(asked):
            return None
        now = time.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return None
        return self.refuse(asked)

    def refuse(self, asked: Asked) -> Refuse:
        self.refused.append(asked)
        return Refuse(self.status, "SlowDown" if self.status == 503 else "TooManyRequests")


class NetworkProxy:
    """TCP on loopback, in a thread of its own.

    Args:
        storage_options: of the server behind it.

    Attributes:
        storage_options: for clients that are to go through it.
        asked: every request so far.
        cuts: connections that were cut so far.
        plan: asked for every request, in the proxy's thread: what is to happen to it.
        bytes_per_second: of each connection, in each direction; None: as fast as it goes.
    """

    def __init__(self, storage_options: Mapping[str, object]) -> None:
        self.behind = urlsplit(str(storage_options["endpoint_url"]))
        self.asked: list[Asked] = []
        self.cuts = 0
        self.plan: Plan = lambda asked: None
        self.bytes_per_second: float | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = self._listener.getsockname()[1]
        self.storage_options = {**storage_options, "endpoint_url": f"http://127.0.0.1:{port}"}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(
        self, meant: Meant, side: Side = "request", after_bytes: int = 0, times: int | None = None
    ) -> Hold:
        """Hold what is meant from now on; the first `times` of it only, or all."""
        hold = Hold(self.loop, side, after_bytes)
        left = times
        before = self.plan

        def plan(asked: Asked) -> Fault | None:
            nonlocal left
            if left != 0 and meant(asked):
                left = None if left is None else left - 1
                return hold
            return before(asked)

        self.plan = plan
        return hold

    def hang_up(self) -> None:
        """Cut every connection that is open, and hold nothing any more."""
        self.plan = lambda asked: None

        async def cut() -> None:
            for task in self._tasks:
                task.cancel()

        self._run(cut())

    def __enter__(self) -> NetworkProxy:
        self._thread.start()
        self._run(self._serve())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_SECONDS)

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(
            self._accepted, sock=self._listener, limit=_CHUNK_BYTES
        )

    async def _end(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self.loop.create_task(self._handle(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs = await asyncio.open_connection(
                self.behind.hostname, self.behind.port, limit=_CHUNK_BYTES
            )
        except OSError:  # the server is down: a client that connects directly is refused
            _abort(writer)
            return
        await _Connection(self, (reader, writer), theirs).run()

    def seen(self, head: bytes) -> tuple[Asked, Fault | None]:
        """A request's head has come."""
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        fields = (line.partition(":") for line in lines[1:] if line)
        headers = {name: value.strip() for name, _, value in fields}
        asked = parse_asked(method, target, headers, len(self.asked))
        assert "transfer-encoding" not in asked.headers, "a request without Content-Length"
        self.asked.append(asked)
        return asked, self.plan(asked)


@dataclass
class _Flow:
    """One direction of a connection: how much of the present request, or answer, has passed."""

    passed_bytes: int = 0
    fault: Cut | Hold | None = None


@dataclass
class _Connection:
    """One connection of a client, and the one to the server that is behind it."""

    proxy: NetworkProxy
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    request: _Flow = field(default_factory=_Flow)
    answer: _Flow = field(default_factory=_Flow)

    async def run(self) -> None:
        answers = asyncio.ensure_future(self._answers())
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, _CutError):
                await self._requests()
            # Whoever has gone has sent what he has sent: the server is left to do it.
            if self.request.passed_bytes and not self.answer.passed_bytes:
                await asyncio.wait([answers])
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            self.client[1].close()
            self.server[1].close()

    async def _requests(self) -> None:
        reader, writer = self.client[0], self.server[1]
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            asked, fault = self.proxy.seen(head[:-4])
            if isinstance(fault, Refuse):
                await self._refuse(asked, fault)
                continue
            self.request = _Flow(0, fault if fault and fault.side == "request" else None)
            self.answer = _Flow(0, fault if fault and fault.side == "answer" else None)
            await self._pass(self.request, head, writer)
            left = asked.size_bytes
            while left:
                data = await reader.read(min(left, _CHUNK_BYTES))
                if not data:
                    # With a part of a body the server can do nothing.
                    self.request.passed_bytes = 0
                    return
                left -= len(data)
                await self._pass(self.request, data, writer)

    async def _refuse(self, asked: Asked, fault: Refuse) -> None:
        reader, writer = self.client
        self.request = _Flow()
        left = asked.size_bytes
        while left:
            data = await reader.read(min(left, _CHUNK_BYTES))
            if not data:
                return
            left -= len(data)
        text = f"<Error><Code>{fault.code}</Code><Message>Refused.</Message></Error>"
        body = b"" if asked.method == "HEAD" else text.encode()
        head = (
            f"HTTP/1.1 {fault.status} Refused\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(text)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()

    async def _answers(self) -> None:
        reader, writer = self.server[0], self.client[1]
        with contextlib.suppress(OSError, _CutError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._pass(self.answer, data, writer)
        writer.close()  # ends `_requests`

    async def _pass(self, flow: _Flow, data: bytes, writer: asyncio.StreamWriter) -> None:
        fault = flow.fault
        if fault is not None and flow.passed_bytes + len(data) > fault.after_bytes:
            flow.fault = None
            before = max(0, fault.after_bytes - flow.passed_bytes)
            await self._send(flow, data[:before], writer)
            data = data[before:]
            if isinstance(fault, Cut):
                self._cut(fault.how)
            await fault.here()
        await self._send(flow, data, writer)

    async def _send(self, flow: _Flow, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not data:
            return
        if self.proxy.bytes_per_second is not None:
            await asyncio.sleep(len(data) / self.proxy.bytes_per_second)
        flow.passed_bytes += len(data)
        writer.write(data)
        await writer.drain()

    def _cut(self, how: How) -> NoReturn:
        self.proxy.cuts += 1
        for _, writer in (self.client, self.server):
            if how == "rst":
                _abort(writer)
            else:
                writer.close()
        raise _CutError


class _CutError(Exception):
    pass


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    held = writer.get_extra_info("socket")
    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
