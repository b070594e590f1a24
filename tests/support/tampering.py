"""A proxy in front of an S3 server that tampers with the answers it is told to.

with TamperingProxy(bucket.storage_options) as proxy:
    proxy.tamper(flipped(1000), lambda asked: asked.covers("__1_0", 1000), times=1)
    load(url, proxy.storage_options)
"""

from __future__ import annotations

import dataclasses
import http.client
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from dcp_objstore.stores import open_store


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        key: the path, bucket included.
        start, end: of the range that is asked for; None for a whole object.
        signed_url: it carries its signature in the URL, as the direct lane's requests do.
        headers: as they came, their names in lower case.
    """

    method: str
    key: str
    start: int | None
    end: int | None
    signed_url: bool
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)

    def covers(self, name: str, at: int) -> bool:
        """Whether it is a ranged GET of that byte of the object whose key has `name` in it."""
        if self.method != "GET" or self.start is None or self.end is None:
            return False
        return name in self.key and self.start <= at < self.end


@dataclass
class Answer:
    """What is answered; `length` is what Content-Length says, whatever the body has."""

    status: int
    headers: dict[str, str]
    body: bytes
    length: int


# The request, its right answer, and a way to all of the object.
Change = Callable[[Asked, Answer, Callable[[], bytes]], Answer]


def cut(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """The connection is closed in the middle of the body."""
    return dataclasses.replace(answer, body=answer.body[: len(answer.body) // 2])


def shorter(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """An answer that is right in itself, to a question for fewer bytes."""
    body, headers = answer.body[:-7], dict(answer.headers)
    if asked.start is not None:
        end = asked.start + len(body)
        headers["Content-Range"] = f"bytes {asked.start}-{end - 1}/{len(whole())}"
    return Answer(answer.status, headers, body, len(body))


def whole_object(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """200 and all of the object, as from a server that does not know of ranges."""
    headers = {name: value for name, value in answer.headers.items() if name != "Content-Range"}
    body = whole()
    return Answer(200, headers, body, len(body))


def wrong_length(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """200 and something else."""
    found = whole_object(asked, answer, whole)
    body = found.body[: len(answer.body) // 3]
    return dataclasses.replace(found, body=body, length=len(body))


def flipped(at: int) -> Change:
    """The byte of the object at this place is damaged."""

    def change(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
        body = bytearray(answer.body)
        body[at - (asked.start or 0)] ^= 0xFF
        return dataclasses.replace(answer, body=bytes(body))

    return change


@dataclass
class _Rule:
    change: Change
    meant: Callable[[Asked], bool]
    times: int | None
    # By key and end of the range: who has received a part asks for the rest.
    done: Counter[tuple[str, int | None]] = field(default_factory=Counter)


class TamperingProxy(ThreadingHTTPServer):
    """HTTP/1.1 on loopback; what is asked is sent on as it came, so signatures stay valid.

    Args:
        storage_options: of the server behind it.

    Attributes:
        storage_options: for clients that are to go through it.
        asked: every request so far.
        rewrite: changes every answer.
        damage: of these requests, the body's first byte is flipped on its way to the server.
    """

    daemon_threads = True

    def __init__(self, storage_options: Mapping[str, object]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._options_behind = storage_options
        self.behind = urlsplit(str(storage_options["endpoint_url"])).netloc
        self.storage_options = {
            **storage_options,
            "endpoint_url": f"http://127.0.0.1:{self.server_address[1]}",
        }
        self.asked: list[Asked] = []
        self.rewrite: Callable[[Answer], Answer] = lambda answer: answer
        self.damage: Callable[[Asked], bool] = lambda asked: False
        self._refused: Callable[[Asked], bool] = lambda asked: False
        self._rules: list[_Rule] = []
        self._before: tuple[Callable[[Asked], bool], Callable[[], None]] | None = None
        self._lock = threading.Lock()

    def tamper(
        self, change: Change, meant: Callable[[Asked], bool], times: int | None = None
    ) -> None:
        """Change the answers to what is meant, the first `times` for each range, or always."""
        self._rules.append(_Rule(change, meant, times))

    def before(self, meant: Callable[[Asked], bool], act: Callable[[], None]) -> None:
        """Do something once, before the first request that is meant is sent on."""
        self._before = (meant, act)

    def refuse(self, meant: Callable[[Asked], bool]) -> None:
        """Answer what is meant with 403, as a store does whose policy forbids it."""
        self._refused = meant

    def refused(self, asked: Asked) -> Answer | None:
        """The answer, if it is refused."""
        if not self._refused(asked):
            return None
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        return Answer(http.client.FORBIDDEN, {}, body, len(body))

    def sending_on(self, asked: Asked) -> None:
        """A request has come."""
        with self._lock:
            self.asked.append(asked)
            if self._before is not None and self._before[0](asked):
                act, self._before = self._before[1], None
                act()

    def changed(self, asked: Asked, answer: Answer) -> Answer:
        """What is to be answered."""
        for rule in self._rules:
            place = (asked.key, asked.end)
            with self._lock:
                meant = rule.meant(asked) and (rule.times is None or rule.done[place] < rule.times)
                rule.done[place] += meant
            if meant:
                return rule.change(asked, answer, lambda: self._whole(asked.key))
        return answer

    def _whole(self, path: str) -> bytes:
        bucket, _, key = path.lstrip("/").partition("/")
        return open_store(f"s3://{bucket}", self._options_behind).get(key, max_size_bytes=1 << 30)[
            0
        ]

    def __enter__(self) -> TamperingProxy:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Clients may go away in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TamperingProxy

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        start = end = None
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1
        signed_url = "X-Amz-Signature=" in parts.query
        named = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, unquote(parts.path), start, end, signed_url, named)
        self.server.sending_on(asked)
        headers = dict(self.headers.items())
        if body and self.server.damage(asked):
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        refused = self.server.refused(asked)
        answer = refused or self._ask(self.command, self.path, body, headers)
        if self.command == "GET" and answer.status in (http.client.OK, http.client.PARTIAL_CONTENT):
            answer = self.server.changed(asked, answer)
        answer = self.server.rewrite(answer)
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(answer.length))
        self.end_headers()
        self.wfile.write(answer.body)
        self.close_connection = self.command != "HEAD" and len(answer.body) < answer.length

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815 - http.server's names

    def _ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self.server.behind, timeout=30)
        # With the Host that was signed.
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() != "connection":
                connection.putheader(name, value)
        connection.endheaders(body)
        found = connection.getresponse()
        received = found.read()
        length = int(found.getheader("Content-Length", len(received)))
        dropped = ("content-length", "transfer-encoding", "connection")
        kept = {name: value for name, value in found.getheaders() if name.lower() not in dropped}
        connection.close()
        return Answer(found.status, kept, received, length)

    def log_message(self, *_: Any) -> None:
        pass
