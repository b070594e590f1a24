"""Turn a failure on any rank into one error that is the same on every rank."""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_objstore.contexts import contextmanager, drop_frames, led_to
from dcp_objstore.distributed.arrivals import missing_ranks, watching
from dcp_objstore.distributed.groups import gone_error, has_gone, is_first
from dcp_objstore.distributed.plugin import plugin_errors, typed
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError, DcpObjstoreError, RankFailedError
from dcp_objstore.observe.report import first_few

T = TypeVar("T")

# A job can have thousands of ranks, and a wrong setting fails all of them.
_OTHERS_SHOWN = 8
_SAME_CALLS = "every rank has to make the same calls"


def capture(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call `make`; return its result, or its error for `raise_on_all` to raise on all ranks.

    If one rank raised the error at once, the other ranks would wait for it. That holds for Ctrl-C,
    too, which is returned as it is; other errors become DcpObjstoreErrors.
    """
    try:
        with plugin_errors(current_rank(), None):
            return make(), None
    except BaseException as error:  # noqa: BLE001 - `raise_on_all` raises it
        return None, error


def every_rank(call: str) -> str:
    """Return advice for `typed_failures` on ranks that do not meet at the start of a call."""
    return (
        f"every rank has to call {call}, including those that `if rank == 0:` excludes; nothing was"
        " read or written yet"
    )


@contextmanager
def meeting(
    url: str | None, group: dist.ProcessGroup | None, advice: str = _SAME_CALLS
) -> Iterator[None]:
    """Begin what the ranks of a group do together; warn of ranks that do not come to it.

    Arguments and errors are those of `typed_failures`; with None, this process is alone.
    """
    with watching(url, group, advice), typed_failures(url, group, advice):
        yield


@contextmanager
def typed_failures(
    url: str | None,
    group: dist.ProcessGroup | None,
    advice: str = _SAME_CALLS,
) -> Iterator[None]:
    """Turn what a DCP call or a collective raises into a DcpObjstoreError.

    Args:
        url: URL of the checkpoint; None if it is not known yet.
        group: group of the ranks that take part; None for all ranks.
        advice: a sentence that says what to do if the ranks did not meet.

    Raises:
        DcpObjstoreError: the error of the lowest rank that failed, with its (global) rank. Its text
            lists other failures.
        RankFailedError: the lowest rank failed with an error of another type, or the process group
            broke because a rank died or did not answer within the group's time-out.
        InputError: the group was destroyed.
        KeyboardInterrupt: Ctrl-C was pressed; raised on the rank that received it.
        SystemExit: the program called `sys.exit`; raised on the rank that did so.
    """
    handled = sys.exception()  # the error that the program was handling when it made this call
    try:
        yield
    except CheckpointException as error:
        # DCP numbers the ranks within the group.
        failures = {
            global_rank(number, group): failure
            for number, (failure, _) in sorted(error.failures.items())
        }
        # The frames of the failed call hold the state, which may not fit into memory twice.
        _free_locals(error, handled)
        _raise_lowest(failures, url, gone=has_gone(group))
    except DcpObjstoreError:
        raise
    except Exception as error:
        if has_gone(group):
            raise gone_error(url) from error
        if not isinstance(error, RuntimeError | ValueError):  # not of a collective
            raise
        # What a rank's own code raises arrives as a CheckpointException. So this is torch's report
        # that a collective failed. It speaks of sockets, and the traceback shows it.
        unseen = missing_ranks()
        raise RankFailedError(
            "a rank died, did not make this call, or did not answer in time"
            + (f" (not seen in this call: {unseen})" if unseen else ""),
            rank=current_rank(),
            url=url,
            advice=advice,
        ) from error


class _Report(NamedTuple):
    """The message of a rank to the others in `raise_on_all`, with its arguments of these names."""

    error: BaseException | None
    advice: str
    same: Mapping[str, object]


def raise_on_all(
    own: BaseException | None,
    url: str | None,
    group: dist.ProcessGroup | None,
    advice: str = _SAME_CALLS,
    same: Mapping[str, object] | None = None,
) -> None:
    """Raise on every rank if any rank has an error. A collective of the group's ranks.

    A group that was destroyed on a rank counts as such an error. The ranks can still exchange it,
    because a group works as long as something holds it.

    Args:
        own: this rank's error, as `capture` returns it, or None.
        url: URL of the checkpoint; None if it is not known yet.
        group: group of the ranks; None if this process is alone.
        advice: a sentence that says what to do if the ranks did not meet. It is the same on ranks
            that make the same call.
        same: arguments that must be the same on every rank, by name.

    Raises:
        ConfigError: an argument in `same` differs between ranks.
        DcpObjstoreError: the error of the lowest rank that has one.
        RankFailedError: the process group broke because a rank died or did not answer, or the ranks
            make different calls.
        KeyboardInterrupt, SystemExit: `own` is one; the other ranks raise RankFailedError.
    """
    if group is None:
        if isinstance(own, DcpObjstoreError):
            _raise_copy(own, url=url)
        if own is not None:  # such as Ctrl-C
            raise own
        return
    if own is None and has_gone(group):
        own = gone_error(url)
    with meeting(url, group, advice):
        reports: list[Any] = [None] * dist.get_world_size(group)
        # Ctrl-C or `sys.exit`, which is raised here as it is.
        ending = None if isinstance(own, DcpObjstoreError) else own
        sent = own if ending is None else typed(ending, current_rank(), url)
        # After an error, `same` is left out: it may have a wrong argument, which may not pickle.
        report = _Report(sent, advice, {} if own is not None or same is None else same)
        dist.all_gather_object(reports, report, group=group)
        failures: dict[int, BaseException] = {
            global_rank(number, group): report.error
            for number, report in enumerate(reports)
            if report.error is not None
        }
        if ending is not None:
            failures[current_rank() or 0] = ending
        if failures:
            _raise_lowest(failures, url)
        _check_same(reports, url, group)


def _check_same(reports: list[_Report], url: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise for the first rank whose call or arguments differ from those of the first rank."""
    first, first_rank = reports[0], global_rank(0, group)
    for number, report in enumerate(reports):
        rank = global_rank(number, group)
        # The advice names the call, as `every_rank` makes it.
        if report.advice != first.advice or report.same.keys() != first.same.keys():
            raise RankFailedError(
                f"rank {rank} makes another call than rank {first_rank}",
                rank=rank,
                url=url,
                advice=first.advice,
            )
        for name, value in report.same.items():
            if value != first.same[name]:
                raise ConfigError(
                    f"every rank must pass the same {name}=, but rank {first_rank}"
                    f" has {first.same[name]!r}, rank {rank} {value!r}",
                    url=url,
                )


def from_first(
    value: T, url: str | None, group: dist.ProcessGroup | None, advice: str = _SAME_CALLS
) -> T:
    """Return the value of the group's first rank on every rank. A collective.

    Arguments and errors are those of `typed_failures`.
    """
    values = [value]  # which the broadcast replaces on the other ranks
    if group is not None:
        with meeting(url, group, advice):
            dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def on_first(make: Callable[[], T], url: str | None, group: dist.ProcessGroup | None) -> T:
    """Call `make` on the group's first rank; return its result on every rank. A collective.

    Raises:
        DcpObjstoreError: the error of `make`, raised on every rank.
        InputError: the group was destroyed on some rank. If on the first, `make` is not called.
    """
    with watching(url, group, _SAME_CALLS):
        makes_it = not has_gone(group) and is_first(group)
        result, failed = capture(make) if makes_it else (None, None)
        raise_on_all(failed, url, group)
        return cast(T, from_first(result, url, group))


def from_all(value: T, url: str | None, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of the group, in their order. A collective."""
    values = [value]
    if group is not None:
        values *= dist.get_world_size(group)
        with meeting(url, group):
            dist.all_gather_object(values, value, group=group)
    return values


def global_rank(number: int, group: dist.ProcessGroup | None) -> int:
    """Return the global rank of a rank that is numbered within the group.

    If torch no longer knows the group, the number is the best that an error can say.
    """
    if group is None or has_gone(group):
        return number
    return dist.get_global_rank(group, number)


def _raise_lowest(
    failures: dict[int, BaseException], url: str | None, *, gone: bool = False
) -> NoReturn:
    """Raise the error of the first of these ranks; a Ctrl-C of this rank comes before it.

    Args:
        failures: the errors by global rank, in ascending order.
        url: URL of the checkpoint; None if it is not known yet.
        gone: whether the ranks' group was destroyed.
    """
    own = failures.get(current_rank() or 0)
    if own is not None and not isinstance(own, Exception):
        raise own  # such as Ctrl-C on this rank; the code below raises it on the other ranks
    first, cause = next(iter(failures.items()))
    others = [
        f"rank {number}: {type(failure).__name__}"
        for number, failure in failures.items()
        if number != first
    ]
    suffix = f" (also failed: {first_few(others, _OTHERS_SHOWN)})" if others else ""
    if not isinstance(cause, DcpObjstoreError):
        cause = typed(cause, first, url)
    # A RankFailedError stands here for what torch raises once it no longer knows the group.
    if gone and isinstance(cause, RankFailedError):
        raise gone_error(url) from cause
    # The error may have the rank within the group; its copy has the global rank.
    _raise_copy(cause, suffix, rank=first, url=url)


def _raise_copy(
    error: DcpObjstoreError, suffix: str = "", rank: int | None = None, url: str | None = None
) -> NoReturn:
    """Raise a copy of an error, with a longer message, its rank and URL, as if it were the error.

    Args:
        error: the error, which its holder may raise again.
        suffix: what to add to its message.
        rank: the rank to set. Default: the error's own.
        url: the URL of the checkpoint, for an error that has none.
    """
    # Not in a local variable: the error keeps this frame, which would keep the error.
    raise (
        _extended(error, suffix, rank).at(url=url).with_traceback(error.__traceback__)
    ) from error.__cause__


def _extended(error: DcpObjstoreError, suffix: str, rank: int | None) -> DcpObjstoreError:
    """Return a copy with `suffix` added to its message; the original may be raised again."""
    longer = copy.copy(error)
    longer.message += suffix
    longer.args = (longer.message,)
    longer.rank = error.rank if rank is None else rank
    return longer


def advised(error: DcpObjstoreError, advice: str | None) -> DcpObjstoreError:
    """Return a copy with this advice; the original may be raised again."""
    copied = copy.copy(error)
    copied.advice = advice
    return copied


def drop_state(error: BaseException) -> None:
    """Remove the frames, which hold a whole state, from an error that is kept for later.

    If the error may be a bug, its traceback is kept as a note. (`RankFailedError` stands for an
    error of another library.)
    """
    if not isinstance(error, DcpObjstoreError) or isinstance(error, RankFailedError):
        with contextlib.suppress(Exception):  # a frozen dataclass refuses notes
            error.add_note("".join(traceback.format_exception(error)))
    drop_frames(led_to(error, more=_failures_of_ranks))


def _free_locals(error: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables of the frames that an error and its causes have left.

    Some of them hold the error, so all of them, and with them the state and its process group,
    would stay in memory until the cyclic garbage collector runs.

    Args:
        error: the error of a call.
        handled: the error that the program was handling when it made the call. A debugger may still
            want to show its frames.
    """
    for cause in led_to(error, handled=id(handled), more=_failures_of_ranks):
        traceback.clear_frames(cause.__traceback__)


def _failures_of_ranks(error: BaseException) -> list[BaseException]:
    """Return the errors of single ranks that DCP's error holds."""
    if not isinstance(error, CheckpointException):
        return []
    return [failure for failure, _ in error.failures.values()]
