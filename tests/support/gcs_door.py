"""What GCS's XML API adds to S3's, in front of a backend that speaks S3: the GCS door of moto.

obstore speaks this API. The rules are those of the Cloud Storage documentation ("Request
preconditions", "HTTP headers", "Status and error codes" and "Multipart uploads" of the XML API):
- every object has a generation, a number that grows with each write of it and that every answer
  about the object carries in `x-goog-generation`;
- `x-goog-if-generation-match: N` lets a write through only if N is the object's generation, 0 if
  there is no object; otherwise 412. Check and write are one step;
- deleting what is not there is 404;
- a bearer token that is not valid (any more) is 401.

For tests of tokens that expire, `POST /o/token?lifetime=SECONDS` hands one out, and
`POST /o/revoke?token=TOKEN` takes it back. All other tokens are valid for ever.

A listing has 50 keys a page; `POST /o/pages?bucket=BUCKET&keys=N` makes it fewer for a bucket.

Of the JSON API it has the bucket ("Buckets: get" and "patch"), with its lifecycle and versioning:
`/storage/v1/b/BUCKET`; and "Objects: rewrite", in two requests from `LONG_BYTES` on.

GCS takes one write of an object in a second ("Quotas & limits") and answers 429 to more, though not
always: `POST /o/limit?prefix=/bucket/prefix&seconds=S` makes it so below a prefix, for each write
within S seconds of the last one, whatever its precondition.
"""

from __future__ import annotations

import io
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, quote

Answer = tuple[str, list[tuple[str, str]], bytes]
WsgiApp = Callable[..., Iterable[bytes]]
# moto checks no signatures, but treats a caller without one as the anonymous public.
SOMEBODY = "AWS4-HMAC-SHA256 Credential=gcs/20260101/us-east-1/s3/aws4_request"
# An object that is not rewritten in one request.
LONG_BYTES = 8 << 20
HANDED_OUT = "ya29.handed-out-"


def call(app: WsgiApp, environ: dict[str, Any]) -> Answer:
    """One request to a WSGI application, with its answer read to the end."""
    head: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], *_: object) -> None:
        head.append((status, headers))

    body = app(environ, start_response)
    try:
        data = b"".join(body)
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()
    return head[0][0], head[0][1], data


class OneAtATime:
    """The S3 door: reads the request's body first, then asks moto under one lock."""

    def __init__(self, app: WsgiApp, lock: threading.RLock) -> None:
        self.app, self.lock = app, lock

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., object]
    ) -> list[bytes]:
        if not environ.get("wsgi.input_terminated"):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self.lock:
            status, headers, body = self.answer(environ)
        start_response(status, headers)
        return [body]

    def answer(self, environ: dict[str, Any]) -> Answer:
        return call(self.app, environ)


class GcsDoor(OneAtATime):
    """The GCS door; see the module."""

    def __init__(self, app: WsgiApp, lock: threading.RLock) -> None:
        super().__init__(app, lock)
        self.counter = itertools.count(1_700_000_000_000_000)
        self.known: dict[str, tuple[str, int]] = {}
        self.valid_until: dict[str, float] = {}
        self.page_keys: dict[str, int] = {}
        self.buckets: dict[str, Any] = {}
        self.limits: dict[str, float] = {}
        self.written_at: dict[str, float] = {}
        self.rewrites: set[str] = set()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., object]
    ) -> list[bytes]:
        # When the head has come, and not after a body that may take its time.
        kind, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        environ["gcs.stale"] = kind == "Bearer" and self.is_stale(token)
        return super().__call__(environ, start_response)

    def answer(self, environ: dict[str, Any]) -> Answer:
        query = environ.get("QUERY_STRING", "")
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/o/") and method == "POST":
            asked = {name: values[0] for name, values in parse_qs(query).items()}
            return self.control(path, asked)
        if environ["gcs.stale"]:
            return refusal("401 Unauthorized", "AuthenticationRequired", method)
        environ["HTTP_AUTHORIZATION"] = SOMEBODY
        if path.startswith("/storage/v1/b/"):
            return self.of_bucket(environ, method, path.removeprefix("/storage/v1/b"))
        if path in self.page_keys and "list-type=2" in query:
            query = environ["QUERY_STRING"] = f"{query}&max-keys={self.page_keys[path]}"
        # obstore's GCS client escapes `-` and `.` too, and moto takes the bucket's name as sent.
        plain = quote(path.encode("latin-1")) + (f"?{query}" if query else "")
        environ["RAW_URI"] = environ["REQUEST_URI"] = plain
        refused = self.refused(environ, method, path, query)
        if refused is not None:
            return refusal(*refused, method)
        status, headers, body = call(self.app, environ)
        if not status.startswith("2"):
            return status, headers, body
        if writes_object(method, query):
            self.known.pop(path, None)  # a write of the same bytes counts too
            self.written_at[path] = time.monotonic()
        generation = self.generation(environ)
        if generation:
            headers = [*headers, ("x-goog-generation", str(generation))]
        return status, headers, body

    def refused(
        self, environ: dict[str, Any], method: str, path: str, query: str
    ) -> tuple[str, str] | None:
        """Status and code, where a rule of GCS that moto does not know stands in the way."""
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if writes_object(method, query) and self.is_too_soon(path):
            return "429 Too Many Requests", "SlowDown"
        if wanted is not None and self.generation(environ) != int(wanted):
            return "412 Precondition Failed", "PreconditionFailed"
        if method == "DELETE" and not query and self.is_absent(environ):
            return "404 Not Found", "NoSuchKey"
        return None

    def control(self, path: str, asked: dict[str, str]) -> Answer:
        """What a test asks of the door itself."""
        if path == "/o/limit":
            self.limits[asked["prefix"]] = float(asked["seconds"])
            return "200 OK", [("Content-Type", "application/json")], b"{}"
        if path == "/o/revoke":
            self.valid_until[asked["token"]] = 0.0
            return "200 OK", [("Content-Type", "application/json")], b"{}"
        if path == "/o/pages":
            self.page_keys[f"/{asked['bucket']}"] = int(asked["keys"])
            return "200 OK", [("Content-Type", "application/json")], b"{}"
        return self.hand_out(float(asked["lifetime"]))

    def of_bucket(self, environ: dict[str, Any], method: str, bucket: str) -> Answer:
        if "/rewriteTo/b/" in bucket:
            return self.rewrite(environ, *bucket.split("/rewriteTo/b"))
        if not self.ask_moto(environ, bucket)[0].startswith("200"):
            return refusal("404 Not Found", "notFound", method)
        if method == "PATCH":
            self.buckets[bucket] = json.loads(environ["wsgi.input"].read())
        found = self.buckets.get(bucket, {})
        return "200 OK", [("Content-Type", "application/json")], json.dumps(found).encode()

    def rewrite(self, environ: dict[str, Any], *places: str) -> Answer:
        """Copy an object, if its generation is the one that is asked for."""
        source, target = (place.replace("/o/", "/", 1) for place in places)
        asked = {name: one[0] for name, one in parse_qs(environ["QUERY_STRING"]).items()}
        status, headers, _ = self.ask_moto(environ, source)
        if not status.startswith("200"):
            return refusal("404 Not Found", "notFound", "POST")
        wanted = asked.get("ifSourceGenerationMatch")
        if wanted and self.generation({**environ, "PATH_INFO": source}) != int(wanted):
            return refusal("412 Precondition Failed", "conditionNotMet", "POST")
        size = int(next(value for name, value in headers if name.lower() == "content-length"))
        token = asked.get("rewriteToken", "")
        answer: dict[str, object] = {"done": True, "totalBytesRewritten": str(size)}
        if size >= LONG_BYTES and not token:
            self.rewrites.add(token := secrets.token_hex(8) + "+/=")
            answer = {"done": False, "totalBytesRewritten": str(size // 2), "rewriteToken": token}
        elif token and token not in self.rewrites:
            return refusal("400 Bad Request", "invalid", "POST")
        else:
            self.known.pop(target, None)
            copy_source = {"HTTP_X_AMZ_COPY_SOURCE": quote(source.encode("latin-1"))}
            status, _, body = self.ask_moto({**environ, **copy_source}, target, "PUT")
            assert status.startswith("200"), body
        return "200 OK", [("Content-Type", "application/json")], json.dumps(answer).encode()

    def hand_out(self, lifetime_seconds: float) -> Answer:
        token = HANDED_OUT + secrets.token_hex(8)
        self.valid_until[token] = time.monotonic() + lifetime_seconds
        answer = {"access_token": token, "expires_in": lifetime_seconds}
        return "200 OK", [("Content-Type", "application/json")], json.dumps(answer).encode()

    def is_too_soon(self, path: str) -> bool:
        pause = max((s for prefix, s in self.limits.items() if path.startswith(prefix)), default=0)
        return time.monotonic() < self.written_at.get(path, -1.0) + pause

    def is_stale(self, token: str) -> bool:
        known = self.valid_until.get(token, 0.0)
        return token.startswith(HANDED_OUT) and time.monotonic() > known

    def generation(self, environ: dict[str, Any]) -> int:
        """The object's generation, 0 where there is none. Asks moto: the S3 door writes too."""
        path = environ["PATH_INFO"]
        if not is_object(path):
            return 0
        status, headers, _ = self.ask_moto(environ, path)
        if not status.startswith("200"):
            self.known.pop(path, None)
            return 0
        e_tag = next(value for name, value in headers if name.lower() == "etag")
        if path not in self.known or self.known[path][0] != e_tag:
            self.known[path] = (e_tag, next(self.counter))
        return self.known[path][1]

    def is_absent(self, environ: dict[str, Any]) -> bool:
        """Whether the bucket is there and the object is not."""
        if not is_object(environ["PATH_INFO"]) or self.generation(environ):
            return False
        bucket = "/" + environ["PATH_INFO"].lstrip("/").partition("/")[0]
        return self.ask_moto(environ, bucket)[0].startswith("200")

    def ask_moto(self, environ: dict[str, Any], path: str, method: str = "HEAD") -> Answer:
        """A request of our own."""
        probe = {
            **{name: environ[name] for name in environ if not name.startswith("HTTP_")},
            **{name: environ[name] for name in environ if name == "HTTP_X_AMZ_COPY_SOURCE"},
            "HTTP_HOST": environ["HTTP_HOST"],
            "HTTP_AUTHORIZATION": SOMEBODY,
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": "",
            "RAW_URI": quote(path.encode("latin-1")),
            "REQUEST_URI": quote(path.encode("latin-1")),
            "CONTENT_LENGTH": "0",
            "wsgi.input": io.BytesIO(),
        }
        return call(self.app, probe)


def is_object(path: str) -> bool:
    return path.count("/") >= 2 and not path.endswith("/")


def writes_object(method: str, query: str) -> bool:
    """A whole object, or the completion of an upload; not its beginning, nor one of its parts."""
    if method == "PUT":
        return "uploadId=" not in query
    return method == "POST" and "uploadId=" in query


def refusal(status: str, code: str, method: str) -> Answer:
    body = b"" if method == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    return status, headers, body
