"""A moto S3 server in a process of its own, with a second door that speaks GCS's XML API.

Run as `python moto_process.py`: prints the two ports, ends when standard input ends. moto's
backend has no locks, so every request to it is made whole, one at a time: that is what makes
conditional puts atomic here.
"""

from __future__ import annotations

import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Answer = tuple[str, list[tuple[str, str]], bytes]
WsgiApp = Callable[..., Iterable[bytes]]
# moto checks no signatures, but treats a caller without one as the anonymous public.
SOMEBODY = "AWS4-HMAC-SHA256 Credential=gcs/20260101/us-east-1/s3/aws4_request"


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
    """The GCS door: generations, and preconditions on them, in front of the same backend.

    Source: "Request preconditions" and "HTTP headers" of the Cloud Storage XML API reference:
    `x-goog-if-generation-match: 0` means the object must not exist; every answer about an object
    carries `x-goog-generation`, a number that grows with each write of the object.
    """

    def __init__(self, app: WsgiApp, lock: threading.RLock) -> None:
        super().__init__(app, lock)
        self.counter = itertools.count(1_700_000_000_000_000)
        self.known: dict[str, tuple[str, int]] = {}

    def answer(self, environ: dict[str, Any]) -> Answer:
        environ["HTTP_AUTHORIZATION"] = SOMEBODY
        # obstore's GCS client escapes `-` and `.` too, and moto takes the bucket's name as sent.
        query = environ.get("QUERY_STRING", "")
        plain = quote(environ["PATH_INFO"].encode("latin-1")) + (f"?{query}" if query else "")
        environ["RAW_URI"] = environ["REQUEST_URI"] = plain
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if wanted is not None and self.generation(environ) != int(wanted):
            refusal = b"<Error><Code>PreconditionFailed</Code></Error>"
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(refusal)))]
            return "412 Precondition Failed", headers, refusal
        writes = environ["REQUEST_METHOD"] in {"PUT", "POST"}
        part_of_upload = "uploadId=" in environ.get("QUERY_STRING", "")
        status, headers, body = call(self.app, environ)
        if status.startswith("2"):
            is_object_write = writes and (environ["REQUEST_METHOD"] == "POST" or not part_of_upload)
            if is_object_write:
                self.known.pop(environ["PATH_INFO"], None)  # a write of the same bytes counts too
            generation = self.generation(environ)
            if generation:
                headers = [*headers, ("x-goog-generation", str(generation))]
        return status, headers, body

    def generation(self, environ: dict[str, Any]) -> int:
        """The object's generation, 0 where there is none. Asks moto: the S3 door writes too."""
        key = environ["PATH_INFO"]
        if key.count("/") < 2 or key.endswith("/"):
            return 0
        probe = {
            **{name: environ[name] for name in environ if not name.startswith("HTTP_")},
            "HTTP_HOST": environ["HTTP_HOST"],
            "HTTP_AUTHORIZATION": SOMEBODY,
            "REQUEST_METHOD": "HEAD",
            "QUERY_STRING": "",
            "RAW_URI": quote(key),
            "REQUEST_URI": quote(key),
            "CONTENT_LENGTH": "0",
            "wsgi.input": io.BytesIO(),
        }
        status, headers, _ = call(self.app, probe)
        if not status.startswith("200"):
            self.known.pop(key, None)
            return 0
        e_tag = next(value for name, value in headers if name.lower() == "etag")
        if key not in self.known or self.known[key][0] != e_tag:
            self.known[key] = (e_tag, next(self.counter))
        return self.known[key][1]


class QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # keep connections: two servers' worth of handshakes saved

    def log_request(self, *_: object) -> None:
        pass


def main() -> None:
    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.RLock()
    for door in (OneAtATime(app, lock), GcsDoor(app, lock)):
        server = make_server("127.0.0.1", 0, door, threaded=True, request_handler=QuietHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
