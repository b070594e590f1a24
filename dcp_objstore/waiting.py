"""Wait for futures, events and queues, in short steps where that is necessary.

Ctrl-C reaches the main thread only. A signal that comes just before that thread begins to wait
interrupts nothing, and Python handles it only when the wait ends. So the main thread waits in short
steps. Other threads wait in one step, unless they have to check something meanwhile: each time a
thread wakes up, it takes the GIL from the training loop.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# The longest time until Ctrl-C, or another thread's request to stop, is noticed.
STEP_SECONDS = 0.25
# The time between two checks for a stalled transfer, in threads that Ctrl-C does not reach.
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
        wait: blocks for at most the given number of seconds; without a limit if it is None.
        timeout_seconds: how long to wait. Default: without a limit.
        look: called between two steps. If it raises, the wait ends.
        step_seconds: length of a step outside the main thread. Default: a single step.
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
    """Return `future.result(timeout_seconds)`; the arguments are those of `wait_in_steps`."""
    ended = partial(has_ended, future)
    try:
        if wait_in_steps(ended, timeout_seconds, look=look, step_seconds=step_seconds):
            return future.result(0)
    finally:
        del future, ended  # its error has this frame, and would wait for the garbage collector
    raise FutureTimeoutError


def has_ended(future: Future[T], timeout_seconds: float | None) -> bool:
    """Wait for the end of a future, at most so long; return whether it came."""
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
    """Return `source.get()`; the other arguments are those of `wait_in_steps`."""
    taken: list[T] = []

    def get(timeout_seconds: float | None) -> bool:
        try:
            taken.append(source.get(timeout=timeout_seconds))
        except queue.Empty:
            return False
        return True

    wait_in_steps(get, look=look, step_seconds=step_seconds)
    return taken.pop()
