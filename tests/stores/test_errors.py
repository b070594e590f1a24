"""Every failure of a store is one typed error, whatever verb met it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dcp_objstore.checkpoint import commit as commits
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.checkpoint.read import open_committed
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    BucketNotFoundError,
    CheckpointCorruptError,
    ConfigError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    StoreUnavailableError,
    UploadLostError,
)
from dcp_objstore.stores import IfAbsent, open_store
from dcp_objstore.stores.obstore.errors import judge_obstore
from dcp_objstore.stores.protocol import IfVersion, Version
from dcp_objstore.stores.ranges import read_range
from tests.model.faults import ERROR_BODY, UNIX_EPOCH
from tests.support.scripted import Scripted, refusing
from tests.support.servers import READ_ONLY
from tests.support.verbs import ANSWERS, ONCE, READS, VERBS, check

MIB = 1024 * 1024
both = pytest.mark.parametrize("transport", ["native", "boto3"])


@pytest.mark.backends("seaweed", "moto", "gcs")
@both
def test_a_missing_bucket(bucket, transport):
    if (bucket.kind, transport) == ("gcs", "boto3"):
        pytest.skip("boto3 carries S3")
    scheme = bucket.url.partition(":")[0]
    options = {**bucket.storage_options, "transport": transport}
    store = open_store(f"{scheme}://no-such-bucket/run", options, ONCE)
    for name, verb in VERBS.items():
        with pytest.raises(BucketNotFoundError) as caught:
            verb(store)
        check(caught.value, store, name)


@pytest.mark.backends("seaweed")
@both
@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_credentials(bucket, wrong, transport):
    options = {**bucket.storage_options, wrong: "wrong", "transport": transport}
    store = open_store(bucket.url, options, ONCE)
    for name, verb in VERBS.items():
        with pytest.raises(CredentialsError) as caught:
            verb(store)
        check(caught.value, store, name)
        assert str(bucket.storage_options["secret"]) not in str(caught.value)


@pytest.mark.backends("seaweed")
@both
def test_an_identity_without_the_right_to_write(bucket, transport):
    bucket.put("k", b"as it was")
    options = {**bucket.storage_options, **READ_ONLY, "transport": transport}
    store = open_store(bucket.url, options, ONCE)
    for name, verb in VERBS.items():
        if name in READS:
            verb(store)
            continue
        with pytest.raises(PermissionDeniedError) as caught:
            verb(store)
        check(caught.value, store, name)
        assert (caught.value.status, caught.value.code) == (403, "AccessDenied")
    assert bucket.keys() == ["k"]
    assert bucket.get("k") == b"as it was"
    assert bucket.uploads() == []


@both
def test_nobody_listens(transport):
    with refusing() as endpoint:
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint, "transport": transport}
        store = open_store("s3://bucket/run", options, ONCE)
        for name, verb in VERBS.items():
            with pytest.raises(StoreUnavailableError, match="connection") as caught:
                verb(store)
            check(caught.value, store, name)


@both
def test_a_server_that_never_answers(transport):
    config = TransferConfig(max_retries=0, request_timeout_seconds=0.2, transport=transport)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"key": "a", "secret": "b", "endpoint_url": endpoint}
        store = open_store("s3://bucket/run", options, config)
        for verb in VERBS.values():
            with pytest.raises(StoreUnavailableError):
                verb(store)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as found:
        yield found


@pytest.fixture(scope="module")
def of_boto3() -> Iterator[Scripted]:
    """One for all tests, so that boto3's clients are made once."""
    with Scripted() as found:
        yield found


@pytest.fixture(params=["native", "boto3"])
def over(request: pytest.FixtureRequest) -> Scripted:
    """A server, whose stores are over one of the transports."""
    name = "scripted" if request.param == "native" else "of_boto3"
    found: Scripted = request.getfixturevalue(name)
    found.config = replace(ONCE, transport=request.param)
    del found.requests[:]
    return found


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS)
def test_each_answer_is_one_error(over, status, code, expected):
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode() if code else b""
    over.answer = lambda *_: (status, {}, body)
    store = over.store()
    for name, verb in VERBS.items():
        with pytest.raises(DcpObjstoreError) as caught:
            verb(store)
        # obstore takes some of what may pass as final, so the upload is begun again.
        is_lost = name == "put_stream" and type(caught.value) is UploadLostError
        assert type(caught.value) is expected or (
            is_lost and expected is StoreUnavailableError and over.config.transport == "native"
        ), name
        check(caught.value, store, name)


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed"])
def test_a_bucket_in_another_region(over, code):
    status = 301 if code == "PermanentRedirect" else 400
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
    # AWS names the region in a header, with which botocore tries once more.
    over.answer = lambda *_: (status, {"x-amz-bucket-region": "eu-west-3"}, body)
    store = over.store()
    for name, verb in VERBS.items():
        with pytest.raises(ConfigError, match="another region") as caught:
            verb(store)
        check(caught.value, store, name)


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
@pytest.mark.parametrize(
    ("status", "code", "said", "option"),
    [
        (400, "InvalidRequest", "required with Object Lock parameters", "ChecksumAlgorithm"),
        (400, "XAmzContentSHA256Mismatch", "no match", "sign_payload"),
        (400, "InvalidDigest", "UNSIGNED-PAYLOAD PUT is not allowed", "sign_payload"),
        (403, "SecondLevelDomainForbidden", "use virtual hosted style", "addressing_style"),
    ],
)
def test_an_answer_that_asks_for_an_option_is_an_error_that_names_it(
    scripted, transport, status, code, said, option
):
    body = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
    scripted.answer = lambda *_: (status, {}, body)
    with pytest.raises(ConfigError, match=option):
        scripted.store(transport=transport).put("k", b"x")


def test_an_absent_object_is_not_an_absent_bucket(moto_server):
    store = open_store("s3://dcp-tests/nothing-here", moto_server.storage_options)
    with pytest.raises(ObjectNotFoundError):
        store.head("k")
    assert list(store.list()) == []


def test_retry_false_sends_one_request(over):
    over.answer = lambda *_: (503, {}, b"")
    store = over.store(TransferConfig(max_retries=2, transport=over.config.transport))
    with pytest.raises(StoreUnavailableError):
        store.put("k", b"x", precondition=IfAbsent(), retry=False)
    assert len(over.requests) == 1
    with pytest.raises(StoreUnavailableError):
        store.put("k", b"x")
    assert len(over.requests) == 1 + 3


def test_a_request_that_fails_once_is_retried(scripted):
    scripted.answer = lambda method, target, nth: (
        (500, {}, b"") if nth == 1 else (200, {"ETag": '"e"'}, b"")
    )
    assert scripted.store(TransferConfig()).put("k", b"x").e_tag == '"e"'
    assert len(scripted.requests) == 2


@pytest.mark.parametrize("code", ["", "XMinioStorageFull"])
@pytest.mark.parametrize("transport", ["native", "boto3"])
def test_a_full_store_is_not_asked_again(scripted, transport, code):
    body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
    scripted.answer = lambda *_: (507, {}, body)
    store = scripted.store(TransferConfig(max_retries=2, transport=transport))
    with pytest.raises(StoreFullError):
        store.put("k", b"x")
    assert len(scripted.requests) == 1


def test_a_body_shorter_than_announced_is_an_error(over):
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Length": "100",
        "Content-Range": "bytes 0-99/100",
    }
    over.answer = lambda *_: (206, headers, b"only this")
    for verb in ("get", "open_range"):
        with pytest.raises((CorruptDataError, StoreUnavailableError)):
            if verb == "get":
                over.store().get("k", max_size_bytes=100)
            else:
                read_range(over.store(), "k", 0, 100)


def test_a_server_that_ignores_the_range_is_an_error(over):
    headers = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    over.answer = lambda *_: (200, headers, b"0123456789")
    with pytest.raises(CorruptDataError, match="ignores Range"):
        read_range(over.store(), "k", 2, 4)


def test_another_range_than_was_asked_for_is_an_error(over):
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Range": "bytes 2-4/10",
    }
    over.answer = lambda *_: (206, headers, b"234")
    for start, end in ((2, 6), (1, 5)):
        with pytest.raises(CorruptDataError, match="another range"):
            read_range(over.store(), "k", start, end)


def test_get_does_not_read_a_body_that_is_too_large(over):
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Length": str(1 << 40),
    }
    over.answer = lambda *_: (200, headers, b"the first bytes")
    with pytest.raises(CorruptDataError, match="1099511627776 bytes"):
        over.store().get("k", max_size_bytes=1000)


def test_listing_asks_for_a_page_when_it_is_needed(scripted):
    def page(method: str, target: str, nth: int) -> tuple[int, dict[str, str], bytes]:
        entries = "".join(
            f"<Contents><Key>run/{nth}-{number:03d}</Key><Size>1</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for number in range(1000)
        )
        more = f"<NextContinuationToken>{nth}</NextContinuationToken>" if nth < 20 else ""
        body = f"<ListBucketResult>{entries if nth <= 20 else ''}{more}</ListBucketResult>"
        return 200, {}, body.encode()

    scripted.answer = page
    found = scripted.store().list()
    assert next(found).key == "1-000"
    assert len(scripted.requests) <= 3  # one, and what is read ahead
    assert sum(1 for _ in found) == 20 * 1000 - 1
    assert len(scripted.requests) == 21, "a full last page does not say that it is the last"


def test_bodies_are_not_signed_unless_asked(scripted):
    scripted.answer = lambda *_: (200, {"ETag": '"e"'}, b"")
    scripted.store().put("k", b"x")
    scripted.store(sign_payload=True).put("k", b"x")
    sums = [headers["x-amz-content-sha256"] for _, _, headers in scripted.requests]
    assert sums[0] == "UNSIGNED-PAYLOAD"
    assert len(sums[1]) == 64


def test_anonymous_requests_carry_no_signature(scripted, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    scripted.answer = lambda *_: (200, {"ETag": '"e"'}, b"")
    scripted.store(key=None, secret=None, anon=True).put("k", b"x")
    assert not any(name.lower() == "authorization" for name in scripted.requests[0][2])


def test_given_keys_are_not_mixed_with_a_token_of_the_environment(over, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    over.answer = lambda *_: (200, {"ETag": '"e"'}, b"")
    over.store().put("k", b"x")
    headers = {name.lower(): value for name, value in over.requests[0][2].items()}
    assert "x-amz-security-token" not in headers
    assert "Credential=a/" in headers["authorization"]


def test_an_endpoint_gets_the_bucket_in_the_path(scripted):
    scripted.answer = lambda *_: (200, {"ETag": '"e"'}, b"")
    scripted.store().put("k", b"x")
    assert scripted.requests[0][1] == "/bucket/run/k"


def test_a_failing_head_of_a_busy_store_is_not_asked_again(scripted):
    scripted.answer = lambda *_: (503, {}, b"")
    with pytest.raises(StoreUnavailableError):
        scripted.store().head("k")
    assert len(scripted.requests) == 1


def test_the_stores_answer_is_reduced_to_its_code_and_message():
    from obstore.exceptions import GenericError

    answer = (
        'Server returned non-2xx status code: 403 Forbidden: <?xml version="1.0"?>\n<Error><Code>'
        "AccessDenied</Code><Message>No.</Message><RequestId>1</RequestId></Error>"
    )
    error = judge_obstore(GenericError(answer)).error
    assert type(error) is PermissionDeniedError
    assert error.message.endswith("403 Forbidden: AccessDenied: No.")


def test_an_answer_of_the_instance_metadata_is_about_credentials():
    from obstore.exceptions import GenericError

    url = "http://169.254.169.254/latest/api/token"
    error = judge_obstore(GenericError(f"PUT {url} - status code: 403 Forbidden: no")).error
    assert type(error) is CredentialsError
    assert error.message.startswith("no credentials for S3")
    assert "AWS_PROFILE" in error.message and "169.254" not in error.message


# --- a 200 that is none: `tests.model.faults` does to the core what comes out here

_STARTED = (
    200,
    {},
    b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
)


def test_200_with_an_error_body_is_no_success_of_a_put(scripted):
    """S3 begins to answer CompleteMultipartUpload with 200 before it knows how it will end."""
    answers = {
        ("POST", "?uploads="): _STARTED,
        ("PUT", "partNumber="): (200, {"ETag": '"p"'}, b""),
        ("DELETE", "uploadId="): (204, {}, b""),
    }

    def answer(method: str, target: str, _nth: int) -> tuple[int, dict[str, str], bytes]:
        said = (
            value for (verb, part), value in answers.items() if verb == method and part in target
        )
        return next(said, (200, {}, ERROR_BODY))

    scripted.answer = answer
    store = scripted.store()
    for retry in (True, False):
        with pytest.raises(StoreUnavailableError):
            store.put("k", b"x", retry=retry)
    part = np.zeros(5 * 1024 * 1024, np.uint8)
    with pytest.raises(StoreUnavailableError, match="InternalError"):
        store.put_stream(
            "k", iter([part, part[:9]]), part_size_bytes=part.nbytes, max_concurrency=2
        )
    assert [verb for verb, target, _ in scripted.requests if "uploadId=" in target][-1] == "DELETE"


def test_200_with_an_error_body_is_never_what_was_asked_for(scripted):
    scripted.answer = lambda *_: (200, {}, ERROR_BODY)
    store = scripted.store()
    with pytest.raises(ConfigError, match="does not look like a store"):
        list(store.list())
    store.delete("k")
    body, meta = store.get(MARKER_KEY, max_size_bytes=1000)
    assert (body, meta.version, meta.last_modified) == (ERROR_BODY, Version(None, None), UNIX_EPOCH)
    assert store.head("k").version == Version(None, None)
    with pytest.raises(CorruptDataError):
        read_range(store, "k", 0, 10)
    with pytest.raises(InputError):
        store.put("k", b"x", precondition=IfVersion(Version(None, None)))
    # So a reader learns that the checkpoint is damaged, and a save stops.
    with pytest.raises(CheckpointCorruptError):
        open_committed(store)
    with pytest.raises(StoreUnavailableError, match="does not look like a store"):
        commits.take_begin_token(store, overwrite=True)
