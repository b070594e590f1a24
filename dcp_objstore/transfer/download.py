"""Parallel ranged GETs within a memory budget; each body is consumed in the thread that fetched it.

Worker threads take requests in order, read the bodies piece by piece into memory that they keep,
and pass each piece to `consume`, which verifies it and copies it out while it is in the processor's
cache. If the store can do it, a worker has several requests under way and reads a piece of each in
turn: bytes of the others wait in the buffers of the kernel. So the number of workers bounds the
memory in use, whatever the size of the load. The calling thread receives the finished requests as
an iterator and can be interrupted at any time. It watches for requests that take far longer than
the others, and has them asked for again.

What there is, and who may touch it:

    fetch_ranges              the caller's thread
      _Shared                 one for the call
        tasks                 requests that nobody has begun: workers take the first
        done                  finished requests, or the first error: workers put, the caller takes
        gate                  who is at the caller's memory: workers enter, the caller closes it
        store_pace.slot       places in the bucket's window: the worker of a request takes and gives
        store_pace.stragglers     how long waits take: workers report, the caller ends a slow one
        local_pace            the same of copies on this machine
        staffing              a lock: how many workers there are; any worker may start another
      _Worker                 one a thread
        under_way             the requests that it has under way, which no other thread touches
        memory for a piece    kept from one piece to the next
      _Fetch                  a request under way: its worker's, until that hands it over
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Generic, TypeVar

from typing_extensions import Buffer

from dcp_objstore.config import AUTO_MOST, TransferConfig, at_most, processors
from dcp_objstore.contexts import contextmanager
from dcp_objstore.errors import CorruptDataError, DcpObjstoreError
from dcp_objstore.observe.dispatch import current_channel
from dcp_objstore.observe.events import RangeRead
from dcp_objstore.stores.admission.limiter import AdmissionSlot, admission_slot, limiter_of
from dcp_objstore.stores.protocol import ObjectStore, RangeBody, RangeReading
from dcp_objstore.threads import STEP_SECONDS, Spawned, spawn, take
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.memory import new_memory
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, cut
from dcp_objstore.transfer.stragglers import StragglerError, Stragglers

T = TypeVar("T")

# Requests that a worker has in flight, if they can be sent ahead: threads that have no processor of
# their own wait for one another and for the GIL. With more, too many would wait behind one that is
# slow (docs/design/few-threads-read-many-connections.md).
_LEAST_AHEAD, _MOST_AHEAD = 2, 8
# With so many, each worker of a near store has one. Counting more would only give a far store
# threads, and take their memory from requests in flight.
_MOST_PROCESSORS = 4
# A worker waits so long for any of its answers to begin; then for one alone, as its transport does.
_ANY_ANSWER_SECONDS = 10.0
# How often one slow request is asked for again: in a large load, a few are slow twice.
_MOST_REPEATS = 2


def worker_count(
    concurrency: int, piece_bytes: int, budget_bytes: int, reading: RangeReading, *, depth: int
) -> int:
    """Return how many workers the requests in flight take, or as many as the memory budget allows.

    A worker takes the memory for a piece, and what the store takes for the one range that it is
    reading. Ranges that are open and not read yet take none.

    Args:
        concurrency: the number of requests that all workers have in flight.
        piece_bytes: the size of the largest piece.
        budget_bytes: the memory budget. One worker is always allowed.
        reading: how the store reads ranges.
        depth: the number of requests that a worker has in flight.
    """
    fitting = max(1, budget_bytes // max(1, piece_bytes + reading.memory_bytes))
    return min(-(-concurrency // depth), fitting)


def _depth(concurrency: int, reading: RangeReading) -> int:
    """Return how many requests each worker has in flight at a time.

    The requests in flight are divided among as many workers as there are processors for them, four
    at most.

    Args:
        concurrency: the number of requests that all workers have in flight.
        reading: how the store reads ranges. If reading takes the GIL, there is one worker for two
            processors: a second one costs more processor time, and moves no more bytes.
    """
    if not reading.ahead:  # a range is only asked for when it is read
        return 1
    usable = processors() // 2 if reading.takes_gil else processors()
    share = concurrency // min(max(usable, 1), _MOST_PROCESSORS)
    return min(_MOST_AHEAD, max(_LEAST_AHEAD, share))


def largest_piece(requests: Iterable[RangeRequest[T]]) -> int:
    """Return the size of the largest piece that is read as a whole."""
    pieces = chain.from_iterable(cut(request, BLOCK_SIZE_BYTES) for request in requests)
    return max((piece.end - piece.start for piece in pieces), default=0)


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
    may_begin: Callable[[RangeRequest[T]], bool] | None = None,
    in_place: Callable[[RangeRequest[T]], memoryview | None] = lambda _: None,
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None = None,
) -> Generator[RangeRequest[T] | None, None, None]:
    """Fetch every request and yield it once `consume(request, body)` has returned for it.

    Close the iterator if you stop before its end (`contextlib.closing`). Once it has raised or is
    closed, `consume` is not running and will not be called again, and nothing is received in place,
    though requests may still be under way: the destination memory belongs to the caller again.

    The first error that the store or `consume` raises ends the transfer and is raised here.

    Args:
        consume: a function that worker threads call with a request and its body, for different
            requests at the same time, and once for each piece of a request. If it returns True, the
            calling thread is needed before the request is done, and None is yielded. If it raises
            `CorruptDataError`, the range is fetched once more from this piece on before the error
            counts, because a damaged transfer is not a damaged checkpoint.
        progress: an object that receives the bytes that were fetched, and may stop the transfer.
        local: the numbers of objects that the store reads from this machine. Their requests take no
            place in the bucket's window, and nothing is learnt from how long they take.
        budget_bytes: memory for bodies. Default: `config.memory_budget_bytes`.
        admit: a function that a worker calls before a request is fetched. It may wait, and it may
            return the memory that the body must be read into.
        may_begin: a function that says whether `admit` would return at once; once it does, it does
            so until the request is admitted. Without it, a worker has only one request under way:
            the memory for another may only be free once that was read.
        in_place: a function that returns the memory where the bytes of a request belong, if they
            need not be looked at first. They are received there, and not consumed.
        explain: a function that a worker calls with the error of a GET, and that returns the error
            to raise instead.

    Raises:
        TransferStalledError: no request was finished for the stall time-out.
        ObjectNotFoundError: an object does not exist; the error has its `object_key`.
        CorruptDataError: an object ends before the range, or `consume` found damage twice.
    """
    from_store = requests  # the requests that are not read from a copy on this machine
    if local:
        from_store = [request for request in requests if request.object_number not in local]
    slot = admission_slot(
        store,
        "open_range",
        config,
        concurrency=config.download_concurrency,
        request_bytes=max((request.end - request.start for request in from_store), default=0),
    )

    reading = store.range_reading
    # Asking ahead gains nothing for copies on this machine, which are there at once; and without
    # `may_begin`, a worker must not wait in `admit` while it has other requests to read.
    asks_ahead = bool(from_store) and (admit is None or may_begin is not None)
    depth = _depth(slot.concurrency, reading) if asks_ahead else 1
    piece_bytes = largest_piece(requests)
    most_workers = worker_count(
        at_most(config.download_concurrency),
        piece_bytes,
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
        may_begin=may_begin,
        # Only a store that reads ahead lets go of the caller's memory when a body is cancelled.
        in_place=in_place if reading.ahead else lambda _: None,
        progress=progress,
        store_pace=_Pace(len(from_store), slot),
        local_pace=_Pace(len(requests) - len(from_store), _Unlimited()),
        local=local,
        depth=depth,
        piece_bytes=piece_bytes,
        most_workers=most_workers,
    )
    try:
        shared.start_workers()
        unfinished = len(requests)
        while unfinished:
            shared.check()
            outcome = take(shared.done, check=shared.check, step_seconds=STEP_SECONDS)
            if isinstance(outcome, BaseException):
                raise outcome
            # None: no request is done, but `consume` needs the calling thread.
            unfinished -= outcome is not None
            yield outcome
    except BaseException as error:  # also GeneratorExit: the caller has closed the iterator
        progress.stop(error)
        shared.gate.close()
        raise
    finally:
        slot.close()


class _Gate:
    """Lets workers write to the caller's memory until the transfer is stopped."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        # For each worker inside, the body that it reads into the caller's memory, or None if it
        # calls `consume`.
        self._inside: list[RangeBody | None] = []
        self._changed = threading.Condition()

    @contextmanager
    def writing(self, receiving: RangeBody | None = None) -> Iterator[None]:
        """Write to the caller's memory in this block; raise instead if the transfer was stopped.

        Args:
            receiving: the body that the block reads straight into the caller's memory, so that
                `close` can cancel it. Default None: the block calls `consume`, and `close` waits
                until that has returned.
        """
        with self._changed:
            self._progress.check_stopped()
            self._inside.append(receiving)
        try:
            yield
        finally:
            with self._changed:
                self._inside.remove(receiving)
                self._changed.notify_all()

    def close(self) -> None:
        """Wait until no worker writes any more. After `progress.stop` no worker enters.

        Bodies are cancelled. One that does not end at once is not waited for: it writes nothing.
        """
        with self._changed:
            awaited = [body for body in self._inside if body is None or body.cancel(at_once=False)]
            self._changed.wait_for(lambda: not any(body in self._inside for body in awaited))


@dataclass(eq=False)
class _Fetch(Generic[T]):
    """A request that is under way.

    Attributes:
        memory: the memory for all of it; None to read each piece into its worker's memory.
        is_in_place: whether its bytes belong there, and are not consumed.
        began_at: when it began (monotonic).
        body: the opened range; another one after each time that it was asked for again.
        row: its row in a trace.
        unread: the pieces that were not consumed yet.
        read_at: when the last piece was read, or when the request began.
        repeats: how often it was asked for again, because it was slow.
        is_handed_over: whether another worker goes on with it, and this one gives it up. The
            calling thread sets it, while the worker waits.
    """

    request: RangeRequest[T]
    memory: memoryview | None
    is_in_place: bool
    began_at: float
    body: RangeBody
    row: int
    unread: deque[RangeRequest[T]]
    read_at: float
    repeats: int = 0
    is_handed_over: bool = False


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


class _Pace(Generic[T]):
    """The pace of the requests to the store, or of those to copies on this machine.

    Attributes:
        requests: the number of such requests in the transfer.
        slot: how many of them may be in flight.
        stragglers: how long they take.
    """

    def __init__(self, requests: int, slot: AdmissionSlot | _Unlimited) -> None:
        self.requests = requests
        self.slot = slot
        self.stragglers: Stragglers[_Fetch[T]] = Stragglers(requests)


@dataclass(kw_only=True)
class _Shared(Generic[T]):
    """The state that the workers of one call of `fetch_ranges` share, and its thread manages.

    A request that takes far longer than the others is asked for again. If its transport can be
    interrupted, its worker does that itself, in the same memory. Otherwise the worker goes on
    waiting, which takes memory until it ends, so the request is handed over to another one only if
    there is room.
    """

    store: ObjectStore
    object_keys: Sequence[str]
    # These are not kept, because a worker that waits in a transport for long would keep all
    # destinations alive.
    requests: InitVar[Sequence[RangeRequest[T]]]
    consume: Callable[[RangeRequest[T], Buffer], bool | None]
    explain: Callable[[RangeRequest[T], DcpObjstoreError], DcpObjstoreError] | None
    admit: Callable[[RangeRequest[T], Progress], memoryview | None] | None
    may_begin: Callable[[RangeRequest[T]], bool] | None
    in_place: Callable[[RangeRequest[T]], memoryview | None]
    progress: Progress
    store_pace: _Pace[T]
    local_pace: _Pace[T]
    local: Collection[int]
    depth: int
    piece_bytes: int
    most_workers: int

    def __post_init__(self, requests: Sequence[RangeRequest[T]]) -> None:
        self.tasks = deque(requests)
        self.done: queue.SimpleQueue[RangeRequest[T] | BaseException | None] = queue.SimpleQueue()
        self.gate = _Gate(self.progress)
        self._limiter = limiter_of(self.store)
        self._workers = 0  # the number of workers that were started, those that have ended too
        self._threads: list[Spawned] = []  # the threads of these workers
        self.staffing = threading.Lock()

    def start_workers(self) -> None:
        """Start the workers that are missing for the requests that may be in flight now.

        Requests that the window does not allow take no thread and no memory. This is called at the
        start and after each piece, because the window may have grown.
        """
        with self.staffing:
            store, copies = self.store_pace, self.local_pace
            # A worker has `depth` requests to the store in flight.
            for_store = min(store.requests, -(-store.slot.concurrency // self.depth))
            # To read a copy takes a processor, and no place in the window.
            for_copies = min(copies.requests, processors())
            workers = min(self.most_workers, max(for_store, for_copies))
            while self._workers < workers and self.tasks:
                self._start_worker(self._workers)

    def _start_worker(self, number: int, *handed_over: _Fetch[T]) -> None:
        """Start a worker, which first goes on with what was handed over. Hold `staffing`."""
        run = partial(_Worker(self, number).run, handed_over)
        self._threads.append(spawn(run, f"download-{number}"))
        self._workers += 1

    @property
    def _has_room(self) -> bool:
        """Whether there is memory for one more worker. Hold `staffing`."""
        return sum(thread.is_alive() for thread in self._threads) < self.most_workers

    def pace(self, request: RangeRequest[T]) -> _Pace[T]:
        """Return the pace of requests of this kind."""
        return self.local_pace if request.object_number in self.local else self.store_pace

    def key(self, request: RangeRequest[T]) -> str:
        """Return the key of the object that the request reads."""
        return self.object_keys[request.object_number]

    def open(self, request: RangeRequest[T], start: int) -> RangeBody:
        """Open a request from `start` on."""
        return self.store.open_range(self.key(request), start, request.end)

    def pass_on(self, request: RangeRequest[T], body: Buffer) -> None:
        """Call `consume`, unless the transfer was stopped."""
        with self.gate.writing():
            caller_is_needed = self.consume(request, body)
        if caller_is_needed:
            self.done.put(None)

    def check(self) -> None:
        """Raise if the transfer has stalled. Have a request asked for again, if one is slow."""
        self.progress.check_stalled("download")
        # Not while the store throttles, or few retries are left, which failed requests need.
        if not self._limiter.spares_retries:
            return
        with self.staffing:
            # At most one request at a time: the second pace is only asked if the first has none.
            paces = self.store_pace, self.local_pace
            given_up = (pace.stragglers.take(self._give_up) for pace in paces)
            fetch = next(filter(None, given_up), None)
            if fetch is None:
                return
            if fetch.is_handed_over:
                # The new worker gets a copy, because the one that waits still has the original. It
                # also gets that one's number, which is the request's row, as the depth is 1.
                self._start_worker(fetch.row, replace(fetch))
        self._limiter.spend_retry()
        if (channel := current_channel()) is not None:
            channel.retried(
                "slow range",
                self.key(fetch.request),
                attempt=fetch.repeats + 1,
                error="it takes far longer than the others",
                began_at=fetch.began_at,
            )

    def _give_up(self, fetch: _Fetch[T]) -> bool:
        """Have a request asked for again, by its worker or another one; return whether it will be.

        Its worker, which waits for bytes of it, sees the result in `is_handed_over`.
        """
        if fetch.repeats == _MOST_REPEATS:
            return False
        # If another worker takes the request over, this one goes on waiting in the transport. Then
        # it must hold only its own memory, and no other request.
        may_be_handed_over = fetch.memory is None and self.depth == 1 and self._has_room
        # If the wait cannot be interrupted and nobody else can take over, it must simply go on.
        is_cancelled = fetch.body.cancel(at_once=not may_be_handed_over)
        is_given_up = is_cancelled or may_be_handed_over
        fetch.repeats += is_given_up
        # A worker whose wait was cancelled asks for the request again itself.
        fetch.is_handed_over = may_be_handed_over and not is_cancelled
        return is_given_up


@dataclass
class _Worker(Generic[T]):
    """One thread: has requests under way and reads their answers, piece by piece."""

    shared: _Shared[T]
    number: int

    def __post_init__(self) -> None:
        self._scratch = memoryview(b"")

    def run(self, handed_over: Sequence[_Fetch[T]]) -> None:
        """Fetch requests until there are none left. On an error, put it into `done` and stop.

        Args:
            handed_over: requests of another worker to go on with first.
        """
        shared = self.shared
        under_way: deque[_Fetch[T]] = deque()
        try:
            with suppress(StragglerError):  # another worker goes on with all that this one had
                for fetch in handed_over:
                    # The body that it has is still the other worker's, and is not closed here.
                    fetch.body = shared.open(fetch.request, fetch.unread[0].start)
                    under_way.append(fetch)
                self._read_all(under_way)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            for fetch in under_way:
                fetch.body.close()
            shared.done.put(error)

    def _read_all(self, under_way: deque[_Fetch[T]]) -> None:
        """Read a piece of each request in turn, and begin others, until no task is left.

        Args:
            under_way: the requests that were begun, the one that is read next first.
        """
        while True:
            self.shared.progress.check_stopped()
            self._begin_requests(under_way)
            # A worker with nothing to read waits until it can begin a request, if a task is left.
            if not under_way:
                return
            if len(under_way) > 1:
                self._bring_answered_to_front(under_way)
            self._read_piece(under_way[0])
            if under_way[0].unread:
                under_way.rotate(-1)
            else:
                self._end(under_way.popleft())

    def _bring_answered_to_front(self, under_way: deque[_Fetch[T]]) -> None:
        """Bring the first request whose answer has begun to the front; wait until there is one.

        To wait for one answer while another one lies here unread may be to wait for ever: some
        servers serve few requests at a time. If no answer begins for `_ANY_ANSWER_SECONDS`, the
        order stays as it is, and the caller waits for the first request until its transport times
        out.
        """
        if under_way[0].body.descriptor_to_poll() is None:  # its answer has begun
            return
        # The position of each request by the descriptor that it waits for. Those that wait for none
        # have the key None: their answers have begun, and the first of them counts.
        positions: dict[int | None, int] = {}
        poll, deadline = select.poll(), time.monotonic() + _ANY_ANSWER_SECONDS
        for position, fetch in enumerate(under_way):
            descriptor = fetch.body.descriptor_to_poll()
            positions.setdefault(descriptor, position)
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        # If one answer has begun, the others are looked at once, and not waited for.
        step_seconds = 0 if None in positions else STEP_SECONDS
        while not (readable := poll.poll(step_seconds * 1000)) and None not in positions:
            self.shared.progress.check_stopped()
            if time.monotonic() > deadline:
                return
        answered = {None, *(descriptor for descriptor, _ in readable)} & positions.keys()
        under_way.rotate(-min(positions[descriptor] for descriptor in answered))

    def _begin_requests(self, under_way: deque[_Fetch[T]]) -> None:
        """Begin requests until this worker has as many under way as it may."""
        # `popleft` raises it if no task is left. To look before would not do, because another
        # worker may take the last task in between.
        with suppress(IndexError):
            while len(under_way) < self.shared.depth:
                # In a trace, each request that one thread has under way gets its own row.
                used_rows = {fetch.row for fetch in under_way}
                rows = count(self.shared.depth * self.number)
                row = next(row for row in rows if row not in used_rows)
                # Only a worker with nothing to read waits for a place.
                fetch = self._begin(self.shared.tasks.popleft(), row, wait=not under_way)
                if fetch is None:
                    return
                under_way.append(fetch)

    def _begin(self, request: RangeRequest[T], row: int, *, wait: bool) -> _Fetch[T] | None:
        """Begin a request. Without `wait`, put it back and return None if it would have to wait.

        It may have to wait for memory, and for a place in the window.
        """
        shared, progress = self.shared, self.shared.progress
        take_place = partial(shared.pace(request).slot.begin, id(request), progress.check_stopped)
        if not wait:
            has_memory = shared.may_begin is None or shared.may_begin(request)
            if not (has_memory and take_place(wait=False)):
                shared.tasks.appendleft(request)
                return None
        # With `wait`, memory comes first: a request that waits for it takes no place in the window.
        # Without `wait`, this does not wait, and the place that was taken is not taken twice.
        admitted = None if shared.admit is None else shared.admit(request, progress)
        take_place()
        # A range that is admitted into memory is consumed there as a whole.
        pieces = [request] if admitted is not None else cut(request, BLOCK_SIZE_BYTES)
        destination = shared.in_place(request) if admitted is None else None
        body = shared.open(request, request.start)
        now = time.monotonic()
        return _Fetch(
            request,
            destination if admitted is None else admitted,
            is_in_place=destination is not None,
            began_at=now,
            body=body,
            row=row,
            unread=deque(pieces),
            read_at=now,
        )

    def _read_piece(self, fetch: _Fetch[T]) -> None:
        """Read the next piece and consume it. If it is damaged or slow, ask for it again."""
        shared, piece = self.shared, fetch.unread[0]
        # The first attempt may read a damaged copy on this machine. Then the store is asked, whose
        # answer may be damaged once, as without a copy.
        most_attempts = 3 if fetch.request.object_number in shared.local else 2
        attempt = 1
        size_bytes = piece.end - piece.start
        request_start = fetch.request.start
        memory = (
            self._memory(size_bytes)
            if fetch.memory is None
            else fetch.memory[piece.start - request_start : piece.end - request_start]
        )
        while True:
            began_at = time.monotonic()
            try:
                if fetch.is_in_place:  # `memory` is the caller's, and there is nothing to consume
                    with shared.gate.writing(fetch.body):
                        self._receive(fetch, piece, memory)
                else:
                    self._receive(fetch, piece, memory)
                    shared.pass_on(piece, memory)
                break
            except CorruptDataError as error:
                key = shared.key(fetch.request)
                if attempt == most_attempts:
                    raise error.at(object_key=key) from None
                attempt += 1
                if (channel := current_channel()) is not None:
                    text = f"{type(error).__name__}: {error.message}"
                    channel.retried("range", key, attempt=attempt, error=text, began_at=began_at)
            except StragglerError:
                if fetch.is_handed_over:  # another worker has the request now; `run` ends this one
                    fetch.body.close()
                    raise
            # The piece was damaged, or the wait for it was cancelled: ask again for the rest of the
            # request, from this piece on.
            fetch.body.close()
            fetch.body = shared.open(fetch.request, piece.start)
        fetch.unread.popleft()
        fetch.read_at = time.monotonic()
        shared.pace(fetch.request).slot.moved(size_bytes)
        shared.start_workers()
        shared.progress.alive()

    def _receive(self, fetch: _Fetch[T], piece: RangeRequest[T], memory: memoryview) -> None:
        """Read the next piece of a request into memory; raise its errors as `explain` puts them.

        Raises:
            StragglerError: the wait was given up. `explain` does not see it: it is no error of the
                store.
        """
        try:
            stragglers = self.shared.pace(fetch.request).stragglers
            with stragglers.waiting(fetch, len(memory), since=fetch.read_at):
                fetch.body.readinto(memory)
        except DcpObjstoreError as error:
            if self.shared.explain is None:
                raise
            raise self.shared.explain(piece, error) from error

    def _end(self, fetch: _Fetch[T]) -> None:
        """Close a request that was read, and pass it to the calling thread."""
        request, progress = fetch.request, self.shared.progress
        fetch.body.close()
        self.shared.pace(request).slot.end(id(request), answered=True)
        progress.moved(request.end - request.start)
        if progress.channel is not None:
            progress.channel.emit(
                RangeRead,
                fetch.began_at,
                object_key=self.shared.key(request),
                offset=request.start,
                size_bytes=request.end - request.start,
                worker=fetch.row,
            )
        self.shared.done.put(request)

    def _memory(self, size_bytes: int) -> memoryview:
        """Return memory for a piece.

        It has room for the largest one and is kept, because memory that is new to the process costs
        as much as copying into it. When the thread ends, it goes back to the system: of memory from
        malloc, each arena, of which there may be one for each thread, would keep a piece.
        """
        if not self._scratch:  # only now: requests with memory of their own need none of this
            self._scratch = memoryview(new_memory(self.shared.piece_bytes))
        return self._scratch[:size_bytes]
