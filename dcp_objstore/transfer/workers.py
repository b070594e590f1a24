"""Daemon worker threads.

No obstore call can be interrupted: a thread inside one ends when the server answers or the
request times out. The threads of `concurrent.futures` are joined at interpreter exit, so one
stalled request would keep a program that was told to stop alive for minutes. These are not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from types import TracebackType
from typing import Any, TypeVar

from dcp_objstore.waiting import in_main_thread, result_of

T = TypeVar("T")
R = TypeVar("R")

# Small requests: as many at once as a connection pool has room for.
AT_ONCE = 16
# Ctrl-C ends the waiting between two waves; what a wave has begun goes on, and does no harm.
WAVE = 4 * AT_ONCE


class DaemonPool:
    """A fixed number of daemon threads that run what is submitted, in order of submission."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = threads
        for number in range(threads):
            spawn(self._work, f"{name}-{number}")

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            run_into(*task)
            del task  # buffers must not outlive their task while this thread waits for the next

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` on a worker; its result or error is in the future."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: function(*args)))
        return future

    def __enter__(self) -> DaemonPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the threads end after what was submitted; do not wait for them."""
        for _ in range(self._threads):
            self._tasks.put(None)


def in_waves(do: Callable[[T], R], items: Sequence[T], wave: int = WAVE) -> Iterator[R]:
    """`do(item)` of each, `AT_ONCE` of them at a time, in their order.

    Args:
        wave: so many are begun before the first of them is given.
    """
    if not items:
        return
    with DaemonPool(min(AT_ONCE, len(items), wave), "requests") as pool:
        for start in range(0, len(items), wave):
            futures = [pool.submit(do, item) for item in items[start : start + wave]]
            for future in futures:
                yield result_of(future)


def run_into(future: Future[Any], function: Callable[[], Any]) -> None:
    """Run `function` and put its result or error into `future`."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
        future.set_exception(error)


def wait_for(function: Callable[..., T], *args: Any, **settings: Any) -> T:
    """Run `function` so that Ctrl-C can end the waiting: in the main thread, beside it.

    The call itself cannot be ended; it goes on until the store answers or the request times out.
    """
    if not in_main_thread():
        return function(*args, **settings)
    future: Future[T] = Future()
    spawn(lambda: run_into(future, lambda: function(*args, **settings)), "request")
    return result_of(future)


def worker_number() -> int:
    """Of the thread that this is called in, in its `DaemonPool`; 0 elsewhere."""
    number = threading.current_thread().name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def spawn(function: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread. Context variables have the values there that they have here."""
    thread = threading.Thread(
        target=copy_context().run, args=(function,), name=f"dcp_objstore-{name}", daemon=True
    )
    thread.start()
    return thread
