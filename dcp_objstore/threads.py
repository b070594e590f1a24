"""Daemon threads, and a stock of them for a save that outlives the program.

At the end of a program Python still waits for a save in the background. But Python 3.12.0 to 3.12.2
start no thread from then on (python/cpython#113964), so there the threads exist before.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from dcp_objstore.config import AUTO_MOST
from dcp_objstore.errors import InputError
from dcp_objstore.forking import PerProcess
from dcp_objstore.waiting import in_main_thread, result_of

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
            del run  # what the function holds is free when `join` returns
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
        """Start the threads, as many as the system allows."""
        with self._lock, contextlib.suppress(RuntimeError):
            while self._started < _STOCK:
                threading.Thread(
                    target=self._work, name="dcp_objstore-waiting", daemon=True
                ).start()
                self._started += 1
                self._idle.release()

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
                "the program has ended, and Python"
                f" {platform.python_version()} starts no more threads; call result() of a save in"
                " the background before the program ends"
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
        del future  # its error has this frame; together they would wait for the garbage collector


def wait_for(function: Callable[..., T], *args: Any, **settings: Any) -> T:
    """Call `function` so that Ctrl-C can end the wait for it.

    No call of obstore can be interrupted. So in the main thread the call runs in a daemon thread.
    It cannot be ended itself: it goes on until the store answers or the request times out.
    """
    if not in_main_thread():
        return function(*args, **settings)
    return result_of(run_in_thread(partial(function, *args, **settings), "request"))
