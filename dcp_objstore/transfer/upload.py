"""Upload of one object from an iterator of buffers, watched from the calling thread.

The transport runs in a daemon thread, because no call into it can be interrupted. The calling
thread waits in short steps, so Ctrl-C and the stall watchdog act at once: they make the iterator
raise, which makes the transport abort its multipart upload. If even that takes too long, the
thread is left behind, and the error names the possible orphan.

If the store is throttling, each part waits for its turn (`stores.admission`): the transport pulls
what it sends next, so the iterator can hold it back. A part is known by its place in the stream.
It is under way from when its last byte is handed over until its buffers are dropped.

The transport drops the buffers of a part when its request has ended, well or not; weak references
report that. It shows that requests have ended well by going on: it asks for more only while at most
`max_concurrency` parts that it has are without a good answer. So when it asks for more after N
whole parts, N - `max_concurrency` of them are uploaded, and so many of those that have ended are
counted. Once the object is there, all of them are.

If the store answers but loses the upload, the object is sent again from its start, in a new
upload. The parts that were counted before are not counted twice.
"""

from __future__ import annotations

import heapq
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from dcp_objstore.config import AUTO_MOST, TransferConfig, at_most
from dcp_objstore.errors import (
    DcpObjstoreError,
    UnsupportedError,
    UploadLostError,
    add_advice,
)
from dcp_objstore.observe.dispatch import current_channel
from dcp_objstore.observe.events import ObjectUploaded, PartUploaded
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.admission.limiter import AdmissionSlot, admission_slot, limiter_of
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE, ObjectStore, Version
from dcp_objstore.stores.retries import RetryPolicy, Tries
from dcp_objstore.threads import WATCH_SECONDS, result_of, run_in_thread
from dcp_objstore.transfer.memory import ByteArray
from dcp_objstore.transfer.parts import MAX_PARTS, PartPlan, part_count
from dcp_objstore.transfer.progress import Progress, Silence

T = TypeVar("T")


# So many parts may be in flight at least, or half of all, although only the end of the object shows
# that the last ones are uploaded: with fewer, the first save to a far store takes a quarter longer.
_LEAST_IN_FLIGHT = 8
# An object is sent again so often, from its start, if the store has lost its upload.
_MOST_RETRIES = 2
# The time for a stopped upload to send its abort, before its thread is left behind.
_ABORT_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Content:
    """The content of an object, which can be read from its start more than once.

    Attributes:
        read: a function that returns an iterator over all of it.
    """

    read: Callable[[], Iterator[ByteArray]]

    def __iter__(self) -> Iterator[ByteArray]:
        return self.read()


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One uploaded object."""

    size_bytes: int
    version: Version
    parts: int


@dataclass(slots=True)
class _Part:
    """One part that is being handed to the transport, or has been.

    Attributes:
        number: its position in the object.
        row: its row in a trace: parts that are under way at a time have different ones.
        size_bytes: the size of what was handed over so far.
        held: references to the buffers that the transport still holds, by their `id`.
        is_whole: whether all of its buffers were handed over.
    """

    number: int
    row: int
    began_at: float
    size_bytes: int = 0
    held: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    is_whole: bool = False
    ended_at: float = 0.0


class _TrackedBuffers:
    """Yields buffers, cut where a part ends, and knows which parts the store has.

    A buffer may be dropped in any thread, even during another call here. So there are no locks, and
    each step is atomic in the interpreter.

    Args:
        buffers: the content.
        silence: what is known of the store; with the key, and the progress that receives the bytes
            of the parts that were uploaded.
        part_size_bytes: the size of every part but the last.
        slot: the place of the requests in the window.
        most_unanswered: the largest number of parts that the transport may have without a good
            answer when it asks for more.
        reported_before: the number of parts that an earlier upload of the object has reported.

    Attributes:
        check_stopped: a function that raises if the upload must stop.
        size_bytes: the size of what was handed over.
        uploaded: the number of parts that the store is known to have.
    """

    def __init__(
        self,
        buffers: Iterable[ByteArray],
        silence: Silence,
        *,
        part_size_bytes: int,
        slot: AdmissionSlot,
        most_unanswered: int,
        reported_before: int,
    ) -> None:
        self._silence, self._progress, self._slot = silence, silence.progress, slot
        self._buffers = iter(buffers)
        self._part_size_bytes, self._most_unanswered = part_size_bytes, most_unanswered
        self._reported_before = reported_before
        # The rest of a buffer that was cut where a part ends; the next part begins with it.
        self._rest: ByteArray | None = None
        # Buffers that `take_whole` has taken from a content of several parts, for `__next__`.
        self._taken_early: deque[ByteArray] = deque()
        self._filling: _Part | None = None  # the part that is being filled; None between parts
        self._under_way: dict[int, _Part] = {}  # by the numbers of the parts
        # Parts whose buffers were all dropped, and of which the slot does not know how they ended.
        self._dropped: deque[_Part] = deque()
        # Parts whose buffers were all dropped, and that were not counted as uploaded yet.
        self._unreported: deque[_Part] = deque()
        self._free_rows: list[int] = []  # a heap of the rows in the trace that no part uses now
        self._rows = self.uploaded = self.size_bytes = 0  # `_rows`: how many rows there are
        # Whether the transport waits in `__next__`. Then no request need be open, so a silent
        # store is no bad sign.
        self._transport_waits = False
        self.check_stopped = self._progress.check_stopped

    def __iter__(self) -> Iterator[ByteArray]:
        return self

    def take_whole(self) -> Sequence[ByteArray] | None:
        """Return all buffers if they fit into one part.

        Otherwise return None, and keep those that were taken for `__next__`.
        """
        while self.size_bytes <= self._part_size_bytes:
            try:
                self._taken_early.append(self._take())
            except StopIteration:
                whole, self._taken_early = self._taken_early, deque()
                return list(whole)
        return None

    def __next__(self) -> ByteArray:
        """Return the next buffer, for which the transport asks when it can send more."""
        self._transport_waits = True
        try:
            return self._taken_early.popleft() if self._taken_early else self._take()
        finally:
            self._transport_waits = False

    def check(self) -> None:
        """Look whether the store still answers; called in the thread that waits.

        Raises:
            StoreUnavailableError: it does not, and no part is under way any more.
        """
        parts = sum(part.is_whole for part in list(self._under_way.values()))
        self._silence.check(parts, is_open=parts > 0 or not self._transport_waits)

    def end(self) -> None:
        """Count all parts as uploaded, because the object is there."""
        for part in list(self._under_way.values()):
            part.held.clear()  # the transport may hold buffers for longer than it needs them
            self._end_if_dropped(part)
        self._count_dropped_as_answered()
        self._report(MAX_PARTS)  # all that there are

    def _count_dropped_as_answered(self) -> None:
        """Tell the slot that the parts that were dropped have got a good answer.

        It is called when the transport goes on: it would not, had one failed.
        """
        while self._dropped:
            part = self._dropped.popleft()
            self._slot.end(part.number, part.size_bytes, answered=True)

    def _take(self) -> ByteArray:
        """Return the next buffer of the content, once its part may be sent."""
        self._count_dropped_as_answered()
        # The transport asks for more, so the store has all whole parts but the last few, of which
        # there may be no answer yet.
        self._report(self.size_bytes // self._part_size_bytes - self._most_unanswered)
        self._silence.wait()
        self._progress.check_stopped()
        self._silence.heard()  # the transport goes on
        buffer = self._next_within_a_part()
        if self.size_bytes + buffer.nbytes > self._part_size_bytes * MAX_PARTS:
            # The size of parts was chosen without pickled values: how large they are is only known
            # once they are written.
            raise UnsupportedError(
                f"an object would need more than {MAX_PARTS} parts of {self._part_size_bytes}"
                " bytes; raise TransferConfig.part_size_bytes"
            )
        number, rest_bytes = divmod(self.size_bytes + buffer.nbytes, self._part_size_bytes)
        # With this buffer the part is whole, and is sent. (The last part, if it is smaller, takes
        # no place: that it is the last is only known when there are no more buffers.)
        if buffer.nbytes and not rest_bytes:
            self._slot.begin(number - 1, self._progress.check_stopped)
        # Pass on a new view, which dies when the transport drops it: `buffer` itself may live on,
        # because the caller may keep a reference to it.
        view = buffer[:]
        if view.nbytes:
            self._hand_over(view)
        return view

    def _next_within_a_part(self) -> ByteArray:
        """Return the next buffer, cut where a part ends.

        A buffer that belongs to two parts would be held until both are done.
        """
        buffer, self._rest = self._rest, None
        if buffer is None:
            try:
                buffer = next(self._buffers)
            except StopIteration:
                self._close()  # the last part may be smaller
                raise
        room_bytes = self._part_size_bytes - self.size_bytes % self._part_size_bytes
        if buffer.nbytes > room_bytes:
            buffer, self._rest = buffer[:room_bytes], buffer[room_bytes:]
        return buffer

    def _hand_over(self, view: ByteArray) -> None:
        """Count a buffer that is handed over, and watch for the transport to drop it."""
        part = self._filling
        if part is None:  # a part begins, in the first free row
            row = heapq.heappop(self._free_rows) if self._free_rows else self._rows
            self._rows = max(self._rows, row + 1)
            number = self.size_bytes // self._part_size_bytes
            part = self._filling = self._under_way[number] = _Part(number, row, time.monotonic())
        part.size_bytes += view.nbytes
        self.size_bytes += view.nbytes
        part.held[id(view)] = weakref.ref(view, partial(self._drop, part, id(view)))
        if part.size_bytes == self._part_size_bytes:
            self._close()

    def _close(self) -> None:
        """Mark the part that is being filled as whole: it gets no more buffers."""
        part, self._filling = self._filling, None
        if part is not None:
            part.is_whole = True
            self._end_if_dropped(part)

    def _drop(self, part: _Part, buffer_id: int, _: object) -> None:
        """Note that the transport has dropped a buffer; a weak reference calls this."""
        part.held.pop(buffer_id, None)
        self._end_if_dropped(part)

    def _end_if_dropped(self, part: _Part) -> None:
        """Note that a part was sent, once the transport has released all of its buffers."""
        # Several threads may see that the part has ended; `pop` gives it to one of them.
        if part.is_whole and not part.held and self._under_way.pop(part.number, None) is not None:
            part.ended_at = time.monotonic()
            heapq.heappush(self._free_rows, part.row)
            self._slot.release(part.number)
            self._dropped.append(part)
            self._unreported.append(part)
            self._silence.heard()

    def _report(self, parts: int) -> None:
        """Count parts as uploaded, those that ended first, and report them to `progress`.

        Parts that an earlier upload of the object has reported already are counted only.

        Args:
            parts: the number of parts that the store has. No more than these are counted.
        """
        while self.uploaded < parts and self._unreported:
            part = self._unreported.popleft()
            self.uploaded += 1
            if self.uploaded <= self._reported_before:
                continue
            self._progress.moved(part.size_bytes)
            if self._progress.channel is not None:
                self._progress.channel.emit(
                    PartUploaded,
                    part.began_at,
                    seconds=part.ended_at - part.began_at,
                    object_key=self._silence.key,
                    part=part.number,
                    size_bytes=part.size_bytes,
                    worker=part.row,
                )


def upload_object(
    store: ObjectStore,
    key: str,
    buffers: Iterable[ByteArray],
    plan: PartPlan,
    config: TransferConfig,
    progress: Progress,
    *,
    most: int = AUTO_MOST,
    is_own: bool = False,
) -> Uploaded:
    """Write one object: in a single PUT if it fits into one part, otherwise in parallel parts.

    Nothing is visible under `key` unless this returns. If it raises, the multipart upload was
    aborted, or the error names it if that is not certain. An error that `buffers` raises is raised
    unchanged, unless the abort failed, too; then a `DcpObjstoreError` says so.

    Args:
        buffers: the content. Its memory must not change before this returns or raises. If the store
            loses the upload, it is read from its start again (`Content`); an iterator cannot be.
        plan: how the object is cut into parts.
        progress: an object that receives the bytes that were uploaded, and may stop the upload.
        most: the largest number of parts in flight, if the configuration gives none.
        is_own: whether nothing else ever writes this key, so that an object of this size there is
            this one.

    Raises:
        TransferStalledError: no buffer was uploaded for the stall time-out.
        StoreUnavailableError, PermissionDeniedError, CredentialsError, BucketNotFoundError: the
            store answered so, after all retries.
        UploadLostError: the store lost the upload, and those that were begun in its place.
        UnsupportedError: the buffers need more parts than an object may have.
    """
    limiter, reported_before = limiter_of(store), 0
    began_at = time.monotonic()
    # An iterator cannot be read from its start again.
    most_retries = 0 if isinstance(buffers, Iterator) else min(config.max_retries, _MOST_RETRIES)
    tries = Tries(RetryPolicy(most_retries, math.inf), on_retry=partial(_report_retry, key))
    while True:
        slot = admission_slot(
            store,
            "put_stream",
            config,
            concurrency=config.upload_concurrency,
            request_bytes=plan.part_size_bytes,
        )
        # The transport gets this number once, and the window may grow. So it may be larger than the
        # window is now, up to half of the parts: what is in flight at each moment is limited by the
        # slot.
        in_flight = min(most, slot.most, max(slot.concurrency, _LEAST_IN_FLIGHT, plan.parts // 2))
        in_flight = at_most(config.upload_concurrency, in_flight)
        tracked = _TrackedBuffers(
            buffers,
            Silence(store, key, progress),
            part_size_bytes=plan.part_size_bytes,
            slot=slot,
            most_unanswered=max(2, in_flight),  # two parts are always allowed to `put_stream`
            reported_before=reported_before,
        )
        send = partial(_send, store, key, tracked, slot, plan, most=in_flight, is_own=is_own)
        try:
            with closing(slot):
                version = run_watched(send, f"upload of {key}", progress, tracked.check)
            break
        except UploadLostError as error:
            if tries.retries == most_retries or not limiter.spend_retry():
                error.message += f" (begun {tries.retries + 1} times)" if tries.retries else ""
                raise
            reported_before = max(reported_before, tracked.uploaded)
            tries.pause(error)
    tracked.end()
    size_bytes = tracked.size_bytes
    parts = part_count(size_bytes, plan.part_size_bytes)
    if progress.channel is not None:
        progress.channel.emit(
            ObjectUploaded, began_at, object_key=key, size_bytes=size_bytes, parts=parts
        )
    return Uploaded(size_bytes=size_bytes, version=version, parts=parts)


def _send(
    store: ObjectStore,
    key: str,
    tracked: _TrackedBuffers,
    slot: AdmissionSlot,
    plan: PartPlan,
    *,
    most: int,
    is_own: bool,
) -> Version:
    """Send the requests of one upload, in the thread that `run_watched` starts.

    Args:
        most: the largest number of parts in flight.
        is_own: see `upload_object`.
    """
    whole = tracked.take_whole()
    if whole is not None:
        slot.begin(0, tracked.check_stopped)
        version = store.put(key, whole)
        slot.end(0, tracked.size_bytes, answered=True)
        return version
    try:
        return store.put_stream(
            key, tracked, part_size_bytes=plan.part_size_bytes, max_concurrency=most
        )
    except UploadLostError:
        # The object may be there: if the answer to the request that completes the upload is lost,
        # the retry of that request hears that there is no such upload. If the store cannot say,
        # the upload counts as lost.
        with suppress(DcpObjstoreError):
            meta = store.head(key) if is_own else None
            if meta is not None and meta.size_bytes == tracked.size_bytes:
                return meta.version
        raise


def _report_retry(key: str, number: int, error: Exception, began_at: float) -> None:
    """Emit an event for an upload that is begun again; `Tries` calls this."""
    channel = current_channel()
    if channel is not None:
        channel.retried("request", key, attempt=number, error=str(error), began_at=began_at)


def run_watched(
    task: Callable[[], T],
    name: str,
    progress: Progress,
    check: Callable[[], object] | None = None,
) -> T:
    """Run `task()` in a daemon thread and wait for it, so that the wait can be interrupted.

    On a stall or an interrupt, call `progress.stop` and give the task a few seconds to end.

    Args:
        name: the name of the transfer, for the thread and for errors.
        check: a function that is called now and then, and may raise. Default: it looks for a stall.
    """
    check = check or partial(progress.check_stalled, name)
    future = run_in_thread(task, name)
    try:
        return result_of(future, check=check, step_seconds=WATCH_SECONDS)
    except BaseException as error:
        if future.done():  # the error is the task's own
            raise
        progress.stop(error)
        try:
            task_error = future.exception(timeout=_ABORT_GRACE_SECONDS)
            # The task has ended; its error says so if it could not clean up.
            leftover = LEFTOVER_ADVICE if LEFTOVER_ADVICE in str(task_error) else ""
        except FutureTimeoutError:
            leftover = f"the request did not end: {LEFTOVER_ADVICE}"
        if leftover and isinstance(error, DcpObjstoreError):
            add_advice(error, leftover)
        elif leftover:
            logger.warning("%s was stopped; %s", name, leftover)
        raise
