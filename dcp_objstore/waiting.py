"""Waiting, in steps where something must be looked at meanwhile.

Ctrl-C reaches the main thread only. A signal that comes in the instant before a thread begins to
wait interrupts nothing, and Python looks at it again only when the waiting ends; so the main thread
waits in short steps. Another thread waits without waking unless it has something to look at: each
waking takes the GIL from a training loop.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# The longest that Ctrl-C goes unseen, or that another thread's request to stop does.
STEP_SECONDS = 0.25
# Between two looks at whether a transfer has stalled, where no Ctrl-C can come.
WATCH_SECONDS = 1.0


def in_main_thread() -> bool:
    """Return whether this is the thread that signals reach."""
    return threading.current_thread() is threading.main_thread()


def wait_in_steps(
    wait: Callable[[float | None], bool],
    timeout_seconds: float | None = None,
    *,
    look: Callable[[], object] | None = None,
    step_seconds: float | None = None,
) -> bool:
    """Call `wait` until it returns True or the time is over; return whether it did.

    Args:
        wait: blocks for at most that many seconds, or without end for None.
        timeout_seconds: None: no limit.
        look: called between two steps. What it raises ends the waiting.
        step_seconds: the length of a step outside the main thread. None: one step.
    """
    step = STEP_SECONDS if in_main_thread() else step_seconds
    if step is None:
        return wait(timeout_seconds)
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        left = deadline - time.monotonic()
        if wait(max(0.0, min(left, step))):
            return True
        if left <= step:
            return False
        if look is not None:
            look()


def result_of(
    future: Future[T],
    timeout_seconds: float | None = None,
    *,
    look: Callable[[], object] | None = None,
    step_seconds: float | None = None,
) -> T:
    """Return `future.result(timeout_seconds)`; for the arguments see `wait_in_steps`."""
    ended = partial(_has_ended, future)
    if wait_in_steps(ended, timeout_seconds, look=look, step_seconds=step_seconds):
        return future.result(0)
    raise FutureTimeoutError


def _has_ended(future: Future[T], timeout_seconds: float | None) -> bool:
    try:
        future.exception(timeout_seconds)
    except FutureTimeoutError:
        return future.done()  # in this instant
    return True


def wait_until(event: threading.Event, timeout_seconds: float | None = None) -> bool:
    """Return `event.wait(timeout_seconds)`."""
    return wait_in_steps(event.wait, timeout_seconds)


def take(
    source: queue.SimpleQueue[T],
    *,
    look: Callable[[], object] | None = None,
    step_seconds: float | None = None,
) -> T:
    """Return `source.get()`; for the other arguments see `wait_in_steps`."""
    taken: list[T] = []

    def get(timeout_seconds: float | None) -> bool:
        try:
            taken.append(source.get(timeout=timeout_seconds))
        except queue.Empty:
            return False
        return True

    wait_in_steps(get, look=look, step_seconds=step_seconds)
    return taken.pop()
