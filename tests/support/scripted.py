"""An HTTP server that answers what a test says, with the error bodies of the provider it plays."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self

from dcp_objstore.config import TransferConfig
from dcp_objstore.stores import ObjectStore, StoreSpec
from tests.support.verbs import ONCE

Dialect = Literal["s3", "gcs-xml", "gcs-json", "azure"]
Answer = tuple[int, dict[str, str], bytes]
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
        return status, {"Content-Type": "application/json; charset=UTF-8"}, body
    text = f"<Error><Code>{code}</Code><Message>m</Message></Error>"
    headers = {"Content-Type": "application/xml"}
    if dialect == "azure":
        headers["x-ms-error-code"] = code
    return status, headers, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()


class ScriptedServer:
    """Answers what `answer(method, target, nth)` says; with a `Content-Length` of its own making,
    the connection is closed after the body.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.answer: Callable[[str, str, int], Answer]
        outer = self
        count = itertools.count(1)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path, dict(self.headers.items())))
                status, headers, body = outer.answer(self.command, self.path, next(count))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                if "Content-Length" in headers:
                    self.close_connection = True

            def __getattr__(self, name: str) -> Callable[[], None]:
                if name.startswith("do_"):
                    return self.handle_any
                raise AttributeError(name)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Scripted(ScriptedServer):
    """The scripted server, and the S3 store in front of it."""

    def spec(self, config: TransferConfig = ONCE, **options: object) -> StoreSpec:
        base: dict[str, object] = {"key": "a", "secret": "b", "endpoint_url": self.endpoint_url}
        return StoreSpec("s3://bucket/run", {**base, **options}, config)

    def store(self, config: TransferConfig = ONCE, **options: object) -> ObjectStore:
        return self.spec(config, **options).open()
