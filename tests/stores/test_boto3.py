"""The boto3 transport keeps the same contract as the native one, and more ways to be used."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import boto3
import numpy as np
import pytest
from moto import mock_aws

import dcp_objstore as dos
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    InputError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE, CopySource, IfAbsent, IfVersion, Version
from dcp_objstore.stores.s3.boto3 import JoinedBuffers
from dcp_objstore.stores.s3.upload import MultipartUpload
from tests.contract import PART, BucketContract, race
from tests.contract.buckets import S3_LACKS
from tests.support.proxy import Asked, Cut, NetworkProxy
from tests.support.servers import Bucket
from tests.support.states import fill, tensor_state, wrong_keys

BOTO3 = {"transport": "boto3"}
ONCE = TransferConfig(max_retries=0, transport="boto3")


class TestBucket(BucketContract):
    """SeaweedFS, moto and Ceph (or `--bucket-url`)."""

    endpoint = {  # noqa: RUF012
        "seaweed": "SeaweedFS (boto3)",
        "moto": "moto (boto3)",
        "ceph": "Ceph RGW (boto3)",
        "user": "your bucket (boto3)",
    }
    lacks = S3_LACKS
    dialect = "s3"
    race_rounds = 0
    races_at_once = 8

    def open(self, url: str, options: Mapping[str, object]) -> ObjectStore:
        return open_store(url, {**options, **BOTO3})

    def store_at(self, endpoint_url: str) -> ObjectStore:
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint_url}
        return open_store("s3://bucket/run", {**options, **BOTO3}, ONCE)


@pytest.mark.parametrize("key", ["a%20b", "a+b"])
def test_a_source_whose_key_a_server_may_misread_is_not_copied(key):
    """Ceph's gateway decodes it twice: it would copy `a b` for each of these."""
    store = open_store(
        "s3://bucket/run",
        {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:1", **BOTO3},
    )
    source = CopySource(f"s3://bucket/{key}", 0, 1, Version('"e"'))
    with pytest.raises(UnsupportedError, match="misread"):
        store.copy("k", [source], part_size_bytes=1, max_concurrency=1, moved=lambda _: None)


def test_nothing_is_made_of_a_source_that_was_replaced_while_it_was_copied(bucket):
    """A server that ignores the condition of a part would have copied parts of both."""
    store = open_store(bucket.url, {**bucket.storage_options, **BOTO3})
    version = store.put("from", b"first bytes")
    bucket.put("to", b"old")
    source = CopySource(bucket.at("from"), 0, 11, version)

    def replace(_: int) -> None:
        bucket.put("from", b"other bytes")

    with pytest.raises(PreconditionFailedError, match="changed"):
        store.copy("to", [source], part_size_bytes=11, max_concurrency=1, moved=replace)
    assert bucket.get("to") == b"old"
    assert bucket.keys() == ["from", "to"]
    assert not bucket.uploads()


def test_a_unit_test_saves_and_loads_under_mock_aws_where_one_creator_wins():
    """moto has no locks: without ours, 1 in 15 of the probe's races had two winners here."""
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="unit-test")
        state = tensor_state("plain")
        fill(state)
        dos.save(dict(state), "s3://unit-test/run/step-1", storage_options=BOTO3, progress=False)
        back = tensor_state("plain")
        dos.load(back, "s3://unit-test/run/step-1", storage_options=BOTO3, progress=False)
        assert wrong_keys(back) == []
        answer = boto3.client("s3", region_name="us-east-1").list_objects_v2(Bucket="unit-test")
        assert "run/step-1/_COMMIT" in [entry["Key"] for entry in answer["Contents"]]
        store = open_store("s3://unit-test/raced", BOTO3, ONCE)

        def create(_: int) -> Version:
            return store.put("k", b"1", precondition=IfAbsent(), retry=False)

        switching_seconds = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(10):
                assert len(race(8, create)) == 1
                store.delete("k")
        finally:
            sys.setswitchinterval(switching_seconds)
    with pytest.raises(InputError, match="e_tag"):
        store.put("k", b"x", precondition=IfVersion(Version(None, "7")))


# --- uploads


def through(bucket: Bucket, proxy: NetworkProxy, config: TransferConfig = ONCE) -> ObjectStore:
    return open_store(bucket.url, proxy.storage_options, config)


def stream(parts: int) -> Iterator[np.ndarray]:
    return (np.full(PART, number, dtype=np.uint8) for number in range(parts))


def is_part(asked: Asked) -> bool:
    return asked.method == "PUT" and "partNumber" in asked.query


@pytest.mark.backends("seaweed")
def test_a_part_that_is_cut_off_is_sent_again_from_its_beginning(bucket):
    with NetworkProxy(bucket.storage_options) as proxy:
        cut = [
            Cut("request", 2_000_000, "rst"),
            Cut("request", 400, "fin"),
            Cut("answer", 0, "rst"),
        ]
        proxy.plan = lambda asked: cut.pop() if cut and is_part(asked) else None
        config = TransferConfig(max_retries=5, transport="boto3")
        through(bucket, proxy, config).put_stream(
            "k", stream(3), part_size_bytes=PART, max_concurrency=2
        )
        assert proxy.cuts == 3
    assert bucket.get("k") == b"".join(bytes([number]) * PART for number in range(3))
    assert bucket.uploads() == []


@pytest.mark.backends("seaweed")
def test_a_part_that_fails_ends_the_upload_and_lets_go_of_the_memory(bucket):
    alive: set[int] = set()

    def buffers() -> Iterator[np.ndarray]:
        for number, buffer in enumerate(stream(6)):
            alive.add(number)
            weakref.finalize(buffer, alive.discard, number)
            yield buffer
            del buffer

    with NetworkProxy(bucket.storage_options) as proxy:
        proxy.plan = lambda asked: (
            Cut("request", 1_000_000, "rst") if "partNumber=2" in asked.query else None
        )
        with pytest.raises(StoreUnavailableError) as caught:
            through(bucket, proxy).put_stream(
                "k", buffers(), part_size_bytes=PART, max_concurrency=2
            )
    assert caught.value.object_key == "k"
    assert LEFTOVER_ADVICE not in str(caught.value)
    assert bucket.uploads() == bucket.keys() == []
    gc.collect()
    # All but the one that was to be sent next, which the error's traceback leads to.
    assert len(alive) <= 1, "the error holds what it was about"


class Unchecked:
    beginning: ClassVar[dict[str, str]] = {}

    def of(self, part: object) -> dict[str, str]:
        return {}


def upload_by(send: Callable[..., Any], threads: int = 2) -> MultipartUpload:
    """An upload whose requests `send` answers; a part is known by its bytes."""
    target = {"Bucket": "b", "Key": "k"}
    upload = MultipartUpload(send, target, {}, Unchecked(), threads)  # type: ignore[arg-type]
    upload.create()
    return upload


def test_the_store_is_told_to_abort_once_no_part_is_under_way():
    """A part that arrived after the abort would stay, and nobody would know of it."""
    begun, aborted = threading.Event(), threading.Event()
    sent: list[str] = []

    def send(verb: str, _arguments: object, *, body: object = None, **_: Any) -> Any:
        if verb == "upload_part":
            begun.set()
            aborted.wait(0.2)
        sent.append(verb)
        if verb == "abort_multipart_upload":
            aborted.set()
        return {"UploadId": "u", "ETag": "e"}

    upload = upload_by(send)
    upload.send([memoryview(b"x")])
    assert begun.wait(30)
    assert upload.abort()
    assert sent == ["create_multipart_upload", "upload_part", "abort_multipart_upload"]


@pytest.mark.parametrize("ends_by", ["an abort", "another part"])
def test_a_part_under_way_ends_when_its_upload_does(ends_by):
    begun, ended = threading.Event(), list[bytes]()

    def send(verb: str, _: object, *, body: Any = (), check: Any = None, **__: Any) -> Any:
        part = b"".join(body)
        if part == b"endless":
            begun.set()
            for _ in range(500):
                check()
                time.sleep(0.01)
        if part == b"failing":
            assert begun.wait(30)
            raise OSError("the first")
        ended.append(part)
        return {"UploadId": "u", "ETag": "e"}

    upload = upload_by(send)
    upload.send([memoryview(b"endless")])
    assert begun.wait(30)
    if ends_by == "another part":
        upload.send([memoryview(b"failing")])
        with pytest.raises(OSError, match="the first"):
            upload.wait()
    assert upload.abort()
    assert b"endless" not in ended


def test_parts_are_listed_in_their_order_whichever_ends_first():
    done = [threading.Event() for _ in range(3)]
    listed: list[int] = []

    def send(verb: str, arguments: Any, *, body: Any = (), **_: Any) -> Any:
        if verb == "upload_part":  # the last one first
            number = arguments["PartNumber"]
            assert number == 3 or done[number].wait(30)
            done[number - 1].set()
        if verb == "complete_multipart_upload":
            listed.extend(part["PartNumber"] for part in arguments["MultipartUpload"]["Parts"])
        return {"UploadId": "u", "ETag": "e"}

    upload = upload_by(send, threads=3)
    for _ in done:
        upload.send([memoryview(b"x")])
    upload.complete()
    assert listed == [1, 2, 3]


@pytest.mark.backends("seaweed", "moto")
def test_a_completion_whose_answer_is_lost_is_recognised(bucket):
    with NetworkProxy(bucket.storage_options) as proxy:
        cut = [Cut("answer", 0, "rst")]
        proxy.plan = lambda asked: (
            cut.pop() if cut and asked.method == "POST" and "uploadId" in asked.query else None
        )
        config = TransferConfig(max_retries=5, transport="boto3")
        version = through(bucket, proxy, config).put_stream(
            "k", stream(2), part_size_bytes=PART, max_concurrency=2
        )
        assert proxy.cuts == 1
    assert open_store(bucket.url, bucket.storage_options).head("k").version == version


# --- bodies


def test_buffers_are_sent_as_they_lie_in_memory():
    arrays = [np.arange(count, dtype=np.uint8) for count in (100, 0, 5)]
    body = JoinedBuffers([memoryview(array) for array in arrays])
    for _ in range(2):
        seen = list(iter(lambda: body.read(128 * 1024), b""))
        assert b"".join(seen) == b"".join(array.tobytes() for array in arrays)
        assert np.shares_memory(np.frombuffer(seen[0], dtype=np.uint8), arrays[0])
        assert body.tell() == 105
        assert body.seek(0, os.SEEK_END) == len(body) == 105
        body.seek(0)
    body.seek(101)
    assert body.read() == bytes([1, 2, 3, 4])
    assert body.read() == body.read(7) == b""
