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
        raise RankFailedError(f"{type(error).__name__}: {error}", rank=rank, url=url) from error
