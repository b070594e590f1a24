"""One error for a failure on any rank, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_objstore.dcp.groups import current_rank
from dcp_objstore.errors import DcpObjstoreError, RankFailedError


@contextlib.contextmanager
def typed_failures(url: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn what a DCP call or a collective raises into one of our errors.

    Args:
        url: the checkpoint.
        group: the ranks that take part; None for all.

    Raises:
        DcpObjstoreError: that of the lowest rank that failed, with its (global) rank; other
            failures are listed in its text.
        RankFailedError: the lowest rank failed with an error that is not ours, or the process
            group broke because a rank died or did not answer within the group's time-out.
        KeyboardInterrupt, SystemExit: on the rank where it came up.
    """
    try:
        yield
    except CheckpointException as error:
        # DCP numbers the ranks within the group.
        failures = {_global(n, group): pair[0] for n, pair in sorted(error.failures.items())}
        _raise_lowest(failures, url)
    except DcpObjstoreError:
        raise
    except (RuntimeError, ValueError) as error:
        # Every rank's own failure arrives as a CheckpointException; what is left is torch
        # reporting that a collective failed.
        raise RankFailedError(
            "the ranks lost each other: one has died, or did not answer within the process"
            f" group's time-out. Look at the checkpoint before you save it again: it exists only"
            f" if rank 0 had committed it already ({error})",
            rank=current_rank(),
            url=url,
        ) from error


def agree(own: DcpObjstoreError | None, url: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank has an error. A collective of the group's ranks.

    Raises:
        As `typed_failures`.
    """
    if current_rank() is None:
        if own is not None:
            raise own
        return
    with typed_failures(url, group):
        found: list[DcpObjstoreError | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
        failures: dict[int, BaseException] = {
            _global(number, group): error for number, error in enumerate(found) if error is not None
        }
        if failures:
            _raise_lowest(failures, url)


def _global(number: int, group: dist.ProcessGroup | None) -> int:
    """The global rank of a rank numbered within the group."""
    if current_rank() is None or group is None:
        return number
    return dist.get_global_rank(group, number)


def _raise_lowest(failures: dict[int, BaseException], url: str) -> NoReturn:
    own = failures.get(current_rank() or 0)
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
        cause.rank = first  # it may have been filled in with the rank within the group
        raise cause.at(url=url) from None
    raise RankFailedError(f"{type(cause).__name__}: {cause}{suffix}", rank=first, url=url) from None
