"""The one place where errors of obstore become ours.

obstore 0.12 gives 400, 416, 429, 500, 503 and time-outs all as `GenericError` without attributes,
404 as the builtin `FileNotFoundError` and 409 as `AlreadyExistsError`, so this module, and no
other, reads `status code: NNN` and the XML's `<Code>` out of the text. `tests/test_stores.py` pins
both against real servers.
"""

from __future__ import annotations

import re

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

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
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

# Error codes of S3 (docs: "Error responses"), which GCS's XML API shares where it has them.
_BY_CODE: dict[str, type[DcpObjstoreError]] = {
    "NoSuchBucket": BucketNotFoundError,
    "InvalidBucketName": BucketNotFoundError,
    "NoSuchKey": ObjectNotFoundError,
    "ExpiredToken": CredentialsError,
    "TokenRefreshRequired": CredentialsError,
    "InvalidToken": CredentialsError,
    "InvalidAccessKeyId": CredentialsError,
    "InvalidSecurity": CredentialsError,
    "SignatureDoesNotMatch": CredentialsError,
    "AuthenticationRequired": CredentialsError,
    "AccessDenied": PermissionDeniedError,
    "AllAccessDisabled": PermissionDeniedError,
    "AccountProblem": PermissionDeniedError,
    "RequestTimeTooSkewed": CredentialsError,
    "AuthorizationHeaderMalformed": ConfigError,
    "PermanentRedirect": ConfigError,
    "IllegalLocationConstraintException": ConfigError,
    "InvalidRange": CorruptDataError,
    "PreconditionFailed": PreconditionFailedError,
    "ConditionalRequestConflict": PreconditionFailedError,
    "OperationAborted": StoreUnavailableError,
    "RequestTimeout": StoreUnavailableError,
    "SlowDown": StoreUnavailableError,
    "InternalError": StoreUnavailableError,
    "ServiceUnavailable": StoreUnavailableError,
    "NotImplemented": UnsupportedError,
    "EntityTooLarge": InputError,
    "KeyTooLongError": InputError,
}
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
}
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


def http_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's `<Code>` in an obstore error, where it has them."""
    text, _, dump = str(error).partition("\n\nDebug source:")
    if _REDIRECT in dump:
        return 301, None
    status, code = _STATUS.search(text), _CODE.search(text)
    return (int(status[1]) if status else None, code[1] if code else None)


def translate_obstore(error: Exception) -> DcpObjstoreError:
    """Turn what an obstore call raised into an error of ours, by code, status, then type.

    The text keeps the store's answer and drops obstore's debug dump. Errors without a status come
    from the transport (refused, reset, timed out, DNS, TLS) when they are `GenericError`s of a
    request; anything else that we do not know becomes a plain `DcpObjstoreError`.
    """
    if isinstance(error, DcpObjstoreError):
        return error
    kind = _kind(error)
    summary = _ANSWER.sub(r"\1: \2", str(error).partition("\n\nDebug source:")[0]).strip()
    advice = _ADVICE.get(kind)
    return kind(f"{advice}: {summary}" if advice else f"{type(error).__name__}: {summary}")


def _kind(error: Exception) -> type[DcpObjstoreError]:
    from obstore import exceptions as theirs

    if _INSTANCE_METADATA in str(error):
        return CredentialsError
    status, code = http_code(error)
    if code == "NoSuchKey" and isinstance(error, theirs.PreconditionError):
        return PreconditionFailedError  # If-Match on an absent key: 404 on AWS and moto
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is not None:
        return StoreUnavailableError if status >= 500 else DcpObjstoreError
    return _kind_without_status(error)


def _kind_without_status(error: Exception) -> type[DcpObjstoreError]:
    from obstore import exceptions as theirs

    pairs: tuple[tuple[type[BaseException], type[DcpObjstoreError]], ...] = (
        (FileNotFoundError, ObjectNotFoundError),
        (theirs.AlreadyExistsError, PreconditionFailedError),
        (theirs.PreconditionError, PreconditionFailedError),
        (theirs.PermissionDeniedError, PermissionDeniedError),
        (theirs.UnauthenticatedError, CredentialsError),
        (theirs.NotSupportedError, UnsupportedError),
        (theirs.InvalidPathError, InputError),
        (theirs.UnknownConfigurationKeyError, ConfigError),
        # No answer at all: connection refused or reset, time-out, DNS, TLS.
        (theirs.GenericError, StoreUnavailableError),
        (OSError, StoreUnavailableError),
        (ValueError, InputError),
        (TypeError, InputError),
        (BufferError, InputError),
    )
    for theirs_type, ours in pairs:
        if isinstance(error, theirs_type):
            return ours
    return DcpObjstoreError
