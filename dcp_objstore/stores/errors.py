"""Map a store's answer, or a builtin error, to an error of this package, for every transport."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

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
    printable,
)

T = TypeVar("T")

# What stores repeat of a request that they refuse: who signed it, and how. AWS does so in
# elements of SignatureDoesNotMatch, others and proxies in whatever form they like.
_TOLD_ELEMENT = re.compile(
    r"<(AWSAccessKeyId|StringToSign\w*|CanonicalRequest\w*|SignatureProvided|Token-\d+)>.*?</\1>",
    re.S,
)
_TOLD_FIELDS = [
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
    507: InputError,
}
_BY_ERRNO: dict[int, type[DcpObjstoreError]] = {
    errno.ENOENT: ObjectNotFoundError,
    # A key may not be both an object and the prefix of another one in a tree of folders.
    errno.ENOTDIR: ObjectNotFoundError,
    errno.EISDIR: InputError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
    errno.EEXIST: PreconditionFailedError,
    errno.EINVAL: InputError,
    errno.ENAMETOOLONG: InputError,
    errno.ENOSYS: UnsupportedError,
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSPC: InputError,
    errno.EDQUOT: InputError,
    errno.EFBIG: InputError,
}
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_BY_TYPE: tuple[tuple[type[BaseException], type[DcpObjstoreError]], ...] = (
    (FileNotFoundError, ObjectNotFoundError),
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
_FULL = (
    "the store is full, or a quota is reached: remove old checkpoints and incomplete multipart"
    " uploads, or raise the quota"
)
# Of Ceph, of MinIO (twice), and of gateways in front of a file system.
_FULL_CODES = ("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded")
_FULL_STATUS = 507
# A HEAD's answer has no body, so these do not say whether the key or the bucket is missing, or
# whether the secret is wrong or a right is missing.
UNCLEAR_IN_HEAD = (400, 403, 404, 409)
# AWS and most others say 503, GCS and some others 429 (RFC 6585).
THROTTLING_STATUSES = (429, 503)
_ADVICE: dict[type[DcpObjstoreError], str] = {
    BucketNotFoundError: "the bucket does not exist (or is at another endpoint)",
    ObjectNotFoundError: "there is no such object",
    CredentialsError: "there are no credentials, or the store did not accept them",
    PermissionDeniedError: "the credentials do not allow this",
    ConfigError: "the bucket is in another region: set storage_options={'region': …}",
    CorruptDataError: "the object is shorter than the range that was asked for",
    PreconditionFailedError: "the object is not in the state that the write was conditioned on",
    StoreUnavailableError: "the store did not answer as it should, after all retries",
    UnsupportedError: "the store does not support this",
    InputError: "the store refused the request",
}
NO_STORE = (
    "this does not look like a store: it answers as a web server does, or something on the way to"
    " it does; check endpoint_url and any proxy"
)

SAME_PAGE = "the store answers with the same page of a listing again"


@dataclass(frozen=True, slots=True)
class Failure:
    """What an exception of a transport means.

    Attributes:
        error: the error to raise.
        may_pass: it may pass if the request is sent again.
        throttled: the store asks for fewer requests.
        had_no_effect: the request changed nothing: no connection was made, or the store refused.
        answered: there is a server: it answered, or closed the connection.
    """

    error: DcpObjstoreError
    may_pass: bool
    throttled: bool
    had_no_effect: bool
    answered: bool


def failure(
    error: DcpObjstoreError,
    status: int | None,
    code: str | None,
    *,
    connected: bool = True,
    timed_out: bool = False,
) -> Failure:
    """Return what an exception of a transport means.

    Args:
        error: the error to raise.
        status: of the store's answer; None: none came.
        code: the store's own, if there is one.
        connected: whether a connection was made; asked only if there was no answer.
        timed_out: whether nothing came in time; asked only if there was no answer.
    """
    answered = status is not None
    return Failure(
        error,
        may_pass=isinstance(error, StoreUnavailableError) and not is_full(status, code),
        throttled=status in THROTTLING_STATUSES or code == "SlowDown",
        had_no_effect=answered or not connected,
        answered=answered or (connected and not timed_out),
    )


def kind_of_answer(status: int | None, code: str | None) -> type[DcpObjstoreError] | None:
    """Return the error for an HTTP status and the store's `<Code>`; None without either."""
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is not None:
        return StoreUnavailableError if status >= 500 else DcpObjstoreError
    return None


def kind_of_builtin(error: BaseException) -> type[DcpObjstoreError]:
    """Return the error for one of Python's, by errno, then by type; `DcpObjstoreError` if none."""
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    return next((ours for kind, ours in _BY_TYPE if isinstance(error, kind)), DcpObjstoreError)


def by_type(error: BaseException, kinds: Mapping[str, T]) -> T | None:
    """Return the entry of the first named type that an error has; see `is_of`."""
    return next((kind for name, kind in kinds.items() if is_of(type(error), name)), None)


def is_full(status: int | None, code: str | None) -> bool:
    """Whether an answer says that the store is full, or a quota reached."""
    return status == _FULL_STATUS or code in _FULL_CODES


def of_os(error: OSError) -> DcpObjstoreError:
    """Return the error for one of the operating system's, without the path of a file."""
    text = error.strerror or str(error)
    return kind_of_builtin(error)(f"{_FULL}: {text}" if error.errno in FULL_ERRNOS else text)


def advice_on(
    kind: type[DcpObjstoreError], status: int | None = None, code: str | None = None
) -> str | None:
    """Return what an error means to the user, for the beginning of its text; None if unknown."""
    if is_full(status, code):
        return _FULL
    return _ADVICE.get(kind)


def redacted(text: str) -> str:
    """Return the text without credentials and signatures that a store repeats in it, printable."""
    text = _TOLD_ELEMENT.sub(r"<\1/>", text)
    for field in _TOLD_FIELDS:
        text = field.sub(r"\1***", text)
    return printable(text, keep="\n\t")


def redact(error: BaseException) -> None:
    """Remove credentials and signatures from the texts of an error and of what led to it.

    In place, because they stay as the cause and are shown with it.
    """
    for one in led_to(error):
        one.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in one.args)


def led_to(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised for; urllib3 keeps some in `args` and `reason`."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [*one.args, one.__cause__, one.__context__, getattr(one, "reason", None)]


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes. Contexts may be about other requests."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def is_of(cls: type, *names: str) -> bool:
    """Return whether a class or one of its bases is among the named ones, which stay unimported.

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
