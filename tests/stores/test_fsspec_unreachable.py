"""A server that s3fs or gcsfs cannot reach: it is given up soon, and the error says what to do."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, PermissionDeniedError, StoreUnavailableError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.fsspec.errors import translate_fsspec

S3 = {"key": "a", "secret": "b"}
GS: dict[str, object] = {"anon": True}
BOTH = pytest.mark.parametrize(
    ("url", "options"), [("s3://bucket/run", S3), ("gs://bucket/run", GS)]
)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.stores.retries.FIRST_PATIENCE_SECONDS", 0.2)


class Listener:
    """A server that answers each request with the same, or takes connections and says nothing."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        held = []
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.requests.append(connection.recv(65536).decode("latin-1").partition("\r")[0])
            if not self.answer:
                held.append(connection)
                continue
            with connection:
                connection.sendall(self.answer)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def silent() -> Iterator[Listener]:
    found = Listener(b"")
    yield found
    found.close()


@pytest.fixture
def forbidding() -> Iterator[Listener]:
    found = Listener(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    yield found
    found.close()


def at(url: str, options: dict[str, object], endpoint_url: str) -> ObjectStore:
    given = {**options, "endpoint_url": endpoint_url, "transport": "fsspec"}
    return open_store(url, given, TransferConfig(request_timeout_seconds=2))


@BOTH
def test_a_refused_connection_is_given_up_and_says_what_to_check(
    url: str, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        began_at = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=endpoint.removeprefix("http://")) as caught:
            at(url, options, endpoint).get("k", max_size_bytes=10)
    assert time.monotonic() - began_at < 5
    assert str(caught.value).count("check endpoint_url") == 1
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@BOTH
def test_a_server_that_says_nothing_is_asked_once(
    silent: Listener, url: str, options: dict[str, object]
) -> None:
    with pytest.raises(StoreUnavailableError, match="check endpoint_url"):
        at(url, options, silent.url).put("k", b"body")
    assert len(silent.requests) == 1


@BOTH
def test_a_server_that_refuses_is_asked_once_and_for_nothing_else(
    forbidding: Listener, url: str, options: dict[str, object]
) -> None:
    store = at(url, options, forbidding.url)
    for _ in range(2):
        with pytest.raises(PermissionDeniedError):
            store.put("k", b"body")
    assert len(forbidding.requests) == 2


def test_tls_where_there_is_none_is_a_wrong_setting_and_is_tried_once(
    forbidding: Listener,
) -> None:
    with pytest.raises(ConfigError, match="SSL"):
        at("s3://bucket/run", S3, forbidding.url.replace("http:", "https:")).put("k", b"body")
    assert len(forbidding.requests) == 1


def test_a_connection_that_was_never_made_is_no_wrong_setting() -> None:
    from botocore.exceptions import EndpointConnectionError

    found = translate_fsspec(EndpointConnectionError(endpoint_url="http://x"))
    assert type(found) is StoreUnavailableError
    assert "check endpoint_url and that the server runs" in found.message
