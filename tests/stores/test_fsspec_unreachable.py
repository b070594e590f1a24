"""A server that cannot be reached over fsspec: the error says what to do, soon over s3fs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, PermissionDeniedError, StoreUnavailableError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.s3.s3fs import judge_s3fs
from tests.support.scripted import RawServer, refusing

S3 = {"key": "a", "secret": "b"}
GS: dict[str, object] = {"anon": True}
BOTH = pytest.mark.parametrize(
    ("url", "options"), [("s3://bucket/run", S3), ("gs://bucket/run", GS)]
)


@pytest.fixture(autouse=True)
def short_pauses() -> None:
    """Not here: with them, it would be given up soon in any case."""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.stores.retries.FIRST_PATIENCE_SECONDS", 0.2)


@pytest.fixture
def silent() -> Iterator[RawServer]:
    with RawServer(b"", hang_up=False) as server:
        yield server


@pytest.fixture
def forbidding() -> Iterator[RawServer]:
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with RawServer(head) as server:
        yield server


def at(
    url: str, options: dict[str, object], endpoint_url: str, seconds: float = 200
) -> ObjectStore:
    given = {**options, "endpoint_url": endpoint_url, "transport": "fsspec"}
    return open_store(url, given, TransferConfig(request_timeout_seconds=seconds))


def test_a_refused_connection_is_given_up_and_says_what_to_check(caplog):
    began_at = time.monotonic()
    with (
        refusing() as endpoint,
        pytest.raises(StoreUnavailableError, match=endpoint.removeprefix("http://")) as caught,
    ):
        at("s3://bucket/run", S3, endpoint).get("k", max_size_bytes=10)
    assert time.monotonic() - began_at < 25  # all retries take 31 s and more
    assert str(caught.value).count("check endpoint_url") == 1
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@BOTH
def test_a_server_that_says_nothing_is_asked_once(silent, url, options):
    with pytest.raises(StoreUnavailableError, match="check endpoint_url"):
        # A busy machine needs seconds to send the first request.
        at(url, options, f"http://{silent.address}", seconds=5).put("k", b"body")
    assert len(silent.heads) == 1


@BOTH
def test_a_server_that_refuses_is_asked_once_and_for_nothing_else(forbidding, url, options):
    store = at(url, options, f"http://{forbidding.address}")
    for _ in range(2):
        with pytest.raises(PermissionDeniedError):
            store.put("k", b"body")
    assert len(forbidding.heads) == 2


def test_tls_where_there_is_none_is_a_wrong_setting_and_is_tried_once(forbidding):
    with pytest.raises(ConfigError, match="SSL"):
        at("s3://bucket/run", S3, f"https://{forbidding.address}").put("k", b"body")
    assert len(forbidding.heads) == 1


def test_a_connection_that_was_never_made_is_no_wrong_setting():
    from botocore.exceptions import EndpointConnectionError

    found = judge_s3fs(EndpointConnectionError(endpoint_url="http://x")).error
    assert type(found) is StoreUnavailableError
    assert "check endpoint_url and that the server runs" in found.advice
