"""A store that cannot be reached, or is lost on the way: the error says why and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
    UploadLostError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, Version
from tests.support.scripted import Answer, RawServer, Scripted, ScriptedServer, refusing
from tests.support.tampering import TamperingProxy
from tests.support.verbs import ONCE, VERBS, check

MIB = 1024 * 1024


TRANSPORTS = pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])


def at(endpoint_url: str, config: TransferConfig = ONCE, transport: str = "native") -> ObjectStore:
    options = {"key": "a", "secret": "b", "endpoint_url": endpoint_url, "transport": transport}
    return open_store("s3://bucket/run", options, config)


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Makes a server that sends the same bytes to each client, and hangs up; gives its address."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(RawServer(answer)).address


@TRANSPORTS
def test_a_refused_connection_names_the_host_and_says_what_to_check(transport):
    with refusing() as endpoint:
        store = at(endpoint, transport=transport)
        for name, verb in VERBS.items():
            with pytest.raises(StoreUnavailableError, match=endpoint[7:]) as caught:
                verb(store)
            check(caught.value, store, name)
            assert "connect" in caught.value.message
            assert str(caught.value).count("check endpoint_url") == 1


def test_an_unknown_host_is_said_to_be_one():
    with pytest.raises(StoreUnavailableError) as caught:
        at("http://no-such-host.invalid:9000").head("k")
    assert "cannot reach no-such-host.invalid:9000: the host name cannot be resolved" in str(
        caught.value
    )


@TRANSPORTS
def test_https_where_there_is_only_http_is_a_wrong_setting_and_tried_once(transport):
    with RawServer(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as server:
        store = at(f"https://{server.address}", TransferConfig(), transport)
        with pytest.raises(ConfigError, match="http://"):
            store.put("k", b"body")
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"\x15\x03\x01\x00\x02\x02\x16",  # a TLS alert
        b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n400 The plain HTTP request was sent to HTTPS port\n",
    ],
    ids=["alert", "go", "nginx"],
)
def test_http_where_there_is_only_https_is_a_wrong_setting(answering, answer):
    with pytest.raises(ConfigError, match="endpoint_url should begin with https://"):
        at(f"http://{answering(answer)}").get("k", max_size_bytes=10)


def test_a_connection_that_is_hung_up_is_said_to_be(answering):
    with pytest.raises(StoreUnavailableError, match="connection was closed before an answer"):
        at(f"http://{answering(b'')}").head("k")


CLOSE = {"Connection": "close"}
Serve = Callable[[Callable[[str, str], tuple[int, bytes] | None]], ScriptedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a server that answers by `answer(method, target)`, or vanishes for good at a None."""
    with ExitStack() as stack:

        def make(answer: Callable[[str, str], tuple[int, bytes] | None]) -> ScriptedServer:
            def respond(method: str, target: str, nth: int) -> Answer | None:
                found = answer(method, target)
                if found is None:
                    server.stop()
                    return None
                return Answer(found[0], CLOSE, found[1])

            server = stack.enter_context(ScriptedServer(respond))
            return server

        yield make


BEGUN = (
    200,
    b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
)


def test_a_server_that_dies_in_mid_upload_is_the_cause_and_the_rest_is_told(serve):
    server = serve(lambda method, target: BEGUN if method == "POST" else None)
    with pytest.raises(StoreUnavailableError) as caught:
        VERBS["put_stream"](at(server.endpoint_url))
    text = str(caught.value)
    assert "PUT of a part, or the end of the upload" in text
    assert "an incomplete multipart upload may be left" in text
    assert "lifecycle rule" in text
    assert caught.value.object_key == "k"


def test_an_abort_that_is_refused_says_that_it_hides_the_cause(serve):
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    server = serve(lambda method, target: BEGUN if method == "POST" else (403, denied))
    with pytest.raises(
        PermissionDeniedError, match=r"(?s)hides the cause.*AccessDenied.*may be left"
    ):
        VERBS["put_stream"](at(server.endpoint_url))


@pytest.mark.parametrize("transport", ["native", "boto3"])
@pytest.mark.parametrize("kind", [UnsupportedError, KeyError])
def test_an_upload_that_its_data_ended_and_that_cannot_be_aborted_says_what_is_left(
    serve, kind, transport, caplog
):
    def pieces() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        raise kind("the data's own")

    server = serve(lambda method, target: BEGUN if method == "POST" else (403, b""))
    with pytest.raises(kind, match="the data's own") as caught:
        at(server.endpoint_url, transport=transport).put_stream(
            "k", pieces(), part_size_bytes=5 * MIB, max_concurrency=2
        )
    assert "an incomplete multipart upload may be left" in str(caught.value) + caplog.text


@pytest.mark.parametrize(("aborts", "is_left"), [([500, 204], False), ([500, 500], True)])
def test_an_abort_over_boto3_that_fails_is_sent_once_more(serve, aborts, is_left):
    answers = iter(aborts)

    def answer(method: str, target: str) -> tuple[int, bytes]:
        if method == "DELETE":
            return next(answers), b""
        return BEGUN if method == "POST" else (403, b"")

    server = serve(answer)
    with pytest.raises(PermissionDeniedError) as caught:
        VERBS["put_stream"](at(server.endpoint_url, TransferConfig(max_retries=2), "boto3"))
    assert ("may be left" in str(caught.value)) == is_left
    assert [method for method, *_ in server.requests].count("DELETE") == 2


@pytest.mark.parametrize("transport", ["native", "boto3"])
@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (b"NoSuchUpload", UploadLostError, "lost this upload"),
        (b"InvalidBlockList", UploadLostError, "lost this upload"),
        (b"NoSuchBucket", BucketNotFoundError, "bucket does not exist"),
    ],
)
def test_an_upload_or_bucket_that_vanishes_in_mid_upload_is_named(
    serve, code, kind, says, transport
):
    gone = b"<Error><Code>" + code + b"</Code><Message>no</Message></Error>"
    server = serve(lambda method, target: BEGUN if method == "POST" else (404, gone))
    with pytest.raises(kind, match=says) as caught:
        VERBS["put_stream"](at(server.endpoint_url, TransferConfig(max_retries=2), transport))
    # The second code is Azure's, which no S3 gives.
    assert code == b"InvalidBlockList" or "may be left" not in str(caught.value)
    parts = [target for method, target, _ in server.requests if method == "PUT"]
    assert len(parts) == len(set(parts)), "none is sent again"


@pytest.mark.parametrize("transport", ["native", "boto3"])
def test_a_full_store_says_so_and_is_not_asked_again(serve, transport):
    for status, code in (507, b"XMinioStorageFull"), (507, b""), (403, b"QuotaExceeded"):
        body = b"<Error><Code>" + code + b"</Code><Message>m</Message></Error>" if code else b""
        server = serve(lambda method, target, answer=(status, body): answer)
        with pytest.raises(StoreFullError, match=r"(?s)quota is reached.*remove old checkpoints"):
            at(server.endpoint_url, TransferConfig(), transport).put("k", b"x")
        assert len(server.requests) == 1


def test_gcsfs_asks_a_server_that_says_nothing_and_one_that_refuses_once():
    pytest.importorskip("gcsfs")
    forbidden = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for answer, kind in (b"", StoreUnavailableError), (forbidden, PermissionDeniedError):
        with RawServer(answer, hang_up=bool(answer)) as server:
            options = {"anon": True, "endpoint_url": f"http://{server.address}"}
            config = TransferConfig(transport="fsspec", request_timeout_seconds=1)
            with pytest.raises(kind):
                open_store("gs://bucket/run", options, config).put("k", b"body")
            assert len(server.heads) == 1


def test_once_an_object_was_put_the_head_of_an_absent_one_is_one_request():
    def answer(method: str, target: str, nth: int) -> Answer:
        status = 200 if method == "PUT" else 404 if "absent" in target else 403
        return Answer(status, {"ETag": '"e"'}, b"")

    with ScriptedServer(answer) as server:
        store = at(server.endpoint_url, ONCE)
        store.put("k", b"body")
        with pytest.raises(ObjectNotFoundError):
            store.head("absent")
        with pytest.raises(PermissionDeniedError):
            store.head("another's")
    assert [method for method, *_ in server.requests] == ["PUT", "HEAD", "HEAD", "GET"]


@pytest.mark.parametrize("e_tag", ["", "&quot;done&quot;"])
def test_a_version_that_the_end_of_an_upload_leaves_out_is_asked_for(e_tag):
    """Ceph's gateway completes an upload without an ETag."""
    done = f"<CompleteMultipartUploadResult><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>"

    def answer(method: str, target: str, nth: int) -> Answer:
        body = BEGUN[1] if "uploads" in target else done.encode() if method == "POST" else b""
        headers = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        return Answer(200, headers, body)

    with ScriptedServer(answer) as server:
        store = at(server.endpoint_url)
        version = store.put_stream("k", iter([b"x"]), part_size_bytes=5 * MIB, max_concurrency=1)
    assert version == Version('"done"' if e_tag else '"e"')
    heads = [] if e_tag else ["HEAD"]
    assert [method for method, *_ in server.requests] == ["POST", "PUT", "POST", *heads]


PAGE = b"<html><body>Welcome</body></html>"
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"key": "a", "secret": "b"},
    "gs": {"token": "t"},
    "az": {"account_name": "a", "account_key": "a2V5"},
    "s3 over boto3": {"key": "a", "secret": "b", "transport": "boto3"},
}
SAYS = r"(?s)this does not look like a store.*check endpoint_url"


@pytest.fixture
def web() -> Iterator[Callable[[int], str]]:
    """Makes a web server that answers everything with one status and a page; gives its URL."""
    with ExitStack() as stack:

        def make(status: int) -> str:
            server = stack.enter_context(ScriptedServer())
            page = (status, {"Content-Type": "text/html; charset=utf-8"}, PAGE)
            server.answer = lambda *_: page
            return server.endpoint_url

        yield make


def url_of(scheme: str) -> str:
    return f"{scheme.split(maxsplit=1)[0]}://bucket/run"


def store_of(scheme: str, endpoint_url: str) -> ObjectStore:
    return open_store(url_of(scheme), {**OPTIONS[scheme], "endpoint_url": endpoint_url}, ONCE)


@pytest.mark.parametrize("scheme", OPTIONS)
def test_a_page_or_a_404_without_a_code_is_no_stores_answer(web, scheme):
    store = store_of(scheme, web(200))
    for verb in ("get", "put", "put_stream", *(["list"] if scheme in ("s3", "gs", "az") else [])):
        with pytest.raises(DcpObjstoreError, match=SAYS):
            VERBS[verb](store)
    store = store_of(scheme, web(404))
    for verb in ("list", "put", "put_stream"):
        with pytest.raises(ConfigError, match=SAYS):
            VERBS[verb](store)


def test_a_save_and_a_load_say_that_there_is_no_store(web):
    for status in (200, 404):
        options = {**OPTIONS["s3"], "endpoint_url": web(status)}
        with pytest.raises(ConfigError, match=SAYS):
            dos.save({"w": torch.ones(2)}, "s3://bucket/run", storage_options=options)
    options["endpoint_url"] = web(200)
    with pytest.raises(ConfigError, match=SAYS):
        dos.load({"w": torch.ones(2)}, "s3://bucket/run", storage_options=options)


@pytest.mark.parametrize("scheme", ["s3", "s3 over boto3"])
def test_a_404_without_a_code_may_say_that_an_object_is_missing(web, scheme):
    store = store_of(scheme, web(404))
    for verb in ("get", "head", "open_range"):
        with pytest.raises(ObjectNotFoundError):
            VERBS[verb](store)
    with pytest.raises(ObjectNotFoundError):
        store.put("k", b"", precondition=IfVersion(Version('"e"', None)))
    with pytest.raises(ConfigError, match=SAYS):
        store.put("k", b"", precondition=IfAbsent())


def test_only_the_first_empty_listing_asks_whether_there_is_a_store(bucket):
    with TamperingProxy(bucket.storage_options) as proxy:
        store = open_store(bucket.url, proxy.storage_options, ONCE)
        assert list(store.list()) == []
        assert list(store.list()) == []
        assert [asked.method for asked in proxy.asked] == ["GET", "HEAD", "GET", "GET", "GET"]


@pytest.mark.parametrize("code", ["NoSuchKey", ""])
def test_an_error_code_shows_that_there_is_a_store(code):
    def answer(method: str, _target: str, nth: int) -> Answer:
        if nth == 1:
            return Answer(404, {}, f"<Error><Code>{code}</Code></Error>".encode() * bool(code))
        status = 404 if method == "HEAD" else 200
        return Answer(status, {"Content-Type": "application/xml"}, b"<ListBucketResult/>")

    with Scripted(answer) as server:
        store = server.store()
        with pytest.raises(ObjectNotFoundError):
            store.get("k", max_size_bytes=9)
        assert list(store.list()) == []
        asks_for_store = [] if code else ["HEAD"]
        assert [row[0] for row in server.requests] == ["GET", "GET", *asks_for_store, "GET"]


LISTING = b"""<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>
<IsTruncated>false</IsTruncated><Contents><Key>run/k</Key><Size>1</Size><ETag>"e"</ETag>
<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"""


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_a_key_outside_of_what_was_asked_for_is_no_answer(transport):
    elsewhere = LISTING.replace(b"run/k", b"other/k")
    answer = Answer(200, {"Content-Type": "application/xml"}, elsewhere)
    with Scripted(lambda *_: answer) as server:
        listed = server.store(transport=transport).list()
        with pytest.raises(StoreUnavailableError, match="other/k"):
            list(listed)


@pytest.mark.parametrize("body", [PAGE, b""])
@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_a_page_in_place_of_one_listing_is_not_believed(transport, body):
    """A run would be taken for an empty one, and its job would begin anew."""

    def answer(method: str, _target: str, nth: int) -> Answer:
        wrong = method == "GET" and nth == 2
        return Answer(200, {"Content-Type": "application/xml"}, body if wrong else LISTING)

    with Scripted(answer) as server:
        store = server.store(TransferConfig(max_retries=2), transport=transport)
        for _ in range(2):
            assert [meta.key for meta in store.list()] == ["k"]
        assert len(server.requests) == 3
