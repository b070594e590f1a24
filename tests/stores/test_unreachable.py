"""A store that cannot be reached, or is lost on the way: the error says why and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
    UploadLostError,
)
from dcp_objstore.stores import ObjectStore, open_store
from dcp_objstore.stores.obstore.errors import judge_obstore
from tests.support.scripted import Answer, RawServer, ScriptedServer, refusing
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


def test_a_certificate_that_is_not_valid_says_how_to_name_ones_own():
    from obstore.exceptions import GenericError

    text = (
        "Generic S3 error: Error performing GET https://store:9000/b/k in 82.5ms - HTTP error:"
        " error sending request\n\nDebug source:\nGeneric {\n  inner: Http(\n    HttpError {\n"
        "      kind: Connect,\n      source: hyper_util::client::legacy::Error(\n        Connect,\n"
        "        Custom { error: InvalidCertificate(\n          UnknownIssuer,\n        ) } ) } ) }"
    )
    error = judge_obstore(GenericError(text)).error
    assert type(error) is ConfigError
    assert "cannot reach store:9000: its TLS certificate is not valid here" in error.message
    assert "'verify'" in error.advice


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.stores.retries.FIRST_PATIENCE_SECONDS", 0.0)


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


LISTING = b"<ListBucketResult></ListBucketResult>"


@pytest.mark.parametrize("verb", ["get", "head", "list"])
def test_a_server_never_reached_is_given_up_before_one_that_was_reached(serve, hurried, verb):
    answers = iter([(200, LISTING), (404, b""), (200, LISTING)])  # of nothing, so asked again
    server = serve(lambda method, target: next(answers, None))
    store = at(server.endpoint_url, TransferConfig(max_retries=1))
    assert list(store.list()) == []
    with pytest.raises(StoreUnavailableError, match=r"\b1 retries in"):
        VERBS[verb](store)  # the server vanishes
    with refusing() as endpoint:
        unknown = at(endpoint, TransferConfig(max_retries=1))
        with pytest.raises(StoreUnavailableError, match="cannot reach") as caught:
            VERBS[verb](unknown)
        assert "retries in" not in str(caught.value)


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
    with pytest.raises(kind, match=says):
        VERBS["put_stream"](at(server.endpoint_url, transport=transport))


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
            config = TransferConfig(transport="fsspec", request_timeout_seconds=2)
            with pytest.raises(kind):
                open_store("gs://bucket/run", options, config).put("k", b"body")
            assert len(server.heads) == 1


def test_once_an_object_was_put_the_head_of_an_absent_one_is_one_request():
    def answer(method: str, target: str, nth: int) -> Answer:
        return Answer(200, {"ETag": '"e"'}, b"") if method == "PUT" else Answer(404, {}, b"")

    with ScriptedServer(answer) as server:
        store = at(server.endpoint_url, ONCE)
        store.put("k", b"body")
        del server.requests[:]
        with pytest.raises(ObjectNotFoundError):
            store.head("absent")
    assert [method for method, *_ in server.requests] == ["HEAD"]
