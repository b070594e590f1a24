"""Parallel ranged GETs within a memory budget; each body is consumed in the thread that fetched it.

Worker threads take requests in order, read the bodies piece by piece into memory that they keep,
and pass each piece to `consume`, which verifies it and copies it out while it is in the processor's
cache. If the store can do it, a worker has several requests under way and reads a piece of each in
turn: what comes meanwhile waits in the buffers of the kernel. So the number of workers bounds the
memory in use, whatever the size of the load. The calling thread receives the finished requests as
an iterator and can be interrupted at any time. It watches for requests that take far longer than
the others, and has them asked for again.

What there is, and who may touch it:

    fetch_ranges              the caller's thread
      _Shared                 one for the call
        tasks                 requests that nobody has begun: workers take the first
        done                  finished requests, or the first error: workers put, the caller takes
        gate                  who is inside `consume`: workers enter, the caller waits for the last
        store_waits.slot      places in the bucket's window: the worker of a request takes and gives
        store_waits.stragglers    how long waits take: workers report, the caller ends a slow one
        local_waits           the same of copies on this machine
        staffing              a lock: how many workers there are; any worker may start another
      _Worker                 one a thread
        ahead                 the requests that it has under way, which no other thread touches
        memory for a piece    kept from one piece to the next
      _Begun                  a request under way: its worker's, until it is left to another one
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from dcp_objstore.config import AUTO_MOST, at_most, processors
from dcp_objstore.errors import CorruptDataError, DcpObjstoreError
from dcp_objstore.observe.dispatch import current_channel
from dcp_objstore.observe.events import RangeRead
from dcp_objstore.stores.admission.limiter import AdmissionSlot, admission_slot, limiter_of
from dcp_objstore.threads import Spawned, spawn
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.pages import new_memory
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, cut
from dcp_objstore.transfer.stragglers import StragglerError, Stragglers
from dcp_objstore.waiting import STEP_SECONDS, take

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.protocol import ObjectStore, RangeBody, RangeReading

T = TypeVar("T")

# Requests that a worker has in flight, if they can be sent ahead: threads that have no processor of
# their own wait for one another and for the GIL. With more, too many would wait behind one that is
# slow (docs/design/few-threads-read-many-connections.md).
_LEAST_AHEAD, _MOST_AHEAD = 2, 8
# With so many, each worker of a near store has one. Counting more would only give a far store
# threads, and take their memory from requests in flight.
_MOST_PROCESSORS = 4
# A request that is slow is asked for again so often: in a large load, a few are slow twice.
_MOST_AGAIN = 2


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
        budget_bytes: the memory budget. One worker is always allowed.
        reading: how the store reads ranges.
        depth: the number of requests that a worker has in flight.
    """
    piece_bytes = max(map(_largest_piece, requests), default=0)
    fitting = max(1, budget_bytes // max(1, piece_bytes + reading.memory_bytes))
    return min(-(-min(concurrency, len(requests)) // depth), fitting)


def _depth(concurrency: int, reading: RangeReading) -> int:
    """Return how many requests a worker has in flight: few if each worker has a processor.

    Args:
        concurrency: how many all workers have in flight.
        reading: how the store reads ranges. If threads wait for the GIL, a worker has two
            processors: a second worker on two of them costs a fifth more, and moves no more.
    """
    if not reading.ahead:
        return 1
    usable = processors() // 2 if reading.takes_gil else processors()
    share = concurrency // min(max(usable, 1), _MOST_PROCESSORS)
    return min(_MOST_AHEAD, max(_LEAST_AHEAD, share))


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
    local: Collection[int] = (),
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
        consume: called in worker threads with a request and its body, for different requests at the
            same time, and once for each piece of a request. If it returns True, the calling thread
            is needed before the request is done, and None is yielded. If it raises
            `CorruptDataError`, the range is fetched once more from this piece on before the error
            counts, because a damaged transfer is not a damaged checkpoint.
        progress: receives the bytes that were fetched; may stop the transfer.
        local: the numbers of objects that the store reads from this machine. Their requests take no
            place in the bucket's window, and nothing is learnt from how long they take.
        budget_bytes: memory for bodies. Default: `config.memory_budget_bytes`.
        admit: called in a worker before a request is fetched. It may wait, and it may return the
            memory that the body must be read into.
        explain: called in a worker with the error of a GET; returns the error to raise instead.

    Raises:
        TransferStalledError: no request was finished for the stall time-out.
        ObjectNotFoundError: an object does not exist; the error has its `object_key`.
        CorruptDataError: an object ends before the range, or `consume` found damage twice.
    """
    of_store = [one for one in requests if one.object_number not in local] if local else requests
    slot = admission_slot(
        store,
        "open_range",
        config,
        config.download_concurrency,
        max((request.end - request.start for request in of_store), default=0),
    )

    # With `admit` a body waits for memory, which may only be free once the body before it was read.
    reading = store.range_reading
    # A copy on this machine is there at once.
    depth = _depth(slot.concurrency, reading) if admit is None and of_store else 1
    most = worker_count(
        requests,
        at_most(config.download_concurrency),
        config.memory_budget_bytes if budget_bytes is None else budget_bytes,
        reading,
        depth=depth,
    )
    shared = _Shared(
        store=store,
        object_keys=object_keys,
        requests=requests,
        consume=consume,
        explain=explain,
        admit=admit,
        progress=progress,
        store_waits=_Waits(len(of_store), slot),
        local_waits=_Waits(len(requests) - len(of_store), _Unlimited()),
        local=local,
        depth=depth,
        most=most,
    )
    try:
        shared.staff()
        left = len(requests)
        while left:
            shared.look()
            outcome = take(shared.done, look=shared.look, step_seconds=STEP_SECONDS)
            if isinstance(outcome, BaseException):
                raise outcome
            left -= outcome is not None
            yield outcome
    except BaseException as error:
        progress.stop(error)
        shared.gate.wait_empty()
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


@dataclass(eq=False)
class _Begun(Generic[T]):
    """A request that is under way.

    Attributes:
        into: where to read it as a whole; None: in pieces, wherever its worker has memory.
        at: when it began (monotonic).
        worker: its number in a trace.
        rest: the pieces that were not consumed yet.
        read_at: when the last piece was read, or when it began.
        again: how often it was asked for again, being slow.
        is_left: its worker is to leave it to another one.
    """

    request: RangeRequest[T]
    into: memoryview | None
    at: float
    body: RangeBody
    worker: int
    rest: deque[RangeRequest[T]]
    read_at: float
    again: int = 0
    is_left: bool = False


class _Unlimited:
    """Stands for an `AdmissionSlot` where any number of requests may be in flight."""

    concurrency = AUTO_MOST

    def begin(self, *_: object, **__: object) -> bool:
        """Let a request begin."""
        return True

    def moved(self, _size_bytes: int) -> None:
        """Learn nothing."""

    def end(self, *_: object, **__: object) -> None:
        """Learn nothing."""


class _Waits(Generic[T]):
    """What is known of the requests to one place: how many may be in flight, how long they take."""

    def __init__(self, requests: int, slot: AdmissionSlot | _Unlimited) -> None:
        self.requests = requests
        self.slot = slot
        self.stragglers: Stragglers[_Begun[T]] = Stragglers(requests)


@dataclass(kw_only=True)
class _Shared(Generic[T]):
    """What the workers of one call of `fetch_ranges` share, and its thread looks after.

    A request that takes far longer than the others is asked for again. If its transport can be
    interrupted, its worker does that itself, in the same memory. Otherwise the worker is left to
    wait, which takes memory until it ends, so another one goes on only if there is room.
    """

    store: ObjectStore
    object_keys: Sequence[str]
    # Not kept: a worker that waits in a transport for long would keep all destinations alive.
    requests: InitVar[Sequence[RangeRequest[T]]]
    consume: Callable[[RangeRequest[T], Buffer], bool | None]
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None
    admit: Callable[[RangeRequest[T], Progress], memoryview | None] | None
    progress: Progress
    store_waits: _Waits[T]
    local_waits: _Waits[T]
    local: Collection[int]
    depth: int
    most: int

    def __post_init__(self, requests: Sequence[RangeRequest[T]]) -> None:
        self.tasks = deque(requests)
        self.done: queue.SimpleQueue[RangeRequest[T] | BaseException | None] = queue.SimpleQueue()
        self.gate = _Gate(self.progress)
        self._limiter = limiter_of(self.store)
        self._workers = 0
        self._threads: list[Spawned] = []
        self.staffing = threading.Lock()

    def staff(self) -> None:
        """Start as many workers as there are requests that may be in flight.

        So what the window does not allow takes no thread and no memory.
        """
        if self._workers == self.most:
            return
        with self.staffing:
            store, copies = self.store_waits, self.local_waits
            of_store = -(-store.slot.concurrency // self.depth) if store.requests else 0
            wanted = min(self.most, max(of_store, processors() if copies.requests else 0))
            while self._workers < wanted and self.tasks:
                self.start(self._workers)

    def start(self, number: int, *begun: _Begun[T]) -> None:
        """Start a worker, to go on with what another one has left. Hold `staffing`."""
        self._threads.append(spawn(partial(_Worker(self, number).run, begun), f"download-{number}"))
        self._workers = min(self.most, self._workers + 1)

    @property
    def _has_room(self) -> bool:
        """Whether there is memory for one more worker. Hold `staffing`."""
        return sum(thread.is_alive() for thread in self._threads) < self.most

    def waits(self, request: RangeRequest[T]) -> _Waits[T]:
        """Return what is known of requests of this kind."""
        return self.local_waits if request.object_number in self.local else self.store_waits

    def key(self, request: RangeRequest[T]) -> str:
        return self.object_keys[request.object_number]

    def open(self, request: RangeRequest[T], start: int) -> RangeBody:
        """Open a request from `start` on."""
        return self.store.open_range(self.key(request), start, request.end)

    def pass_on(self, request: RangeRequest[T], body: Buffer) -> None:
        """Call `consume`, unless the transfer was stopped."""
        with self.gate:
            caller_is_needed = self.consume(request, body)
        if caller_is_needed:
            self.done.put(None)

    def look(self) -> None:
        """Raise if the transfer has stalled. Have a request asked for again, if one is slow."""
        self.progress.check_stalled("download")
        if not self._limiter.spares_retries:
            return
        with self.staffing:
            waits = self.store_waits.stragglers, self.local_waits.stragglers
            begun = next(filter(None, (one.take(self._give_up) for one in waits)), None)
            if begun is None:
                return
            if begun.is_left:
                self.start(begun.worker, replace(begun, is_left=False))
        self._limiter.spend_retry()
        if (channel := current_channel()) is not None:
            text = "it takes far longer than the others"
            number = begun.again + 1
            channel.retried("slow range", self.key(begun.request), number, text, begun.at)

    def _give_up(self, begun: _Begun[T]) -> bool:
        if begun.again == _MOST_AGAIN:
            return False
        # What it is left with must be its own memory, and no other request.
        may_be_left = begun.into is None and self.depth == 1 and self._has_room
        cancelled = begun.body.cancel(at_once=not may_be_left)
        begun.again += cancelled or may_be_left
        begun.is_left = may_be_left and not cancelled
        return cancelled or may_be_left


@dataclass
class _Worker(Generic[T]):
    """The work of one thread."""

    shared: _Shared[T]
    number: int

    def __post_init__(self) -> None:
        self._scratch = memoryview(b"")

    def run(self, left: Sequence[_Begun[T]]) -> None:
        """Fetch requests until there are none left. On an error, put it into `done` and stop.

        Args:
            left: what another worker has left, to go on with first.
        """
        shared = self.shared
        ahead = deque(left)
        try:
            for taken_over in ahead:
                taken_over.body = shared.open(taken_over.request, taken_over.rest[0].start)
            while True:
                shared.progress.check_stopped()
                self._send_ahead(ahead)
                if not ahead:
                    return
                self._read_piece(ahead[0])
                if ahead[0].rest:
                    ahead.rotate(-1)
                else:
                    self._end(ahead.popleft())
        except StragglerError:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            for unread in ahead:
                shared.waits(unread.request).slot.end(id(unread.request), answered=False)
                unread.body.close()
            shared.done.put(error)

    def _send_ahead(self, ahead: deque[_Begun[T]]) -> None:
        with suppress(IndexError):
            while len(ahead) < self.shared.depth:
                # In a trace, each request that one thread has under way gets its own row.
                taken = {begun.worker for begun in ahead}
                row = next(
                    row for row in count(self.shared.depth * self.number) if row not in taken
                )
                begun = self._begin(self.shared.tasks.popleft(), row, wait=not ahead)
                if begun is None:
                    return
                ahead.append(begun)

    def _begin(self, request: RangeRequest[T], row: int, *, wait: bool) -> _Begun[T] | None:
        """Begin a request; put it back and return None if it has no place and `wait` is False."""
        shared = self.shared
        into = None if shared.admit is None else shared.admit(request, shared.progress)
        slot = shared.waits(request).slot
        if not slot.begin(id(request), shared.progress.check_stopped, wait=wait):
            shared.tasks.appendleft(request)
            return None
        body = shared.open(request, request.start)
        rest = [request] if into is not None else cut(request, BLOCK_SIZE_BYTES)
        now = time.monotonic()
        return _Begun(request, into, now, body, row, deque(rest), now)

    def _read_piece(self, begun: _Begun[T]) -> None:
        """Read the next piece and consume it. If it is damaged or slow, ask for it again."""
        shared, piece = self.shared, begun.rest[0]
        # A copy may be damaged, and then the answer of the store once.
        tries = 3 if begun.request.object_number in shared.local else 2
        size_bytes = piece.end - piece.start
        came = self._memory(size_bytes) if begun.into is None else begun.into[:size_bytes]
        while True:
            began_at = time.monotonic()
            try:
                self._receive(begun, piece, came)
                shared.pass_on(piece, came)
                break
            except CorruptDataError as error:
                key = shared.key(begun.request)
                tries -= 1
                if not tries:
                    raise error.at(object_key=key) from None
                if (channel := current_channel()) is not None:
                    text = f"{type(error).__name__}: {error.message}"
                    channel.retried("range", key, 2, text, began_at)
            except StragglerError:
                if begun.is_left:
                    begun.body.close()
                    raise
            begun.body.close()
            begun.body = shared.open(begun.request, piece.start)
        begun.rest.popleft()
        begun.read_at = time.monotonic()
        shared.waits(begun.request).slot.moved(size_bytes)
        shared.staff()
        shared.progress.alive()

    def _receive(self, begun: _Begun[T], piece: RangeRequest[T], came: memoryview) -> None:
        try:
            stragglers = self.shared.waits(begun.request).stragglers
            with stragglers.waiting(begun, len(came), since=begun.read_at):
                begun.body.readinto(came)
        except DcpObjstoreError as error:
            if self.shared.explain is None:
                raise
            raise self.shared.explain(piece, error) from error

    def _end(self, begun: _Begun[T]) -> None:
        request, progress = begun.request, self.shared.progress
        begun.body.close()
        self.shared.waits(request).slot.end(id(request), answered=True)
        progress.moved(request.end - request.start)
        if progress.channel is not None:
            progress.channel.emit(
                RangeRead,
                begun.at,
                object_key=self.shared.key(request),
                offset=request.start,
                size_bytes=request.end - request.start,
                worker=begun.worker,
            )
        self.shared.done.put(request)

    def _memory(self, size_bytes: int) -> memoryview:
        """Return memory for a piece.

        It is kept for the next one, because memory that is new to the process costs as much as
        copying into it. When the thread ends, it goes back to the system: of memory from malloc,
        each arena, of which there may be one for each thread, would keep a piece.
        """
        if len(self._scratch) < size_bytes:
            self._scratch = memoryview(new_memory(size_bytes))
        return self._scratch[:size_bytes]
