"""Translate obstore's errors, and its panics.

obstore 0.12 gives 400, 416, 429, 500, 503 and time-outs all as `GenericError` without attributes,
404 as the builtin `FileNotFoundError` and 409 as `AlreadyExistsError`. So this module, and no
other, reads `status code: NNN` and the XML's `<Code>` out of the text, and out of the dump behind
it why there was no answer at all. `tests/stores/test_errors.py` pins all of it against real
servers.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import replace
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from dcp_objstore.errors import (
    BucketNotFoundError,
    ConfigError,
    CorruptDataError,
    CredentialsError,
    DcpObjstoreError,
    InputError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.errors import (
    NO_STORE,
    Failure,
    advice_on,
    by_type,
    failure,
    is_full,
    is_of,
    kind_of_answer,
    kind_of_builtin,
    redact,
    redacted,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
# Azure's objects are deleted by a batch request even if it is one; of its answer obstore keeps the
# status and the phrase behind it.
_IN_BATCH = re.compile(r"Bulk delete request failed for key .*: (.*) \(code: (\d{3})\)")
_PHRASES = {"The specified container does not exist.": "ContainerNotFound"}
# The store's answer around its code and message, which is all that a reader needs of it.
_ANSWER = re.compile(
    r"(?:<\?xml[^>]*>\s*)?<Error>.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*?</Error>", re.S
)
# Where AWS SDKs ask for an instance's credentials when none were given. An error from there says
# nothing of the bucket.
_INSTANCE_METADATA = "http://169.254.169.254/"
# A 301 without a Location, which is how AWS says that the bucket is in another region, comes
# without its status; only the name of the variant in the dump tells it.
_REDIRECT = "inner: BareRedirect"
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\S+) in ([\d.]+\w+)(?:, after (\d+) retries)?")
# Of panics: errors of the crates url and http, about the address or a header.
_NOT_A_REQUEST = re.compile(r"\b(Invalid[A-Z]\w+|EmptyHost|IdnaError|RelativeUrl\w+)\b")
# The request never got as far as a connection.
_NOT_CONNECTED = "legacy::Error( Connect,"
_TIMED_OUT = "kind: Timeout"
# A server that wants TLS says so in words, with status 400: Go's (MinIO, rclone), then nginx.
_WANTS_TLS = ("HTTP request to an HTTPS server", "HTTP request was sent to HTTPS port")

_EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired")
# Of Azure: real 401s say the second, Azurite a 403 with the first.
_TOKEN_CODES = ("AuthenticationFailed", "InvalidAuthenticationInfo")
_UNKNOWN_KEY_CODES = ("InvalidToken", "InvalidAccessKeyId")

_CHECK_NETWORK = "check endpoint_url, the network and any proxy or firewall"
_USE_HTTPS = "the server does not speak plain HTTP; endpoint_url should begin with https://"
_OF_GOOGLE = "the key of the service account in the environment cannot be used"
# What a ranged GET was answered with, where that was not the range. It may come from a cache or a
# proxy on the way, and only once: bytes that are not those asked for, of which readers ask again.
_WHOLE = "source: NotPartial"

# The tables have a text of obstore, the error to raise, and words for the user. The first that fits
# counts.
_Signs = tuple[tuple[str, type[DcpObjstoreError], str], ...]
# In the dump of a request that was not answered as HTTP demands.
_NOT_THE_RANGE: _Signs = tuple(
    (sign, CorruptDataError, words)
    for sign, words in {
        _WHOLE: "the store ignores Range: it sends whole objects where a part was asked for (or"
        " something on the way to it does)",
        "source: UnexpectedRange": "the store sent another range than was asked for",
        "source: ParseContentRange": "the store's answer does not say which range it is",
        "source: InvalidRangeRequest": "the object is shorter than the range that was asked for",
    }.items()
)
# In the dump of a request that got no answer.
_NO_ANSWERS: _Signs = (
    (
        "kind: ConnectionRefused",
        StoreUnavailableError,
        "connection refused; check endpoint_url and that the server runs",
    ),
    (
        '"dns error"',
        StoreUnavailableError,
        "the host name cannot be resolved; check endpoint_url, the region and this machine's DNS",
    ),
    (
        "InvalidContentType",
        ConfigError,
        "it does not speak TLS; endpoint_url should begin with http:// if the server really has no"
        " TLS",
    ),
    (
        "InvalidCertificate(",
        ConfigError,
        "its TLS certificate is not valid here; for a certificate of your own set"
        " storage_options={'verify': 'path of the CA'}",
    ),
    ("hyper::Error( Parse(", ConfigError, f"its answer is no HTTP; {_USE_HTTPS}"),
    (_NOT_CONNECTED, StoreUnavailableError, f"no connection could be made; {_CHECK_NETWORK}"),
    (_TIMED_OUT, StoreUnavailableError, f"no answer in time; {_CHECK_NETWORK}"),
    (
        "legacy::Error( SendRequest,",
        StoreUnavailableError,
        "the connection was closed before an answer came; check that the server runs, and http://"
        " or https:// in endpoint_url",
    ),
)
# About a setting, or an answer that no store gives: in the text of an error that names no request.
_NO_REQUESTS: _Signs = (
    (
        "Generic Config error",
        ConfigError,
        "a setting is not valid, in storage_options or in the environment (AWS_*, GOOGLE_*,"
        " AZURE_*)",
    ),
    (
        "Invalid encryption",
        ConfigError,
        "'ServerSideEncryption' or 'SSEKMSKeyId' is not valid (AWS_SERVER_SIDE_ENCRYPTION and"
        " AWS_SSE_KMS_KEY_ID in the environment)",
    ),
    ("failed to parse header", ConfigError, "a setting cannot be sent in a header"),
    ("Unable parse source url", ConfigError, "the endpoint is no URL"),
    ("Unable to parse url", ConfigError, "the endpoint is no URL"),
    # obstore reads the variables of a service account even if it is given other credentials.
    ("Unable to open service account file", CredentialsError, _OF_GOOGLE),
    ("Unable to decode service account file", CredentialsError, _OF_GOOGLE),
    ("pem file", CredentialsError, _OF_GOOGLE),
    ("Invalid RSA key", CredentialsError, _OF_GOOGLE),
    ("Invalid Access Key", CredentialsError, "the account's key is not base64"),
    # Reads of GCS and Azure only.
    ("Last-Modified Header missing", ConfigError, NO_STORE),
    # A write may have taken effect all the same.
    ("ETag Header missing", StoreUnavailableError, NO_STORE),
    ("missing field `UploadId`", StoreUnavailableError, NO_STORE),
    ("missing field `Blobs`", StoreUnavailableError, NO_STORE),
    ("invalid Content-Type value", StoreUnavailableError, NO_STORE),
)
_BY_TYPE: dict[str, type[DcpObjstoreError]] = {
    "obstore.AlreadyExistsError": PreconditionFailedError,
    "obstore.PreconditionError": PreconditionFailedError,
    "obstore.PermissionDeniedError": PermissionDeniedError,
    "obstore.UnauthenticatedError": CredentialsError,
    "obstore.NotSupportedError": UnsupportedError,
    "obstore.InvalidPathError": InputError,
    "obstore.UnknownConfigurationKeyError": ConfigError,
    # No answer at all: connection refused or reset, time-out, DNS, TLS.
    "obstore.GenericError": StoreUnavailableError,
}


class RefusedError(Exception):
    """A refusal of a request that obstore did not send, in the form of obstore's errors."""

    def __init__(self, what: str, status: int, code: str | None) -> None:
        told = f"<Error><Code>{code}</Code><Message>{what}</Message></Error>" if code else what
        super().__init__(f"status code: {status}, {told}")


class _Told(NamedTuple):
    """An obstore error, taken apart; the dump is that of its causes, white space collapsed."""

    text: str
    dump: str
    request: re.Match[str] | None
    status: int | None
    code: str | None

    @property
    def is_abort(self) -> bool:
        """It is of an abort, which is raised alone where an upload fails twice."""
        asked = self.request
        return asked is not None and asked[1] == "DELETE" and "?uploadId=" in asked[2]

    def sign(self, signs: _Signs, where: str) -> tuple[type[DcpObjstoreError], str] | None:
        """What the first sign that is there means."""
        return next(((kind, words) for sign, kind, words in signs if sign in where), None)


def _told(error: BaseException) -> _Told:
    text, _, dump = str(error).partition("\n\nDebug source:")
    dump = " ".join(dump.split())
    request = _REQUEST.search(text)
    if _REDIRECT in dump:
        return _Told(text, dump, request, 301, None)
    batch = _IN_BATCH.search(text)
    if batch is not None:
        return _Told(text, dump, request, int(batch[2]), _PHRASES.get(batch[1]))
    status, code = _STATUS.search(text), _CODE.search(text)
    return _Told(text, dump, request, int(status[1]) if status else None, code[1] if code else None)


def http_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's `<Code>` in an obstore error, where it has them."""
    told = _told(error)
    return told.status, told.code


def judge_obstore(error: Exception) -> Failure:
    """Say what an exception of an obstore call means, for the loop that sends requests again."""
    told = _told(error)
    found = failure(
        translate_obstore(error),
        told.status,
        told.code,
        connected=_NOT_CONNECTED not in told.dump,
        timed_out=_TIMED_OUT in told.dump,
    )
    if _INSTANCE_METADATA in str(error):
        return replace(found, may_pass=told.status is None or told.status >= 500)
    return found


def refusal_of(error: BaseException) -> Literal["expired", "token", "unknown key"] | None:
    """Say in what way the store did not accept the credentials; None if it is not that.

    GCS and Azure do not tell apart an access token that has expired, was revoked, or is wrong. With
    an unknown key, credentials are wrong, or gone since.
    """
    status, code = http_code(error)
    if code in _EXPIRED_CODES:
        return "expired"
    if status == http.client.UNAUTHORIZED or code in _TOKEN_CODES:
        return "token"
    return "unknown key" if code in _UNKNOWN_KEY_CODES else None


def answer_of(error: BaseException) -> str | None:
    """Return the store's answer that led to an error, as `403 AccessDenied: Access Denied`.

    None if no answer led to it, or one that cannot be read.
    """
    cause = error.__cause__
    if cause is None or isinstance(cause, DcpObjstoreError):
        return None
    told = _told(cause)
    if told.status is None or told.code is None:
        return None
    answer = _ANSWER.search(told.text)
    message = f": {answer[2].strip().rstrip('.')}" if answer else ""
    return f"{told.status} {told.code}{message}"


def sent_whole(error: BaseException) -> bool:
    """A ranged GET was answered with 200, as a server may do if the range is the whole object."""
    return _WHOLE in str(error)


def translate_obstore(error: Exception) -> DcpObjstoreError:
    """Translate what an obstore call raised, by code, status, then type.

    The text keeps the store's answer and drops obstore's debug dump. Errors without a status come
    from the transport when they are `GenericError`s of a request: the text then says why there was
    no answer. Anything unknown becomes a plain `DcpObjstoreError`. Credentials and
    signatures that a store repeats are left out, in the text and in `error` itself.
    """
    if isinstance(error, DcpObjstoreError):
        return error
    redact(error)
    told = _told(error)
    found = _no_answer(told) or _answer(error, told)
    return _failed_abort(told, found) if told.is_abort else found


def no_store(error: BaseException) -> ConfigError | None:
    """Return the error for a 404 that no store sends; None for anything else.

    Every store sends a code with a 404, such as NoSuchBucket. Ask only after a request that needs
    nothing but a bucket: a listing, or the first request of an unconditional write.
    """
    told = _told(error)
    request = told.request
    if request is None or (told.status, told.code) != (http.client.NOT_FOUND, None):
        return None
    if request[1] not in ("GET", "PUT", "POST") or "uploadId=" in request[2]:
        return None  # a part of an upload, or its end
    return ConfigError(f"{NO_STORE}, and that the bucket exists: {redacted(told.text.strip())}")


def translate_panic(error: BaseException) -> DcpObjstoreError | None:
    """Translate a panic of obstore; None for anything else.

    Its class, made by PyO3, cannot be imported and derives from `BaseException`, so that no
    `except Exception` sees it; it does not pickle either, which would leave other ranks waiting.
    Nothing was sent, or nothing more will be: to send it again would not help.
    """
    if not is_of(type(error), "pyo3_runtime.PanicException"):
        return None
    redact(error)
    text = str(error)
    if _NOT_A_REQUEST.search(text):
        return ConfigError(
            "no request can be made of these settings (endpoint_url, region, credentials):"
            f" obstore says {text!r}"
        )
    return DcpObjstoreError(f"obstore failed in a way of its own, please report it: {text}")


def parts_are_left(error: BaseException) -> bool:
    """Whether an obstore error says that a multipart upload was not aborted."""
    return _told(error).is_abort and not isinstance(error, FileNotFoundError)


def _no_answer(told: _Told) -> DcpObjstoreError | None:
    """The error for a request that got no answer, if it was one."""
    if told.request is None or _INSTANCE_METADATA in told.text or told.status is not None:
        return None
    found = told.sign(_NO_ANSWERS, told.dump)
    if found is None:
        return None
    kind, words = found
    # "REDACTED" where it would show a signature
    method, url, took, retries = told.request.groups()
    tries = f"; {retries} retries in {took}" if retries else ""
    whom = urlsplit(url).netloc or "the store"
    return kind(f"cannot reach {whom}: {words} ({method} {url}{tries})")


def _answer(error: Exception, told: _Told) -> DcpObjstoreError:
    summary = _ANSWER.sub(r"\1: \2", told.text).strip()
    if any(one in told.text for one in _WANTS_TLS) and not is_full(told.status, told.code):
        return ConfigError(f"{_USE_HTTPS}: {summary}")
    kind, words = _meaning(error, told)
    return kind(f"{words or type(error).__name__}: {summary}")


def _meaning(error: Exception, told: _Told) -> tuple[type[DcpObjstoreError], str | None]:
    kind: type[DcpObjstoreError] | None
    if _INSTANCE_METADATA in str(error):
        kind = CredentialsError
    elif told.code == "NoSuchKey" and is_of(type(error), "obstore.PreconditionError"):
        kind = PreconditionFailedError  # If-Match on an absent key: 404 on AWS and moto
    else:
        sign = None if told.request else told.sign(_NO_REQUESTS, told.text)
        kind = kind_of_answer(told.status, told.code)
        if sign is None and kind is None:
            sign = told.sign(_NOT_THE_RANGE, told.dump)
        if sign is not None:
            return sign
        kind = kind or by_type(error, _BY_TYPE) or kind_of_builtin(error)
    return kind, advice_on(kind, told.status, told.code)


def _failed_abort(told: _Told, found: DcpObjstoreError) -> DcpObjstoreError:
    """Return the error for an upload that failed and could not be aborted."""
    if isinstance(found, BucketNotFoundError):
        return found  # nothing is left
    if isinstance(found, ObjectNotFoundError):
        return StoreUnavailableError(f"the store lost this upload before its end: {found.message}")
    if told.status is None:
        return StoreUnavailableError(
            f"the connection to the store was lost in mid-upload: {found.message}"
        )
    return type(found)(
        f"the upload failed, and aborting it failed too, which hides the cause: {found.message}"
    )
