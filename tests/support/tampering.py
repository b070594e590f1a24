"""A proxy in front of an S3 server that tampers with the answers it is told to.

with TamperingProxy(bucket.storage_options) as proxy:
    proxy.tamper(flipped(1000), lambda asked: asked.covers("__1_0", 1000), times=1)
    load(url, proxy.storage_options)
"""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dcp_objstore.stores import open_store
from tests.support.proxy import Asked, Meant, parse_asked
from tests.support.scripted import Answer, HttpServer, fault_answer
from tests.support.tls import Certificate

_DENIED = fault_answer("s3", "forbidden")


# The request, its right answer, and a way to all of the object.
Change = Callable[[Asked, Answer, Callable[[], bytes]], Answer]


def _sized(answer: Answer) -> Answer:
    """With a Content-Length that is right."""
    return answer._replace(headers={**answer.headers, "Content-Length": str(len(answer.body))})


def cut(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """The connection is closed in the middle of the body."""
    return answer._replace(body=answer.body[: len(answer.body) // 2])


def shorter(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """An answer that is right in itself, to a question for fewer bytes."""
    body, headers = answer.body[:-7], dict(answer.headers)
    if asked.start is not None:
        end = asked.start + len(body)
        headers["Content-Range"] = f"bytes {asked.start}-{end - 1}/{len(whole())}"
    return _sized(Answer(answer.status, headers, body))


def whole_object(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """200 and all of the object, as from a server that does not know of ranges."""
    headers = {name: value for name, value in answer.headers.items() if name != "Content-Range"}
    return _sized(Answer(200, headers, whole()))


def wrong_length(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
    """200 and something else."""
    found = whole_object(asked, answer, whole)
    return _sized(found._replace(body=found.body[: len(answer.body) // 3]))


def flipped(at: int) -> Change:
    """The byte of the object at this place is damaged."""

    def change(asked: Asked, answer: Answer, whole: Callable[[], bytes]) -> Answer:
        body = bytearray(answer.body)
        body[at - (asked.start or 0)] ^= 0xFF
        return answer._replace(body=bytes(body))

    return change


@dataclass
class _Rule:
    change: Change
    meant: Meant
    times: int | None
    # By key and end of the range: who has received a part asks for the rest.
    done: Counter[tuple[str, int | None]] = field(default_factory=Counter)


class TamperingProxy(HttpServer):
    """What is asked is sent on as it came, so signatures stay valid.

    Args:
        storage_options: of the server behind it.
        certificate: makes it an HTTPS server.

    Attributes:
        storage_options: for clients that are to go through it.
        asked: every request so far.
        rewrite: changes every answer.
        damage: of these requests, the body's first byte is flipped on its way to the server.
    """

    def __init__(
        self, storage_options: Mapping[str, object], certificate: Certificate | None = None
    ) -> None:
        self._options_behind = storage_options
        behind = urlsplit(str(storage_options["endpoint_url"]))
        self.behind = behind.netloc
        self.asked: list[Asked] = []
        self.rewrite: Callable[[Answer], Answer] = lambda answer: answer
        self.damage: Meant = lambda asked: False
        self._refused: tuple[Meant, Answer | None] = (lambda asked: False, None)
        self._rules: list[_Rule] = []
        self._before: tuple[Meant, Callable[[], None]] | None = None
        self._lock = threading.Lock()
        super().__init__(certificate and certificate.context())
        self.storage_options = {**storage_options, "endpoint_url": self.endpoint_url + behind.path}
        if certificate is not None:
            self.storage_options["verify"] = str(certificate.path)

    def tamper(self, change: Change, meant: Meant, times: int | None = None) -> None:
        """Change the answers to what is meant, the first `times` for each range, or always."""
        self._rules.append(_Rule(change, meant, times))

    def before(self, meant: Meant, act: Callable[[], None]) -> None:
        """Do something once, before the first request that is meant is sent on."""
        self._before = (meant, act)

    def refuse(self, meant: Meant, answer: Answer | None = _DENIED) -> None:
        """Answer what is meant in the server's place: 403, as a store whose policy forbids it."""
        self._refused = (meant, answer)

    def reply(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        with self._lock:
            asked = parse_asked(method, target, headers, len(self.asked))
            self.asked.append(asked)
            if self._before is not None and self._before[0](asked):
                act, self._before = self._before[1], None
                act()
        if body and self.damage(asked):
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        refused, refusal = self._refused
        if refused(asked):
            return refusal
        answer = self._ask(method, target, headers, body)
        if method == "GET" and answer.status in (http.client.OK, http.client.PARTIAL_CONTENT):
            answer = self._changed(asked, answer)
        return self.rewrite(answer)

    def _changed(self, asked: Asked, answer: Answer) -> Answer:
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
        store = open_store(f"s3://{bucket}", self._options_behind)
        return store.get(key, max_size_bytes=1 << 30)[0]

    def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.behind, timeout=30)
        # With the Host that was signed.
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() != "connection":
                connection.putheader(name, value)
        connection.endheaders(body)
        found = connection.getresponse()
        received = found.read()
        dropped = ("content-length", "transfer-encoding", "connection")
        kept = {name: value for name, value in found.getheaders() if name.lower() not in dropped}
        kept["Content-Length"] = found.getheader("Content-Length", str(len(received)))
        connection.close()
        return Answer(found.status, kept, received)
