"""Parallel ranged GETs within a memory budget; each body is consumed in the thread that fetched it.

Worker threads take requests in order, read each body piece by piece into memory that they keep, and
pass each piece to `consume`, which verifies it and copies it out while it is in the processor's
cache. If the store can do it, the next request is sent ahead. So the number of workers bounds the
memory in use, whatever the size of the load. The calling thread receives the finished requests as
an iterator and can be interrupted at any time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from dcp_objstore.config import at_most
from dcp_objstore.errors import CorruptDataError, DcpObjstoreError
from dcp_objstore.observe.dispatch import current_channel
from dcp_objstore.observe.events import RangeRead
from dcp_objstore.stores.admission.limiter import admission_slot
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, cut
from dcp_objstore.transfer.workers import spawn
from dcp_objstore.waiting import WATCH_SECONDS, take

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.admission.limiter import AdmissionSlot
    from dcp_objstore.stores.protocol import ObjectStore, RangeBody, RangeReading

T = TypeVar("T")

# Requests that a worker has in flight if they can be sent ahead. So half as many threads keep as
# many connections busy with half of the memory: 0.7 instead of 0.8 CPU-seconds per GiB (2 cores,
# loopback).
_AHEAD = 2


def worker_count(
    requests: Sequence[RangeRequest[T]],
    concurrency: int,
    budget_bytes: int,
    reading: RangeReading,
    *,
    depth: int = 1,
) -> int:
    """Return how many workers fit into the memory budget.

    A worker takes the memory for the largest piece, and what the store takes for the one range that
    it is reading. Ranges that are open and not read yet take none.

    Args:
        requests: all requests of the transfer.
        concurrency: the largest number of requests in flight.
        budget_bytes: the memory budget. One worker is always allowed.
        reading: how the store reads ranges.
        depth: the number of requests that a worker has in flight.
    """
    piece_bytes = max(map(_largest_piece, requests), default=0)
    fitting = max(1, budget_bytes // max(1, piece_bytes + reading.memory_bytes))
    return min(-(-min(concurrency, len(requests)) // depth), fitting)


def _largest_piece(request: RangeRequest[T]) -> int:
    size_bytes = request.end - request.start
    largest = max((span.end - span.start for span in request.spans), default=size_bytes)
    return min(size_bytes, max(largest, BLOCK_SIZE_BYTES))


def fetch_ranges(
    store: ObjectStore,
    object_keys: Sequence[str],
    requests: Sequence[RangeRequest[T]],
    consume: Callable[[RangeRequest[T], Buffer], bool | None],
    config: TransferConfig,
    progress: Progress,
    *,
    budget_bytes: int | None = None,
    admit: Callable[[RangeRequest[T], Progress], memoryview | None] | None = None,
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None = None,
) -> Generator[RangeRequest[T] | None, None, None]:
    """Fetch every request and yield it once `consume(request, body)` has returned for it.

    Close the iterator if you stop before its end (`contextlib.closing`). Once it has raised or is
    closed, `consume` is not running and will not be called again, though requests may still be
    under way: the destination memory belongs to the caller again.

    The first error that the store or `consume` raises ends the transfer and is raised here.

    Args:
        store: where the objects are.
        object_keys: their keys, by object number.
        requests: what to fetch, in this order.
        consume: called in worker threads with a request and its body, for different requests at the
            same time, and once for each piece of a request. If it returns True, the calling thread
            is needed before the request is done, and None is yielded. If it raises
            `CorruptDataError`, the range is fetched once more from this piece on before the error
            counts, because a damaged transfer is not a damaged checkpoint.
        config: limits and time-outs.
        progress: receives the bytes that were fetched; may stop the transfer.
        budget_bytes: memory for bodies. Default: `config.memory_budget_bytes`.
        admit: called in a worker before a request is fetched. It may wait, and it may return the
            memory that the body must be read into.
        explain: called in a worker with the error of a GET; returns the error to raise instead.

    Raises:
        TransferStalledError: no request was finished for the stall time-out.
        ObjectNotFoundError: an object does not exist; the error has its `object_key`.
        CorruptDataError: an object ends before the range, or `consume` found damage twice.
    """
    tasks = deque(requests)
    done: queue.SimpleQueue[RangeRequest[T] | BaseException | None] = queue.SimpleQueue()
    gate = _Gate(progress)
    slot = admission_slot(
        store,
        "open_range",
        config,
        config.download_concurrency,
        max((request.end - request.start for request in requests), default=0),
    )

    def guarded(request: RangeRequest[T], body: Buffer) -> None:
        with gate:
            caller_is_needed = consume(request, body)
        if caller_is_needed:
            done.put(None)

    # With `admit` a body waits for memory, which may only be free once the body before it was read.
    reading = store.range_reading
    depth = _AHEAD if admit is None and reading.ahead else 1
    most = worker_count(
        requests,
        at_most(config.download_concurrency),
        config.memory_budget_bytes if budget_bytes is None else budget_bytes,
        reading,
        depth=depth,
    )
    shared = _Shared(
        store, object_keys, guarded, explain, admit, progress, slot, depth, most, tasks, done
    )
    shared.staff()
    check_stalled = partial(progress.check_stalled, "download")
    try:
        left = len(requests)
        while left:
            outcome = take(done, look=check_stalled, step_seconds=WATCH_SECONDS)
            if isinstance(outcome, BaseException):
                raise outcome
            left -= outcome is not None
            yield outcome
    except BaseException as error:
        progress.stop(error)
        gate.wait_empty()
        raise
    finally:
        slot.close()


class _Gate:
    """Lets workers call `consume` until the transfer is stopped."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._inside = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._progress.check_stopped()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def wait_empty(self) -> None:
        """Wait until no worker is inside. After `progress.stop` no worker enters."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)


@dataclass(frozen=True)
class _Begun(Generic[T]):
    """A request that is under way."""

    request: RangeRequest[T]
    into: memoryview | None
    at: float
    body: RangeBody
    worker: int


@dataclass
class _Shared(Generic[T]):
    """What the workers of one call of `fetch_ranges` share."""

    store: ObjectStore
    object_keys: Sequence[str]
    consume: Callable[[RangeRequest[T], Buffer], None]
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None
    admit: Callable[[RangeRequest[T], Progress], memoryview | None] | None
    progress: Progress
    slot: AdmissionSlot
    depth: int
    most: int
    tasks: deque[RangeRequest[T]]
    done: queue.SimpleQueue[RangeRequest[T] | BaseException | None]

    def __post_init__(self) -> None:
        self._workers = 0
        self._staffing = threading.Lock()

    def staff(self) -> None:
        """Start as many workers as there are requests that may be in flight.

        So what the window does not allow takes no thread and no memory.
        """
        if self._workers == self.most:
            return
        with self._staffing:
            wanted = min(self.most, -(-self.slot.concurrency // self.depth))
            while self._workers < wanted and self.tasks:
                spawn(_Worker(self, self._workers).run, f"download-{self._workers}")
                self._workers += 1


@dataclass
class _Worker(Generic[T]):
    """The work of one thread."""

    shared: _Shared[T]
    number: int

    def __post_init__(self) -> None:
        self._scratch = memoryview(b"")
        self._begun = 0

    def run(self) -> None:
        """Fetch requests until there are none left. On an error, put it into `done` and stop."""
        ahead: deque[_Begun[T]] = deque()
        try:
            while True:
                self.shared.progress.check_stopped()
                with suppress(IndexError):
                    while len(ahead) < self.shared.depth:
                        begun = self._begin(self.shared.tasks.popleft(), wait=not ahead)
                        if begun is None:
                            break
                        ahead.append(begun)
                if not ahead:
                    return
                begun = ahead.popleft()
                self._finish(begun)
                self.shared.done.put(begun.request)
                del begun
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            for left in ahead:
                self.shared.slot.end(id(left.request), answered=False)
                left.body.close()
            self.shared.done.put(error)

    def _begin(self, request: RangeRequest[T], *, wait: bool) -> _Begun[T] | None:
        """Begin a request; put it back and return None if it has no place and `wait` is False."""
        shared = self.shared
        into = None if shared.admit is None else shared.admit(request, shared.progress)
        if not shared.slot.begin(id(request), shared.progress.check_stopped, wait=wait):
            shared.tasks.appendleft(request)
            return None
        key = shared.object_keys[request.object_number]
        body = shared.store.open_range(key, request.start, request.end)
        # In a trace, each request that one thread has under way gets its own row.
        self._begun += 1
        worker = shared.depth * self.number + self._begun % shared.depth
        return _Begun(request, into, time.monotonic(), body, worker)

    def _finish(self, begun: _Begun[T]) -> None:
        request, progress, answered = begun.request, self.shared.progress, False
        try:
            self._fetch(begun)
            answered = True
        finally:
            self.shared.slot.end(id(request), answered=answered)
        progress.moved(request.end - request.start)
        if progress.channel is not None:
            progress.channel.emit(
                RangeRead,
                begun.at,
                object_key=self.shared.object_keys[request.object_number],
                offset=request.start,
                size_bytes=request.end - request.start,
                worker=begun.worker,
            )

    def _fetch(self, begun: _Begun[T]) -> None:
        """Read a request and consume it: as a whole if it has memory, otherwise in pieces."""
        shared, request, into = self.shared, begun.request, begun.into
        key = shared.object_keys[request.object_number]
        rest = deque([request] if into is not None else cut(request, BLOCK_SIZE_BYTES))
        if into is None:
            into = self._memory(max(piece.end - piece.start for piece in rest))
        body, damaged = begun.body, None
        while rest:
            began_at = time.monotonic()
            try:
                self._consume(body, rest, into)
            except CorruptDataError as error:
                if rest[0] is damaged:
                    raise error.at(object_key=key) from None
                damaged = rest[0]
                if (channel := current_channel()) is not None:
                    text = f"{type(error).__name__}: {error.message}"
                    channel.retried("range", key, 2, text, began_at)
                body = shared.store.open_range(key, damaged.start, request.end)

    def _consume(self, body: RangeBody, rest: deque[RangeRequest[T]], into: memoryview) -> None:
        """Read pieces and consume them, and take each off `rest` once it was consumed."""
        shared = self.shared
        with body:
            while rest:
                piece = rest[0]
                came = into[: piece.end - piece.start]
                try:
                    body.readinto(came)
                except DcpObjstoreError as error:
                    if shared.explain is None:
                        raise
                    raise shared.explain(piece, error) from error
                shared.consume(piece, came)
                rest.popleft()
                shared.slot.moved(len(came))
                shared.staff()
                shared.progress.alive()

    def _memory(self, size_bytes: int) -> memoryview:
        """Return memory for a body or its largest piece.

        It is kept for the next request, because memory that is new to the process costs as much as
        copying into it.
        """
        if len(self._scratch) < size_bytes:
            self._scratch = memoryview(np.empty(size_bytes, dtype=np.uint8))
        return self._scratch[:size_bytes]
