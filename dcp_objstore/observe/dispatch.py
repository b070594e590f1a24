"""`Channel`: takes the events of one save or load from any thread and hands them to listeners.

Telling only queues the event: it never waits and may happen anywhere, also in the midst of another
telling (buffers report by weak references). A thread of the channel's own hands events on, in their
order, one at a time. So a slow listener delays no request, and none can break what it listens to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.observe.events import AnyEvent, Event, Failed, OnEvent, Operation, Retried

logger = logging.getLogger("dcp_objstore")

# How long the end of a save or load waits for a listener that does not return.
_PATIENCE_SECONDS = 10.0


class Listener(Protocol):
    """Made for one save or load. What it raises is logged, and nothing else.

    Attributes:
        name: for the log.
    """

    name: str

    def take(self, event: AnyEvent) -> None:
        """Called with each event, one at a time."""
        ...

    def settle(self) -> None:
        """Called when there is nothing more to take for now, at least once after the last event."""
        ...


class Channel:
    """Where the events of one save or load on one rank are told.

    Args:
        operation: which it is.
        url: the checkpoint.
        rank: of this process.

    Attributes:
        detailed: somebody wants what is told of each part and range; if not, do not tell it.
        began_at: `time.monotonic()` when this was made.
        retries: how often a request for the checkpoint was sent again, as far as it was told.
    """

    def __init__(self, operation: Operation, url: str, rank: int = 0) -> None:
        self.operation = operation
        self.detailed = False
        self.began_at = time.monotonic()
        self._url = url
        self._rank = rank
        # From the clock that durations are measured by to the one that all hosts share.
        self._unix_ns = time.time_ns() - time.monotonic_ns()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._failed = False
        self._warned: set[str] = set()
        self._retries_lock = threading.Lock()
        self.retries = 0

    def add(self, listener: Listener, *, detailed: bool) -> None:
        """Have a listener hear what is told from now on."""
        self._listeners.append(listener)
        self.detailed = self.detailed or detailed

    def emit(
        self,
        kind: Callable[..., Event],
        began_at: float,
        *,
        seconds: float | None = None,
        **fields: object,
    ) -> None:
        """Tell of something that began at `began_at` (`time.monotonic()`) and has just ended."""
        if self._listeners:
            self.pass_on(
                kind(
                    rank=self._rank,
                    url=self._url,
                    start_ns=self._unix_ns + int(began_at * 1e9),
                    seconds=time.monotonic() - began_at if seconds is None else seconds,
                    **fields,
                )
            )

    def pass_on(self, event: Event) -> None:
        """Tell an event that was made elsewhere."""
        self._queue.put(event)

    def retried(
        self,
        what: Literal["commit", "range", "request"],
        object_key: str,
        attempt: int,
        error: str,
        began_at: float,
    ) -> None:
        """Count and tell that a request is sent again; from any thread.

        Args:
            what, object_key, attempt, error: see `Retried`.
            began_at: `time.monotonic()` at the first try.
        """
        with self._retries_lock:
            self.retries += 1
        self.emit(Retried, began_at, what=what, attempt=attempt, error=error, object_key=object_key)

    def key_of(self, bucket_key: str) -> str | None:
        """The key below this checkpoint of an object of its bucket; None if it lies elsewhere."""
        prefix = self._url.partition("://")[2].partition("/")[2].rstrip("/")
        root = f"{prefix}/" if prefix else ""
        return bucket_key[len(root) :] if bucket_key.startswith(root) else None

    def fail(self, error: BaseException) -> None:
        """Tell of the failure of the whole; only the first one is told."""
        if self._failed:
            return
        self._failed = True
        ours = isinstance(error, DcpObjstoreError)
        self.emit(
            Failed,
            self.began_at,
            operation=self.operation,
            error=type(error).__name__,
            message=error.message if isinstance(error, DcpObjstoreError) else str(error),
            failed_rank=getattr(error, "rank", None) if ours else None,
            key=getattr(error, "key", None) if ours else None,
            object_key=getattr(error, "object_key", None) if ours else None,
        )

    @contextmanager
    def current(self) -> Iterator[None]:
        """Tell this channel of the retries of all requests that are made in the block.

        Threads that `transfer.workers.spawn` starts there belong to it.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around what is told of: hands events on meanwhile, and tells of an error that leaves."""
        self._open()
        try:
            with self.current():
                yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.settle()

    def _open(self) -> None:
        if self.detailed and self._thread is None:
            # Not a daemon pool of ours: that floor is above this one.
            self._thread = threading.Thread(
                # All that is raised there is a listener's: Ctrl-C comes to the main thread.
                target=lambda: self._hand_on(BaseException),
                name="dcp_objstore-events",
                daemon=True,
            )
            self._thread.start()

    def settle(self) -> None:
        """Return when what was told so far was handed on; bounded, whatever a listener does."""
        if not self._queue.empty():
            self._open()
        thread, self._thread = self._thread, None
        listeners = self._listeners
        self._queue.put(None)
        if thread is None:
            self._hand_on(Exception)
        else:
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():
                self._listeners, self.detailed = [], False
                logger.warning(
                    "%s: on_event has not returned for %g s; the %s goes on without it",
                    self._url,
                    _PATIENCE_SECONDS,
                    self.operation,
                )
        for listener in listeners:
            with self._guarded(listener, Exception):
                listener.settle()

    def _hand_on(self, harmless: type[BaseException]) -> None:
        for event in iter(self._queue.get, None):
            for listener in self._listeners:
                with self._guarded(listener, harmless):
                    listener.take(event)

    @contextmanager
    def _guarded(self, listener: Listener, harmless: type[BaseException]) -> Iterator[None]:
        """Log the first such error of a listener, with where it came from."""
        try:
            yield
        except harmless:
            if listener.name not in self._warned:
                self._warned.add(listener.name)
                logger.warning(
                    "%s: %s failed; the %s goes on, and further errors of it are not shown",
                    self._url,
                    listener.name,
                    self.operation,
                    exc_info=True,
                )


# Requests are made below the floors that know of saves and loads, in threads of their own.
_current: ContextVar[Channel | None] = ContextVar("dcp_objstore_channel", default=None)


def current_channel() -> Channel | None:
    """The channel of the save or load that this thread works for."""
    return _current.get()


def emit_retry(bucket_key: str, attempt: int, error: str, began_at: float) -> None:
    """For transports: tell the save or load that a request is made for of its retry.

    Args:
        bucket_key: the object's key in the bucket.
        attempt: see `Retried`.
        error: why, in words, without a secret.
        began_at: `time.monotonic()` at the first try.
    """
    channel = current_channel()
    if channel is not None and (key := channel.key_of(bucket_key)):
        channel.retried("request", key, attempt, error, began_at)


class Callback:
    """A listener that is the user's function."""

    name = "on_event"

    def __init__(self, function: OnEvent) -> None:
        self._function = function

    def take(self, event: AnyEvent) -> None:
        """See `Listener`."""
        self._function(event)

    def settle(self) -> None:
        """See `Listener`."""
