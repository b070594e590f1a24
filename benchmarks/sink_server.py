"""The sink's side of one S3 connection: what is asked, and the answer. `wire` moves the bodies.

Protocol: Amazon S3 API Reference (PutObject, UploadPart, CompleteMultipartUpload, GetObject,
ListObjectsV2, CopyObject, DeleteObjects) and its page on `aws-chunked` bodies with trailing
checksums. Signatures and checksums are not looked at. Every bucket exists.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.sink_objects import Body, Objects, RefusedError, Stored
from benchmarks.wire import Wire

# Bodies below this are kept in any case, so that indexes, markers and small values are real.
KEEP_BELOW_BYTES = 1 << 20
_DATE = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
_LIST_DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class _Request:
    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def place(self) -> str:
        return f"{self.bucket}/{self.key}"

    @property
    def length_bytes(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def conditions(self) -> dict[str, str | None]:
        names = ("if_none_match", "if_match")
        return {name: self.headers.get(name.replace("_", "-")) for name in names}


class RequestRate:
    """What each bucket answers per second: a bucket of tokens that holds half a second's.

    Args:
        per_second: requests.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second / 2)
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[float, float]] = {}

    def admits(self, bucket: str) -> bool:
        """Take a token if there is one."""
        with self._lock:
            now = time.monotonic()
            left, at = self._tokens.get(bucket, (self._most, now))
            left = min(self._most, left + (now - at) * self._per_second)
            admitted = left >= 1
            self._tokens[bucket] = (left - admitted, now)
            return admitted


class SlowAnswers:
    """Say which answers are slow: the same ones for the same requests and seed.

    Args:
        percent: of the answers that are slow.
        factor: how many times as long a slow one takes.
        seed: another one makes other answers slow.
    """

    def __init__(self, percent: float, factor: float, seed: int) -> None:
        self._percent, self._factor, self._seed = percent, factor, seed
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()

    def factor(self, request: str) -> float:
        """Return how many times as long the answer to a request takes.

        A request that comes again has another answer.
        """
        with self._lock:
            self._asked[request] += 1
            drawn = random.Random(f"{self._seed} {self._asked[request]} {request}")
        return self._factor if drawn.random() * 100 < self._percent else 1.0


class Connection:
    """Serves one client until it closes; one thread each.

    Args:
        wire: to the client.
        objects: what is stored.
        keep: keep large bodies too.
        latency_seconds: before each answer. Default 0.
        rate: refuses what exceeds it. Default None.
        slow: makes some answers slow. Default None.
    """

    def __init__(
        self,
        wire: Wire,
        objects: Objects,
        *,
        keep: bool,
        latency_seconds: float = 0.0,
        rate: RequestRate | None = None,
        slow: SlowAnswers | None = None,
    ) -> None:
        self._wire = wire
        self._objects = objects
        self._keep = keep
        self._latency_seconds = latency_seconds
        self._rate = rate
        self._slow = slow
        self._ahead = b""  # received, but not yet looked at

    def serve(self) -> None:
        """Answer requests until the client goes away."""
        with self._wire, contextlib.suppress(ConnectionError, ssl.SSLError):
            while True:  # until the client closes
                request = self._read_head()
                if request.headers.get("expect", "").lower() == "100-continue":
                    self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._wire.begin_body()
                body = self._read_body(request)
                try:
                    self._answer(request, body)
                except RefusedError as error:
                    text = f"<Error><Code>{error.code}</Code><Message>sink</Message></Error>"
                    # The answer to a HEAD has no body.
                    self._reply(error.status, "" if request.method == "HEAD" else text)

    def _read_head(self) -> _Request:
        head = self._read_until(b"\r\n\r\n")
        first, *lines = head.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        # Any server has to take a whole URL, too; the AWS SDK for C++ sends one.
        path, _, query = re.sub("^https?://[^/]*", "", target).partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        fields = parse_qs(query, keep_blank_values=True)
        return _Request(method, bucket, key, {k: v[0] for k, v in fields.items()}, headers)

    def _read_body(self, request: _Request) -> Body | bytearray:
        """Return the body as bytes, or only its size if it is not kept."""
        chunked = "aws-chunked" in request.headers.get("content-encoding", "")
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            received = self._read_transfer_chunks()
        else:
            length = request.length_bytes
            if request.method == "PUT" and length >= KEEP_BELOW_BYTES and not self._keep:
                self._wire.discard_body(length - len(self._take_ahead(length)))
                size = int(request.headers["x-amz-decoded-content-length"]) if chunked else length
                return Body(size, None)
            received = bytearray(length)
            self._receive(memoryview(received))
        body = _join_chunks(received) if chunked else received
        keeps = self._keep or request.method != "PUT" or len(body) < KEEP_BELOW_BYTES
        return body if keeps else Body(len(body), None)

    def _read_transfer_chunks(self) -> bytearray:
        """Read a body in chunks (RFC 9112, 7.1), as botocore sends it over https."""
        received = bytearray()
        while size_bytes := int(self._read_until(b"\r\n").split(b";")[0], 16):
            chunk = bytearray(size_bytes + 2)
            self._receive(memoryview(chunk))
            received += memoryview(chunk)[:size_bytes]
        while self._read_until(b"\r\n"):
            pass  # trailers
        return received

    def _take_ahead(self, size_bytes: int) -> bytes:
        taken, self._ahead = self._ahead[:size_bytes], self._ahead[size_bytes:]
        return taken

    def _receive(self, view: memoryview) -> None:
        ahead = self._take_ahead(len(view))
        view[: len(ahead)] = ahead
        self._wire.receive_body(view[len(ahead) :])

    def _read_until(self, mark: bytes) -> bytes:
        """Return what comes before a mark, and take both.

        Raises:
            ConnectionError: the client has closed.
        """
        while mark not in self._ahead:
            received = self._wire.receive()
            if not received:
                raise ConnectionError("the client has closed")
            self._ahead += received
        found, self._ahead = self._ahead.split(mark, 1)
        return found

    def _reply(self, status: str, text: str = "", headers: str = "") -> None:
        body = text.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._wire.send(head.encode() + body)

    def _answer(self, request: _Request, body: Body | bytearray) -> None:
        if request.bucket == "__stats":
            if request.method == "DELETE":
                self._objects.reset_stats()
            self._reply("200 OK", json.dumps(self._objects.stats()))
            return
        verb = _verb(request)
        # Keys are random, ranges are not.
        asked = f"{verb} {request.headers.get('range')}"
        self._factor = 1.0 if self._slow is None else self._slow.factor(asked)
        time.sleep(self._latency_seconds * self._factor)
        self._objects.count(verb, body.size_bytes if isinstance(body, Body) else len(body))
        if self._rate is not None and not self._rate.admits(request.bucket):
            self._objects.count_refused()
            raise RefusedError("503 Slow Down", "SlowDown")
        handlers = {
            "LIST": self._list,
            "GET": self._get,
            "HEAD": self._get,
            "PUT": self._put,
            "PART": self._put_part,
            "COPY": self._copy,
            "BEGIN": self._begin,
            "COMPLETE": self._complete,
            "ABORT": self._abort,
            "DELETE": self._delete,
            "DELETE_MANY": self._delete_many,
            "BUCKET": self._bucket,
        }
        if verb not in handlers:
            raise RefusedError("501 Not Implemented", "NotImplemented")
        handlers[verb](request, body)

    def _bucket(self, _request: _Request, _body: Body | bytearray) -> None:
        self._reply("200 OK", headers="x-amz-bucket-region: us-east-1\r\n")

    def _put(self, request: _Request, body: Body | bytearray) -> None:
        stored = self._objects.put(request.place, self._kept(body), **request.conditions)
        self._reply("200 OK", headers=f"ETag: {stored.e_tag}\r\n")

    def _put_part(self, request: _Request, body: Body | bytearray) -> None:
        number = int(request.query["partNumber"])
        upload_id = request.query["uploadId"]
        e_tag = self._objects.put_part(request.place, upload_id, number, self._kept(body))
        self._reply("200 OK", headers=f"ETag: {e_tag}\r\n")

    def _kept(self, body: Body | bytearray) -> Body:
        return body if isinstance(body, Body) else self._objects.blocks.keep(body)

    def _copy(self, request: _Request, _body: Body | bytearray) -> None:
        source = unquote(request.headers["x-amz-copy-source"]).lstrip("/")
        copied = self._objects.get(source).body
        stored = self._objects.put(request.place, copied, **request.conditions)
        tags = f"<ETag>{escape(stored.e_tag)}</ETag><LastModified>{_LIST_DATE}</LastModified>"
        self._reply("200 OK", f"<CopyObjectResult>{tags}</CopyObjectResult>")

    def _begin(self, request: _Request, _body: Body | bytearray) -> None:
        upload_id = self._objects.begin_upload(request.place)
        self._reply("200 OK", _result("InitiateMultipartUpload", request, UploadId=upload_id))

    def _complete(self, request: _Request, body: Body | bytearray) -> None:
        assert isinstance(body, bytearray)
        root = ElementTree.fromstring(bytes(body))
        numbers = [int(e.text or 0) for e in root.iter() if e.tag.endswith("PartNumber")]
        stored = self._objects.complete_upload(
            request.place, request.query["uploadId"], numbers, **request.conditions
        )
        self._reply("200 OK", _result("CompleteMultipartUpload", request, ETag=stored.e_tag))

    def _abort(self, request: _Request, _body: Body | bytearray) -> None:
        self._objects.abort_upload(request.place, request.query["uploadId"])
        self._reply("204 No Content")

    def _delete(self, request: _Request, _body: Body | bytearray) -> None:
        self._objects.delete(request.place)
        self._reply("204 No Content")

    def _delete_many(self, request: _Request, body: Body | bytearray) -> None:
        assert isinstance(body, bytearray)
        for element in ElementTree.fromstring(bytes(body)).iter():
            if element.tag.endswith("Key"):
                self._objects.delete(f"{request.bucket}/{element.text}")
        self._reply("200 OK", "<DeleteResult></DeleteResult>")

    def _get(self, request: _Request, _body: Body | bytearray) -> None:
        stored = self._objects.get(request.place)
        size = stored.body.size_bytes
        start, end, status, extra = 0, size, "200 OK", ""
        if "range" in request.headers:
            start, end = _range(request.headers["range"], size)
            status = "206 Partial Content"
            extra = f"Content-Range: bytes {start}-{end - 1}/{size}\r\n"
        if request.method == "GET":
            if stored.body.blocks is None:
                raise RefusedError("501 Not Implemented", "BodyDiscardedStartTheSinkWithKeep")
            self._objects.count_sent(end - start)
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {end - start}\r\nETag: {stored.e_tag}\r\n"
            f"Accept-Ranges: bytes\r\n{_DATE}{extra}\r\n"
        )
        self._wire.send(head.encode())
        if request.method == "GET":
            self._wire.begin_body(self._factor)
            self._wire.send_body(stored.body.views(start, end))

    def _list(self, request: _Request, _body: Body | bytearray) -> None:
        query = request.query
        page = self._objects.list_page(
            request.bucket,
            query.get("prefix", ""),
            query.get("delimiter", ""),
            query.get("continuation-token", query.get("start-after", "")),
            min(int(query.get("max-keys", 1000)), 1000),
        )
        items = "".join(_listed(key, stored) for key, stored in page.objects)
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
            for prefix in page.prefixes
        )
        token = page.next_token
        more = "" if token is None else escape(token)
        next_token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        self._reply(
            "200 OK",
            f"<ListBucketResult><Name>{escape(request.bucket)}</Name>"
            f"<Prefix>{escape(query.get('prefix', ''))}</Prefix>"
            f"<KeyCount>{len(page.objects) + len(page.prefixes)}</KeyCount>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
            f"{items}{prefixes}{next_token}</ListBucketResult>",
        )


def _verb(request: _Request) -> str:
    """The S3 operation, by the names under which it is counted."""
    method, query = request.method, request.query
    if not request.key and method != "POST":
        return "LIST" if method == "GET" and "list-type" in query else "BUCKET"
    if method == "POST":
        named = {"uploads": "BEGIN", "uploadId": "COMPLETE", "delete": "DELETE_MANY"}
        return next((verb for name, verb in named.items() if name in query), "POST")
    if method == "PUT":
        if "x-amz-copy-source" in request.headers:
            return "COPY"
        return "PART" if "partNumber" in query else "PUT"
    if method == "DELETE":
        return "ABORT" if "uploadId" in query else "DELETE"
    return method


def _range(header: str, size: int) -> tuple[int, int]:
    """`[start, end)` of a Range header; only one range, as S3 allows."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None or match.groups() == ("", ""):
        raise RefusedError("400 Bad Request", "InvalidArgument")
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= size or end <= start:
        raise RefusedError("416 Range Not Satisfiable", "InvalidRange")
    return start, end


def _join_chunks(body: bytearray) -> bytearray:
    """The payload of an `aws-chunked` body: `hex-size[;signature]`, data, ..., 0, trailers."""
    joined = bytearray()
    position = 0
    while True:
        line_end = body.index(b"\r\n", position)
        size = int(body[position:line_end].split(b";")[0], 16)
        if size == 0:
            return joined
        position = line_end + 2
        joined += memoryview(body)[position : position + size]
        position += size + 2


def _listed(key: str, stored: Stored) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_LIST_DATE}</LastModified>"
        f"<ETag>{escape(stored.e_tag)}</ETag><Size>{stored.body.size_bytes}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _result(name: str, request: _Request, **fields: str) -> str:
    inner = "".join(f"<{tag}>{escape(text)}</{tag}>" for tag, text in fields.items())
    return (
        f"<{name}Result><Bucket>{escape(request.bucket)}</Bucket>"
        f"<Key>{escape(request.key)}</Key>{inner}</{name}Result>"
    )
