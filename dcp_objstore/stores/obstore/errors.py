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
from typing import NamedTuple
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
    failure,
    is_full,
    kind_of_answer,
    kind_of_builtin,
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
# What a ranged GET was answered with, where that was not the range. It may come from a cache or a
# proxy on the way, and only once: bytes that are not those asked for, of which readers ask again.
_WHOLE = "source: NotPartial"
_NOT_THE_RANGE = {
    _WHOLE: "the store ignores Range: it sends whole objects where a part was asked"
    " for (or something on the way to it does)",
    "source: UnexpectedRange": "the store sent another range than was asked for",
    "source: ParseContentRange": "the store's answer does not say which range it is",
    "source: InvalidRangeRequest": "the object is shorter than the range that was asked for",
}
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


class _NoAnswer(NamedTuple):
    """Why a request got no answer.

    Attributes:
        sign: what the dump says, with its white space collapsed.
        kind: the error to raise.
        what: for the user.
        advice: for the user.
    """

    sign: str
    kind: type[DcpObjstoreError]
    what: str
    advice: str


class _Sign(NamedTuple):
    """A text of obstore about a setting, or about an answer that no store gives.

    Attributes:
        sign: what its text says.
        kind: the error to raise.
        advice: for the user.
    """

    sign: str
    kind: type[DcpObjstoreError]
    advice: str


_OF_GOOGLE = "the key of the service account in the environment cannot be used"
_SIGNS = (
    _Sign(
        "Generic Config error",
        ConfigError,
        "a setting is not valid, in storage_options or in the environment (AWS_*, GOOGLE_*,"
        " AZURE_*)",
    ),
    _Sign(
        "Invalid encryption",
        ConfigError,
        "'ServerSideEncryption' or 'SSEKMSKeyId' is not valid (AWS_SERVER_SIDE_ENCRYPTION and"
        " AWS_SSE_KMS_KEY_ID in the environment)",
    ),
    _Sign("failed to parse header", ConfigError, "a setting cannot be sent in a header"),
    _Sign("Unable parse source url", ConfigError, "the endpoint is no URL"),
    _Sign("Unable to parse url", ConfigError, "the endpoint is no URL"),
    # obstore reads the variables of a service account even if it is given other credentials.
    _Sign("Unable to open service account file", CredentialsError, _OF_GOOGLE),
    _Sign("Unable to decode service account file", CredentialsError, _OF_GOOGLE),
    _Sign("pem file", CredentialsError, _OF_GOOGLE),
    _Sign("Invalid RSA key", CredentialsError, _OF_GOOGLE),
    _Sign("Invalid Access Key", CredentialsError, "the account's key is not base64"),
    # Reads of GCS and Azure only.
    _Sign("Last-Modified Header missing", ConfigError, NO_STORE),
    # A write may have taken effect all the same.
    _Sign("ETag Header missing", StoreUnavailableError, NO_STORE),
    _Sign("missing field `UploadId`", StoreUnavailableError, NO_STORE),
    _Sign("missing field `Blobs`", StoreUnavailableError, NO_STORE),
    _Sign("invalid Content-Type value", StoreUnavailableError, NO_STORE),
)


_CHECK_SERVER = "check endpoint_url and that the server runs"
_CHECK_NETWORK = "check endpoint_url, the network and any proxy or firewall"
_USE_HTTPS = "the server does not speak plain HTTP; endpoint_url should begin with https://"
# The first that fits counts.
_NO_ANSWERS = (
    _NoAnswer(
        "kind: ConnectionRefused", StoreUnavailableError, "connection refused", _CHECK_SERVER
    ),
    _NoAnswer(
        '"dns error"',
        StoreUnavailableError,
        "the host name cannot be resolved",
        "check endpoint_url, the region and this machine's DNS",
    ),
    _NoAnswer(
        "InvalidContentType",
        ConfigError,
        "it does not speak TLS",
        "endpoint_url should begin with http:// if the server really has no TLS",
    ),
    _NoAnswer(
        "InvalidCertificate(",
        ConfigError,
        "its TLS certificate is not valid here",
        "for a certificate of your own set storage_options={'verify': 'path of the CA'}",
    ),
    _NoAnswer("hyper::Error( Parse(", ConfigError, "its answer is no HTTP", _USE_HTTPS),
    _NoAnswer(_NOT_CONNECTED, StoreUnavailableError, "no connection could be made", _CHECK_NETWORK),
    _NoAnswer(_TIMED_OUT, StoreUnavailableError, "no answer in time", _CHECK_NETWORK),
    _NoAnswer(
        "legacy::Error( SendRequest,",
        StoreUnavailableError,
        "the connection was closed before an answer came",
        "check that the server runs, and http:// or https:// in endpoint_url",
    ),
)


def _signed(error: BaseException) -> _Sign | None:
    """Return the sign in an error that is not of a request; None if there is none."""
    text = _parts(error)[0]
    if _REQUEST.search(text) is not None:
        return None
    return next((wrong for wrong in _SIGNS if wrong.sign in text), None)


def http_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's `<Code>` in an obstore error, where it has them."""
    text, dump = _parts(error)
    if _REDIRECT in dump:
        return 301, None
    status, code = _STATUS.search(text), _CODE.search(text)
    batch = _IN_BATCH.search(text)
    if batch is not None:
        return int(batch[2]), _PHRASES.get(batch[1])
    return (int(status[1]) if status else None, code[1] if code else None)


def judge_obstore(error: Exception) -> Failure:
    """Say what an exception of an obstore call means, for the loop that sends requests again."""
    status, code = http_code(error)
    dump = _parts(error)[1]
    found = failure(
        translate_obstore(error),
        status,
        code,
        connected=_NOT_CONNECTED not in dump,
        timed_out=_TIMED_OUT in dump,
    )
    if _INSTANCE_METADATA in str(error):
        return replace(found, may_pass=status is None or status >= 500)
    return found


def is_expired(error: BaseException | None) -> bool:
    """Whether an obstore error says that the credentials have expired."""
    return error is not None and http_code(error)[1] in _EXPIRED_CODES


def is_unknown_key(error: BaseException | None) -> bool:
    """Whether the store does not know the credentials: they are wrong, or gone since."""
    return error is not None and http_code(error)[1] in _UNKNOWN_KEY_CODES


def is_refused_token(error: BaseException | None) -> bool:
    """Whether the store did not accept who we say we are, as GCS and Azure answer it.

    An access token that has expired, was revoked, or is wrong: they do not tell these apart.
    """
    if error is None:
        return False
    status, code = http_code(error)
    return status == http.client.UNAUTHORIZED or code in _TOKEN_CODES


def answer_of(error: BaseException) -> str | None:
    """Return the store's answer that led to an error, as `403 AccessDenied: Access Denied`.

    None if no answer led to it, or one that cannot be read.
    """
    cause = error.__cause__
    if cause is None or isinstance(cause, DcpObjstoreError):
        return None
    status, code = http_code(cause)
    if status is None or code is None:
        return None
    told = _ANSWER.search(_parts(cause)[0])
    return f"{status} {code}" + (f": {told[2].strip().rstrip('.')}" if told else "")


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
    # In place, because it stays as the cause and is shown with it.
    error.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in error.args)
    found = _no_answer(error) or _answer(error)
    return _failed_abort(error, found) if _abort_failed(error) else found


def no_store(error: BaseException | None) -> ConfigError | None:
    """Return the error for a 404 that no store sends; None for anything else.

    Every store sends a code with a 404, such as NoSuchBucket. Ask only after a request that needs
    nothing but a bucket: a listing, or the first request of an unconditional write.
    """
    request = _REQUEST.search(str(error)) if isinstance(error, Exception) else None
    if error is None or request is None or http_code(error) != (http.client.NOT_FOUND, None):
        return None
    method, url = request[1], request[2]
    if method not in ("GET", "PUT", "POST") or "uploadId=" in url:
        return None  # a part of an upload, or its end
    summary = _parts(error)[0].strip()
    return ConfigError(f"{NO_STORE}, and that the bucket exists: {redacted(summary)}")


def translate_panic(error: BaseException) -> DcpObjstoreError | None:
    """Translate a panic of obstore; None for anything else.

    Its class, made by PyO3, cannot be imported and derives from `BaseException`, so that no
    `except Exception` sees it; it does not pickle either, which would leave other ranks waiting.
    Nothing was sent, or nothing more will be: to send it again would not help.
    """
    kind = type(error)
    if kind.__name__ != "PanicException" or kind.__module__ != "pyo3_runtime":
        return None
    error.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in error.args)
    text = str(error)
    if _NOT_A_REQUEST.search(text):
        return ConfigError(
            "no request can be made of these settings (endpoint_url, region, credentials):"
            f" obstore says {text!r}"
        )
    return DcpObjstoreError(f"obstore failed in a way of its own, please report it: {text}")


def parts_are_left(error: BaseException) -> bool:
    """Whether an obstore error says that a multipart upload was not aborted."""
    return _abort_failed(error) and not isinstance(error, FileNotFoundError)


def _abort_failed(error: BaseException) -> bool:
    """Whether it is the error of an abort: of an upload that fails twice, it is raised alone."""
    request = _REQUEST.search(_parts(error)[0])
    return request is not None and request[1] == "DELETE" and "?uploadId=" in request[2]


def _answer(error: Exception) -> DcpObjstoreError:
    kind = _kind(error)
    status, code = http_code(error)
    text, dump = _parts(error)
    summary = _ANSWER.sub(r"\1: \2", text).strip()
    wants_tls = any(words in text for words in _WANTS_TLS)
    if wants_tls and not is_full(status, code):
        return ConfigError(f"{_USE_HTTPS}: {summary}")
    wrong = _signed(error)
    if wrong is not None:
        return kind(f"{wrong.advice}: {summary}")
    advice = _not_the_range(status, dump) or advice_on(kind, status, code)
    return kind(f"{advice}: {summary}" if advice else f"{type(error).__name__}: {summary}")


def _not_the_range(status: int | None, dump: str) -> str | None:
    signs = _NOT_THE_RANGE.items() if status is None else ()
    return next((advice for sign, advice in signs if sign in dump), None)


def _no_answer(error: Exception) -> DcpObjstoreError | None:
    """The error for a request that got no answer, if it was one."""
    text, dump = _parts(error)
    request = _REQUEST.search(text)
    if request is None or _INSTANCE_METADATA in text or http_code(error)[0] is not None:
        return None
    reason = next((reason for reason in _NO_ANSWERS if reason.sign in dump), None)
    if reason is None:
        return None
    # "REDACTED" where it would show a signature
    method, url, took, retries = request.groups()
    tries = f"; {retries} retries in {took}" if retries else ""
    whom = urlsplit(url).netloc or "the store"
    asked = f"({method} {url}{tries})"
    return reason.kind(f"cannot reach {whom}: {reason.what}; {reason.advice} {asked}")


def _failed_abort(error: Exception, found: DcpObjstoreError) -> DcpObjstoreError:
    """Return the error for an upload that failed and could not be aborted."""
    status, _ = http_code(error)
    if isinstance(found, BucketNotFoundError):
        return found  # nothing is left
    if isinstance(found, ObjectNotFoundError):
        return StoreUnavailableError(f"the store lost this upload before its end: {found.message}")
    if status is None:
        return StoreUnavailableError(
            f"the connection to the store was lost in mid-upload: {found.message}"
        )
    return type(found)(
        f"the upload failed, and aborting it failed too, which hides the cause: {found.message}"
    )


def _parts(error: BaseException) -> tuple[str, str]:
    """An obstore error's text, and the dump of its causes with white space collapsed."""
    text, _, dump = str(error).partition("\n\nDebug source:")
    return text, " ".join(dump.split())


def _kind(error: Exception) -> type[DcpObjstoreError]:
    from obstore import exceptions as theirs

    if _INSTANCE_METADATA in str(error):
        return CredentialsError
    status, code = http_code(error)
    if code == "NoSuchKey" and isinstance(error, theirs.PreconditionError):
        return PreconditionFailedError  # If-Match on an absent key: 404 on AWS and moto
    wrong = _signed(error)
    if wrong is not None:
        return wrong.kind
    return kind_of_answer(status, code) or _kind_without_status(error)


def _kind_without_status(error: Exception) -> type[DcpObjstoreError]:
    from obstore import exceptions as theirs

    if _not_the_range(None, _parts(error)[1]):
        return CorruptDataError
    pairs: tuple[tuple[type[BaseException], type[DcpObjstoreError]], ...] = (
        (theirs.AlreadyExistsError, PreconditionFailedError),
        (theirs.PreconditionError, PreconditionFailedError),
        (theirs.PermissionDeniedError, PermissionDeniedError),
        (theirs.UnauthenticatedError, CredentialsError),
        (theirs.NotSupportedError, UnsupportedError),
        (theirs.InvalidPathError, InputError),
        (theirs.UnknownConfigurationKeyError, ConfigError),
        # No answer at all: connection refused or reset, time-out, DNS, TLS.
        (theirs.GenericError, StoreUnavailableError),
    )
    for theirs_type, ours in pairs:
        if isinstance(error, theirs_type):
            return ours
    return kind_of_builtin(error)
