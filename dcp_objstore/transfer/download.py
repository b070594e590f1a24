"""Parallel ranged GETs within a memory budget; each body is consumed in the thread that fetched it.

Worker threads take requests in order, fetch each body and pass it to `consume`, which verifies it
and copies it out; the body is dropped before the next one is fetched. If the store can do it, a
body arrives piece by piece, so that each piece is consumed while it is in the processor's cache,
and the next request is sent ahead. So the number of workers bounds the memory in use, whatever the
size of the load. The calling thread receives the finished requests as an iterator and can be
interrupted at any time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from dcp_objstore.errors import CorruptDataError, DcpObjstoreError
from dcp_objstore.observe.dispatch import current_channel
from dcp_objstore.observe.events import RangeRead
from dcp_objstore.stores.admission.limiter import admission_slot
from dcp_objstore.stores.protocol import (
    REST_SIZE_BYTES,
    AskableStore,
    AskedRange,
    PiecewiseStore,
)
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, cut
from dcp_objstore.transfer.workers import spawn
from dcp_objstore.waiting import WATCH_SECONDS, take

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.admission.limiter import AdmissionSlot
    from dcp_objstore.stores.protocol import ObjectStore

T = TypeVar("T")


def worker_count(
    requests: Sequence[RangeRequest[T]],
    concurrency: int,
    budget_bytes: int,
    *,
    piecewise: bool = False,
) -> int:
    """Return how many requests may be in flight so that their bodies fit into the memory budget.

    A body counts twice: the transport collects its pieces before it joins them.

    Args:
        requests: all requests of the transfer.
        concurrency: the largest number of requests in flight.
        budget_bytes: the memory budget.
        piecewise: whether bodies arrive straight in this process's memory, a piece at a time. Then
            two requests use one digest block. The rest of the budget is for bodies that broke off:
            the transport fetches what is missing in ranges of `REST_SIZE_BYTES`.
    """
    held = max((_held_bytes(r, piecewise=piecewise) for r in requests), default=1)
    fitting = max(1, budget_bytes // (2 * held))
    return min(concurrency, fitting, len(requests))


def _held_bytes(request: RangeRequest[T], *, piecewise: bool) -> int:
    size_bytes = request.end - request.start
    if not piecewise or size_bytes <= REST_SIZE_BYTES:
        return size_bytes
    largest = max((span.end - span.start for span in request.spans), default=size_bytes)
    return max(REST_SIZE_BYTES, largest)


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
            `CorruptDataError`, the range is fetched once more before the error counts, because a
            damaged transfer is not a damaged checkpoint.
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
    tasks: queue.SimpleQueue[RangeRequest[T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[RangeRequest[T] | BaseException | None] = queue.SimpleQueue()
    gate = _Gate(progress)
    slot = admission_slot(store, "get_range")
    for request in requests:
        tasks.put(request)

    def guarded(request: RangeRequest[T], body: Buffer) -> None:
        with gate:
            caller_is_needed = consume(request, body)
        if caller_is_needed:
            done.put(None)

    # With `admit` a body waits for memory, which may only be free once the body before it was read.
    asks: AskableStore | None = None
    if admit is None and isinstance(store, AskableStore) and store.asks_ahead:
        asks = store
    shared = _Shared(
        store,
        object_keys,
        guarded,
        explain,
        admit,
        progress,
        slot,
        pieces=store if isinstance(store, PiecewiseStore) else None,
        asks=asks,
    )
    budget_bytes = config.memory_budget_bytes if budget_bytes is None else budget_bytes
    in_flight = worker_count(
        requests, config.download_concurrency, budget_bytes, piecewise=asks is not None
    )
    for number in range(-(-in_flight // shared.depth)):
        spawn(partial(_Worker(shared, number).run, tasks, done), f"download-{number}")
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
    asked: AskedRange | None
    worker: int


@dataclass(frozen=True)
class _Shared(Generic[T]):
    """What the workers of one call of `fetch_ranges` share.

    Attributes:
        pieces, asks: the store, if it has these verbs; otherwise None. (Checked once, because the
            check takes longer than the rest of a request's Python.)
    """

    store: ObjectStore
    object_keys: Sequence[str]
    consume: Callable[[RangeRequest[T], Buffer], None]
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None
    admit: Callable[[RangeRequest[T], Progress], memoryview | None] | None
    progress: Progress
    slot: AdmissionSlot
    _: KW_ONLY
    pieces: PiecewiseStore | None
    asks: AskableStore | None

    @property
    def depth(self) -> int:
        """The number of requests that a worker has under way.

        If requests can be sent ahead, half as many threads keep as many connections busy with half
        of the memory: 0.7 instead of 0.8 CPU-seconds per GiB (2 cores, loopback).
        """
        return 1 if self.asks is None else 2


@dataclass
class _Worker(Generic[T]):
    """The work of one thread."""

    shared: _Shared[T]
    number: int

    def __post_init__(self) -> None:
        self._scratch = memoryview(b"")
        self._begun = 0

    def run(
        self,
        tasks: queue.SimpleQueue[RangeRequest[T]],
        done: queue.SimpleQueue[RangeRequest[T] | BaseException | None],
    ) -> None:
        """Fetch requests until there are none left. On an error, put it into `done` and stop."""
        ahead: deque[_Begun[T]] = deque()
        try:
            while True:
                self.shared.progress.check_stopped()
                with suppress(queue.Empty):
                    while len(ahead) < self.shared.depth:
                        ahead.append(self._begin(tasks.get_nowait()))
                if not ahead:
                    return
                begun = ahead.popleft()
                self._finish(begun)
                done.put(begun.request)
                del begun
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            for left in ahead:
                self.shared.slot.end(id(left.request), answered=False)
                if left.asked is not None:
                    left.asked.close()
            done.put(error)

    def _begin(self, request: RangeRequest[T]) -> _Begun[T]:
        shared = self.shared
        into = None if shared.admit is None else shared.admit(request, shared.progress)
        shared.slot.begin(id(request), shared.progress.check_stopped)
        asked = None
        if shared.asks is not None:
            key = shared.object_keys[request.object_number]
            asked = shared.asks.ask(key, request.start, request.end)
        # In a trace, each request that one thread has under way gets its own row.
        self._begun += 1
        worker = shared.depth * self.number + self._begun % shared.depth
        return _Begun(request, into, time.monotonic(), asked, worker)

    def _finish(self, begun: _Begun[T]) -> None:
        request, progress, answered = begun.request, self.shared.progress, False
        try:
            self._fetch(request, begun.into, begun.asked)
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

    def _fetch(
        self, request: RangeRequest[T], into: memoryview | None, asked: AskedRange | None
    ) -> None:
        """Fetch a request and consume it: as a whole if it has memory, otherwise in pieces."""
        pieces = [request]
        if into is None:
            if self.shared.pieces is not None:
                pieces = cut(request, BLOCK_SIZE_BYTES)
            into = self._memory(max(piece.end - piece.start for piece in pieces))
        consumed = 0
        began_at = time.monotonic()
        try:
            with closing(self._arriving(pieces, into, asked)) as bodies:
                for body in bodies:
                    self.shared.consume(pieces[consumed], body)
                    consumed += 1
                    self.shared.progress.alive()
        except CorruptDataError as error:
            if (channel := current_channel()) is not None:
                key = self.shared.object_keys[request.object_number]
                text = f"{type(error).__name__}: {error.message}"
                channel.retried("range", key, 2, text, began_at)
            rest = pieces[consumed:]
            if len(pieces) > 1:
                spans = [span for piece in rest for span in piece.spans]
                whole = RangeRequest(request.object_number, rest[0].start, request.end, spans)
                rest = cut(whole, REST_SIZE_BYTES)
            try:
                for some in rest:
                    for body in self._arriving([some], None):
                        self.shared.consume(some, body)
                    self.shared.progress.alive()
            except CorruptDataError as error:
                raise error.at(object_key=self.shared.object_keys[request.object_number]) from None

    def _arriving(
        self,
        pieces: Sequence[RangeRequest[T]],
        into: memoryview | None,
        asked: AskedRange | None = None,
    ) -> Generator[Buffer, None, None]:
        """Yield the bodies of the pieces of one request, in their order."""
        key = self.shared.object_keys[pieces[0].object_number]
        given = 0
        try:
            if asked is None and (into is None or len(pieces) == 1):
                yield self.shared.store.get_range(key, pieces[0].start, pieces[0].end, into=into)
                return
            assert into is not None
            cuts = [pieces[0].start, *(piece.end for piece in pieces)]
            if asked is not None:
                assert self.shared.asks is not None
                arriving = self.shared.asks.get_asked(key, cuts, into, asked)
            else:
                assert self.shared.pieces is not None
                arriving = self.shared.pieces.get_pieces(key, cuts, into)
            with closing(arriving) as bodies:
                for body in bodies:
                    yield body
                    given += 1
        except DcpObjstoreError as error:
            if self.shared.explain is None:
                raise
            raise self.shared.explain(pieces[given], error) from error

    def _memory(self, size_bytes: int) -> memoryview:
        """Return memory for a body or its largest piece.

        It is kept for the next request, because memory that is new to the process costs as much as
        copying into it.
        """
        if len(self._scratch) < size_bytes:
            self._scratch = memoryview(np.empty(size_bytes, dtype=np.uint8))
        return self._scratch[:size_bytes]
