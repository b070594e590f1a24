"""A bucket in memory that speaks S3, and answers otherwise than S3 does, but within HTTP.

`BEHAVIOURS` is the table of what servers, gateways and CDNs do.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.scripted import Answer, HttpServer

BUCKET = "bucket"
_TIME = "Mon, 01 Jan 2024 00:00:00 GMT"
_LISTED_TIME = "2024-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Behaviour:
    """What a server does otherwise than S3.

    Attributes:
        e_tag: the ETag in answers about an object, made of the one that listings have.
        framing: `chunked`: bodies come in chunks; `closed`: they end with the connection.
        one_at_a_time: the next request is looked at when the last one's body has been sent.
        timed_out: how many parts are answered with 400 RequestTimeout before they are taken.
        completes_unheard: the answer to the end of an upload is lost, once.
        page_keys: the largest page of a listing.
        marks: whether a page says where the next one begins.
        strays: keys that others have put into the bucket.
    """

    e_tag: Callable[[str], str] = lambda listed: listed
    framing: str = ""
    one_at_a_time: bool = False
    timed_out: int = 0
    completes_unheard: bool = False
    page_keys: int = 1000
    marks: bool = True
    strays: tuple[str, ...] = ()


BEHAVIOURS: Mapping[str, Behaviour] = {
    "as S3": Behaviour(),
    "weak ETags": Behaviour(e_tag=lambda listed: f"W/{listed}"),
    "a CDN's ETags": Behaviour(e_tag=lambda listed: f'"cdn-{listed[1:9]}"'),
    "chunked answers": Behaviour(framing="chunked"),
    "answers without a length": Behaviour(framing="closed"),
    "one request at a time": Behaviour(one_at_a_time=True),
    "400 RequestTimeout": Behaviour(timed_out=1),
    "a lost Complete": Behaviour(completes_unheard=True),
    "small pages": Behaviour(page_keys=2),
    "cut listings": Behaviour(marks=False),
    "empty segments": Behaviour(strays=("-first", "/x", "./x", "../x", "a//b", "zlast")),
}


class OddServer(HttpServer):
    """A bucket in memory.

    Args:
        behaviour: what it does otherwise than S3; it may be changed at any time.

    Attributes:
        objects: the bodies by their keys.
        uploads: the parts of unfinished uploads.
        listings: how many listings were asked for.
    """

    def __init__(self, behaviour: Behaviour = BEHAVIOURS["as S3"]) -> None:
        self.behaviour = behaviour
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.listings = 0
        self._begun = 0
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        super().__init__()

    @property
    def behaviour(self) -> Behaviour:
        """What it does otherwise than S3."""
        return self._behaviour

    @behaviour.setter
    def behaviour(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._timed_out, self._unheard = behaviour.timed_out, behaviour.completes_unheard

    def options(self, transport: str = "native") -> dict[str, object]:
        """How to open it."""
        given = {"endpoint_url": self.endpoint_url, "key": "k", "secret": "s"}
        return {**given, "transport": transport}

    def tag(self, key: str) -> str:
        """The ETag of an object in listings."""
        return _tag(self.objects[key])

    def turn(self) -> AbstractContextManager[object]:
        """Return what is held while a request is answered."""
        return self._turn if self.behaviour.one_at_a_time else nullcontext()

    def reply(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        parts = urlsplit(target)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: some[0] for name, some in parse_qs(parts.query, True).items()}
        fields = {name.lower(): value for name, value in headers.items()}
        with self._lock:
            if not key:
                return self._listing(query)
            return getattr(self, f"_{method.lower()}")(key, query, fields, body)  # type: ignore[no-any-return]

    def _refusal(self, key: str, fields: dict[str, str]) -> Answer | None:
        """Return the answer to a request whose condition does not hold."""
        here, named = key in self.objects, fields.get("if-match")
        matching = [self.tag(key), self.behaviour.e_tag(self.tag(key))] if here else []
        if (fields.get("if-none-match") == "*" and here) or (
            # RFC 9110, section 13.1.1: a weak ETag never matches.
            named is not None and (named.startswith("W/") or named not in matching)
        ):
            return _error(412, "PreconditionFailed")
        return None

    def _put(self, key: str, query: dict[str, str], fields: dict[str, str], body: bytes) -> Answer:
        if "uploadId" in query:
            if self._timed_out:
                self._timed_out -= 1
                return _error(400, "RequestTimeout")
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return Answer(200, {"ETag": _tag(body)}, b"")
        refusal = self._refusal(key, fields)
        if refusal is not None:
            return refusal
        self.objects[key] = body
        return Answer(200, {"ETag": self.behaviour.e_tag(_tag(body))}, b"")

    def _post(
        self, key: str, query: dict[str, str], _fields: dict[str, str], _body: bytes
    ) -> Answer | None:
        if "uploads" in query:
            self._begun += 1
            self.uploads[f"u{self._begun}"] = {}
            return _xml(f"<R><Key>{escape(key)}</Key><UploadId>u{self._begun}</UploadId></R>")
        parts = self.uploads.pop(query["uploadId"], None)
        if parts is None:
            return _error(404, "NoSuchUpload")
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        if self._unheard:
            self._unheard = False
            return None
        tag = self.behaviour.e_tag(self.tag(key))
        root = "CompleteMultipartUploadResult"
        return _xml(f"<{root}><Key>{escape(key)}</Key><ETag>{escape(tag)}</ETag></{root}>")

    def _delete(
        self, key: str, query: dict[str, str], fields: dict[str, str], _body: bytes
    ) -> Answer:
        if "uploadId" in query:
            self.uploads.pop(query["uploadId"], None)
        elif (refusal := self._refusal(key, fields)) is not None:
            return refusal
        else:
            self.objects.pop(key, None)
        return Answer(204, {}, b"")

    def _head(self, key: str, query: dict[str, str], fields: dict[str, str], body: bytes) -> Answer:
        answer = self._get(key, query, fields, body)
        length = {"Content-Length": str(len(answer.body))}
        return Answer(answer.status, {**length, **answer.headers}, b"")

    def _get(
        self, key: str, _query: dict[str, str], fields: dict[str, str], _body: bytes
    ) -> Answer:
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        if (refusal := self._refusal(key, fields)) is not None:
            return refusal
        body, status = self.objects[key], 200
        headers = {"ETag": self.behaviour.e_tag(self.tag(key)), "Last-Modified": _TIME}
        if (asked := fields.get("range")) is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            end = min(int(last) + 1, len(body))
            if int(first) >= end:
                return _error(416, "InvalidRange")
            status, headers["Content-Range"] = 206, f"bytes {first}-{end - 1}/{len(body)}"
            body = body[int(first) : end]
        if self.behaviour.framing == "chunked":
            headers["Transfer-Encoding"] = "chunked"
            middle = len(body) // 2
            chunks = [chunk for chunk in (body[:middle], body[middle:]) if chunk]
            body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
        elif self.behaviour.framing == "closed":
            headers["Content-Length"] = ""
        return Answer(status, headers, body)

    def _listing(self, query: dict[str, str]) -> Answer:
        self.listings += 1
        behaviour, prefix = self.behaviour, query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        if not behaviour.marks:
            after = query.get("start-after", "")
        root = min((key.partition("/")[0] for key in self.objects), default="")
        entries: dict[str, str] = {}
        for key in sorted({*self.objects, *(f"{root}/{stray}" for stray in behaviour.strays)}):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                if folder > after and not after.startswith(folder):
                    entries[folder] = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
            elif key > after:
                body = self.objects.get(key, b"x")
                entries[key] = (
                    f"<Contents><Key>{_named(key, query)}</Key><Size>{len(body)}</Size>"
                    f"<LastModified>{_LISTED_TIME}</LastModified>"
                    f"<ETag>{escape(_tag(body))}</ETag></Contents>"
                )
        size = min(behaviour.page_keys, int(query.get("max-keys", "1000")))
        shown = list(entries)[:size]
        is_cut = len(entries) > size
        text = f"<IsTruncated>{str(is_cut and behaviour.marks).lower()}</IsTruncated>"
        if is_cut and behaviour.marks:
            text += f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
        text += f"<KeyCount>{len(shown)}</KeyCount>" + "".join(entries[key] for key in shown)
        return _xml(f"<ListBucketResult><Name>{BUCKET}</Name>{text}</ListBucketResult>")


def _named(key: str, query: dict[str, str]) -> str:
    return quote(key) if query.get("encoding-type") == "url" else escape(key)


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _xml(text: str) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, text.encode())


def _error(status: int, code: str) -> Answer:
    text = f"<Error><Code>{code}</Code><Message>m</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())
