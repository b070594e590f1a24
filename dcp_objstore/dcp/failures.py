"""One error for a failure that DCP reports for several ranks, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from torch.distributed.checkpoint.api import CheckpointException

from dcp_objstore.errors import DcpObjstoreError, RankFailedError


@contextlib.contextmanager
def typed_failures(url: str, rank: int | None) -> Iterator[None]:
    """Turn what a DCP call raises into one of our errors.

    Raises:
        DcpObjstoreError: that of the lowest rank that failed, with its rank; other failures are
            listed in its text.
        RankFailedError: the lowest rank failed with an error that is not ours, or the process
            group broke because a rank died or did not answer within the group's time-out.
        KeyboardInterrupt, SystemExit: on the rank where it came up.
    """
    try:
        yield
    except CheckpointException as error:
        _raise_one(error, url, rank)
    except DcpObjstoreError:
        raise
    except RuntimeError as error:
        # Every rank's own failure arrives as a CheckpointException; what is left is torch
        # reporting that a collective failed.
        raise RankFailedError(
            "the ranks lost each other: one has died, or did not answer within the process"
            f" group's time-out. Nothing was committed by this rank ({error})",
            rank=rank,
            url=url,
        ) from error


def _raise_one(error: CheckpointException, url: str, rank: int | None) -> NoReturn:
    failures = {number: pair[0] for number, pair in sorted(error.failures.items())}
    own = failures.get(rank or 0)
    if own is not None and not isinstance(own, Exception):
        raise own  # Ctrl-C here; the other ranks are told of it below
    first, cause = next(iter(failures.items()))
    others = [
        f"rank {number}: {type(failure).__name__}"
        for number, failure in failures.items()
        if number != first
    ]
    suffix = f" (also failed: {', '.join(others)})" if others else ""
    if isinstance(cause, DcpObjstoreError):
        cause.message += suffix
        raise cause.at(rank=first, url=url) from None
    raise RankFailedError(f"{type(cause).__name__}: {cause}{suffix}", rank=first, url=url) from None
