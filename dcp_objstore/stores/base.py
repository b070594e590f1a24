"""`BaseStore`: the base of all adapters. It checks arguments and says where errors arose.

Ctrl-C ends the wait for a request, and no other begins after it. Most calls of the transports
cannot be interrupted, so the requests of the main thread are sent from another one. Uploads and
ranges are not: `transfer/` sends them from its own threads.
"""

from __future__ import annotations

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from types import FrameType
from typing import Generic, TypeVar, cast

from typing_extensions import Buffer

from dcp_objstore import errors
from dcp_objstore.contexts import contextmanager, led_to
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.errors import SAME_PAGE
from dcp_objstore.stores.protocol import (
    LEFTOVER_ADVICE,
    Capabilities,
    CopySource,
    ObjectMeta,
    Precondition,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import Range, RangeSource
from dcp_objstore.stores.urls import StoreUrl, check_prefix
from dcp_objstore.threads import wait_for

Place = TypeVar("Place")


_PAGE_KEYS = 1000  # as on S3
_NO_COPIES = (
    "this store copies nothing by itself, or not over this transport or with these credentials;"
    " s3:// does with boto3, az:// with a key or azure-identity, and gs://"
)


class BaseStore(ABC, Generic[Place]):
    """A base of the adapters. An adapter names objects by its own `Place`.

    Args:
        url: the root; keys are relative to it.
        endpoint_url: the server; None for the provider's own, and where there is no server.
    """

    def __init__(self, url: StoreUrl, endpoint_url: str | None = None) -> None:
        self._url = url
        self._endpoint_url = endpoint_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a store holds connections and is not pickled; pickle its StoreSpec")

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return str(self._url)

    @property
    def endpoint_url(self) -> str | None:
        """The server; None for the provider's own, and where there is no server."""
        return self._endpoint_url

    @property
    def reports_throttling(self) -> Collection[str]:
        """The verbs whose requests the adapter sends again itself: none."""
        return ()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The guarantees that the adapter claims."""

    @property
    def range_reading(self) -> RangeReading:
        """Ranges are not read ahead, and take no memory."""
        return RangeReading()

    def open_range(self, key: str, start: int, end: int) -> Range:
        """Open a range of an object; send its request now if that needs no waiting."""
        if not 0 <= start <= end:
            raise errors.InputError(f"not a range: [{start}, {end})")
        with self._errors(key) as place:
            source = self._range_source(place)
            answer = source.ask_ahead(start, end) if start < end else None
        return Range(source, start, end, errors=partial(self._errors, key), answer=answer)

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write an object in one request."""
        with self._errors(key) as place:
            return wait_for(self._put, place, as_buffers(data), precondition, retry=retry)

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """Write an object from an iterator of buffers."""
        source = WatchedBuffers(buffers)
        try:
            with self._errors(key) as place:
                return self._put_stream(place, source, part_size_bytes, max_concurrency)
        except BaseException as error:
            # If the iterator raised, the caller sees its error, not what the transport made of it.
            raised = error if source.error is None else source.error
            if source.left_parts:
                if isinstance(raised, errors.DcpObjstoreError):
                    errors.add_advice(raised, LEFTOVER_ADVICE)
                else:  # a KeyboardInterrupt, for example, has no advice
                    logger.warning("the upload of %s was not aborted; %s", key, LEFTOVER_ADVICE)
            if source.error is None:
                raise
        # Outside of the handler, so that the caller's error keeps its own cause and context.
        raise source.error

    def copy(
        self,
        key: str,
        sources: Sequence[CopySource],
        *,
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Write an object of ranges of other objects, which the store copies."""
        with self._errors(key) as place:
            if not self.capabilities.copies:
                raise errors.UnsupportedError(_NO_COPIES)
            if not sources or not all(0 <= source.start < source.end for source in sources):
                raise errors.InputError(f"not ranges to copy: {sources!r}")
            return self._copy(
                place,
                sources,
                part_size_bytes=part_size_bytes,
                max_concurrency=max_concurrency,
                moved=moved,
            )

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Read a small object, with its metadata."""
        with self._errors(key) as place:
            body, meta = wait_for(self._get, place, max_size_bytes)
            if len(body) != meta.size_bytes:
                raise errors.CorruptDataError(
                    f"the store announced {meta.size_bytes} bytes and sent {len(body)}"
                )
            return body, meta

    def head(self, key: str) -> ObjectMeta:
        """Return the metadata of an object."""
        with self._errors(key) as place:
            return wait_for(self._head, place)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Iterate over the objects below a prefix."""
        return _interruptible(self._without_repeats(check_prefix(prefix)))

    def _without_repeats(self, folder: str) -> Iterator[ObjectMeta]:
        """Yield what a listing has; raise if it repeats itself, as it might then do so for ever.

        An empty listing is asked for once more: obstore and botocore read a page of HTML as one,
        and botocore an empty body. In most stores keys ascend, so only those that do not are kept.
        """
        metas = self._list(folder)
        first = next(metas, None)
        metas = self._list(folder) if first is None else chain([first], metas)
        last_key: str | None = None
        keys_out_of_order: set[str] = set()  # those that came after a greater one
        for meta in metas:
            if last_key is not None and meta.key <= last_key:
                if meta.key == last_key or meta.key in keys_out_of_order:
                    raise errors.StoreUnavailableError(SAME_PAGE, object_key=meta.key, url=self.url)
                keys_out_of_order.add(meta.key)
            last_key = meta.key
            yield meta

    def delete(self, key: str) -> None:
        """Remove an object. No error is raised if it is absent."""
        with self._errors(key) as place:
            try:
                wait_for(self._delete, place)
            except Exception as error:
                # S3 says 204 for an absent object; GCS, Azure and some others say 404.
                if not isinstance(self._translate(error), errors.ObjectNotFoundError):
                    raise

    # What an adapter does.

    @abstractmethod
    def _place(self, key: str | None) -> Place:
        """Check the key; return what names the object, or without a key the root.

        Raises:
            InputError: there can be no such key, or the store cannot be used in this process.
        """

    @abstractmethod
    def _translate(self, error: Exception) -> errors.DcpObjstoreError:
        """Translate what the transport raised."""

    @abstractmethod
    def _put(
        self,
        place: Place,
        buffers: Sequence[Buffer],
        precondition: Precondition | None,
        *,
        retry: bool,
    ) -> Version:
        """Do what `ObjectStore.put` does."""

    @abstractmethod
    def _put_stream(
        self, place: Place, source: WatchedBuffers, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        """Do what `ObjectStore.put_stream` does; note in `source` if parts were left."""

    def _copy(
        self,
        place: Place,
        sources: Sequence[CopySource],
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Do what `ObjectStore.copy` does; where the capability is claimed."""
        raise NotImplementedError

    @abstractmethod
    def _get(self, place: Place, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Do what `ObjectStore.get` does; the caller checks that all of the body came."""

    @abstractmethod
    def _range_source(self, place: Place) -> RangeSource:
        """Say how ranges of an object are asked for."""

    @abstractmethod
    def _head(self, place: Place) -> ObjectMeta:
        """Do what `ObjectStore.head` does."""

    @abstractmethod
    def _list(self, folder: str) -> Iterator[ObjectMeta]:
        """Do what `ObjectStore.list` does; the prefix has no slash at its end."""

    @abstractmethod
    def _delete(self, place: Place) -> None:
        """Do what `ObjectStore.delete` does; an absent object may be an error."""

    def _check_size(self, meta: ObjectMeta, max_size_bytes: int) -> ObjectMeta:
        """Return the metadata of an object; raise if the object is larger than expected."""
        if meta.size_bytes > max_size_bytes:
            raise errors.CorruptDataError(
                f"the object has {meta.size_bytes} bytes, at most {max_size_bytes} expected"
            )
        return meta

    @contextmanager
    def _errors(self, key: str | None) -> Iterator[Place]:
        """Yield the place of a key; translate what is raised, and say in it where it happened.

        The error's frames are cleared, because their variables may hold the caller's buffers.
        """
        place = self._place(key)
        # The error that the caller is handling, if any: its frames are not cleared. The id alone is
        # kept, because a listing would keep the error itself until the listing ends.
        handled = id(sys.exception())
        try:
            yield place
        except errors.DcpObjstoreError as error:
            _clear_frames(error, handled)
            error.at(object_key=key, url=self.url)
            raise
        except Exception as error:
            _clear_frames(error, handled)
            raise self._translate(error).at(object_key=key, url=self.url) from error


def _interruptible(metas: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
    """Yield the entries of a listing; Ctrl-C can end the wait for each page."""
    while page := wait_for(lambda: tuple(islice(metas, _PAGE_KEYS))):
        yield from page


def _clear_frames(error: BaseException, handled: int) -> None:
    """Drop the local variables of the frames that an error and what led to it have left.

    A function that raises an error which it has in a variable is a reference cycle. Until the next
    garbage collection it would hold the caller's buffers, and the memory of a staged save.

    Args:
        error: the error to begin with.
        handled: the id of the error that the caller of the verb was handling. Its frames are not
            ours: a generator that waits in one of them would be closed.
    """
    for cause in led_to(error, handled=handled):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            _clear_frame(frame)


def _clear_frame(frame: FrameType | None) -> None:
    """Clear a frame and its callers, up to one that still runs.

    The callers are cleared, too, because a function of botocore keeps an error in a variable after
    it has returned the error.
    """
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # the frame still runs
            return
        frame = frame.f_back


def cut_range(start: int, end: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range into as few parts as have at most `most_bytes`, equal but for the last.

    Yields the start and end of each: of [0, 10) with at most 4 bytes (0, 4), (4, 8) and (8, 10).
    """
    count = max(1, -(-(end - start) // most_bytes))  # rounded up, and so the size
    size_bytes = max(1, -(-(end - start) // count))
    for part_start in range(start, end, size_bytes):
        yield part_start, min(end, part_start + size_bytes)


def as_buffers(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """One buffer, or a list or tuple of them, as a sequence."""
    if isinstance(data, (list, tuple)):
        return data
    return [cast("Buffer", data)]


class WatchedBuffers:
    """Hands buffers through, and remembers what the iterator raised.

    It is not a generator, because a generator's local variable would keep the last buffer alive
    until the next is asked for; writers see the end of an upload in the death of its buffer.

    Attributes:
        error: what the iterator raised, or None.
        left_parts: whether the writer could not remove what it had sent before it failed.
    """

    def __init__(self, buffers: Iterator[Buffer]) -> None:
        self._buffers = iter(buffers)
        self.error: BaseException | None = None
        self.left_parts = False

    def __iter__(self) -> WatchedBuffers:
        return self

    def __next__(self) -> Buffer:
        try:
            return next(self._buffers)
        except StopIteration:
            raise  # the end of the iterator, not an error of it
        except BaseException as error:
            self.error = error
            raise


def cut_parts(buffers: Iterator[Buffer], part_size_bytes: int) -> Iterator[list[memoryview]]:
    """Cut a stream into parts of equal size; only the last one may be shorter. No part is empty.

    Yields each part as the pieces of buffers that it is made of. No variable here holds a buffer
    while the next one is waited for, except in an unfinished part.
    """
    part: list[memoryview] = []
    room_bytes = part_size_bytes
    for buffer in buffers:
        view = memoryview(buffer)
        del buffer
        while view:
            part.append(view[:room_bytes])
            room_bytes -= len(part[-1])
            view = view[len(part[-1]) :]
            if not room_bytes:
                full, part, room_bytes = part, [], part_size_bytes
                yield full
                del full
        del view
    if part:
        yield part
