"""The one place where errors of fsspec filesystems become ours: by status, code, errno and type.

fsspec has no errors of its own but one for time-outs; its filesystems raise builtin ones, and those
of whatever library they stand on. Those carry the status of the answer under a few names, which are
looked for here. s3fs raises builtin ones from botocore's, which `s3.errors` translates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dcp_objstore.errors import (
    CredentialsError,
    DcpObjstoreError,
    StoreUnavailableError,
)
from dcp_objstore.stores.errors import (
    Failure,
    failure,
    kind_of_answer,
    kind_of_builtin,
    redacted,
)
from dcp_objstore.stores.s3.errors import judge_botocore, translate_botocore

# Of libraries that may or may not be loaded: module, name, ours.
_OF_LIBRARIES: tuple[tuple[str, str, type[DcpObjstoreError]], ...] = (
    ("google.auth.exceptions", "TransportError", StoreUnavailableError),
    ("google.auth.exceptions", "GoogleAuthError", CredentialsError),
    ("aiohttp", "ClientError", StoreUnavailableError),
    ("requests", "RequestException", StoreUnavailableError),
    ("urllib3.exceptions", "HTTPError", StoreUnavailableError),
    ("paramiko", "AuthenticationException", CredentialsError),
    ("paramiko", "SSHException", StoreUnavailableError),
)
# Of them, those by which no connection was made.
_UNREACHED = (
    ("aiohttp", "ClientConnectorError"),
    ("aiohttp", "ConnectionTimeoutError"),
)


def translate_fsspec(
    error: Exception, bare: type[DcpObjstoreError] = StoreUnavailableError
) -> DcpObjstoreError:
    """Translate what a filesystem raised.

    Args:
        error: what it raised.
        bare: what an `OSError` means that says nothing at all: no errno, no cause.

    The store's own code counts first, then the status of its answer, then a library's type, errno
    and builtin type. Anything else becomes a plain `DcpObjstoreError`.
    """
    if isinstance(error, DcpObjstoreError):
        return error
    if is_of_botocore(error):
        return translate_botocore(error)
    for one in _chain(error):
        # In place, because they stay as the cause and are shown with it.
        one.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in one.args)
    kind = _kind(error)
    if type(error) is OSError and error.errno is None and error.__cause__ is None:
        kind = bare
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    unanswered = kind is StoreUnavailableError and status_and_code(error)[0] is None
    if unanswered and (_is_unreached(error) or _is_late(error)):
        text += "; check endpoint_url, that the server runs, and any proxy or firewall"
    return kind(text)


def judge_fsspec(error: Exception, found: DcpObjstoreError) -> Failure:
    """Say what an exception of a filesystem means, for the loop that sends requests again.

    Args:
        error: what it raised.
        found: its translation.
    """
    if is_of_botocore(error):
        return judge_botocore(error, found)
    status, code = status_and_code(error)
    return failure(
        found, status, code, connected=not _is_unreached(error), timed_out=_is_late(error)
    )


def is_of_botocore(error: BaseException) -> bool:
    """Whether an error is botocore's, or was raised from one, as those of s3fs are."""
    return any(type(one).__module__.startswith("botocore.") for one in _chain(error))


def status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's code in an error or what caused it, where they are."""
    for one in _chain(error):
        if type(one).__module__ == "aiohttp.http_exceptions":
            continue  # its codes are its own: 400 for a body that was cut off
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, Mapping):  # botocore
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(answer.get("Error", {}).get("Code", ""))
            return status, None if code.isdigit() else code or None
        for value in (
            getattr(one, "status", None),  # aiohttp
            getattr(one, "status_code", None),  # azure
            getattr(one, "code", None),  # gcsfs
            getattr(answer, "status_code", None),  # requests, huggingface_hub
        ):
            if isinstance(value, int) and not isinstance(value, bool) and 300 <= value < 600:
                return value, None
    return None, None


def _kind(error: BaseException) -> type[DcpObjstoreError]:
    status, code = status_and_code(error)
    found = kind_of_answer(status, code)
    if found is not None:
        return found
    for module, name, ours in _OF_LIBRARIES:
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None and any(isinstance(one, theirs) for one in _chain(error)):
            return ours
    return kind_of_builtin(error)


def _is_unreached(error: BaseException) -> bool:
    """Whether no connection could be made."""
    kinds: list[type[BaseException]] = [ConnectionRefusedError]
    for module, name in _UNREACHED:
        kinds += [found] if (found := getattr(sys.modules.get(module), name, None)) else []
    return any(isinstance(one, tuple(kinds)) for one in _chain(error))


def _is_late(error: BaseException) -> bool:
    """Whether nothing came in time."""
    return any(isinstance(one, TimeoutError) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__
