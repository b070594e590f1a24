"""An HTTP server that answers what a test says, with the error bodies of the provider it plays."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple, Self

from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import ObjectStore, StoreSpec
from tests.support.tls import speak_tls
from tests.support.verbs import ONCE

Dialect = Literal["s3", "gcs-xml", "gcs-json", "azure"]


class Answer(NamedTuple):
    """What is answered: also as a plain tuple."""

    status: int
    headers: dict[str, str]
    body: bytes


# What has gone wrong, whatever the provider calls it.
Fault = Literal[
    "forbidden",
    "no object",
    "no bucket",
    "conflict",
    "precondition",
    "bad range",
    "too many",
    "internal",
    "busy",
    "expired",
]

# Status and code of each fault, as the providers document them.
_CODES: dict[Dialect, dict[Fault, tuple[int, str]]] = {
    "s3": {
        "forbidden": (403, "AccessDenied"),
        "no object": (404, "NoSuchKey"),
        "no bucket": (404, "NoSuchBucket"),
        "conflict": (409, "ConditionalRequestConflict"),
        "precondition": (412, "PreconditionFailed"),
        "bad range": (416, "InvalidRange"),
        "too many": (429, "SlowDown"),
        "internal": (500, "InternalError"),
        "busy": (503, "SlowDown"),
        "expired": (400, "ExpiredToken"),
    },
    "gcs-xml": {
        "forbidden": (403, "AccessDenied"),
        "no object": (404, "NoSuchKey"),
        "no bucket": (404, "NoSuchBucket"),
        "precondition": (412, "PreconditionFailed"),
        "bad range": (416, "InvalidRange"),
        "too many": (429, "SlowDown"),
        "internal": (500, "InternalError"),
        "busy": (503, "ServiceUnavailable"),
        "expired": (401, "AuthenticationRequired"),
    },
    "gcs-json": {
        "forbidden": (403, "forbidden"),
        "no object": (404, "notFound"),
        "no bucket": (404, "notFound"),
        "precondition": (412, "conditionNotMet"),
        "bad range": (416, "requestedRangeNotSatisfiable"),
        "too many": (429, "rateLimitExceeded"),
        "internal": (500, "internalError"),
        "busy": (503, "backendError"),
        "expired": (401, "authError"),
    },
    "azure": {
        "forbidden": (403, "AuthorizationPermissionMismatch"),
        "no object": (404, "BlobNotFound"),
        "no bucket": (404, "ContainerNotFound"),
        "conflict": (409, "BlobAlreadyExists"),
        "precondition": (412, "ConditionNotMet"),
        "bad range": (416, "InvalidRange"),
        "too many": (429, "ServerBusy"),
        "internal": (500, "InternalError"),
        "busy": (503, "ServerBusy"),
        "expired": (401, "InvalidAuthenticationInfo"),
    },
}
_GCS_JSON_MESSAGES: dict[Fault, str] = {
    "no object": "No such object: bucket/k",
    "no bucket": "The specified bucket does not exist.",
    "expired": "Invalid Credentials",
}


def fault_answer(dialect: Dialect, fault: Fault) -> Answer | None:
    """What the provider answers then; None if it never does."""
    if fault not in _CODES[dialect]:
        return None
    status, code = _CODES[dialect][fault]
    if dialect == "gcs-json":
        message = _GCS_JSON_MESSAGES.get(fault, code)
        reason = {"domain": "global", "reason": code, "message": message}
        error = {"code": status, "message": message, "errors": [reason]}
        body = json.dumps({"error": error}).encode()
        return Answer(status, {"Content-Type": "application/json; charset=UTF-8"}, body)
    text = f"<Error><Code>{code}</Code><Message>m</Message></Error>"
    headers = {"Content-Type": "application/xml"}
    if dialect == "azure":
        headers["x-ms-error-code"] = code
    return Answer(status, headers, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())


class HttpServer(ThreadingHTTPServer):
    """HTTP/1.1 on loopback, in threads, until the `with` block ends; a subclass gives `reply`.

    Args:
        tls: makes it an HTTPS server.
    """

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint_url = f"http://127.0.0.1:{self.server_port}"
        if tls is not None:
            speak_tls(self, tls)
            self.endpoint_url = f"https://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def reply(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        """The answer to a request; None: hang up without one."""
        raise NotImplementedError

    def turn(self) -> AbstractContextManager[object]:
        """Return what is held while a request is answered."""
        return nullcontext()

    def stop(self) -> None:
        """Refuse connections from now on; those that are open stay."""
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def handle_error(self, *_: object) -> None:
        """Clients may go away in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpServer

    def _do(self) -> None:
        received = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = dict(self.headers.items())
        with self.server.turn():
            self._answer(self.server.reply(self.command, self.path, headers, received))

    def _answer(self, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection = True
            return
        self.send_response_only(answer[0])
        fields = {"Content-Length": str(len(answer[2])), **answer[1]}
        has_length = "Transfer-Encoding" not in fields and fields["Content-Length"] != ""
        if not has_length:
            del fields["Content-Length"]
            self.close_connection |= "Transfer-Encoding" not in fields
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer[2])
            self.close_connection |= has_length and len(answer[2]) != int(fields["Content-Length"])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815 - http.server's names

    def log_message(self, *_: object) -> None:
        pass


class ScriptedServer(HttpServer):
    """Answers what `answer(method, target, nth)` says; after None it hangs up.

    A `Content-Length` in the answer's headers counts, whatever its body has.

    Attributes:
        requests: method, target and headers of every request so far.
    """

    def __init__(
        self,
        answer: Callable[[str, str, int], Answer | None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._count = itertools.count(1)
        if answer is not None:
            self.answer = answer
        super().__init__(tls)

    def reply(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer | None:
        self.requests.append((method, target, headers))
        return self.answer(method, target, next(self._count))


class RawServer:
    """Sends the same bytes to each client that says something, and hangs up or stays.

    Attributes:
        heads: what came over each connection before the answer.
    """

    def __init__(self, answer: bytes = b"", *, hang_up: bool = True) -> None:
        self.heads: list[str] = []
        self._answer, self._hang_up = answer, hang_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        held = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed at the end of the test
                return
            self.heads.append(connection.recv(65536).decode("latin-1"))
            connection.sendall(self._answer)
            if self._hang_up:
                connection.close()
            else:
                held.append(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port that refuses connections: bound, so that nobody else gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


class Scripted(ScriptedServer):
    """The scripted server, and the S3 store in front of it."""

    config = ONCE

    def spec(self, config: TransferConfig | None = None, **options: object) -> StoreSpec:
        base: dict[str, object] = {"key": "a", "secret": "b", "endpoint_url": self.endpoint_url}
        return StoreSpec("s3://bucket/run", {**base, **options}, config or self.config)

    def store(self, config: TransferConfig | None = None, **options: object) -> ObjectStore:
        return self.spec(config, **options).open()
