"""The ranks that have come to a call of all ranks. One thread a process watches all calls.

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
_RARER = 4
_RANGES_SHOWN = 8

_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_of_thread = threading.local()


class _Call:
    """A call that a thread of this rank makes together with other ranks.

    Attributes:
        due: the time of the next look at it, by the monotonic clock.
        missing: the ranks that had not come at the last look; known to the first rank only.
    """

    def __init__(self, url: str | None, group: dist.ProcessGroup, advice: str) -> None:
        number = _calls[group] = _calls.get(group, 0) + 1
        self.url = url
        self._group = group
        self._advice = advice
        self._notes = f"dcp_objstore/calls/{group.group_name}/{number}"
        self._thread = threading.get_ident()
        self._began_at = time.monotonic()
        self._store: Any = None
        self._is_first = False
        self.due = self._began_at + _NOTED_AFTER_SECONDS
        self.is_over = False
        self.missing: list[int] = []

    def note_or_warn(self) -> None:
        """Leave a note, or warn of missing ranks."""
        self.due, now = math.inf, time.monotonic()
        if self._store is None:
            # With its own connection, because another thread may be waiting in the group's.
            self._store = torch_private.default_store().clone()
            self._store.set_timeout(_STORE_TIMEOUT)
            self._store.append(f"{self._notes}/ranks", f"{current_rank()} ")
            self._is_first = self._store.add(f"{self._notes}/count", 1) == 1
            if self._is_first:
                self.due = self._began_at + _WARNED_AFTER_SECONDS
            if self.is_over:  # since this look began
                self.clear()
            return
        if self.missing_now():
            seconds = now - self._began_at
            self.due = self._began_at + _RARER * seconds
            logger.warning(
                "%srank %s has waited %.0f s in %s for %s, which has not made this call; %s",
                f"{self.url}: " if self.url else "",
                current_rank(),
                seconds,
                _place(self._thread),
                shown(self.missing),
                self._advice,
            )

    def missing_now(self) -> list[int]:
        """Return the ranks without a note, by one request; of each rank that has left its own."""
        if self._store is not None:
            present = {int(rank) for rank in self._store.get(f"{self._notes}/ranks").split()}
            self.missing = sorted(set(dist.get_process_group_ranks(self._group)) - present)
        return self.missing

    def clear(self) -> None:
        """Remove the notes."""
        if self._is_first:
            for name in ("count", "ranks"):
                self._store.delete_key(f"{self._notes}/{name}")


class _Watch:
    """The calls of this process, and the thread that looks at those that take long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[_Call] = set()
        self._left: list[_Call] = []
        self._wakes_at = -math.inf  # while the thread waits; it looks at new calls before that
        self._has_thread = False

    def add(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            if not self._has_thread:
                spawn(self._run, "arrivals")
                self._has_thread = True
            elif call.due < self._wakes_at:
                self._changed.notify()

    def remove(self, call: _Call) -> None:
        with self._changed:
            self._calls.discard(call)
            call.is_over = True
            if call._store is not None:
                self._left.append(call)
                self._changed.notify()

    def _run(self) -> None:
        """Make the calls' checks when they are due, in the thread of this object, for ever."""
        while True:
            with self._changed:
                if not self._left:
                    self._wakes_at = min((call.due for call in self._calls), default=math.inf)
                    seconds = min(self._wakes_at - time.monotonic(), threading.TIMEOUT_MAX)
                    self._changed.wait(seconds)  # not at all if that is past
                    self._wakes_at = -math.inf
                now = time.monotonic()
                looks = [call.note_or_warn for call in self._calls if call.due <= now]
                clears, self._left = [call.clear for call in self._left], []
            tasks = looks + clears
            del looks, clears
            while tasks:
                _try(tasks.pop())  # no name here may hold a call, which holds its process group


def _try(task: Callable[[], None]) -> None:
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
    # Other code refuses what is not a group, and a group that has gone.
    usable = isinstance(group, dist.ProcessGroup) and torch_private.is_registered(group)
    if group is None or not usable or dist.get_world_size(group) == 1 or _current() is not None:
        yield
        return
    call = _of_thread.call = _Call(url, group, advice)
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _watch.here.add(call)
        yield
    finally:
        _of_thread.call = None
        _watch.here.remove(call)


def _current() -> _Call | None:
    return getattr(_of_thread, "call", None)


def missing_ranks() -> str:
    """Return which ranks were not seen in this thread's call; "" if unknown.

    A rank may be healthy, and in the call for less than the second after which it leaves a note.
    """
    call = _current()
    if call is not None:
        with contextlib.suppress(Exception):  # the store may have gone with a rank
            call.missing_now()
    return shown(call.missing) if call is not None and call.missing else ""


def shown(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1 to 3, 7" for ascending numbers."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {first_few(texts, _RANGES_SHOWN)}"


def _place(thread: int) -> str:
    """Return the function of this package that the program has called in a thread, and where."""
    frame, called = sys._current_frames().get(thread), None
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == __name__.partition(".")[0]:
            called = frame
        elif called is not None and package != "torch":
            break
        frame = frame.f_back
    if called is None or frame is None or package == threading.__name__:
        return "a call in the background"
    place = f'"{frame.f_code.co_filename}", line {frame.f_lineno}'
    return f"dcp_objstore.{called.f_code.co_qualname} ({place})"
