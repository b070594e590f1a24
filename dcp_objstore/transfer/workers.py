"""Daemon worker threads.

No obstore call can be interrupted: a thread inside one ends when the server answers or the
request times out. The threads of `concurrent.futures` are joined at interpreter exit, so one
stalled request would keep a program alive for minutes after it was asked to stop. The threads
here are not joined.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.threads import has_ended, result_of, run_in_thread, run_into, spawn, wait_in_steps

T = TypeVar("T")
R = TypeVar("R")

# Small requests in flight: as many as a connection pool has room for.
MOST_IN_FLIGHT = 16
# Ctrl-C takes effect between two waves. The requests of a wave that has begun go on, harmlessly.
WAVE = 4 * MOST_IN_FLIGHT


class DaemonPool:
    """A fixed number of daemon threads that run submitted calls, in order of submission."""

    def __init__(self, threads: int, name: str) -> None:
        # Calls with the futures for their results; None ends the thread that takes it.
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = threads
        for number in range(threads):
            spawn(self._work, f"{name}-{number}")

    def _work(self) -> None:
        """Run tasks in this thread until None is taken, which `__exit__` puts for each thread."""
        while (task := self._tasks.get()) is not None:
            run_into(*task)
            del task  # buffers must not outlive their task while this thread waits for the next

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` in a worker; the future gets its result or error."""
        future: Future[T] = Future()
        self._tasks.put((future, lambda: function(*args)))
        return future

    def __enter__(self) -> DaemonPool:
        return self

    def __exit__(self, *_error: object) -> None:
        """Let the threads end after the submitted calls; do not wait for them."""
        for _ in range(self._threads):
            self._tasks.put(None)


def in_waves(do: Callable[[T], R], items: Sequence[T], wave: int = WAVE) -> Iterator[R]:
    """Yield `do(item)` for each item, in their order; `MOST_IN_FLIGHT` calls run at a time.

    Args:
        wave: the number of calls that are submitted before the first result is yielded.
    """
    with DaemonPool(min(MOST_IN_FLIGHT, len(items), wave), "requests") as pool:
        for start in range(0, len(items), wave):
            futures = [pool.submit(do, item) for item in items[start : start + wave]]
            for future in futures:
                yield result_of(future)


def concurrently(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls at the same time; return their results, in order, once all have ended.

    The first call runs in this thread. If some calls fail, the error of the first of these is
    raised. After a call that failed with StoreUnavailableError, or on Ctrl-C, this does not wait
    for the calls that come later in the order: they go on, and their outcome is not known.
    """
    here: Future[Any] = Future()
    futures = [here, *(run_in_thread(call, "request") for call in calls[1:])]
    try:
        here.set_result(calls[0]())
    except Exception as error:  # noqa: BLE001 - raised below; Ctrl-C is raised at once
        here.set_exception(error)
    for future in futures:
        wait_in_steps(partial(has_ended, future))
        if isinstance(future.exception(), StoreUnavailableError):
            break
    # After a `break`, this raises before it comes to a call that may not have ended.
    return [future.result() for future in futures]


def worker_number() -> int:
    """Return the number of the current thread in its `DaemonPool`; 0 for other threads."""
    number = threading.current_thread().name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
