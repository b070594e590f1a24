"""`Channel`: takes the events of one save or load from any thread and delivers them to listeners.

`EventSettings` makes a channel with the listeners that the user has asked for.

`emit` only queues the event. It never waits and may be called anywhere, even during another `emit`
(buffers report by weak references). A thread of the channel delivers the events in order, one at a
time: from the first event if a listener is detailed, otherwise at the end. So a slow listener
delays no request, and a listener that raises cannot break the save or load.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple

from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.observe.bar import Bar, log_summary
from dcp_objstore.observe.events import Event, Failed, OnEvent, Operation, Retried, Staged
from dcp_objstore.observe.report import logger
from dcp_objstore.observe.trace import TraceFile, check_trace, trace_path
from dcp_objstore.threads import Spawned, spawn

# The time that the end of a save or load waits for a listener that does not return.
_PATIENCE_SECONDS = 10.0


class _Listener(NamedTuple):
    """The arguments of `Channel.add`."""

    take: OnEvent
    name: str
    flush: Callable[[], object]


class Channel:
    """The queue and the listeners for the events of one save or load on one rank.

    Args:
        operation: the kind of operation.
        url: URL of the checkpoint.
        rank: rank of this process.

    Attributes:
        operation: the kind of operation.
        url: URL of the checkpoint.
        detailed: a listener wants the events of each part and range; otherwise do not emit them.
        began_at: `time.monotonic()` when the channel was made.
        retries: the number of requests for the checkpoint that were sent again, as far as the
            transport reports it.
        slow_ranges: the number of ranges that were asked for again because they were slow.
    """

    def __init__(self, operation: Operation, url: str, rank: int = 0) -> None:
        self.operation = operation
        self.detailed = False
        self.began_at = time.monotonic()
        self.url = url
        self._rank = rank
        # The difference between Unix time and the monotonic clock, by which the events are timed.
        # With it they get Unix times, so that traces of several hosts fit together.
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listeners: list[_Listener] = []
        self._thread: Spawned | None = None
        self._has_emitted_failure = False
        self._warned: set[str] = set()  # names of listeners of which an error was logged
        self._counts_lock = threading.Lock()
        self.retries = self.slow_ranges = 0

    def add(
        self,
        take: OnEvent,
        name: str,
        *,
        detailed: bool,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        """Add a listener, which receives the events from now on; what it raises is only logged.

        Args:
            take: a function that is called with each event, one call at a time.
            name: the listener's name in the log.
            detailed: whether it wants the events of each part and range.
            flush: a function that is called when no more events are queued, at least once after
                the last event.
        """
        self._listeners.append(_Listener(take, name, flush))
        self.detailed = self.detailed or detailed

    def show(self, *, bar: bool, summary: bool) -> None:
        """Add a progress bar, if standard error is a terminal, and the line in the log."""
        if bar and Bar.is_seen():
            shown = Bar(self.operation)
            self.add(shown.take, "the progress bar", detailed=True, flush=shown.flush)
        if summary:
            self.add(log_summary, "the log line", detailed=False)

    def emit(
        self,
        kind: Callable[..., Event],
        began_at: float,
        *,
        seconds: float | None = None,
        **fields: object,
    ) -> None:
        """Emit an event about something that has just ended.

        Args:
            kind: the type of the event.
            began_at: `time.monotonic()` when it began.
            seconds: how long it took. Default: the time since `began_at`.
            fields: the event's own fields.
        """
        if self._listeners:
            self.pass_on(
                kind(
                    rank=self._rank,
                    url=self.url,
                    start_ns=self._unix_offset_ns + int(began_at * 1e9),
                    seconds=time.monotonic() - began_at if seconds is None else seconds,
                    **fields,
                )
            )

    def pass_on(self, event: Event) -> None:
        """Emit an event that was made elsewhere."""
        self._queue.put(event)

    def retried(
        self,
        what: Literal["commit", "range", "slow range", "request"],
        object_key: str,
        attempt: int,
        error: str,
        began_at: float,
    ) -> None:
        """Count a retry and emit `Retried`. May be called from any thread.

        Args:
            what: the kind of request.
            object_key: key of the object, relative to the checkpoint.
            attempt: the number of the try that follows, from 2.
            error: the reason, in words, without a secret.
            began_at: `time.monotonic()` at the first try.
        """
        with self._counts_lock:
            if what == "slow range":
                self.slow_ranges += 1
            else:
                self.retries += 1
        self.emit(Retried, began_at, what=what, attempt=attempt, error=error, object_key=object_key)

    def key_of(self, bucket_key: str) -> str | None:
        """Return a key of the bucket relative to this checkpoint; None if it is not below it.

        Of the checkpoint `s3://bucket/run/step-1`, `_COMMIT` for `run/step-1/_COMMIT`.
        """
        prefix = self.url.partition("://")[2].partition("/")[2].rstrip("/")
        root = f"{prefix}/" if prefix else ""
        return bucket_key[len(root) :] if bucket_key.startswith(root) else None

    def fail(self, error: BaseException) -> None:
        """Emit `Failed` for the whole operation; only the first call does."""
        if self._has_emitted_failure:
            return
        self._has_emitted_failure = True
        typed = error if isinstance(error, DcpObjstoreError) else DcpObjstoreError(str(error))
        self.emit(
            Failed,
            self.began_at,
            operation=self.operation,
            error=type(error).__name__,
            message=typed.message,
            failed_rank=typed.rank,
            key=typed.key,
            object_key=typed.object_key,
        )

    @contextmanager
    def current(self) -> Iterator[None]:
        """Report the retries of all requests in the block to this channel.

        This includes requests of threads that `threads.spawn` starts in the block.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Deliver events while the block runs; emit `Failed` if it raises."""
        self._open()
        try:
            with self.current():
                yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.flush()

    def _open(self) -> None:
        """Start the thread that delivers events, if a listener wants them while things go on."""
        if self.detailed and self._thread is None:
            # Ctrl-C comes to the main thread, so a KeyboardInterrupt in this one is a listener's.
            self._thread = spawn(lambda: self._deliver(BaseException), "events")

    def flush(self) -> None:
        """Wait until all events so far were delivered; not for ever, if a listener hangs."""
        # If the queue is not empty, its events may have come after an earlier flush, which has
        # ended the thread. A thread that still runs goes on.
        if not self._queue.empty():
            self._open()
        thread, self._thread = self._thread, None
        listeners = self._listeners
        self._queue.put(None)  # ends `_deliver`
        if thread is None:
            # In this thread, where a KeyboardInterrupt is the user's and not a listener's.
            self._deliver(Exception)
        else:
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():  # a listener hangs, and none gets a further event
                self._listeners, self.detailed = [], False
                logger.warning(
                    "%s: on_event has not returned for %g s; the %s goes on without it",
                    self.url,
                    _PATIENCE_SECONDS,
                    self.operation,
                )
        for listener in listeners:
            with self._guarded(listener, Exception):
                listener.flush()

    def _deliver(self, harmless: type[BaseException]) -> None:
        """Deliver the events that are queued, as they come, up to the None of `flush`."""
        for event in iter(self._queue.get, None):
            for listener in self._listeners:
                with self._guarded(listener, harmless):
                    listener.take(event)

    @contextmanager
    def _guarded(self, listener: _Listener, harmless: type[BaseException]) -> Iterator[None]:
        """Log the first error of a listener that is `harmless`, with its traceback, and go on."""
        try:
            yield
        except harmless:
            if listener.name not in self._warned:
                self._warned.add(listener.name)
                logger.warning(
                    "%s: %s failed; the %s goes on, and further errors of this listener are not"
                    " shown",
                    self.url,
                    listener.name,
                    self.operation,
                    exc_info=True,
                )


# Requests are made by code that knows nothing of saves and loads, in its own threads.
_current: ContextVar[Channel | None] = ContextVar("dcp_objstore_channel", default=None)


def current_channel() -> Channel | None:
    """Return the channel of the save or load that this thread works for, or None."""
    return _current.get()


def emit_retry(bucket_key: str, attempt: int, error: str, began_at: float) -> None:
    """Report a retry to the save or load that the request belongs to. For transports.

    Args:
        bucket_key: the object's key in the bucket.
        attempt: the number of the try that follows, from 2.
        error: the reason, in words, without a secret.
        began_at: `time.monotonic()` at the first try.
    """
    channel = current_channel()
    key = None if channel is None else channel.key_of(bucket_key)
    if channel is not None and key:  # not another object, such as one of the local catalogue
        channel.retried("request", key, attempt=attempt, error=error, began_at=began_at)


class EventSettings:
    """The settings `on_event` and `trace`; picklable if `on_event` is.

    Args:
        on_event: a function that is called with each event, or None.
        trace: the local file to write a trace to, or None; may hold `{rank}` and `{name}`.

    Raises:
        ConfigError: `on_event` is not callable, or `trace` is not the name of a local file.
    """

    def __init__(self, on_event: OnEvent | None, trace: str | os.PathLike[str] | None) -> None:
        if on_event is not None and not callable(on_event):
            raise ConfigError(f"on_event must be a function of one event, got {on_event!r}")
        self.on_event = on_event
        self.trace = check_trace(trace)

    def __deepcopy__(self, memo: dict[int, Any]) -> EventSettings:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            # The pickler by which multiprocessing sends objects. It is tried here to explain a
            # failure.
            ForkingPickler.dumps(self.on_event)
        except Exception as error:
            raise ConfigError(
                f"on_event={self.on_event!r} cannot be sent to another process, where this save"
                f" runs: use a function of a module or an object that can be pickled ({error})"
            ) from error
        return EventSettings, (self.on_event, self.trace)

    def channel(
        self, operation: Operation, url: str, rank: int = 0, world_size: int = 1
    ) -> Channel:
        """Return the channel to which one save or load on this rank emits its events."""
        channel = Channel(operation, url, rank)
        if self.trace is not None:
            file = TraceFile(trace_path(self.trace, url, rank, world_size))
            channel.add(file.take, "trace", detailed=True, flush=file.flush)
        if self.on_event is not None:
            channel.add(self.on_event, "on_event", detailed=True)
        return channel


def staged_event(url: str, rank: int, size_bytes: int, began_at: float) -> Staged:
    """Make the event of a copy that began at `began_at` (`time.monotonic()`) and has just ended."""
    seconds = time.monotonic() - began_at
    start_ns = time.time_ns() - int(seconds * 1e9)
    return Staged(rank=rank, url=url, start_ns=start_ns, seconds=seconds, size_bytes=size_bytes)
