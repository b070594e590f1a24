"""A redirect to another host takes no request there over boto3; obstore and s3fs follow it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, StoreUnavailableError
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.ranges import read_range
from tests.support.scripted import Answer, ScriptedServer

SIZE = 300_000  # enough for the direct lane
TOKEN = "x-amz-security-token"


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """A server that has the object."""
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}",
    }
    with ScriptedServer(lambda *_: Answer(206, headers, bytes(SIZE))) as found:
        yield found


@pytest.fixture
def redirecting(elsewhere: ScriptedServer) -> Iterator[ScriptedServer]:
    """A store that redirects each request there, by another name."""
    there = elsewhere.endpoint_url.replace("127.0.0.1", "localhost")

    def answer(method: str, target: str, nth: int) -> Answer:
        return Answer(307, {"Location": there + target}, b"")

    with ScriptedServer(answer) as found:
        yield found


def store_over(transport: str, server: ScriptedServer) -> ObjectStore:
    options = {"key": "a", "secret": "b", "token": "c", "endpoint_url": server.endpoint_url}
    config = TransferConfig(transport=transport, max_retries=0, request_timeout_seconds=2)
    return open_store("s3://bucket/run", options, config)


def test_a_redirect_to_another_host_is_not_followed_over_boto3(redirecting, elsewhere):
    store = store_over("boto3", redirecting)
    with pytest.raises((ConfigError, StoreUnavailableError)):
        read_range(store, "k", 0, SIZE)
    with pytest.raises((ConfigError, StoreUnavailableError)):
        store.put("k", b"x")
    assert redirecting.requests
    assert elsewhere.requests == []


def test_the_direct_lane_follows_none_and_obstore_all_with_the_session_token(
    redirecting, elsewhere
):
    """A fact about obstore 0.12, which has no switch: see docs/stores.md."""
    assert read_range(store_over("native", redirecting), "k", 0, SIZE) == bytes(SIZE)
    (direct, by_obstore) = redirecting.requests
    assert "X-Amz-Signature" in direct[1]
    assert "X-Amz-Signature" not in by_obstore[1]
    ((_, _, headers),) = elsewhere.requests
    sent = {name.lower() for name in headers}
    assert TOKEN in sent
    assert "authorization" not in sent
