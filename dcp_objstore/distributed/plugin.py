"""Errors of DCP plug-ins: let only DcpObjstoreErrors leave a method of writer or reader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dcp_objstore.errors import DcpObjstoreError, RankFailedError


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
