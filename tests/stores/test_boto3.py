"""The boto3 transport keeps the same contract as the native one, and more ways to be used."""

from __future__ import annotations

import gc
import http.client
import os
import ssl
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import boto3
import botocore.exceptions
import numpy as np
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

import dcp_objstore as dos
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import (
    ConfigError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import ObjectStore, StoreSpec, open_store
from dcp_objstore.stores.errors import NO_STORE, ErrorDetails
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    CopySource,
    IfAbsent,
    IfVersion,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import BrokenOffError
from dcp_objstore.stores.retries import SMALL_BYTES
from dcp_objstore.stores.s3.boto3 import Boto3Clients, JoinedBuffers, ReceivedBody
from dcp_objstore.stores.s3.errors import read_botocore
from dcp_objstore.stores.s3.s3fs import read_s3fs
from dcp_objstore.stores.s3.store import check_range_answer, pages
from dcp_objstore.stores.s3.upload import Checksums, MultipartUpload
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


def upload_by(send: Callable[..., Any], threads: int = 2) -> MultipartUpload:
    """An upload whose requests `send` answers; a part is known by its bytes."""
    target = {"Bucket": "b", "Key": "k"}
    upload = MultipartUpload(send, target, {}, Checksums(None), threads)
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


# --- what is sent, and what an answer means; nothing is sent here


ANSWER = {
    "ETag": '"e"',
    "UploadId": "u",
    "ContentLength": 9,
    "LastModified": datetime(2026, 1, 1, tzinfo=UTC),
    "CopyPartResult": {"ETag": '"p"'},
}


class Called:
    """What clients of boto3 that send nothing were called for.

    Attributes:
        uses: for which use each operation was last called.
        arguments: with which arguments.
        counts: how often.
        answers: its answer, where that is another than `ANSWER`, or what it raises.
    """

    def __init__(self) -> None:
        self.uses: dict[str, str] = {}
        self.arguments: dict[str, dict[str, Any]] = {}
        self.counts = Counter[str]()
        self.answers: dict[str, Any] = {}

    def client(self, use: str) -> Any:
        def call(operation: str, **arguments: Any) -> Any:
            self.uses[operation], self.arguments[operation] = use, arguments
            self.counts[operation] += 1
            answer = self.answers.get(operation, ANSWER)
            if isinstance(answer, Exception):
                raise answer
            return answer

        class Client:
            def __getattr__(self, operation: str) -> Any:
                return partial(call, operation)

        return Client()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    called = Called()
    monkeypatch.setattr(Boto3Clients, "get", lambda _, use: called.client(use))
    return called


def test_each_operation_waits_as_long_as_its_use_allows(called):
    """And on AWS, which decodes no key twice, a source may have any key."""
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3})
    for key, size in (("k", SMALL_BYTES), ("large", SMALL_BYTES + 1)):
        store.put(key, bytes(size))
        assert called.uses.pop("put_object") == ("small" if key == "k" else "write")
    store.put("empty", b"")
    assert "Body" not in called.arguments["put_object"]
    assert called.uses.pop("put_object") == "small"
    store.put_stream("k", iter([bytes(PART)]), part_size_bytes=PART, max_concurrency=1)
    assert list(called.arguments) == [
        "put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"
    ]  # fmt: skip
    store.head("k")
    assert list(store.list()) == []
    store.delete("k")
    sources = [CopySource(f"s3://bucket/{key}", 2, 9, Version('"e"')) for key in ("a%20b", "a+b")]
    moved: list[int] = []
    store.copy("k", sources, part_size_bytes=5, max_concurrency=1, moved=moved.append)
    assert moved == [4, 3, 4, 3]
    assert called.arguments["upload_part_copy"] == {
        "Bucket": "bucket",
        "Key": "run/k",
        "UploadId": "u",
        "PartNumber": 4,
        "CopySource": {"Bucket": "bucket", "Key": "a+b"},
        "CopySourceIfMatch": '"e"',
        "CopySourceRange": "bytes=6-8",
    }
    assert called.uses == {
        "create_multipart_upload": "small",
        "upload_part": "write",
        "complete_multipart_upload": "write",
        "upload_part_copy": "write",
        "head_object": "read",
        "list_objects_v2": "read",
        "delete_object": "small",
    }


def test_a_version_that_the_end_of_an_upload_leaves_out_is_asked_for(called):
    """Ceph's gateway completes an upload without an ETag."""
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3})
    called.answers["complete_multipart_upload"] = {"ETag": ""}
    version = store.put_stream("k", iter([bytes(PART)]), part_size_bytes=PART, max_concurrency=1)
    assert version == Version('"e"')
    assert called.uses["head_object"] == "read"


@pytest.mark.parametrize(
    ("fails", "code", "aborts", "left"),
    [
        ("create_multipart_upload", "", 0, False),
        ("complete_multipart_upload", "NoSuchUpload", 1, False),
        ("complete_multipart_upload", "NoSuchBucket", 1, False),
        ("complete_multipart_upload", "Odd", 2, True),
    ],
)
def test_parts_that_an_abort_may_have_left_are_told_of(called, fails, code, aborts, left):
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3}, ONCE)
    called.answers[fails] = refused("it", 403)
    called.answers["abort_multipart_upload"] = refused("AbortMultipartUpload", 404, code)
    sources = [CopySource("s3://bucket/from", 0, 9, Version('"e"'))]
    for write in (
        lambda: store.put_stream("k", iter([bytes(PART)]), part_size_bytes=PART, max_concurrency=1),
        lambda: store.copy("k", sources, part_size_bytes=9, max_concurrency=1, moved=id),
    ):
        called.counts.clear()
        with pytest.raises(PermissionDeniedError) as caught:
            write()
        assert (LEFTOVER_ADVICE in str(caught.value)) == left
        assert called.counts["abort_multipart_upload"] == aborts


@pytest.mark.parametrize("if_absent", [False, True])
def test_the_cause_of_a_write_that_failed_is_botocores_error(if_absent, called):
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3}, ONCE)
    called.answers["put_object"] = refusal = refused("PutObject", 503)
    with pytest.raises(StoreUnavailableError) as caught:
        store.put("k", b"x", precondition=IfAbsent() if if_absent else None)
    assert caught.value.__cause__ is refusal


def test_a_callers_error_in_a_copy_stays_as_it_is_and_another_names_the_source(called):
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3}, ONCE)
    source = CopySource("s3://bucket/from", 0, 9, Version('"e"'))

    def stop(_: int) -> None:
        raise DcpObjstoreError("the caller's own")

    with pytest.raises(DcpObjstoreError) as caught:
        store.copy("k", [source], part_size_bytes=9, max_concurrency=1, moved=stop)
    assert caught.value.message == "the caller's own"
    assert called.uses["abort_multipart_upload"] == "write"
    called.answers["upload_part_copy"] = refusal = refused("UploadPartCopy", 403)
    with pytest.raises(PermissionDeniedError, match=r"\(in a copy of s3://bucket/from\)") as caught:
        store.copy("k", [source], part_size_bytes=9, max_concurrency=1, moved=stop)
    assert caught.value.__cause__ is refusal


@pytest.mark.parametrize(
    ("nexts", "count", "repeats"),
    [
        (["a", "b", None], 3, False),
        ([None], 1, False),
        ([""], 1, True),
        (["a", ""], 2, True),
        (["a", "a"], 2, True),
        (["a", "b", "a"], 3, True),
    ],
)
def test_pages_are_asked_for_until_the_last_or_until_one_begins_again(nexts, count, repeats):
    """A page of a server: where the next one begins, an empty text if it does not say, or None."""
    asked: list[Mapping[str, Any]] = []

    def ask(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(arguments)
        mark = nexts[len(asked) - 1]
        return {"IsTruncated": mark is not None, "Next": mark or None, "NextId": None}

    listed = pages(ask, {"Prefix": "p"}, {"Marker": "Next", "Id": "NextId"})
    if repeats:
        with pytest.raises(StoreUnavailableError, match="again"):
            list(listed)
    else:
        list(listed)
    begins = [{}, *({"Marker": mark} for mark in nexts)]
    assert asked == [{"Prefix": "p", **begin} for begin in begins[:count]]


def test_a_range_is_taken_only_from_an_answer_that_is_this_range():
    def check(status: int, **answer: object) -> None:
        check_range_answer({"ResponseMetadata": {"HTTPStatusCode": status}, **answer}, 2, 5)

    check(206, ContentRange="bytes 2-4/9", ContentLength=3)
    check(206, ContentRange="bytes 2-4/*")
    for status, answer, says in (
        (200, {"ContentRange": "bytes 2-4/9", "ContentLength": 3}, "ignores Range"),
        (206, {"ContentRange": "bytes 2-4/9", "ContentLength": 4}, "4 bytes announced"),
        (206, {"ContentRange": "bytes 2-3/4"}, "an object of 4 bytes"),
        (206, {"ContentRange": "bytes 2-5/5"}, "another range"),
        (206, {}, "another range"),
    ):
        with pytest.raises(CorruptDataError, match=says):
            check(status, **answer)


def refused(operation: str, status: int, code: str = "", message: str = "") -> ClientError:
    error = {"Code": code, "Message": message}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)


def test_a_connection_that_is_lost_while_a_body_arrives_broke_off():
    body = ReceivedBody(SimpleNamespace(readinto=Mock(side_effect=ConnectionResetError("cut"))))
    with pytest.raises(BrokenOffError, match="cut"):
        body.in_chunks(10)


@pytest.mark.parametrize(
    ("verify", "trusted"),
    [(True, ssl.__file__), (False, False), (__file__, __file__)],
)
def test_each_client_trusts_what_it_is_told_to(monkeypatch, verify, trusted):
    monkeypatch.setenv("AWS_CA_BUNDLE", ssl.__file__)
    options = {"transport": "boto3", "key": "k", "secret": "s", "verify": verify}
    client = StoreSpec("s3://bucket/x", options).boto3_clients().get("read")
    assert client._endpoint.http_session._verify == trusted


@pytest.mark.parametrize(
    ("error", "text", "status", "code"),
    [
        (refused("GetObject", 403, "Odd", "no"), "403 Forbidden: Odd: no", 403, "Odd"),
        (refused("HeadObject", 403, "403", "Forbidden"), "403 Forbidden", 403, None),
        (refused("GetObject", 799, "Odd"), "799: Odd", 799, "Odd"),
        (ClientError({}, "GetObject"), "None", None, None),
    ],
)
def test_an_answer_that_refuses_is_read_in_one_line(error, text, status, code):
    assert read_botocore(error) == ErrorDetails(text=text, status=status, code=code)


@pytest.mark.parametrize(
    ("error", "is_no_store"),
    [
        *((refused(name, 404), True) for name in
          ("ListObjectsV2", "PutObject", "CreateMultipartUpload")),
        (refused("GetObject", 404), False),
        (refused("PutObject", 404, "NoSuchBucket"), False),
        (refused("PutObject", 403), False),
        (KeyError("ETag"), True),
        (KeyError("UploadId"), True),
        (KeyError("CopyPartResult"), True),
        (KeyError("Key"), False),
    ],
)  # fmt: skip
def test_what_no_store_answers_is_told_from_what_one_refuses(error, is_no_store):
    meaning = read_botocore(error).meaning
    assert (meaning is not None and meaning.words == NO_STORE) == is_no_store
    if isinstance(error, ClientError):
        for read in (read_botocore, read_s3fs):
            assert read(error, conditional=True).meaning is None


SILENCES: list[tuple[str, dict[str, Any], type[DcpObjstoreError], str]] = [
    ("CredentialRetrievalError", {"provider": "p", "error_msg": "m"}, CredentialsError, ""),
    ("LoginError", {}, CredentialsError, ""),
    ("NoAuthTokenError", {}, CredentialsError, ""),
    ("NoCredentialsError", {}, CredentialsError, ""),
    ("PartialCredentialsError", {"provider": "p", "cred_var": "v"}, CredentialsError, ""),
    ("ProfileNotFound", {"profile": "p"}, CredentialsError, ""),
    ("SSOError", {}, CredentialsError, ""),
    ("TokenRetrievalError", {"provider": "p", "error_msg": "m"}, CredentialsError, ""),
    ("EndpointConnectionError", {"endpoint_url": "u"}, StoreUnavailableError, "unsent"),
    ("ProxyConnectionError", {"proxy_url": "u"}, StoreUnavailableError, "unsent"),
    ("ConnectTimeoutError", {"endpoint_url": "u"}, StoreUnavailableError, "unsent, in time"),
    ("ReadTimeoutError", {"endpoint_url": "u"}, StoreUnavailableError, "late, in time"),
    ("HTTPClientError", {"error": "e"}, StoreUnavailableError, "was lost"),
    ("ConnectionError", {"error": "e"}, StoreUnavailableError, "was lost"),
    ("ParamValidationError", {"report": "r"}, ConfigError, "refused the request"),
]


@pytest.mark.parametrize(("name", "settings", "kind", "says"), SILENCES)
def test_each_error_of_botocore_without_an_answer_says_what_is_known(name, settings, kind, says):
    error = getattr(botocore.exceptions, name, None)
    if error is None:
        pytest.skip("another version of botocore")
    details = read_botocore(error(**settings))
    assert details.meaning is not None
    assert details.meaning.kind is kind
    assert details.connected == ("unsent" not in says)
    assert details.timed_out == ("late" in says)
    assert says.rpartition("unsent")[2].rpartition(", ")[2] in (details.meaning.words or "")


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (BrokenOffError("cut"), StoreUnavailableError, "was lost"),
        (ConnectionResetError("reset"), StoreUnavailableError, "was lost"),
        (RecursionError(), ConfigError, "redirects every request"),
        (ValueError("v"), ConfigError, "refused the request"),
        (TypeError("t"), ConfigError, "refused the request"),
        (ssl.SSLCertVerificationError(1, "x"), ConfigError, "certificate"),
        (tls_error("WRONG_VERSION_NUMBER"), ConfigError, "does not speak TLS"),
        (tls_error("UNEXPECTED_EOF"), StoreUnavailableError, "was lost"),
        (http.client.BadStatusLine("x"), ConfigError, "no HTTP"),
        (http.client.RemoteDisconnected("x"), StoreUnavailableError, "was lost"),
        (LookupError("of ours"), DcpObjstoreError, ""),
    ],
)
def test_each_other_error_without_an_answer_says_what_is_known(error, kind, says):
    """Also where botocore has raised its own for it."""
    meaning = read_botocore(error).meaning
    assert meaning is not None
    assert meaning.kind is kind
    assert says in (meaning.words or "")
    if says in ("certificate", "does not speak TLS", "no HTTP"):
        outer = botocore.exceptions.HTTPClientError(error=error)
        outer.__cause__ = error
        assert read_botocore(outer).meaning == meaning


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
    assert body.read(0) == b""
    assert body.read() == bytes([1, 2, 3, 4])
    assert body.read() == body.read(7) == b""
    body.seek(-3, os.SEEK_CUR)
    into = bytearray(2)
    assert body.readinto(into) == 2
    assert into == bytes([2, 3])
    assert body.seekable()
    assert body.readable()


def test_a_small_body_is_joined_and_a_larger_one_sent_as_it_lies():
    """A readable one waits for the server's "100 Continue" first."""
    store = open_store("s3://bucket/run", {"key": "a", "secret": "b", **BOTO3})
    for size, kind in ((64 * 1024, bytes), (64 * 1024 + 1, JoinedBuffers)):
        body = store._body([memoryview(bytes(size))], None)  # type: ignore[attr-defined]
        assert type(body) is kind
        assert len(body) == size
    assert store.range_reading == RangeReading(memory_bytes=2 * MIB)
