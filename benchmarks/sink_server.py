"""The sink's side of one S3 connection: large bodies pass through no Python code.

Bodies that are not kept are dropped by the kernel: `recv` with MSG_TRUNC takes them off the socket
without copying them anywhere, and MSG_WAITALL makes that one call for a whole part. Kept bodies
are sent from memory, a whole range in one call. So the process measured against the sink has the
processor nearly to itself. Linux only.

Protocol: Amazon S3 API Reference (PutObject, UploadPart, CompleteMultipartUpload, GetObject,
ListObjectsV2, CopyObject, DeleteObjects) and its page on `aws-chunked` bodies with trailing
checksums. Signatures and checksums are not looked at. Every bucket exists.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.sink_objects import Body, Objects, RefusedError, Stored

# Bodies below this are kept in any case, so that indexes, markers and small values are real.
KEEP_BELOW_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 20
_HEAD_BYTES = 1 << 16
_THROTTLED_BYTES = 1 << 20
_DISCARD = socket.MSG_TRUNC | socket.MSG_WAITALL  # Linux: tcp(7)
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


class Throttle:
    """Takes bytes at a given rate, all connections together.

    Args:
        bytes_per_second: the rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, size_bytes: int) -> None:
        """Wait until the bytes before these have been taken."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_second
            wait_seconds = self._free_at - now
        time.sleep(wait_seconds)


class Connection:
    """Serves one client until it closes; one thread each."""

    def __init__(
        self,
        connection: socket.socket,
        objects: Objects,
        *,
        keep: bool,
        throttle: Throttle | None = None,
    ) -> None:
        self._socket = connection
        self._objects = objects
        self._keep = keep
        self._throttle = throttle
        self._ahead = b""  # received, but not yet looked at
        self._scratch = mmap.mmap(-1, _SCRATCH_BYTES)  # never touched

    def serve(self) -> None:
        """Answer requests until the client goes away."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._socket, self._scratch, contextlib.suppress(ConnectionError):
            while (request := self._read_head()) is not None:
                if request.headers.get("expect", "").lower() == "100-continue":
                    self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = self._read_body(request)
                try:
                    self._answer(request, body)
                except RefusedError as error:
                    text = f"<Error><Code>{error.code}</Code><Message>sink</Message></Error>"
                    # The answer to a HEAD has no body.
                    self._reply(error.status, "" if request.method == "HEAD" else text)

    def _read_head(self) -> _Request | None:
        while b"\r\n\r\n" not in self._ahead:
            received = self._socket.recv(_HEAD_BYTES)
            if not received:
                return None
            self._ahead += received
        head, self._ahead = self._ahead.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        fields = parse_qs(query, keep_blank_values=True)
        return _Request(method, bucket, key, {k: v[0] for k, v in fields.items()}, headers)

    def _read_body(self, request: _Request) -> Body | bytearray:
        """The body, if it is kept as bytes or in memory files; else only its size."""
        length = request.length_bytes
        chunked = "aws-chunked" in request.headers.get("content-encoding", "")
        drop = request.method == "PUT" and length >= KEEP_BELOW_BYTES and not self._keep
        if drop:
            self._discard(length)
            size = int(request.headers["x-amz-decoded-content-length"]) if chunked else length
            return Body(size, None)
        received = bytearray(length)
        count = min(length, len(self._ahead))
        received[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        view = memoryview(received)[count:]
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionError("the client closed in the middle of a body")
            view = view[got:]
        view.release()
        return _join_chunks(received) if chunked else received

    def _discard(self, length: int) -> None:
        count = min(length, len(self._ahead))
        self._ahead = self._ahead[count:]
        length -= count
        while length:
            most = _SCRATCH_BYTES if self._throttle is None else _THROTTLED_BYTES
            got = self._socket.recv_into(self._scratch, min(length, most), _DISCARD)
            if not got:
                raise ConnectionError("the client closed in the middle of a body")
            length -= got
            if self._throttle is not None:
                self._throttle.take(got)

    def _reply(self, status: str, text: str = "", headers: str = "") -> None:
        body = text.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._socket.sendall(head.encode() + body)

    def _answer(self, request: _Request, body: Body | bytearray) -> None:
        if request.bucket == "__stats":
            if request.method == "DELETE":
                self._objects.reset_stats()
            self._reply("200 OK", json.dumps(self._objects.stats()))
            return
        verb = _verb(request)
        size = body.size_bytes if isinstance(body, Body) else len(body)
        if verb != "GET":
            self._objects.count(verb, received_bytes=size)
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

    def _bucket(self, request: _Request, body: Body | bytearray) -> None:
        del request, body
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

    def _copy(self, request: _Request, body: Body | bytearray) -> None:
        del body
        source = unquote(request.headers["x-amz-copy-source"]).lstrip("/")
        copied = self._objects.get(source).body
        stored = self._objects.put(request.place, copied, **request.conditions)
        tags = f"<ETag>{escape(stored.e_tag)}</ETag><LastModified>{_LIST_DATE}</LastModified>"
        self._reply("200 OK", f"<CopyObjectResult>{tags}</CopyObjectResult>")

    def _begin(self, request: _Request, body: Body | bytearray) -> None:
        del body
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

    def _abort(self, request: _Request, body: Body | bytearray) -> None:
        del body
        self._objects.abort_upload(request.place, request.query["uploadId"])
        self._reply("204 No Content")

    def _delete(self, request: _Request, body: Body | bytearray) -> None:
        del body
        self._objects.delete(request.place)
        self._reply("204 No Content")

    def _delete_many(self, request: _Request, body: Body | bytearray) -> None:
        assert isinstance(body, bytearray)
        for element in ElementTree.fromstring(bytes(body)).iter():
            if element.tag.endswith("Key"):
                self._objects.delete(f"{request.bucket}/{element.text}")
        self._reply("200 OK", "<DeleteResult></DeleteResult>")

    def _get(self, request: _Request, body: Body | bytearray) -> None:
        del body
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
            self._objects.count("GET", sent_bytes=end - start)
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {end - start}\r\nETag: {stored.e_tag}\r\n"
            f"Accept-Ranges: bytes\r\n{_DATE}{extra}\r\n"
        )
        self._socket.sendall(head.encode())
        if request.method == "GET":
            stored.body.send(self._socket, start, end)

    def _list(self, request: _Request, body: Body | bytearray) -> None:
        del body
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
