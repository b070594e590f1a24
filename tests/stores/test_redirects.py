"""A redirect to another host takes no request there over boto3; obstore and s3fs follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp_objstore as dos
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import ConfigError, StoreUnavailableError, UnsupportedError
from dcp_objstore.observe.events import NotCopied
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.ranges import read_range
from tests.support.campaign import cases
from tests.support.hf_gateway import HfGateway, carries_credentials
from tests.support.scripted import Answer, ScriptedServer
from tests.support.servers import Bucket
from tests.support.states import same_bits, seeded

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


on_seaweed = pytest.mark.backends("seaweed")


@pytest.fixture
def gateway(bucket: Bucket) -> Iterator[HfGateway]:
    with HfGateway(bucket.storage_options) as gateway:
        yield gateway


def state(rows: int = 100) -> dict[str, torch.Tensor]:
    # Large enough for the direct lane; with 1500 rows also for a copy by the store.
    return {"wide": seeded("wide", (rows, 1000)), "small": seeded("small", (3,))}


def assert_whole(tensors: Mapping[str, object], rows: int = 100) -> None:
    for key, value in state(rows).items():
        read = tensors[key]
        assert isinstance(read, torch.Tensor)
        assert same_bits(value, read)


def empty(rows: int = 100) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in state(rows).items()}


@on_seaweed
@pytest.mark.parametrize("edge_host", cases(["localhost", "127.0.0.1"], default=["localhost"]))
def test_reads_follow_the_redirect_to_the_edge_without_credentials(
    bucket, gateway, edge_host, tmp_path
):
    """To another host, and to another port of the same host."""
    gateway.edge_host = edge_host
    options = gateway.storage_options
    url, copy = bucket.at("step-1"), bucket.at("copy")
    loaded = empty()
    dos.save(state(), url, storage_options=options)
    dos.load(loaded, url, storage_options=options)
    checkpoint = dos.open(url, storage_options=options)
    read = checkpoint.read()
    assert checkpoint.verify(deep=True).ok
    dos.copy_checkpoint(url, copy, storage_options=options)
    exported = dos.export_checkpoint(copy, tmp_path / "m.safetensors", storage_options=options)
    for tensors in (loaded, read, load_file(exported.files[0])):
        assert_whole(tensors)
    data = [target for target, headers in gateway.edge.requests if "range" in lower(headers)]
    markers = [target for target, headers in gateway.edge.requests if "range" not in lower(headers)]
    assert data
    assert markers
    assert not any(carries_credentials(*request) for request in gateway.edge.requests)
    assert any(asked.signed_url for asked in gateway.asked)  # which is declined, and no more


def lower(headers: dict[str, str]) -> set[str]:
    return {name.lower() for name in headers}


@on_seaweed
@pytest.mark.parametrize("transport", cases(["native", "boto3", "fsspec"], default=["native"]))
def test_what_the_gateway_does_not_copy_is_uploaded(bucket, gateway, transport):
    options = {**gateway.storage_options, "transport": transport}
    large = state(rows=1500)
    dos.save(large, bucket.at("step-1"), storage_options=options)
    events: list[Any] = []
    report = dos.save(
        large, bucket.at("step-2"), base="latest", storage_options=options, on_event=events.append
    )
    (refused,) = [event for event in events if isinstance(event, NotCopied)]
    assert "NotImplemented" in refused.reason
    assert report.copied_bytes == 0
    assert bucket.uploads() == []
    loaded = empty(rows=1500)
    dos.load(loaded, bucket.at("step-2"), storage_options=bucket.storage_options)
    assert_whole(loaded, rows=1500)
    # What calls itself botocore gets the bytes from the gateway.
    assert bool(gateway.edge.requests) == (transport == "native")


@on_seaweed
def test_an_edge_with_etags_of_its_own_takes_the_overwriting_and_nothing_else(bucket, gateway):
    """A token that the edge gives is refused by the gateway, so nothing is replaced by it."""
    gateway.edge.e_tag = '"of the edge"'
    url, options = bucket.at("step-1"), gateway.storage_options
    dos.save(state(), url, storage_options=options)
    before = bucket.sizes()
    with pytest.raises(UnsupportedError, match="save under another URL"):
        dos.save(empty(), url, overwrite=True, storage_options=options)
    assert bucket.sizes() == before
    loaded = empty()
    dos.load(loaded, url, storage_options=options)
    assert_whole(loaded)
