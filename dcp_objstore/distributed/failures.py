"""One error for a failure on any rank, the same on every rank."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_objstore.distributed.groups import current_rank, gone_error, has_gone
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import ConfigError, DcpObjstoreError, RankFailedError

T = TypeVar("T")

# A job can have thousands of ranks, and a wrong setting fails all of them.
_OTHERS_SHOWN = 8


def capture(make: Callable[[], T]) -> tuple[T | None, DcpObjstoreError | None]:
    """What `make` returns; or the error, for `raise_on_all` to raise where all ranks hear of it.

    Raised at once on one rank alone, it would leave the others waiting for that rank.
    """
    try:
        with plugin_errors(current_rank(), None):
            return make(), None
    except DcpObjstoreError as error:
        return None, error


def every_rank(call: str) -> str:
    """What to do where the ranks did not meet at the start of a call, for `typed_failures`."""
    return (
        f"Every rank has to call {call}, also those that `if rank == 0:` leaves out; nothing was"
        " read or written yet"
    )


@contextlib.contextmanager
def typed_failures(
    url: str | None,
    group: dist.ProcessGroup | None,
    advice: str = "Every rank has to make the same calls",
) -> Iterator[None]:
    """Turn what a DCP call or a collective raises into one of our errors.

    Args:
        url: the checkpoint; None where it is not known yet.
        group: the ranks that take part; None for all.
        advice: a sentence on what to do where they did not meet.

    Raises:
        DcpObjstoreError: that of the lowest rank that failed, with its (global) rank; other
            failures are listed in its text.
        RankFailedError: the lowest rank failed with an error that is not ours, or the process
            group broke because a rank died or did not answer within the group's time-out.
        InputError: the group was destroyed.
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
    except Exception as error:
        if has_gone(group):
            raise gone_error(url) from error
        if not isinstance(error, RuntimeError | ValueError):
            raise
        # Every rank's own failure arrives as a CheckpointException; what is left is torch
        # reporting that a collective failed.
        raise RankFailedError(
            "the ranks lost each other: one has died, did not come, or did not answer within the"
            f" process group's time-out. {advice} ({error})",
            rank=current_rank(),
            url=url,
        ) from error


def raise_on_all(
    own: DcpObjstoreError | None,
    url: str | None,
    group: dist.ProcessGroup | None,
    advice: str = "Every rank has to make the same calls",
    same: Mapping[str, object] | None = None,
) -> None:
    """Raise on every rank if any rank has an error. A collective of the group's ranks.

    A group that was destroyed on a rank is such an error; the ranks can still hear of it, as a
    group works for those who hold it.

    Args:
        own: this rank's error.
        url, advice: see `typed_failures`.
        group: the ranks; None: this process is alone.
        same: arguments that must be the same on every rank, by name.

    Raises:
        ConfigError: they are not.
        As `typed_failures`.
    """
    if group is None:
        if own is not None:
            _raise_copy(own, url=url)
        return
    if own is None and has_gone(group):
        own = gone_error(url)
    with typed_failures(url, group, advice):
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (own, same or {}), group=group)
        failures: dict[int, BaseException] = {
            _global(number, group): error
            for number, (error, _) in enumerate(found)
            if error is not None
        }
        if failures:
            _raise_lowest(failures, url)
        first = found[0][1]
        for number, (_, theirs) in enumerate(found):
            for name, value in theirs.items():
                if value != first[name]:
                    raise ConfigError(
                        f"every rank must pass the same {name}=, but rank {_global(0, group)} has"
                        f" {first[name]!r} and rank {_global(number, group)} {value!r}",
                        url=url,
                    )


def _global(number: int, group: dist.ProcessGroup | None) -> int:
    """The global rank of a rank numbered within the group."""
    if group is None or has_gone(group):
        return number
    return dist.get_global_rank(group, number)


def _raise_lowest(failures: dict[int, BaseException], url: str | None) -> NoReturn:
    own = failures.get(current_rank() or 0)
    if own is not None and not isinstance(own, Exception):
        raise own  # Ctrl-C here; the other ranks are told of it below
    first, cause = next(iter(failures.items()))
    others = [
        f"rank {number}: {type(failure).__name__}"
        for number, failure in failures.items()
        if number != first
    ]
    if len(others) > _OTHERS_SHOWN:
        others[_OTHERS_SHOWN:] = [f"{len(others) - _OTHERS_SHOWN} more"]
    suffix = f" (also failed: {', '.join(others)})" if others else ""
    if isinstance(cause, DcpObjstoreError):
        # The rank may have been filled in with that within the group.
        _raise_copy(cause, suffix, rank=first, url=url)
    raise RankFailedError(f"{type(cause).__name__}: {cause}{suffix}", rank=first, url=url) from None


def _raise_copy(
    error: DcpObjstoreError, suffix: str = "", rank: int | None = None, url: str | None = None
) -> NoReturn:
    raise (
        extended(error, suffix, rank).at(url=url).with_traceback(error.__traceback__)
    ) from error.__cause__


def extended(error: DcpObjstoreError, suffix: str, rank: int | None = None) -> DcpObjstoreError:
    """A copy whose message goes on with `suffix`: who holds the error may raise it again."""
    longer = copy.copy(error)
    longer.message += suffix
    longer.args = (longer.message,)
    longer.rank = error.rank if rank is None else rank
    return longer


def without_frames(error: BaseException) -> None:
    """Take the frames out of an error, and of what led to it: they hold a whole state.

    Where the error may be a bug, what they would have shown becomes a note of it.
    """
    if not isinstance(error, DcpObjstoreError) or isinstance(error, RankFailedError):
        with contextlib.suppress(Exception):  # one that refuses attributes, as a frozen dataclass
            error.add_note("".join(traceback.format_exception(error)))
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        BaseException.with_traceback(found, None)  # not an assignment: it may refuse that
        waiting += [found.__cause__, found.__context__]
        if isinstance(found, CheckpointException):
            waiting += [pair[0] for pair in found.failures.values()]
