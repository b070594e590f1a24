"""The one place that says which status, code or builtin error is which error of this package.

An adapter reads out of an exception of its library what is in it (`ErrorDetails`). `judge` makes
the error of that, and says whether the request may be sent again.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dcp_objstore import contexts
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
    UploadLostError,
    printable,
)

# What stores repeat of a request that they refuse: who signed it, and how. AWS does so in
# elements of SignatureDoesNotMatch, others and proxies in whatever form they like.
_SECRET_ELEMENT = re.compile(
    r"<(AWSAccessKeyId|StringToSign\w*|CanonicalRequest\w*|SignatureProvided|Token-\d+)>.*?</\1>",
    re.S,
)
# A field's name, what stands between it and its value, and the value: `Signature="abc"`.
_SECRET_FIELDS = [
    re.compile(rf"((?:{names})\b[\\\"']*\s*[:=]\s*[\\\"']*{scheme})[^\s,;&<>\\\"']+", re.I)
    for names, scheme in (
        ("x-amz-security-token|x-amz-credential|x-amz-signature|credential|signature", ""),
        ("awsaccesskeyid|sig", ""),
        ("authorization", r"(?:Bearer\s+|Basic\s+)?"),
    )
]
# Error codes of S3 (docs: "Error responses"), which GCS's XML API shares where it has them (docs:
# "XML API: HTTP status and error codes"), then GCS's own, then Azure's (docs: "Blob Storage error
# codes" and "Common REST API error codes").
_CODES: dict[type[DcpObjstoreError], str] = {
    BucketNotFoundError: "NoSuchBucket InvalidBucketName ContainerNotFound ContainerBeingDeleted",
    ObjectNotFoundError: "NoSuchKey BlobNotFound",
    CredentialsError: (
        "ExpiredToken TokenRefreshRequired InvalidToken InvalidAccessKeyId InvalidSecurity"
        " SignatureDoesNotMatch AuthenticationRequired RequestTimeTooSkewed AuthenticationFailed"
        " InvalidAuthenticationInfo NoAuthenticationInformation KeyBasedAuthenticationNotPermitted"
    ),
    # The last three do not say that another writer was first: a lease or a policy stands in
    # everybody's way.
    PermissionDeniedError: (
        "AccessDenied AllAccessDisabled AccountProblem ContainerDisabled PublicAccessNotPermitted"
        " LeaseIdMissing LeaseIdMismatchWithBlobOperation BlobImmutableDueToPolicy"
    ),
    ConfigError: (
        "AuthorizationHeaderMalformed PermanentRedirect IllegalLocationConstraintException"
        " UserProjectMissing UserProjectInconsistent UserProjectInvalid AccountRequiresHttps"
    ),
    CorruptDataError: "InvalidRange",
    PreconditionFailedError: (
        "PreconditionFailed ConditionalRequestConflict BlobAlreadyExists ConditionNotMet"
    ),
    StoreUnavailableError: (
        "OperationAborted RequestTimeout SlowDown InternalError ServiceUnavailable"
        " InvalidBucketState ServerBusy OperationTimedOut PendingCopyOperation"
    ),
    UnsupportedError: "NotImplemented",
    # Of Ceph, and of MinIO (twice). Gateways in front of a file system have the status 507.
    StoreFullError: "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded",
    InputError: "EntityTooLarge KeyTooLongError KeyTooLong BlockCountExceedsLimit"
    " RequestBodyTooLarge",
}
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_BY_STATUS: dict[int, type[DcpObjstoreError]] = {
    301: ConfigError,
    307: ConfigError,
    400: InputError,
    401: CredentialsError,
    403: PermissionDeniedError,
    404: ObjectNotFoundError,
    405: UnsupportedError,
    408: StoreUnavailableError,
    409: PreconditionFailedError,
    412: PreconditionFailedError,
    416: CorruptDataError,
    429: StoreUnavailableError,
    501: UnsupportedError,
    507: StoreFullError,
}
# Where Python has no class for the error.
_BY_ERRNO: dict[int, type[DcpObjstoreError]] = {
    errno.EROFS: PermissionDeniedError,
    errno.EINVAL: InputError,
    errno.ENAMETOOLONG: InputError,
    errno.ENOSYS: UnsupportedError,
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: InputError,
}
_BY_TYPE: tuple[tuple[type[BaseException], type[DcpObjstoreError]], ...] = (
    (FileNotFoundError, ObjectNotFoundError),
    # A key may not be both an object and the prefix of another one in a tree of folders.
    (NotADirectoryError, ObjectNotFoundError),
    (FileExistsError, PreconditionFailedError),
    (PermissionError, PermissionDeniedError),
    (IsADirectoryError, InputError),
    (ImportError, ConfigError),
    (NotImplementedError, UnsupportedError),
    (OSError, StoreUnavailableError),
    (EOFError, StoreUnavailableError),
    (ValueError, InputError),
    (TypeError, InputError),
    (BufferError, InputError),
)
# A HEAD's answer has no body, so these do not say whether the key or the bucket is missing, or
# whether the secret is wrong or a right is missing.
UNCLEAR_IN_HEAD = (400, 403, 404, 409)
# AWS and most others say 503, GCS and some others 429 (RFC 6585).
THROTTLING_STATUSES = (429, 503)
_WORDS: dict[type[DcpObjstoreError], str] = {
    BucketNotFoundError: "the bucket does not exist (or is at another endpoint)",
    ObjectNotFoundError: "there is no such object",
    CredentialsError: "the store did not accept the credentials",
    PermissionDeniedError: "the credentials do not allow this",
    ConfigError: "the bucket is in another region",
    CorruptDataError: "the object is shorter than the range that was asked for",
    PreconditionFailedError: "the object is not in the state that the write was conditioned on",
    StoreUnavailableError: "the store did not answer as it should, after all retries",
    UnsupportedError: "the store does not support this",
    StoreFullError: "the store is full, or a quota is reached",
    InputError: "the store refused the request",
}
_ADVICE: dict[type[DcpObjstoreError], str] = {
    CredentialsError: "check them in storage_options and the environment",
    ConfigError: "set storage_options={'region': …}",
    StoreFullError: (
        "remove old checkpoints (dcp-objstore rm) and what failed saves left (dcp-objstore sweep),"
        " or raise the quota"
    ),
}
# The codes that are looked for by name.
NO_SUCH_KEY = "NoSuchKey"
NO_SUCH_UPLOAD = "NoSuchUpload"
_NO_SUCH_BLOCKS = "InvalidBlockList"  # what Azure says of an upload that has ended

NO_S3_CREDENTIALS = (
    "no credentials for S3 in any of these: storage_options (key and secret, or"
    " profile); AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AWS_PROFILE; the web identity or role"
    " of a container; the default profile of ~/.aws; the role of this instance"
)
SET_S3_CREDENTIALS = "set one of these, or storage_options={'anon': True} for a public bucket"
NO_STORE = (
    "this does not look like a store: it answers as a web server does, or something on the way to"
    " it does"
)
CHECK_STORE = "check endpoint_url and any proxy, and that the bucket exists"
SAME_PAGE = "the store answers with the same page of a listing again"
_CHECK_NETWORK = "check endpoint_url, the network and any proxy or firewall"
_USE_HTTPS = "endpoint_url should begin with https://"


class Meaning(NamedTuple):
    """The meaning of an answer, or of the lack of one.

    Attributes:
        kind: the error to raise.
        words: the beginning of its text. None: those for every error of its kind.
        advice: what to do about it.
    """

    kind: type[DcpObjstoreError]
    words: str | None = None
    advice: str | None = None

    def error(self, text: str = "") -> DcpObjstoreError:
        """Make the error, which ends with what the library says."""
        message = ": ".join(filter(None, (self.words, redacted(text))))
        return self.kind(message, advice=self.advice)


# Why a request got no answer.
REFUSED = Meaning(
    StoreUnavailableError, "connection refused", "check endpoint_url and that the server runs"
)
UNRESOLVED = Meaning(
    StoreUnavailableError,
    "the host name cannot be resolved",
    "check endpoint_url, the region and this machine's DNS",
)
NOT_CONNECTED = Meaning(
    StoreUnavailableError,
    "no connection could be made",
    "check endpoint_url and that the server runs, the network and any proxy or firewall",
)
LATE = Meaning(StoreUnavailableError, "no answer in time", _CHECK_NETWORK)
CLOSED = Meaning(
    StoreUnavailableError,
    "the connection was closed before an answer came",
    "check that the server runs, and http:// or https:// in endpoint_url",
)
LOST = Meaning(StoreUnavailableError, "the connection to the store was lost")
NO_TLS = Meaning(
    ConfigError,
    "the server does not speak TLS",
    "endpoint_url should begin with http:// if it really has no TLS",
)
WRONG_CERTIFICATE = Meaning(
    ConfigError,
    "its TLS certificate is not valid here",
    "for a certificate of your own set storage_options={'verify': 'path of the CA'}",
)
NO_HTTP = Meaning(ConfigError, "its answer is no HTTP", f"{_USE_HTTPS} if it speaks TLS")
WANTS_TLS = Meaning(ConfigError, "the server does not speak plain HTTP", _USE_HTTPS)
_WANTS_SIGNED_BODIES = Meaning(
    ConfigError, "the store wants signed bodies", "set storage_options={'sign_payload': True}"
)
# Answers by which a store asks for an option, by a part of their text.
_OPTIONS_ASKED_FOR = {
    "with Object Lock": Meaning(
        ConfigError,
        "the bucket locks its objects and takes no body without a checksum",
        "set storage_options={'s3_additional_kwargs': {'ChecksumAlgorithm': 'SHA256'}}",
    ),
    "XAmzContentSHA256Mismatch": _WANTS_SIGNED_BODIES,
    "UNSIGNED-PAYLOAD": _WANTS_SIGNED_BODIES,
    "SecondLevelDomainForbidden": Meaning(
        ConfigError,
        "the store wants the bucket in the host's name",
        "set storage_options={'addressing_style': 'virtual'}",
    ),
}
# The answer is not what was asked for. It may come from a cache or a proxy on the way, and only
# once: bytes of which readers ask again.
WHOLE = Meaning(
    CorruptDataError,
    "the store ignores Range: it, or something on the way, sends whole objects",
)
ANOTHER_RANGE = Meaning(CorruptDataError, "the store sent another range than was asked for")
# An answer that no store gives. A write may have taken effect all the same.
NO_STORE_ANSWERED = Meaning(StoreUnavailableError, NO_STORE, CHECK_STORE)
NO_BUCKET = Meaning(ConfigError, NO_STORE, CHECK_STORE)
UPLOAD_LOST = Meaning(UploadLostError, "the store lost this upload before its end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """The parts that an adapter reads out of an exception of its library.

    Attributes:
        text: what the library says, for the user.
        status: the status of the store's answer; None: no answer came.
        code: the store's own code for what is wrong, if it gave one.
        meaning: what the exception means, where the adapter knows better than status and code.
        conditional: whether the request was conditioned on a state of the object.
        connected: whether a connection was made. It counts only if there was no answer.
        timed_out: whether nothing came in time. It counts only if there was no answer.
        may_pass: whether another try may help, where the adapter knows better than the error.
    """

    text: str
    status: int | None = None
    code: str | None = None
    meaning: Meaning | None = None
    conditional: bool = False
    connected: bool = True
    timed_out: bool = False
    may_pass: bool | None = None


class Failure(NamedTuple):
    """The meaning of an exception of a transport.

    Attributes:
        error: the error to raise.
        details: the details that it was made of.
    """

    error: DcpObjstoreError
    details: ErrorDetails

    @property
    def may_pass(self) -> bool:
        """Whether the request may succeed if it is sent again."""
        if self.details.may_pass is not None:
            return self.details.may_pass
        # A lost upload is a `StoreUnavailableError`, but it has to be begun again as a whole.
        is_lost_upload = isinstance(self.error, UploadLostError)
        return isinstance(self.error, StoreUnavailableError) and not is_lost_upload

    @property
    def throttled(self) -> bool:
        """The store asks for fewer requests."""
        return self.details.status in THROTTLING_STATUSES or self.details.code == "SlowDown"

    @property
    def had_no_effect(self) -> bool:
        """The request changed nothing: no connection was made, or the store refused."""
        return self.details.status is not None or not self.details.connected

    @property
    def answered(self) -> bool:
        """Whether there is a server: it answered, or closed the connection."""
        details = self.details
        return details.status is not None or (details.connected and not details.timed_out)


def judge(error: Exception, read: Callable[[Exception], ErrorDetails]) -> Failure:
    """Say what an exception of a transport means.

    Credentials and signatures that a store repeats are left out, in the text and in `error` itself.

    Args:
        error: an exception of the transport. An error of this package means itself.
        read: the adapter's function that reads the details out of it.
    """
    if isinstance(error, DcpObjstoreError):
        return Failure(error, ErrorDetails(text=""))
    redact(error)
    details = read(error)
    our_error = meaning_of(error, details).error(details.text)
    our_error.status, our_error.code = details.status, details.code
    return Failure(our_error, details)


def meaning_of(error: Exception, details: ErrorDetails) -> Meaning:
    """Return what an exception means: by what its adapter knows, by code, by status, by type.

    A meaning without words gets those of its kind.
    """
    if details.code in (NO_SUCH_UPLOAD, _NO_SUCH_BLOCKS):
        return UPLOAD_LOST
    # If the store's text asks for an option, that counts before what the adapter knows.
    meaning = first_sign(_OPTIONS_ASKED_FOR, details.text) or details.meaning
    if details.code == NO_SUCH_KEY and details.conditional:
        # AWS and moto say 404 to a conditional update of an object that another writer deleted.
        meaning = Meaning(PreconditionFailedError)
    if meaning is None:
        kind = kind_of_answer(details.status, details.code) or kind_of_builtin(error)
        meaning = Meaning(kind)
    if meaning.words:
        return meaning
    kind, words = meaning.kind, _WORDS.get(meaning.kind, type(error).__name__)
    if kind is CredentialsError and details.status is None:  # no store was asked
        words = "there are no credentials, or they cannot be used"
    return Meaning(kind, words, _ADVICE.get(kind))


def first_sign(meanings: Mapping[str, Meaning], text: str) -> Meaning | None:
    """Return the meaning of the first key that stands in a text; None if none does."""
    return next((meaning for sign, meaning in meanings.items() if sign in text), None)


def kind_of_answer(status: int | None, code: str | None) -> type[DcpObjstoreError] | None:
    """Return the error for an HTTP status and the store's `<Code>`, which counts first.

    Returns:
        None if there is no status and the code is not known.
    """
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is None:
        return None
    return StoreUnavailableError if status >= 500 else DcpObjstoreError


def kind_of_builtin(error: BaseException) -> type[DcpObjstoreError]:
    """Return the error for one of Python's, by errno, then by type; `DcpObjstoreError` if none."""
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    kinds = (ours for builtin, ours in _BY_TYPE if isinstance(error, builtin))
    return next(kinds, DcpObjstoreError)


def of_os(error: OSError) -> DcpObjstoreError:
    """Return the error for one of the operating system's, without the path of a file.

    The system's own words are enough, except where the user has to make room.
    """
    text, kind = error.strerror or str(error), kind_of_builtin(error)
    if kind is StoreFullError:
        return Meaning(kind, _WORDS[kind], _ADVICE[kind]).error(text)
    return kind(text)


def words_for(kind: type[DcpObjstoreError]) -> str | None:
    """Return what an error means to the user, for the beginning of its text; None if unknown."""
    return _WORDS.get(kind)


def check_no_page(content_type: object) -> None:
    """Raise `ConfigError` for a page of HTML, which no object here is."""
    if str(content_type).startswith("text/html"):
        raise NO_BUCKET.error()


def redacted(text: str) -> str:
    """Return the text without credentials and signatures that a store repeats in it, printable."""
    text = _SECRET_ELEMENT.sub(r"<\1/>", text)
    for field in _SECRET_FIELDS:
        text = field.sub(r"\1***", text)
    return printable(text, keep="\n\t")


def redact(error: BaseException) -> None:
    """Remove credentials and signatures from the texts of an error and of what led to it.

    In place, because they stay as the cause and are shown with it.
    """
    for cause in led_to(error):
        cause.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in cause.args)


def led_to(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised for; urllib3 keeps some in `args` and `reason`."""
    return contexts.led_to(error, more=lambda cause: (*cause.args, getattr(cause, "reason", None)))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of the cause, and so on.

    Contexts are left out, because they may be about other requests.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def is_of(cls: type, *names: str) -> bool:
    """Return whether a class or one of its bases is among the named ones, without importing them.

    Args:
        cls: the class.
        names: `library.Class`, in whichever module of the library, or a `library` with all of its
            classes.
    """
    for base in cls.__mro__:
        library = base.__module__.partition(".")[0]
        if library in names or f"{library}.{base.__name__}" in names:
            return True
    return False
