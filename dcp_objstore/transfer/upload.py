"""Upload of one object from an iterator of buffers, watched from the calling thread.

The transport runs in a daemon thread, because no call into it can be interrupted. The calling
thread waits in short steps, so Ctrl-C and the stall watchdog act at once: they make the iterator
raise, which makes the transport abort its multipart upload. If even that takes too long, the
thread is left behind, and the error names the possible orphan.

If the store is throttling, each part waits for its turn (`stores.admission`): the transport pulls
what it sends next, so the iterator can hold it back. A part is known by its place in the stream.
It is under way from when its last byte is handed over until a buffer with bytes of it is dropped.

Progress needs no help from the transport: it drops a buffer when its part is uploaded, and a weak
reference to the buffer reports that.
"""

from __future__ import annotations

import heapq
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcp_objstore.config import AUTO_MOST, at_most
from dcp_objstore.errors import DcpObjstoreError, UnsupportedError, UploadLostError
from dcp_objstore.observe.events import ObjectUploaded, PartUploaded
from dcp_objstore.stores.admission.limiter import AdmissionSlot, admission_slot
from dcp_objstore.stores.protocol import LEFTOVER_ADVICE
from dcp_objstore.transfer.parts import MAX_PARTS, PartPlan, part_count
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.workers import run_in_thread
from dcp_objstore.waiting import WATCH_SECONDS, result_of

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.stores.protocol import ObjectStore, Version

T = TypeVar("T")

logger = logging.getLogger("dcp_objstore")

# The type of a buffer with a tensor's memory, a frame or a pickled value. Arrays rather than
# memoryviews, because only arrays can be weakly referenced.
ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]

# The time for a stopped upload to send its abort, before its thread is left behind.
_ABORT_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One uploaded object."""

    size_bytes: int
    version: Version
    parts: int


@dataclass(slots=True)
class _Part:
    """One part: the buffers that the transport holds, and whether it has all of them."""

    number: int
    worker: int
    began_at: float
    size_bytes: int = 0
    held: set[int] = field(default_factory=set)
    is_whole: bool = False


class _Parts:
    """Emits `PartUploaded` for each part of one object when the transport drops its last buffer.

    A buffer may be dropped in any thread, even during another call here. So there are no locks, and
    each step is atomic in the interpreter.
    """

    def __init__(self, channel: Channel, object_key: str) -> None:
        self._channel = channel
        self._object_key = object_key
        self._under_way: dict[int, _Part] = {}
        self._filling: _Part | None = None
        self._free: list[int] = []
        self._workers = 0

    def hand(self, token: int, number: int, size_bytes: int) -> Callable[[], None]:
        """Record a buffer of this part that is handed over; call the result once it is dropped."""
        part = self._filling
        if part is None or part.number != number:
            self.close()
            part = self._under_way[number] = _Part(number, self._worker(), time.monotonic())
            self._filling = part
        part.size_bytes += size_bytes
        part.held.add(token)
        return partial(self._dropped, part, token)

    def _worker(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._workers += 1
        return self._workers - 1

    def close(self) -> None:
        """Mark the part that is being filled as whole: it gets no more buffers."""
        part, self._filling = self._filling, None
        if part is not None:
            part.is_whole = True
            self._emit_if_done(part)

    def _dropped(self, part: _Part, token: int) -> None:
        part.held.discard(token)
        self._emit_if_done(part)

    def _emit_if_done(self, part: _Part) -> None:
        # If several threads see that the part is done, only one of them gets it.
        if part.is_whole and not part.held and self._under_way.pop(part.number, None) is not None:
            self._channel.emit(
                PartUploaded,
                part.began_at,
                object_key=self._object_key,
                part=part.number,
                size_bytes=part.size_bytes,
                worker=part.worker,
            )
            heapq.heappush(self._free, part.worker)


class _Tracked:
    """Yields buffers, and reports to `progress` when the transport drops each of them."""

    def __init__(
        self,
        buffers: Iterable[ByteArray],
        progress: Progress,
        *,
        part_size_bytes: int,
        key: str,
        slot: AdmissionSlot,
    ) -> None:
        self._slot = slot
        self._buffers = iter(buffers)
        self._part_size_bytes = part_size_bytes
        self._progress = progress
        self._pending: dict[int, weakref.ref[Any]] = {}
        channel = progress.channel
        self._parts = None if channel is None else _Parts(channel, key)
        self._rest: ByteArray | None = None
        self._head: deque[ByteArray] = deque()
        self.size_bytes = 0

    def __iter__(self) -> Iterator[ByteArray]:
        return self

    def take_whole(self) -> Sequence[ByteArray] | None:
        """Return all buffers if they fit into one part; otherwise keep those that were taken."""
        while self.size_bytes <= self._part_size_bytes:
            try:
                self._head.append(self._take())
            except StopIteration:
                whole, self._head = self._head, deque()
                return list(whole)
        return None

    def __next__(self) -> ByteArray:
        # No reference is kept to what is passed on.
        return self._head.popleft() if self._head else self._take()

    def _take(self) -> ByteArray:
        self._progress.check_stopped()
        self._progress.alive()
        buffer = next(self._buffers) if self._parts is None else self._within_a_part(self._parts)
        if self.size_bytes + buffer.nbytes > self._part_size_bytes * MAX_PARTS:
            # No plan allows for pickled values: their size is only known once they are written.
            raise UnsupportedError(
                f"an object would need more than {MAX_PARTS} parts of {self._part_size_bytes}"
                " bytes; raise TransferConfig.part_size_bytes"
            )
        ended = self.size_bytes + buffer.nbytes
        for part in range(self.size_bytes // self._part_size_bytes, ended // self._part_size_bytes):
            self._slot.begin(part, self._progress.check_stopped)
        # Pass on a new view, because the caller may keep a reference to its array.
        view = buffer[:]
        self.track(view)
        return view

    def _within_a_part(self, parts: _Parts) -> ByteArray:
        """Return the next buffer, cut where a part ends.

        Otherwise the transport would hold it until both parts are done.
        """
        buffer, self._rest = self._rest, None
        if buffer is None:
            try:
                buffer = next(self._buffers)
            except StopIteration:
                parts.close()
                raise
        room_bytes = self._part_size_bytes - self.size_bytes % self._part_size_bytes
        if buffer.nbytes > room_bytes:
            buffer, self._rest = buffer[:room_bytes], buffer[room_bytes:]
        return buffer

    def track(self, view: ByteArray) -> None:
        """Report to `progress` and the parts when the transport drops this buffer."""
        count_bytes = view.nbytes
        if not count_bytes:
            return
        start = self.size_bytes
        self.size_bytes += count_bytes
        first, last = (at // self._part_size_bytes for at in (start, self.size_bytes - 1))
        token, slot, part_size_bytes = id(view), self._slot, self._part_size_bytes
        parts = self._parts
        dropped = None if parts is None else parts.hand(token, first, count_bytes)

        def done(_: object) -> None:
            self._pending.pop(token, None)
            for number in range(first, last + 1):
                slot.end(number, part_size_bytes, answered=True)
            self._progress.moved(count_bytes)
            if dropped is not None:
                dropped()

        self._pending[token] = weakref.ref(view, done)


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
        buffers: the content. Its memory must not change before this returns or raises.
        plan: how the object is cut into parts.
        progress: an object that receives the bytes that were uploaded, and may stop the upload.
        most: the largest number of parts in flight, if the configuration gives none.
        is_own: whether nothing else ever writes this key, so that an object of this size there is
            this one.

    Raises:
        TransferStalledError: no buffer was uploaded for the stall time-out.
        StoreUnavailableError, PermissionDeniedError, CredentialsError, BucketNotFoundError: the
            store answered so, after all retries.
        UnsupportedError: the buffers need more parts than an object may have.
    """
    slot = admission_slot(
        store,
        "put_stream",
        config,
        concurrency=config.upload_concurrency,
        request_bytes=plan.part_size_bytes,
    )
    began_at = time.monotonic()
    tracked = _Tracked(buffers, progress, part_size_bytes=plan.part_size_bytes, key=key, slot=slot)

    def send() -> Version:
        whole = tracked.take_whole()
        if whole is not None:
            slot.begin(0, progress.check_stopped)
            version = store.put(key, whole)
            slot.end(0, tracked.size_bytes, answered=True)
            return version
        try:
            return store.put_stream(
                key,
                tracked,
                part_size_bytes=plan.part_size_bytes,
                max_concurrency=at_most(config.upload_concurrency, min(most, slot.most)),
            )
        except UploadLostError:
            # The end of the upload took effect, its answer was lost, and the next try heard this.
            with suppress(DcpObjstoreError):
                if is_own and (meta := store.head(key)).size_bytes == tracked.size_bytes:
                    return meta.version
            raise

    with closing(slot):
        version = run_watched(send, f"upload of {key}", progress)
    size_bytes = tracked.size_bytes
    parts = part_count(size_bytes, plan.part_size_bytes)
    if progress.channel is not None:
        progress.channel.emit(
            ObjectUploaded, began_at, object_key=key, size_bytes=size_bytes, parts=parts
        )
    return Uploaded(size_bytes=size_bytes, version=version, parts=parts)


def run_watched(task: Callable[[], T], what: str, progress: Progress) -> T:
    """Run `task()` in a daemon thread and wait for it, so that the wait can be interrupted.

    On a stall or an interrupt, call `progress.stop` and give the task a few seconds to end.
    """
    future = run_in_thread(task, what)
    try:
        return result_of(
            future, look=lambda: progress.check_stalled(what), step_seconds=WATCH_SECONDS
        )
    except BaseException as error:
        if future.done():
            raise
        progress.stop(error)
        try:
            future.exception(timeout=_ABORT_GRACE_SECONDS)
        except FutureTimeoutError:
            leftover = f"the request did not end: {LEFTOVER_ADVICE}"
            if isinstance(error, DcpObjstoreError):
                error.message += f"; {leftover}"
            else:
                logger.warning("%s was stopped; %s", what, leftover)
        raise
