"""The one place where errors of fsspec filesystems become ours: by status, errno and type.

fsspec has no errors of its own but one for time-outs; its filesystems raise builtin ones, and those
of whatever library they stand on. Those carry the status of the answer under a few names, which are
looked for here. s3fs raises builtin ones from botocore's, which `s3.errors` translates.
"""

from __future__ import annotations

from typing import Any

from dcp_objstore.errors import (
    CredentialsError,
    DcpObjstoreError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from dcp_objstore.stores.errors import (
    FULL_ERRNOS,
    Failure,
    causes,
    failure,
    is_of,
    kind_of_answer,
    kind_of_builtin,
    of_os,
    redact,
)
from dcp_objstore.stores.s3.errors import judge_botocore, translate_botocore

# By what libraries raise without a status.
_BY_NAME: dict[str, type[DcpObjstoreError]] = {
    "google.TransportError": StoreUnavailableError,
    "google.GoogleAuthError": CredentialsError,
    "aiohttp.ClientError": StoreUnavailableError,
    "urllib3.HTTPError": StoreUnavailableError,
    "paramiko.AuthenticationException": CredentialsError,
    "paramiko.SSHException": StoreUnavailableError,
}
_UNREACHED = (
    "builtins.ConnectionRefusedError",
    "aiohttp.ClientConnectorError",
    "aiohttp.ConnectionTimeoutError",
)
_LATE = "builtins.TimeoutError"


def translate_fsspec(error: Exception) -> DcpObjstoreError:
    """Translate what a filesystem raised.

    The status of the store's answer counts first, then a library's type, errno and builtin type.
    Anything else becomes a plain `DcpObjstoreError`.
    """
    if isinstance(error, DcpObjstoreError):
        return error
    if is_of_botocore(error):
        return translate_botocore(error)
    redact(error)
    status = _http_status(error)
    kind = kind_of_answer(status, None) or _kind(error)
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return of_os(error)
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if kind is StoreUnavailableError and status is None and _is_from(error, *_UNREACHED, _LATE):
        text += "; check endpoint_url, that the server runs, and any proxy or firewall"
    return kind(text)


def judge_fsspec(error: Exception) -> Failure:
    """Say what an exception of a filesystem means, for the loop that sends requests again."""
    found = translate_fsspec(error)
    if is_of_botocore(error):
        return judge_botocore(error, found)
    connected, timed_out = not _is_from(error, *_UNREACHED), _is_from(error, _LATE)
    return failure(found, _http_status(error), None, connected=connected, timed_out=timed_out)


def is_of_botocore(error: BaseException) -> bool:
    """Whether an error is botocore's, or was raised from one, as those of s3fs are."""
    return _is_from(error, "botocore")


def _is_from(error: BaseException, *names: str) -> bool:
    """Whether an error or one of its causes is of these types; see `is_of`."""
    return any(is_of(type(one), *names) for one in causes(error))


def _http_status(error: BaseException) -> int | None:
    """The HTTP status in an error or what caused it, where it is."""
    for one in causes(error):
        if type(one).__module__ == "aiohttp.http_exceptions":
            continue  # its codes are its own: 400 for a body that was cut off
        answer: Any = getattr(one, "response", None)
        for value in (
            getattr(one, "status", None),  # aiohttp
            getattr(one, "status_code", None),  # azure
            getattr(one, "code", None),  # gcsfs
            getattr(answer, "status_code", None),  # requests, huggingface_hub
        ):
            if isinstance(value, int) and 300 <= value < 600:
                return value
    return None


def _kind(error: BaseException) -> type[DcpObjstoreError]:
    """Return the type for an error without a status."""
    if type(error) is OSError and str(error).startswith("Forbidden"):
        return PermissionDeniedError  # what gcsfs makes of a 403
    found = (kind for name, kind in _BY_NAME.items() if _is_from(error, name))
    return next(found, None) or kind_of_builtin(error)
