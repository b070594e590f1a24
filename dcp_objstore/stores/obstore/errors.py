"""Read obstore's errors, and its panics.

obstore 0.12 gives 400, 416, 429, 500, 503 and time-outs all as `GenericError` without attributes,
404 as the builtin `FileNotFoundError` and 409 as `AlreadyExistsError`. So this module, and no
other, reads `status code: NNN` and the XML's `<Code>` out of the text, and the reason of a
missing answer out of the dump behind it. `tests/stores/test_errors.py` pins all of it against real
servers.
"""

from __future__ import annotations

import http.client
import re
import textwrap
from dataclasses import replace
from functools import partial
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
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores import errors
from dcp_objstore.stores.errors import ErrorDetails, Meaning
from dcp_objstore.stores.obstore.direct import LaneError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
# Azure's objects are deleted by a batch request even if it is one; of its answer obstore keeps the
# status and the phrase behind it.
_IN_BATCH = re.compile(
    r"Bulk delete request failed for key .*: (?P<phrase>.*) \(code: (?P<status>\d{3})\)"
)
_CODES_OF_PHRASES = {"The specified container does not exist.": "ContainerNotFound"}
# The store's answer around its code and message, which is all that a reader needs of it.
_ANSWER = re.compile(
    r"(?:<\?xml[^>]*>\s*)?<Error>.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*?</Error>", re.S
)
# The place where AWS SDKs ask for an instance's credentials when none were given. An error from
# there says nothing of the bucket.
_INSTANCE_METADATA = "http://169.254.169.254/"
# A 301 without a Location, which is how AWS says that the bucket is in another region, comes
# without its status; only the name of the variant in the dump tells it.
_REDIRECT = "inner: BareRedirect"
_REQUEST = re.compile(
    r"Error performing (?P<method>[A-Z]+) (?P<url>\S+) in (?P<time>[\d.]+\w+)"
    r"(?:, after (?P<retries>\d+) retries)?"
)
# A panic about the address or a header, by the errors of the crates url and http.
_NOT_A_REQUEST = re.compile(r"\b(Invalid[A-Z]\w+|EmptyHost|IdnaError|RelativeUrl\w+)\b")
# The sign that a request never got as far as a connection.
_NOT_CONNECTED = "legacy::Error( Connect,"
_TIMED_OUT = "kind: Timeout"
# A server that wants TLS says so in words, with status 400: Go's (MinIO, rclone), then nginx.
_WANTS_TLS = ("HTTP request to an HTTPS server", "HTTP request was sent to HTTPS port")
_PANIC = "pyo3_runtime.PanicException"
_CONDITIONAL = "obstore.PreconditionError"

_EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired")
# Azure's codes: real 401s say the second, Azurite a 403 with the first.
_TOKEN_CODES = ("AuthenticationFailed", "InvalidAuthenticationInfo")
_UNKNOWN_KEY_CODES = ("InvalidToken", "InvalidAccessKeyId")

# The sign that a ranged GET was answered with 200.
_WHOLE = "source: NotPartial"
# Answers that obstore cannot read: an object without its length, a listing with an odd key.
_NO_LENGTH, _INVALID_PATH = "Content-Length Header missing", "object with invalid path"
_USE_ANOTHER_TRANSPORT = (
    "use storage_options={'transport': 'fsspec'}, or for s3://"
    " install boto3 (pip install 'dcp-objstore[s3]'), which is then asked instead"
)
_WRONG_GOOGLE_KEY = Meaning(
    CredentialsError, "the key of the service account in the environment cannot be used"
)
_UPLOAD_AND_ABORT_UNANSWERED = (
    "PUT of a part, or the end of the upload, got no answer, nor did the abort after it"
)

# The tables have a text of obstore and what it means. The first that fits counts.
# The dump of a request that was not answered as HTTP demands has one of these.
_NOT_THE_RANGE: dict[str, Meaning] = {
    _WHOLE: errors.WHOLE,
    "source: UnexpectedRange": errors.ANOTHER_RANGE,
    "source: ParseContentRange": Meaning(
        CorruptDataError, "the store's answer does not say which range it is"
    ),
    "source: InvalidRangeRequest": Meaning(
        CorruptDataError, "the object is shorter than the range that was asked for"
    ),
}
# The dump of a request that got no answer has one of these.
_NO_ANSWERS: dict[str, Meaning] = {
    "kind: ConnectionRefused": errors.REFUSED,
    '"dns error"': errors.UNRESOLVED,
    "InvalidContentType": errors.NO_TLS,
    "InvalidCertificate(": errors.WRONG_CERTIFICATE,
    "hyper::Error( Parse(": errors.NO_HTTP,
    _NOT_CONNECTED: errors.NOT_CONNECTED,
    _TIMED_OUT: errors.LATE,
    "legacy::Error( SendRequest,": errors.CLOSED,
}
# The text of an error that names no request has one of these: it is about a setting, or an answer
# that no store gives.
_NO_REQUESTS: dict[str, Meaning] = {
    "Generic Config error": Meaning(
        ConfigError,
        "a setting is not valid, in storage_options or in the environment (AWS_*, GOOGLE_*,"
        " AZURE_*)",
    ),
    "Invalid encryption": Meaning(ConfigError, "'SSEKMSKeyId' or AWS_SSE_KMS_KEY_ID is not valid"),
    "HTTP client error: builder error": Meaning(
        ConfigError,
        "the certificates to trust cannot be read: SSL_CERT_FILE or SSL_CERT_DIR in the environment"
        " names none, or 'verify' does",
    ),
    "failed to parse header": Meaning(ConfigError, "a setting cannot be sent in a header"),
    # obstore reads the variables of a service account even if it is given other credentials.
    "Unable to open service account file": _WRONG_GOOGLE_KEY,
    "Unable to decode service account file": _WRONG_GOOGLE_KEY,
    "pem file": _WRONG_GOOGLE_KEY,
    "Invalid RSA key": _WRONG_GOOGLE_KEY,
    "Invalid Access Key": Meaning(CredentialsError, "the account's key is not base64"),
    _NO_LENGTH: Meaning(
        UnsupportedError,
        "the server does not announce the length of an object (Content-Length), without which"
        " transport 'native' reads nothing",
        _USE_ANOTHER_TRANSPORT,
    ),
    _INVALID_PATH: Meaning(
        UnsupportedError,
        "there is a key with an empty, '.' or '..' segment: transport 'native' reads nothing",
        f"{_USE_ANOTHER_TRANSPORT}; or remove the object",
    ),
    # Reads of GCS and Azure only.
    "Last-Modified Header missing": errors.NO_BUCKET,
    "ETag Header missing": errors.NO_STORE_ANSWERED,
    "missing field `UploadId`": errors.NO_STORE_ANSWERED,
    "missing field `Blobs`": errors.NO_STORE_ANSWERED,
    "invalid Content-Type value": errors.NO_STORE_ANSWERED,
}
_BY_TYPE: dict[str, type[DcpObjstoreError]] = {
    "obstore.AlreadyExistsError": PreconditionFailedError,
    _CONDITIONAL: PreconditionFailedError,
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
        body = f"<Error><Code>{code}</Code><Message>{what}</Message></Error>" if code else what
        super().__init__(f"status code: {status}, {body}")


class _Message(NamedTuple):
    """The text of an obstore error, taken apart.

    Attributes:
        text: the text before the dump.
        dump: the dump of its causes, white space collapsed.
        request: the request that failed, where the text names one.
        status: the status of the store's answer.
        code: the store's `<Code>`.
    """

    text: str
    dump: str
    request: re.Match[str] | None
    status: int | None
    code: str | None

    @property
    def is_abort(self) -> bool:
        """Whether it comes from an abort, which is raised alone where an upload fails twice."""
        request = self.request
        if request is None:
            return False
        return request["method"] == "DELETE" and "?uploadId=" in request["url"]

    @property
    def is_of_instance_metadata(self) -> bool:
        """Whether it comes from the service that gives instances their credentials."""
        return _INSTANCE_METADATA in self.text or _INSTANCE_METADATA in self.dump


def _message(error: BaseException) -> _Message:
    """Take the text of an error of obstore apart; see `_Message`."""
    text, _, dump = str(error).partition("\n\nDebug source:")
    dump = " ".join(dump.split())
    status: int | None = None
    code: str | None = None
    if _REDIRECT in dump:  # obstore tells this status of AWS by the name of its variant alone
        status = http.client.MOVED_PERMANENTLY
    elif batch := _IN_BATCH.search(text):  # a delete on Azure
        status, code = int(batch["status"]), _CODES_OF_PHRASES.get(batch["phrase"])
    elif answer := _STATUS.search(text):
        xml_code = _CODE.search(text)
        status, code = int(answer[1]), xml_code[1] if xml_code else None
    return _Message(text, dump, _REQUEST.search(text), status, code)


def http_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's `<Code>` in an obstore error, where it has them."""
    message = _message(error)
    return message.status, message.code


def read_obstore(error: Exception) -> ErrorDetails:
    """Read what an obstore call raised, or the direct lane in its place.

    The text keeps the store's answer and drops obstore's debug dump. An error without a status
    means that no answer came, or none that obstore understands; the meaning is then the reason, if
    the dump tells it.
    """
    if isinstance(error, LaneError):
        # A lane's error with a status is the store's throttling, which the status says by itself.
        meaning = errors.LOST if error.status is None else None
        return ErrorDetails(text=str(error), status=error.status, meaning=meaning)
    message = _message(error)
    details = ErrorDetails(
        text=_answer_text(message),
        status=message.status,
        code=message.code,
        meaning=_meaning_in_text(error, message),
        conditional=errors.is_of(type(error), _CONDITIONAL),
        connected=_NOT_CONNECTED not in message.dump,
        timed_out=_TIMED_OUT in message.dump,
    )
    if message.is_of_instance_metadata:
        # The text of the metadata service would only distract from the remedy.
        may_pass = message.status is None or message.status >= 500
        details = replace(details, text="", may_pass=may_pass)
    elif message.status is None:
        details = _with_reason_of_silence(details, message)
    return _details_of_failed_abort(error, details) if message.is_abort else details


def _answer_text(message: _Message) -> str:
    """Return what the store said: the status, its code and its sentence, without the request."""
    text = _ANSWER.sub(r"\1: \2", message.text).strip()
    answer = _STATUS.search(text)
    return textwrap.shorten(text[answer.start(1) :], 400, placeholder=" …") if answer else text


judge_obstore = partial(errors.judge, read=read_obstore)


def refusal_of(error: BaseException) -> Literal["expired", "token", "unknown key"] | None:
    """Say in what way the store did not accept the credentials; None for any other error.

    Returns:
        "expired": they were valid once. "token": an access token has expired, was revoked, or is
        wrong; GCS and Azure do not say which. "unknown key": the key is wrong, or was removed.
    """
    status, code = http_code(error)
    if code in _EXPIRED_CODES:
        return "expired"
    if status == http.client.UNAUTHORIZED or code in _TOKEN_CODES:
        return "token"
    return "unknown key" if code in _UNKNOWN_KEY_CODES else None


def sent_whole(error: BaseException) -> bool:
    """A ranged GET was answered with 200, as a server may do if the range is the whole object."""
    return _WHOLE in str(error)


def is_unreadable(error: BaseException) -> bool:
    """Whether obstore could not read an answer that other libraries can."""
    return any(sign in str(error) for sign in (_NO_LENGTH, _INVALID_PATH))


def no_store(error: BaseException) -> DcpObjstoreError | None:
    """Return the error for a 404 that no store sends; None for anything else.

    Every store sends a code with a 404, such as NoSuchBucket. Ask only after a request that needs
    nothing but a bucket: a listing, or the first request of an unconditional write.
    """
    message = _message(error)
    request = message.request
    if request is None or (message.status, message.code) != (http.client.NOT_FOUND, None):
        return None
    if request["method"] not in ("GET", "PUT", "POST") or "uploadId=" in request["url"]:
        return None  # of a part of an upload, or its end: a 404 may mean that the upload is gone
    return errors.NO_BUCKET.error(message.text.strip())


def translate_panic(error: BaseException) -> DcpObjstoreError | None:
    """Translate a panic of obstore; None for anything else.

    Its class, made by PyO3, cannot be imported and derives from `BaseException`, so that no
    `except Exception` sees it. A rank that raised it could not send it to the others, which would
    wait, because it does not pickle either. To send the request again would not help.
    """
    if not errors.is_of(type(error), _PANIC):
        return None
    errors.redact(error)
    text = str(error)
    if _NOT_A_REQUEST.search(text):
        return ConfigError(
            "no request can be made of these settings (endpoint_url, region, credentials): obstore"
            f" says {text!r}"
        )
    return DcpObjstoreError(f"obstore failed in a way of its own, please report it: {text}")


def parts_are_left(error: BaseException) -> bool:
    """Whether an obstore error says that a multipart upload was not aborted."""
    return _message(error).is_abort and not isinstance(error, FileNotFoundError)


def _meaning_in_text(error: Exception, message: _Message) -> Meaning | None:
    """Return what an error means where its text or its class tells; None: status and code do."""
    kind = errors.kind_of_answer(message.status, message.code)
    # A status of its own says that the store is full, whatever the text is.
    if kind is not StoreFullError and any(words in message.text for words in _WANTS_TLS):
        return errors.WANTS_TLS
    if message.is_of_instance_metadata:
        is_aws = f"{_INSTANCE_METADATA}latest/" in message.text
        if not is_aws:  # the same address serves Google's and Azure's machines
            return Meaning(CredentialsError)
        return Meaning(CredentialsError, errors.NO_S3_CREDENTIALS, errors.SET_S3_CREDENTIALS)
    # An error that names no request is about a setting, or an answer that obstore cannot use.
    meaning = None if message.request else errors.first_sign(_NO_REQUESTS, message.text)
    if meaning is not None or kind is not None:
        return meaning  # None if status or code tell the kind
    kinds = (Meaning(kind) for name, kind in _BY_TYPE.items() if errors.is_of(type(error), name))
    return errors.first_sign(_NOT_THE_RANGE, message.dump) or next(kinds, None)


def _with_reason_of_silence(details: ErrorDetails, message: _Message) -> ErrorDetails:
    """Return the details with the reason why a request got no answer, where the dump tells it.

    The meaning then names the server, and the text begins with the reason.
    """
    meaning, request = errors.first_sign(_NO_ANSWERS, message.dump), message.request
    if meaning is None or request is None:
        return details
    retries = request["retries"]
    tries = f" ({retries} retries in {request['time']})" if retries else ""
    words = f"cannot reach {urlsplit(request['url']).netloc or 'the store'}"
    meaning_here = Meaning(meaning.kind, words, meaning.advice)
    return replace(details, text=f"{meaning.words}{tries}", meaning=meaning_here)


def _details_of_failed_abort(error: Exception, details: ErrorDetails) -> ErrorDetails:
    """Return the details of an upload that failed, from those of its abort, which failed too.

    obstore raises the error of the abort alone. The answer to the abort says what is left.
    """
    kind, words, _ = errors.meaning_of(error, details)
    if kind is BucketNotFoundError or words == errors.UPLOAD_LOST.words:
        return details  # the bucket or the upload is gone, and the parts with it
    if kind is ObjectNotFoundError:  # a 404 without a code: the upload is not there
        return replace(details, meaning=errors.UPLOAD_LOST)
    # Without a status, neither request was answered; otherwise the abort was refused.
    meaning = Meaning(StoreUnavailableError, _UPLOAD_AND_ABORT_UNANSWERED)
    if details.status is not None:
        words_of_both = "the upload failed, and aborting it failed too, which hides the cause"
        meaning = Meaning(kind, words_of_both)
    return replace(details, text=f"{words}: {details.text}", meaning=meaning)
