"""What writer and reader share as DCP plug-ins: their errors, and the calls of DCP around them."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dcp_objstore.errors import DcpObjstoreError, InvalidUrlError, RankFailedError

_NO_GROUP_TEXT = "torch.distributed is disabled"
# The entry that `warnings.filters` holds for it.
_NO_GROUP_WARNING = ("ignore", re.compile(_NO_GROUP_TEXT, re.IGNORECASE), UserWarning, None, 0)


@contextlib.contextmanager
def plugin_errors(rank: int | None, url: str | None) -> Iterator[None]:
    """Turn every error of the block into a DcpObjstoreError, and fill in rank and URL.

    DCP pickles the error that a method raises and sends it to every rank. If an exception cannot be
    unpickled there, the ranks are left in different collectives and the job hangs.
    """
    try:
        yield
    except DcpObjstoreError as error:
        error.at(rank=rank, url=url)
        raise
    except Exception as error:
        raise typed(error, rank, url) from error


def typed(error: BaseException, rank: int | None, url: str | None) -> DcpObjstoreError:
    """Return the error, or a RankFailedError with its text, with rank and URL filled in."""
    if not isinstance(error, DcpObjstoreError):
        error = RankFailedError(f"{type(error).__name__}: {error}")
    return error.at(rank=rank, url=url)


def same_url(urls: Sequence[Any]) -> None:
    """Refuse ranks that pass different URLs; `urls` has one for each rank."""
    for rank, url in enumerate(urls):
        if url != urls[0]:
            raise InvalidUrlError(
                f"every rank must pass the same URL, but rank 0 has {urls[0]} and rank {rank} {url}"
            )


class Plugin(Protocol):
    """The common part of `ObjectStoreWriter` and `ObjectStoreReader`."""

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint."""

    def _report_failure(self, error: BaseException) -> None: ...


@contextlib.contextmanager
def reporting_failures(plugin: Plugin | None) -> Iterator[None]:
    """Report an error that leaves the block, unless the plug-in has already reported it."""
    try:
        yield
    except BaseException as error:
        if plugin is not None:
            plugin._report_failure(error)
        raise


def url_of(plugin: Plugin | None) -> str | None:
    """Return the checkpoint's URL for errors; None if an argument was refused."""
    return None if plugin is None else plugin.checkpoint_id


def single_process_is_fine() -> None:
    """Ignore torch's warning that there is no process group; none is needed here.

    The filter stays in place after the call. `warnings.catch_warnings` would restore the filters of
    all threads to an earlier state, and a save runs at the same time as the program.
    """
    if _NO_GROUP_WARNING not in warnings.filters:
        warnings.filterwarnings("ignore", message=_NO_GROUP_TEXT, category=UserWarning)
