"""`Filesystems` of fsspec that carry the requests to a bucket, and how their errors are read.

fsspec has only one error class of its own, for time-outs. Its filesystems raise Python's builtin
errors, and errors of the library by which they send requests. Errors of libraries carry the status
of the store's answer in one of a few attributes, which are looked for here. s3fs raises builtin
errors from those of botocore, which `s3.s3fs` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import (
    CredentialsError,
    DcpObjstoreError,
    PermissionDeniedError,
    StoreFullError,
    StoreUnavailableError,
)
from dcp_objstore.stores import errors
from dcp_objstore.stores.errors import ErrorDetails, Failure, Meaning
from dcp_objstore.stores.retries import Requests
from dcp_objstore.stores.urls import StoreUrl

# The meaning of errors of libraries that have no status, because no answer came.
_BY_NAME: dict[str, type[DcpObjstoreError]] = {
    "google.TransportError": StoreUnavailableError,
    "google.GoogleAuthError": CredentialsError,
    "aiohttp.ClientError": StoreUnavailableError,
    "urllib3.HTTPError": StoreUnavailableError,
    "paramiko.AuthenticationException": CredentialsError,
    "paramiko.SSHException": StoreUnavailableError,
}
# After these no connection was made.
_UNREACHED = (
    "builtins.ConnectionRefusedError",
    "aiohttp.ClientConnectorError",
    "aiohttp.ConnectionTimeoutError",
)
_LATE = "builtins.TimeoutError"


def read_fsspec(error: Exception) -> ErrorDetails:
    """Read what a filesystem raised.

    The status of the store's answer says what it means; without one the class of the library's
    error, else the errno, else the builtin class.
    """
    status = _http_status(error)
    kind = errors.kind_of_answer(status, None) or _kind_without_status(error)
    text = str(error)
    meaning = Meaning(kind, type(error).__name__)
    connected, timed_out = not is_from(error, *_UNREACHED), is_from(error, _LATE)
    if kind is StoreFullError:
        # A `Meaning` without words gets those that are the same for all stores. The text of an
        # OSError has the path of a file, its `strerror` has not.
        text, meaning = getattr(error, "strerror", None) or text, Meaning(kind)
    elif kind is StoreUnavailableError and status is None and (timed_out or not connected):
        meaning = meaning._replace(
            advice="check endpoint_url, that the server runs, and any proxy or firewall"
        )
    return ErrorDetails(
        text=text, status=status, meaning=meaning, connected=connected, timed_out=timed_out
    )


judge_fsspec = partial(errors.judge, read=read_fsspec)


def is_from(error: BaseException, *names: str) -> bool:
    """Whether an error or one of its causes is of these types; see `is_of`."""
    return any(errors.is_of(type(cause), *names) for cause in errors.causes(error))


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an error or what caused it; None if there is none."""
    for cause in errors.causes(error):
        # aiohttp's errors of reading an answer have a `code` that no server has sent.
        if type(cause).__module__ == "aiohttp.http_exceptions":
            continue  # its codes are its own: 400 for a body that was cut off
        answer: Any = getattr(cause, "response", None)
        for holder, name in (
            (cause, "status"),  # aiohttp; its `code` is deprecated, so `status` comes first
            (cause, "status_code"),  # azure
            (cause, "code"),  # gcsfs
            (answer, "status_code"),  # requests, huggingface_hub
        ):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 300 <= value < 600:  # others are no status of HTTP
                return value
    return None


def _kind_without_status(error: BaseException) -> type[DcpObjstoreError]:
    """Return the error of this package for one that has no status of an answer."""
    if type(error) is OSError and str(error).startswith("Forbidden"):
        return PermissionDeniedError  # what gcsfs makes of a 403
    kinds = (kind for name, kind in _BY_NAME.items() if is_from(error, name))
    return next(kinds, None) or errors.kind_of_builtin(error)


class Filesystems(Requests):
    """The filesystems that carry the requests to one bucket.

    Its adapter repeats what failed over s3fs. Other filesystems have their own retries,
    which cannot be seen from here.

    Args:
        url: a URL of the bucket; its prefix is not used.
        config: time-outs and retries.
        read: the filesystem for reads.
        write: the filesystem for writes, which waits longer. Default: that for reads.
        endpoint_url: the server, where the filesystem has such an option.
        judge: a function that says what an error of the filesystems means.
    """

    def __init__(
        self,
        url: StoreUrl,
        config: TransferConfig,
        read: Any,
        write: Any = None,
        *,
        endpoint_url: str | None = None,
        judge: Callable[[Exception], Failure] = judge_fsspec,
    ) -> None:
        """Keep the filesystems, and switch off the cache of listings."""
        super().__init__(config, judge, endpoint_url, url)
        self.read = read
        self.write = read if write is None else write
        self.request_timeout_seconds = config.request_timeout_seconds
        if hasattr(getattr(read, "dircache", None), "use_listings_cache"):
            # A checkpoint must not be judged by what was there some time ago. Set here, because not
            # every filesystem takes the option: sftp's passes all it is given to paramiko.
            read.dircache.use_listings_cache = False
