"""Every failure of a store is one typed error, whatever verb met it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import obstore.exceptions
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
from dcp_objstore.stores.errors import (
    ErrorDetails,
    Failure,
    Meaning,
    causes,
    check_no_page,
    is_of,
    judge,
    kind_of_answer,
    kind_of_builtin,
    of_os,
    redact,
    redacted,
    words_for,
)
from dcp_objstore.stores.obstore.direct import LaneError
from dcp_objstore.stores.obstore.errors import (
    RefusedError,
    is_unreadable,
    judge_obstore,
    no_store,
    parts_are_left,
    refusal_of,
    sent_whole,
    translate_panic,
)
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
            assert not code or kind_of_answer(418, code) is expected, answer


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
            assert ("remove old checkpoints" in str(error)) == (expected is StoreFullError)
    assert "of a library" in str(of_os(OSError("of a library")))
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
        (404, "NoSuchBucket", BucketNotFoundError),
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


WORDS: dict[type[DcpObjstoreError], tuple[str, str]] = {
    BucketNotFoundError: ("the bucket does not exist", ""),
    ObjectNotFoundError: ("there is no such object", ""),
    CredentialsError: ("the store did not accept the credentials", "check them"),
    PermissionDeniedError: ("the credentials do not allow this", ""),
    ConfigError: ("the bucket is in another region", "'region'"),
    CorruptDataError: ("the object is shorter", ""),
    PreconditionFailedError: ("the object is not in the state", ""),
    StoreUnavailableError: ("the store did not answer as it should", ""),
    UnsupportedError: ("the store does not support this", ""),
    StoreFullError: ("the store is full, or a quota is reached", "sweep"),
    InputError: ("the store refused the request", ""),
    DcpObjstoreError: ("RuntimeError", ""),
}


def test_each_error_begins_with_what_it_means_and_some_say_what_to_do():
    for kind, (words, advice) in WORDS.items():
        details = ErrorDetails(text="said", status=400, meaning=Meaning(kind))
        error = judge(RuntimeError("no"), lambda _, details=details: details).error
        assert type(error) is kind
        assert error.message.startswith(words) and error.message.endswith(": said"), kind
        assert (advice in (error.advice or "")) if advice else error.advice is None, kind
        assert (error.status, error.code) == (400, None)
    raised = RuntimeError("Signature=SECRET")
    for code, conditional, kind in (
        ("NoSuchUpload", False, UploadLostError),
        ("InvalidBlockList", False, UploadLostError),
        ("NoSuchKey", False, ObjectNotFoundError),
        ("NoSuchKey", True, PreconditionFailedError),
        ("NoSuchBucket", True, BucketNotFoundError),
    ):
        details = ErrorDetails(text="", status=404, code=code, conditional=conditional)
        assert type(judge(raised, lambda _, details=details: details).error) is kind, code
    assert str(raised) == "Signature=***"
    own = StoreUnavailableError("of ours")
    failure = judge(own, lambda _: pytest.fail("it needs no reading"))
    assert failure.error is own and failure.may_pass
    unasked = ErrorDetails(text="", meaning=Meaning(CredentialsError))
    assert "there are no credentials" in judge(RuntimeError(), lambda _: unasked).error.message
    assert words_for(StoreFullError) == "the store is full, or a quota is reached"


def test_a_failure_says_if_the_request_had_an_effect_and_if_another_try_may_help():
    """The first row: an answer; the others: none."""
    for details, throttled, had_no_effect, answered in (
        ({"status": 500}, False, True, True),
        ({"status": 429}, True, True, True),
        ({"status": 503, "connected": False, "timed_out": True}, True, True, True),
        ({"status": 400, "code": "SlowDown"}, True, True, True),
        ({}, False, False, True),
        ({"timed_out": True}, False, False, False),
        ({"connected": False}, False, True, False),
    ):
        failure = Failure(StoreUnavailableError("no"), ErrorDetails(text="", **details))
        assert failure.throttled is throttled, details
        assert failure.had_no_effect is had_no_effect, details
        assert failure.answered is answered, details
        assert failure.may_pass
    for error, knows, may_pass in (
        (StoreUnavailableError("no"), False, False),
        (UploadLostError("no"), None, False),
        (CredentialsError("no"), None, False),
        (CredentialsError("no"), True, True),
    ):
        assert Failure(error, ErrorDetails(text="", may_pass=knows)).may_pass is may_pass


@pytest.mark.parametrize(
    "element",
    [
        "AWSAccessKeyId",
        "StringToSign",
        "StringToSignBytes",
        "CanonicalRequest",
        "CanonicalRequestBytes",
        "SignatureProvided",
        "Token-0",
    ],
)
def test_an_element_with_what_was_signed_is_left_out_of_an_error(element):
    error = RuntimeError(f"<Code>C</Code><{element}>SE\nCRET</{element}><Host>h</Host>", 7)
    error.__cause__ = OSError("Signature=SECRET")
    redact(error)
    assert error.args == (f"<Code>C</Code><{element}/><Host>h</Host>", 7)
    assert str(error.__cause__) == "Signature=***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x-amz-security-token: SECRET, x", "x-amz-security-token: ***, x"),
        ("X-Amz-Credential=SECRET&x=1", "X-Amz-Credential=***&x=1"),
        ("X-Amz-Signature=SECRET;x", "X-Amz-Signature=***;x"),
        ("Credential=SECRET, Signature=SECRET<x>", "Credential=***, Signature=***<x>"),
        ("AWSAccessKeyId=SECRET&sig=SECRET", "AWSAccessKeyId=***&sig=***"),
        ('{"Authorization": "Bearer SECRET"}', '{"Authorization": "Bearer ***"}'),
        ("authorization: basic SECRET", "authorization: basic ***"),
        ("authorization = SECRET", "authorization = ***"),
        ("\x1b[31mdesign: red", "\\x1b[31mdesign: red"),
    ],
)
def test_a_field_with_a_credential_or_signature_is_hidden_wherever_it_stands(text, shown):
    assert redacted(text) == shown


def test_the_causes_of_an_error_are_followed_in_order_and_each_once():
    first, second, third = OSError("1"), OSError("2"), OSError("3")
    first.__cause__, second.__cause__, third.__cause__ = second, third, first
    second.__context__ = OSError("of another request")
    assert list(causes(first)) == [first, second, third]
    # urllib3 keeps some in its arguments, and in `reason`.
    kept, reason = OSError("Signature=SECRET"), OSError("sig=SECRET")
    outer = RuntimeError("no", kept)
    outer.reason = reason  # type: ignore[attr-defined]
    redact(outer)
    assert "SECRET" not in f"{kept} {reason}"


def test_a_class_is_known_by_its_library_wherever_it_stands_there():
    base = type("Base", (Exception,), {"__module__": "library.deep.down"})
    derived = type("Derived", (base,), {"__module__": "mine"})
    assert is_of(derived, "library.Base") and is_of(derived, "other", "library")
    assert is_of(derived, "mine.Derived") and is_of(base, "library.Base")
    assert not is_of(base, "library.Other", "deep", "library.deep.Base", "mine.Derived")


def test_a_page_of_html_is_no_stores_answer():
    check_no_page("application/xml")
    check_no_page(None)
    with pytest.raises(ConfigError, match="does not look like a store"):
        check_no_page("text/html; charset=utf-8")


# --- what obstore says, by which nothing else but its class tells errors apart


def got(method: str, query: str = "", answer: str = "") -> str:
    url = f"https://host:1/bucket/k{query}"
    return f"Generic S3 error: Error performing {method} {url} in 1.5s, after 2 retries{answer}"


# Its dump where a request got no answer; the answer is not HTTP, or not the range.
DUMPS = {
    "kind: ConnectionRefused": (StoreUnavailableError, "connection refused", "server runs"),
    '"dns error"': (StoreUnavailableError, "name cannot be resolved", "DNS"),
    "InvalidContentType": (ConfigError, "does not speak TLS", "http://"),
    "InvalidCertificate(": (ConfigError, "certificate is not valid", "'verify'"),
    "hyper::Error( Parse(": (ConfigError, "is no HTTP", "https://"),
    "legacy::Error( Connect,": (StoreUnavailableError, "no connection could be made", "firewall"),
    "kind: Timeout": (StoreUnavailableError, "no answer in time", "firewall"),
    "legacy::Error( SendRequest,": (StoreUnavailableError, "closed before an answer", "http://"),
}
RANGES = {
    "source: NotPartial": "ignores Range",
    "source: UnexpectedRange": "another range",
    "source: ParseContentRange": "does not say which range",
    "source: InvalidRangeRequest": "shorter than the range",
}
# Its text where it names no request: a setting, or an answer that no store gives.
TEXTS: dict[type[DcpObjstoreError], dict[str, str]] = {
    ConfigError: {
        "Generic Config error": "a setting is not valid",
        "Invalid encryption": "AWS_SSE_KMS_KEY_ID",
        "HTTP client error: builder error": "SSL_CERT_FILE",
        "failed to parse header": "cannot be sent in a header",
        "Last-Modified Header missing": "does not look like a store",
        "HTTP request to an HTTPS server": "does not speak plain HTTP",
        "HTTP request was sent to HTTPS port": "does not speak plain HTTP",
    },
    CredentialsError: {
        "Unable to open service account file": "the key of the service account",
        "Unable to decode service account file": "the key of the service account",
        "pem file": "the key of the service account",
        "Invalid RSA key": "the key of the service account",
        "Invalid Access Key": "is not base64",
    },
    UnsupportedError: {
        "Content-Length Header missing": "does not announce the length",
        "object with invalid path": "empty, '.' or '..' segment",
    },
    StoreUnavailableError: {
        "ETag Header missing": "does not look like a store",
        "missing field `UploadId`": "does not look like a store",
        "missing field `Blobs`": "does not look like a store",
        "invalid Content-Type value": "does not look like a store",
        "anything else": "did not answer as it should",
    },
}
CLASSES = {
    "AlreadyExistsError": PreconditionFailedError,
    "PreconditionError": PreconditionFailedError,
    "PermissionDeniedError": PermissionDeniedError,
    "UnauthenticatedError": CredentialsError,
    "NotSupportedError": UnsupportedError,
    "InvalidPathError": InputError,
    "UnknownConfigurationKeyError": ConfigError,
    "GenericError": StoreUnavailableError,
    "JoinError": DcpObjstoreError,
}


def of_obstore(text: str, name: str = "GenericError") -> Failure:
    return judge_obstore(getattr(obstore.exceptions, name)(text))


def test_why_obstore_got_no_answer_is_read_out_of_its_dump():
    for sign, (kind, words, advice) in DUMPS.items():
        dump = "\n\nDebug source:\n" + sign.replace(" ", "\n    ")
        failure = of_obstore(got("GET") + dump)
        error, details = failure
        assert type(error) is kind, sign
        assert error.message.startswith("cannot reach host:1: "), sign
        assert words in error.message and "(2 retries in 1.5s)" in error.message
        assert advice in str(error.advice), sign
        assert details.connected is ("Connect," not in sign)
        assert details.timed_out is (sign == "kind: Timeout")
        # With a status, the store has answered.
        status = of_obstore(got("GET", answer=" - status code: 403") + dump)
        assert type(status.error) is PermissionDeniedError
    assert "cannot reach" not in of_obstore(got("GET")).error.message
    assert "did not answer" in of_obstore("no\n\nDebug source: kind: Timeout").error.message
    # A redirect that obstore does not follow has no status.
    failure = of_obstore(got("GET") + "\n\nDebug source: inner: BareRedirect")
    assert (type(failure.error), failure.details.status) == (ConfigError, 301)
    assert "BareRedirect" not in failure.error.message
    # The direct lane in obstore's place.
    lost = judge_obstore(LaneError("ConnectionError"))
    assert lost.error.message == "the connection to the store was lost: ConnectionError"
    assert lost.may_pass and not lost.throttled
    assert judge_obstore(LaneError("no", status=503)).throttled


def test_an_answer_that_obstore_cannot_use_is_read_out_of_its_texts():
    for sign, words in RANGES.items():
        error = of_obstore(f"no\n\nDebug source: {sign}").error
        assert type(error) is CorruptDataError and words in error.message, sign
        assert sent_whole(RuntimeError(sign)) is (sign == "source: NotPartial")
    for kind, texts in TEXTS.items():
        for text, words in texts.items():
            error = of_obstore(f"Generic error: {text}: more").error
            assert type(error) is kind and words in error.message, text
            assert ("'transport': 'fsspec'" in str(error)) == (kind is UnsupportedError)
            assert is_unreadable(RuntimeError(text)) == (kind is UnsupportedError)
            if "HTTP request" not in text:  # a request is about the store, not about a setting
                error = of_obstore(f"{got('GET')}: {text}").error
                assert "did not answer as it should" in error.message, text
    full = of_obstore("status code: 507: HTTP request to an HTTPS server").error
    assert type(full) is StoreFullError
    for name, kind in CLASSES.items():
        assert type(of_obstore("no", name).error) is kind, name
        # The status counts before the class.
        assert type(of_obstore("status code: 416", name).error) is CorruptDataError
        assert of_obstore("no", name).details.conditional is (name == "PreconditionError")


def test_the_answer_to_a_batch_has_its_status_and_code():
    said = "Bulk delete request failed for key k: {} (code: 404)"
    gone = of_obstore(said.format("The specified container does not exist."))
    assert (type(gone.error), gone.details.code) == (BucketNotFoundError, "ContainerNotFound")
    other = of_obstore(said.format("No."))
    assert (type(other.error), other.details.code) == (ObjectNotFoundError, None)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("", StoreUnavailableError, "PUT of a part, or the end"),
        (" - status code: 403", PermissionDeniedError, "hides the cause: the credentials do not"),
        (" - status code: 404", UploadLostError, "the store lost this upload"),
        (" - status code: 404 <Code>NoSuchUpload</Code>", UploadLostError, "the store lost this"),
        (" - status code: 404 <Code>NoSuchBucket</Code>", BucketNotFoundError, "the bucket does"),
    ],
)
def test_an_abort_that_fails_stands_for_its_upload(answer, kind, words):
    text = got("DELETE", "?uploadId=1", answer)
    error = of_obstore(text).error
    assert type(error) is kind and words in error.message
    assert ("hides the cause" in error.message) == (kind is PermissionDeniedError)
    assert parts_are_left(RuntimeError(text))
    assert not parts_are_left(FileNotFoundError(text))
    for method, query in (("DELETE", ""), ("PUT", "?uploadId=1")):
        text = got(method, query, answer)
        assert not parts_are_left(RuntimeError(text))
        assert "hides the cause" not in of_obstore(text).error.message


def test_a_404_without_a_code_tells_of_no_store_if_the_request_needs_no_object():
    for method, query, answer, expected in (
        ("GET", "", "404", ConfigError),
        ("PUT", "", "404", ConfigError),
        ("POST", "?uploads=", "404", ConfigError),
        ("POST", "?uploadId=1", "404", None),
        ("HEAD", "", "404", None),
        ("GET", "", "403", None),
        ("GET", "", "404 <Code>NoSuchKey</Code>", None),
    ):
        error = no_store(RuntimeError(got(method, query, f" - status code: {answer}")))
        assert (error and type(error)) is expected, (method, query, answer)
    assert no_store(RuntimeError("status code: 404")) is None


def test_it_is_known_which_credentials_a_store_has_refused():
    for status, code, why in (
        (400, "ExpiredToken", "expired"),
        (400, "TokenRefreshRequired", "expired"),
        (401, "", "token"),
        (401, "ExpiredToken", "expired"),
        (403, "AuthenticationFailed", "token"),
        (403, "InvalidAuthenticationInfo", "token"),
        (400, "InvalidToken", "unknown key"),
        (403, "InvalidAccessKeyId", "unknown key"),
        (403, "AccessDenied", None),
        (403, "", None),
    ):
        assert refusal_of(RefusedError("said", status, code or None)) == why, (status, code)


def test_a_panic_of_obstore_is_an_error_that_hides_no_credential():
    panic_type = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for text, kind in (
        ("called unwrap on InvalidPort, Signature=SECRET", ConfigError),
        ("index out of bounds, Signature=SECRET", DcpObjstoreError),
    ):
        panic = panic_type(text)
        error = translate_panic(panic)
        assert type(error) is kind
        assert "SECRET" not in f"{error} {panic}"
        assert "please report it: index out" in str(error) or kind is ConfigError
    assert translate_panic(KeyboardInterrupt("InvalidPort")) is None


def test_the_stores_answer_is_reduced_to_its_code_and_message():
    answer = (
        'Server returned non-2xx status code: 403 Forbidden: <?xml version="1.0"?>\n<Error><Code>'
        "AccessDenied</Code><Message>No.</Message><RequestId>1</RequestId></Error>"
    )
    error = of_obstore(answer).error
    assert type(error) is PermissionDeniedError
    words = "the credentials do not allow this: "
    assert error.message == f"{words}403 Forbidden: AccessDenied: No."
    for long, size in (("a a", 399), ("bb a", 400)):  # at most 400, cut between words
        message = of_obstore(f"status code: 403 {long}" + " a" * 500).error.message
        assert message.endswith(" a …")
        assert len(message) == len(words) + size


@pytest.mark.parametrize(
    ("path", "place", "status", "may_pass"),
    [
        ("latest/api/token", "text", 403, False),
        ("latest/api/token", "text", 499, False),
        ("latest/api/token", "text", 500, True),
        ("latest/api/token", "dump", None, True),
        ("metadata/identity", "text", None, True),
    ],
)
def test_an_answer_of_the_instance_metadata_is_about_credentials(path, place, status, may_pass):
    url = f"http://169.254.169.254/{path}"
    text = got("GET") if place == "dump" else f"Error performing PUT {url} in 1s"
    text += f" - status code: {status}" if status else ""
    failure = of_obstore(f"{text}\n\nDebug source: kind: Timeout {url if place == 'dump' else ''}")
    assert type(failure.error) is CredentialsError
    assert failure.may_pass is may_pass
    message = str(failure.error)
    assert ("no credentials for S3" in message) == ("latest" in path and place == "text")
    assert "169.254" not in message and "cannot reach" not in message


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
