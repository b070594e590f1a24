"""What writer and reader share as DCP plug-ins: only errors of ours leave a method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dcp_objstore.errors import DcpObjstoreError, RankFailedError


@contextlib.contextmanager
def plugin_errors(rank: int | None, url: str | None) -> Iterator[None]:
    """Let only our own errors out of a plug-in method, with rank and URL filled in.

    DCP pickles what a method raises and sends it to every rank. An exception that does not
    unpickle there leaves the ranks at different collectives: the job hangs.
    """
    try:
        yield
    except DcpObjstoreError as error:
        error.at(rank=rank, url=url)
        raise
    except Exception as error:
        raise typed(error, rank, url) from error


def typed(error: BaseException, rank: int | None, url: str | None) -> DcpObjstoreError:
    """The error itself, with rank and URL filled in, or one of ours with its text."""
    if not isinstance(error, DcpObjstoreError):
        error = RankFailedError(f"{type(error).__name__}: {error}")
    return error.at(rank=rank, url=url)
