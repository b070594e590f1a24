"""Daemon threads, waits that Ctrl-C can end, and threads for a save that outlives the program.

Ctrl-C reaches the main thread only. A signal that comes just before that thread begins to wait
interrupts nothing, and Python handles it only when the wait ends. So the main thread waits in short
steps. Other threads wait in one step, unless they have to check something: each time a
thread wakes up, it takes the GIL from the training loop.

At the end of a program Python still waits for a save in the background. But Python 3.12.0 to 3.12.2
start no thread from then on (python/cpython#113964), so there the threads exist before.
"""

from __future__ import annotations

import contextlib
import math
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from dcp_objstore.config import AUTO_MOST
from dcp_objstore.errors import InputError
from dcp_objstore.forking import PerProcess

T = TypeVar("T")

# Enough for one upload over boto3 at its widest, beside the hashing and small requests.
_STOCK = AUTO_MOST + 32


class Spawned:
    """A function that runs in a daemon thread, with the context variables of the caller."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._run: Callable[[], object] = partial(copy_context().run, function)
        self._ended = threading.Event()
        self.name = f"dcp_objstore-{name}"

    def run(self) -> None:
        """Run the function in this thread, under its name."""
        threading.current_thread().name = self.name
        run = self._run
        del self._run
        try:
            run()
        finally:
            del run  # the last reference to the function: what it holds is free when `join` returns
            self._ended.set()

    def is_alive(self) -> bool:
        """Return whether the function has not ended."""
        return not self._ended.is_set()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until the function has ended."""
        self._ended.wait(timeout_seconds)


class _Stock:
    """Threads that wait for a function, in case no other can be started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Spawned] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def fill(self) -> None:
        """Start the threads, as many as the system allows: it may refuse one with RuntimeError."""
        with self._lock, contextlib.suppress(RuntimeError):
            while self._started < _STOCK:
                threading.Thread(
                    target=self._work, name="dcp_objstore-waiting", daemon=True
                ).start()
                self._started += 1
                self._idle.release()  # one more thread is idle

    def take(self, task: Spawned) -> bool:
        """Run a task in one of the threads; return False if none is idle."""
        is_taken = self._idle.acquire(blocking=False)
        if is_taken:
            self._tasks.put(task)
        return is_taken

    def _work(self) -> None:
        while True:
            self._tasks.get().run()
            self._idle.release()


_stock = PerProcess(_Stock)


def ready_for_program_end() -> None:
    """Start the threads that a save in the background needs if the program ends during it."""
    if (3, 12) <= sys.version_info < (3, 12, 3):
        _stock.here.fill()


def spawn(function: Callable[[], object], name: str) -> Spawned:
    """Run a function in a daemon thread, with the context variables of the calling thread.

    Raises:
        InputError: the program has ended, and Python starts no thread any more.
    """
    task = Spawned(function, name)
    try:
        threading.Thread(target=task.run, name=task.name, daemon=True).start()
    except RuntimeError as error:
        # "can't create new thread at interpreter shutdown"; another text means that there are too
        # many threads.
        if "shutdown" not in str(error):
            raise
        if not _stock.here.take(task):
            raise InputError(
                f"the program has ended, and Python {platform.python_version()} starts no more"
                " threads; call result() of each save before its end"
            ) from None
    return task


def run_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a daemon thread; the future gets its result or error."""
    future: Future[T] = Future()
    spawn(partial(run_into, future, function), name)
    return future


def run_into(future: Future[Any], function: Callable[[], Any]) -> None:
    """Run `function` and put its result or error into `future`."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the future
        future.set_exception(error)
        # The error has this frame. If the frame had the future, both would stay until the cyclic
        # garbage collector runs.
        del future


def wait_for(function: Callable[..., T], *args: Any, **settings: Any) -> T:
    """Call `function` so that Ctrl-C can end the wait for it.

    No call of obstore can be interrupted. So in the main thread the call runs in a daemon thread.
    It cannot be ended itself: it goes on until the store answers or the request times out.
    """
    if not in_main_thread():
        return function(*args, **settings)
    return result_of(run_in_thread(partial(function, *args, **settings), "request"))


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
    check: Callable[[], object] | None = None,
    step_seconds: float | None = None,
) -> bool:
    """Call `wait` until it returns True or the time is over; return whether it did.

    Args:
        wait: blocks for at most the given number of seconds; without a limit if it is None.
        timeout_seconds: how long to wait. Default: without a limit.
        check: called between two steps. If it raises, the wait ends.
        step_seconds: length of a step outside the main thread. Default: a single step.
    """
    step = STEP_SECONDS if in_main_thread() else step_seconds
    if step is None:
        return wait(timeout_seconds)
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        remaining_seconds = deadline - time.monotonic()
        if wait(max(0.0, min(remaining_seconds, step))):
            return True
        if remaining_seconds <= step:
            return False
        if check is not None:
            check()


def result_of(
    future: Future[T],
    timeout_seconds: float | None = None,
    *,
    check: Callable[[], object] | None = None,
    step_seconds: float | None = None,
) -> T:
    """Return `future.result(timeout_seconds)`; the arguments are those of `wait_in_steps`."""
    ended = partial(has_ended, future)
    try:
        if wait_in_steps(ended, timeout_seconds, check=check, step_seconds=step_seconds):
            return future.result(0)
    finally:
        # The future's error has this frame. If the frame had the future, both would stay until the
        # cyclic garbage collector runs.
        del future, ended
    raise FutureTimeoutError


def has_ended(future: Future[T], timeout_seconds: float | None) -> bool:
    """Wait for the end of a future, at most so long; return whether it has ended."""
    try:
        future.exception(timeout_seconds)
    except FutureTimeoutError:
        return future.done()  # it may have ended just now
    return True


def wait_until(event: threading.Event, timeout_seconds: float | None = None) -> bool:
    """Return `event.wait(timeout_seconds)`."""
    return wait_in_steps(event.wait, timeout_seconds)


def take(
    source: queue.SimpleQueue[T],
    *,
    check: Callable[[], object] | None = None,
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

    # Without a time-out it returns only when `get` has returned True.
    wait_in_steps(get, check=check, step_seconds=step_seconds)
    return taken.pop()
