"""Every failure of a store is one typed error, whatever verb met it."""

from __future__ import annotations

import errno
import os
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
    PreconditionFailedError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
    UploadLostError,
)
from dcp_objstore.stores import open_store
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.errors import kind_of_answer, kind_of_builtin, of_os
from dcp_objstore.stores.obstore.errors import judge_obstore
from dcp_objstore.stores.protocol import CopySource, IfVersion, Version
from dcp_objstore.stores.ranges import read_range
from tests.model.faults import ERROR_BODY, UNIX_EPOCH
from tests.support.scripted import Scripted
from tests.support.verbs import ANSWERS, ONCE, VERBS, check

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


# What the providers and the servers that speak their languages document: a code counts before the
# status that it comes with.
DOCUMENTED: dict[type[DcpObjstoreError], str] = {
    BucketNotFoundError: (
        "404 NoSuchBucket, 400 InvalidBucketName, 404 ContainerNotFound, 409 ContainerBeingDeleted"
    ),
    ObjectNotFoundError: "404, 404 NoSuchKey, 404 BlobNotFound",
    CredentialsError: (
        "401, 400 ExpiredToken, 400 TokenRefreshRequired, 400 InvalidToken, 403 InvalidAccessKeyId,"
        " 403 InvalidSecurity, 403 SignatureDoesNotMatch, 403 RequestTimeTooSkewed,"
        " 401 AuthenticationRequired, 403 AuthenticationFailed, 400 InvalidAuthenticationInfo,"
        " 401 NoAuthenticationInformation, 403 KeyBasedAuthenticationNotPermitted"
    ),
    PermissionDeniedError: (
        "403, 403 AccessDenied, 403 AllAccessDisabled, 403 AccountProblem, 409 ContainerDisabled,"
        " 409 PublicAccessNotPermitted, 412 LeaseIdMissing, 412 LeaseIdMismatchWithBlobOperation,"
        " 409 BlobImmutableDueToPolicy"
    ),
    ConfigError: (
        "301, 307, 301 PermanentRedirect, 400 AuthorizationHeaderMalformed,"
        " 400 IllegalLocationConstraintException, 400 UserProjectMissing,"
        " 400 UserProjectInconsistent, 400 UserProjectInvalid, 400 AccountRequiresHttps"
    ),
    CorruptDataError: "416, 416 InvalidRange",
    PreconditionFailedError: (
        "409, 412, 412 PreconditionFailed, 409 ConditionalRequestConflict, 409 BlobAlreadyExists,"
        " 412 ConditionNotMet"
    ),
    StoreUnavailableError: (
        "408, 429, 500, 502, 503, 504, 409 OperationAborted, 400 RequestTimeout, 503 SlowDown,"
        " 500 InternalError, 503 ServiceUnavailable, 409 InvalidBucketState, 503 ServerBusy,"
        " 500 OperationTimedOut, 409 PendingCopyOperation"
    ),
    UnsupportedError: "405, 501, 501 NotImplemented",
    StoreFullError: (
        "507, 403 QuotaExceeded, 507 XMinioStorageFull, 400 XMinioAdminBucketQuotaExceeded"
    ),
    InputError: (
        "400, 400 EntityTooLarge, 400 KeyTooLongError, 400 KeyTooLong, 409 BlockCountExceedsLimit,"
        " 413 RequestBodyTooLarge"
    ),
    DcpObjstoreError: "418, 499",
}


def test_each_documented_status_and_code_is_one_error():
    for expected, answers in DOCUMENTED.items():
        for answer in answers.split(", "):
            status, _, code = answer.partition(" ")
            assert kind_of_answer(int(status), code or None) is expected, answer


def test_each_error_of_the_system_and_of_python_is_one_error():
    for expected, numbers in {
        ObjectNotFoundError: (errno.ENOENT, errno.ENOTDIR),
        PreconditionFailedError: (errno.EEXIST,),
        PermissionDeniedError: (errno.EACCES, errno.EPERM, errno.EROFS),
        InputError: (errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG),
        UnsupportedError: (errno.ENOSYS, errno.EOPNOTSUPP),
        StoreFullError: (errno.ENOSPC, errno.EDQUOT),
        StoreUnavailableError: (errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    }.items():
        for number in numbers:
            error = of_os(OSError(number, os.strerror(number), "/a/secret/place"))
            assert type(error) is expected, errno.errorcode[number]
            assert os.strerror(number) in str(error)
            assert "secret" not in str(error)
    for kind, expected_kind in {
        ImportError: ConfigError,
        NotImplementedError: UnsupportedError,
        EOFError: StoreUnavailableError,
        ValueError: InputError,
        TypeError: InputError,
        BufferError: InputError,
        ArithmeticError: DcpObjstoreError,
    }.items():
        assert kind_of_builtin(kind("x")) is expected_kind


def test_each_answer_is_one_error(over):
    """Here the paths of an answer to its error; `tests/contract` has every verb."""
    for status, code, expected in ANSWERS:
        body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode() if code else b""
        over.answer = lambda *_, answer=(status, {}, body): answer
        store = over.store()
        for name in ("get", "head", "put_stream"):
            limiter_of(store).window = Window()  # what the last one met slows none down
            with pytest.raises(DcpObjstoreError) as caught:
                VERBS[name](store)
            # obstore takes these as final, though they may pass: the upload is begun again.
            is_final = (status, code) in ((400, "RequestTimeout"), (409, "OperationAborted"))
            is_lost = is_final and name == "put_stream" and over.config.transport == "native"
            kind = UploadLostError if is_lost else expected
            assert type(caught.value) is kind, (name, status, code)
            check(caught.value, store, name)
            if expected is not CredentialsError and not is_lost:
                # The answer to a HEAD has no code. It is asked again where a code may tell more.
                told = name != "head" or status in (400, 403, 404, 409)
                assert (caught.value.status, caught.value.code) == (status, (told and code) or None)


def test_an_update_that_fails_for_another_reason_is_not_taken_for_a_lost_race(over):
    for status, code, expected in (
        (412, "PreconditionFailed", PreconditionFailedError),
        (404, "NoSuchKey", PreconditionFailedError),
        (409, "ConditionalRequestConflict", PreconditionFailedError),
        (404, "NoSuchBucket", BucketNotFoundError),
        (403, "AccessDenied", PermissionDeniedError),
        (400, "ExpiredToken", CredentialsError),
        (500, "InternalError", StoreUnavailableError),
        (503, "SlowDown", StoreUnavailableError),
    ):
        body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
        over.answer = lambda *_, answer=(status, {}, body): answer
        store = over.store()
        for retry in (True, False):
            limiter_of(store).window = Window()
            with pytest.raises(DcpObjstoreError) as caught:
                store.put("k", b"x", precondition=IfVersion(Version('"e"')), retry=retry)
            assert type(caught.value) is expected, (status, code)


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed"])
def test_a_bucket_in_another_region(over, code):
    status = 301 if code == "PermanentRedirect" else 400
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
    # AWS names the region in a header, with which botocore tries once more.
    over.answer = lambda *_: (status, {"x-amz-bucket-region": "eu-west-3"}, body)
    store = over.store()
    for name in ("get", "head", "put"):
        with pytest.raises(ConfigError, match="another region") as caught:
            VERBS[name](store)
        check(caught.value, store, name)


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_an_answer_that_asks_for_an_option_is_an_error_that_names_it(scripted, transport):
    store = scripted.store(transport=transport)
    for status, code, said, option in (
        (400, "InvalidRequest", "required with Object Lock parameters", "ChecksumAlgorithm"),
        (400, "XAmzContentSHA256Mismatch", "no match", "sign_payload"),
        (400, "InvalidDigest", "UNSIGNED-PAYLOAD PUT is not allowed", "sign_payload"),
        (403, "SecondLevelDomainForbidden", "use virtual hosted style", "addressing_style"),
    ):
        body = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
        scripted.answer = lambda *_, answer=(status, {}, body): answer
        with pytest.raises(ConfigError, match=option):
            store.put("k", b"x")


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_get_does_not_read_a_body_that_is_too_large(scripted, transport):
    headers = {
        "ETag": '"e"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Length": str(1 << 40),
    }
    scripted.answer = lambda *_: (200, headers, b"the first bytes")
    narrow = replace(ONCE, upload_concurrency=1, download_concurrency=1)
    store = scripted.store(narrow, transport=transport)
    for _ in range(4):  # more than there may be connections, so none is kept by a body
        with pytest.raises(CorruptDataError, match="1099511627776 bytes"):
            store.get("k", max_size_bytes=1000)


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


def test_given_credentials_are_not_mixed_with_those_of_the_environment(over, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "from-the-environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    over.answer = lambda *_: (200, {"ETag": '"e"'}, b"")

    def sent(**options: object) -> dict[str, str]:
        over.store(**options).put("k", b"x")
        method, target, headers = over.requests[-1]
        assert (method, target) == ("PUT", "/bucket/run/k")
        return {name.lower(): value for name, value in headers.items()}

    headers = sent(region="eu-west-3")
    assert "x-amz-security-token" not in headers
    assert "Credential=a/" in headers["authorization"]
    assert "/eu-west-3/s3/" in headers["authorization"]
    assert sent(token="t")["x-amz-security-token"] == "t"
    assert "authorization" not in sent(key=None, secret=None, anon=True)


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


@pytest.mark.parametrize("transport", ["native", "boto3", "fsspec"])
def test_200_with_an_error_body_is_no_success_of_a_copied_part(scripted, transport):
    """S3 begins to answer UploadPartCopy with 200 before it knows how it will end."""
    copied = b"<CopyPartResult><ETag>&quot;p&quot;</ETag></CopyPartResult>"
    parts: Iterator[bytes] = iter(())
    aborted = 204
    seen = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Length": "9"}

    def answer(method: str, target: str, _nth: int) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in target:
            return _STARTED
        if method == "PUT":
            return 200, {}, next(parts)
        if method == "HEAD":
            return 200, seen, b""
        done = b"<CompleteMultipartUploadResult><ETag>done</ETag></CompleteMultipartUploadResult>"
        return (aborted, {}, b"") if method == "DELETE" else (200, {}, done)

    scripted.answer = answer
    store = scripted.store(TransferConfig(max_retries=1), transport=transport)
    source = CopySource("s3://bucket/run/from", 0, 9, Version('"e"'))
    moved: list[int] = []

    def copy(*bodies: bytes) -> Version:
        nonlocal parts
        parts = iter(bodies)
        del scripted.requests[:], moved[:]
        return store.copy("k", [source], part_size_bytes=9, max_concurrency=1, moved=moved.append)

    assert copy(ERROR_BODY, copied) == Version('"done"')
    assert moved == [9]
    for bodies in ((ERROR_BODY, ERROR_BODY), (b"<CopyPartResult/>",), (b"",)):
        with pytest.raises(StoreUnavailableError):
            copy(*bodies)
        assert next(parts, None) is None
        methods = [method for method, *_ in scripted.requests]
        assert methods == ["POST", *["PUT"] * len(bodies), "DELETE"]
        assert moved == []
    aborted = 403
    with pytest.raises(StoreUnavailableError, match="may be left"):
        copy(b"")


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
