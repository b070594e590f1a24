"""The ranks that take part in a call of all ranks. One thread a process watches all calls.

A call that some ranks do not make, such as one below `if rank == 0:`, would say nothing until the
process group's time-out. In each process, one thread watches the calls that other threads are in:

- A rank that has been in a call for a second notes that in the process group's store, under the
  number of the call. Calls are numbered by process group, and all ranks make the same calls.
- The rank whose note was the first one logs a warning after 30 s, and more rarely after that, if
  ranks are missing. They have not made the call; a rank that is at work in it has its note, too.

A call that takes less than a second sends nothing. A longer one sends two requests from each rank,
two to remove the notes, and one for each look at them.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcp_objstore import torch_private
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.forking import PerProcess
from dcp_objstore.observe.report import first_few, logger
from dcp_objstore.threads import spawn

_NOTED_AFTER_SECONDS = 1.0
_WARNED_AFTER_SECONDS = 30.0
# A note that another rank has just removed is not waited for any longer.
_STORE_TIMEOUT = timedelta(seconds=5)
# The next warning comes when the call has taken this many times as long.
_WARNING_FACTOR = 4
_RANGES_SHOWN = 8

_call_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_of_thread = threading.local()  # `call`: the call that the thread is in


class _Call:
    """A call that a thread of this rank makes together with other ranks.

    The thread of `_Watch` calls `note_or_warn` and `clear`.

    Attributes:
        due: the time of the next look at it, by the monotonic clock.
        is_over: whether the call has returned or raised.
        missing: the ranks without a note at the last look; only ranks that have left a note look.
    """

    def __init__(self, url: str | None, group: dist.ProcessGroup, advice: str) -> None:
        number = _call_counts[group] = _call_counts.get(group, 0) + 1
        self.url = url
        self._group = group
        self._advice = advice
        self._notes = f"dcp_objstore/calls/{group.group_name}/{number}"
        self._thread = threading.get_ident()
        self._began_at = time.monotonic()
        self._store: Any = None  # None until this rank leaves a note
        self._is_first = False  # whether its note was the first
        self.due = self._began_at + _NOTED_AFTER_SECONDS
        self.is_over = False
        self.missing: list[int] = []

    def note_or_warn(self) -> None:
        """Leave a note; at later looks, warn if ranks are missing, and then look again.

        Only the rank with the first note has later looks. If no rank is missing, it is the last.
        """
        self.due, now = math.inf, time.monotonic()  # no later look, unless one is set below
        if self._store is None:
            # With its own connection, because another thread may be waiting in the group's.
            self._store = torch_private.default_store().clone()
            self._store.set_timeout(_STORE_TIMEOUT)
            self._store.append(f"{self._notes}/ranks", f"{current_rank()} ")
            self._is_first = self._store.add(f"{self._notes}/count", 1) == 1
            if self._is_first:
                self.due = self._began_at + _WARNED_AFTER_SECONDS
            # If the call has ended during this look, `remove` may have found no store, and then
            # nobody else removes the notes.
            if self.is_over:
                self.clear()
            return
        if self.missing_now():
            seconds = now - self._began_at
            self.due = self._began_at + _WARNING_FACTOR * seconds
            logger.warning(
                "%srank %s has waited %.0f s in %s for %s, which has not made this call; %s",
                f"{self.url}: " if self.url else "",
                current_rank(),
                seconds,
                _called_in(self._thread),
                in_words(self.missing),
                self._advice,
            )

    def missing_now(self) -> list[int]:
        """Return the ranks without a note, as the store says if this rank has left its own."""
        if self._store is not None:
            present = {int(rank) for rank in self._store.get(f"{self._notes}/ranks").split()}
            self.missing = sorted(set(dist.get_process_group_ranks(self._group)) - present)
        return self.missing

    def clear(self) -> None:
        """Remove the notes, on the rank whose note was the first."""
        if self._is_first:
            for name in ("count", "ranks"):
                self._store.delete_key(f"{self._notes}/{name}")


class _Watch:
    """The calls of this process, and the thread that looks at those that take long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[_Call] = set()
        self._to_clear: list[_Call] = []  # calls that are over and may have notes
        self._has_thread = False

    def add(self, call: _Call) -> None:
        """Watch a call; wake the thread, which may sleep for too long."""
        with self._changed:
            self._calls.add(call)
            if not self._has_thread:
                spawn(self._run, "arrivals")
                self._has_thread = True
            self._changed.notify()

    def remove(self, call: _Call) -> None:
        """End the watch of a call, and have its notes removed."""
        with self._changed:
            self._calls.discard(call)
            call.is_over = True
            if call._store is not None:  # otherwise it has no notes yet: see `note_or_warn`
                self._to_clear.append(call)
                self._changed.notify()

    def _run(self) -> None:
        """Look at calls when they are due, and clear those that are over. Runs for ever.

        The requests are made without the lock, so that `add` and `remove` never wait for them.
        """
        while True:
            with self._changed:
                if not self._to_clear:
                    due = min((call.due for call in self._calls), default=math.inf)
                    seconds = min(due - time.monotonic(), threading.TIMEOUT_MAX)
                    self._changed.wait(seconds)  # not at all if that is past
                now = time.monotonic()
                looks = [call.note_or_warn for call in self._calls if call.due <= now]
                clears, self._to_clear = [call.clear for call in self._to_clear], []
            tasks = looks + clears
            del looks, clears
            while tasks:
                _run_or_log(tasks.pop())  # no name here may hold a call, which holds its group


def _run_or_log(task: Callable[[], None]) -> None:
    """Run a task; an error must not end the thread, which other calls need."""
    try:
        task()
    except Exception as error:  # noqa: BLE001 - such as a store that has gone
        logger.debug("nobody can say which ranks have come: %s", error)


_watch = PerProcess(_Watch)


@contextmanager
def watching(url: str | None, group: dist.ProcessGroup | None, advice: str) -> Iterator[None]:
    """Warn of ranks that do not come to the call in this block. Blocks inside belong to the call.

    Args:
        url: URL of the checkpoint; None if it is not known yet.
        group: the ranks that make the call; None if this process is alone.
        advice: a sentence that says what to do if a rank does not come.
    """
    # What is not a group, or has gone, is not watched; other code refuses it.
    is_usable = isinstance(group, dist.ProcessGroup) and torch_private.is_registered(group)
    is_alone = not is_usable or dist.get_world_size(group) == 1
    if group is None or is_alone or _current() is not None:
        yield
        return
    call = _of_thread.call = _Call(url, group, advice)
    try:
        with contextlib.suppress(RuntimeError):  # if no thread can be started, nothing warns
            _watch.here.add(call)
        yield
    finally:
        _of_thread.call = None
        _watch.here.remove(call)


def _current() -> _Call | None:
    """Return the call that this thread is in; None if it is in none."""
    return getattr(_of_thread, "call", None)


def missing_ranks() -> str:
    """Return in words which ranks were not seen in this thread's call; "" if unknown.

    A rank may be healthy, and in the call for less than the second after which it leaves a note.
    """
    call = _current()
    if call is not None:
        with contextlib.suppress(Exception):  # the store may have gone with a rank
            call.missing_now()
    return in_words(call.missing) if call is not None and call.missing else ""


def in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1 to 3, 7" for ascending numbers."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {first_few(texts, _RANGES_SHOWN)}"


def _called_in(thread: int) -> str:
    """Return the function of this package that the program has called in a thread, and where.

    Such as `dcp_objstore.save ("train.py", line 12)`. From the inside to the outside, a thread's
    frames are those of the call (torch's and ours), then the program's, which calls one of ours.
    """
    frame, outermost = sys._current_frames().get(thread), None
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == __name__.partition(".")[0]:
            outermost = frame
        elif outermost is not None and package != "torch":
            break
        frame = frame.f_back
    # A thread of our own begins in `threading`; one that has ended has no frame.
    if outermost is None or frame is None or package == threading.__name__:
        return "a call in the background"
    place = f'"{frame.f_code.co_filename}", line {frame.f_lineno}'
    return f"dcp_objstore.{outermost.f_code.co_qualname} ({place})"
