"""`WrappedStore`: a store around a store, which subclasses step into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from dcp_objstore.stores.buffers import WatchedBuffers, as_buffers
from dcp_objstore.stores.protocol import (
    Capabilities,
    ObjectMeta,
    ObjectStore,
    Precondition,
    RangeBody,
    RangeReading,
    Version,
)

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

Verb = Literal["put", "put_stream", "get", "open_range", "head", "list", "delete"]
T = TypeVar("T")


@dataclass(slots=True)
class Request:
    """One request, recorded when it has ended.

    Attributes:
        verb: the method's name.
        key: the object, or the prefix for `list`.
        bytes: length of the body sent or received; 0 for `head`, `list` and `delete`.
        start: first byte of a range, else None.
        end: end of a range, else None.
        precondition: of a `put`.
        retry: of a `put`.
        buffers: number of buffers that a `put_stream` took.
        thread: name of the calling thread.
        error: what it raised, or None.
    """

    verb: Verb
    key: str
    bytes: int = 0
    start: int | None = None
    end: int | None = None
    precondition: Precondition | None = None
    retry: bool = True
    buffers: int = 0
    thread: str = ""
    error: BaseException | None = None


class WrappedStore:
    """Hands every verb on to the inner store, within `_around`, which subclasses override."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    @property
    def endpoint_url(self) -> str | None:
        """The inner store's."""
        return self.inner.endpoint_url

    @property
    def reports_throttling(self) -> Collection[str]:
        """The inner store's."""
        return self.inner.reports_throttling

    @property
    def range_reading(self) -> RangeReading:
        """The inner store's."""
        return self.inner.range_reading

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's."""
        return self.inner.capabilities

    def _around(self, request: Request) -> AbstractContextManager[None]:  # noqa: ARG002
        """What happens around a request; raising here raises instead of, or after, it."""
        return nullcontext()

    def _on_buffer(self, request: Request, buffer: Buffer) -> None:
        """What happens to each buffer of a `put_stream` before it is handed on."""

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """See `ObjectStore.put`."""
        size = sum(memoryview(piece).nbytes for piece in as_buffers(data))
        request = Request("put", key, size, precondition=precondition, retry=retry)
        with self._around(request):
            return self.inner.put(key, data, precondition=precondition, retry=retry)

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """See `ObjectStore.put_stream`."""
        request = Request("put_stream", key)

        def seen(buffer: Buffer) -> None:
            self._on_buffer(request, buffer)
            request.bytes += memoryview(buffer).nbytes
            request.buffers += 1

        with self._around(request):
            return self.inner.put_stream(
                key,
                WatchedBuffers(buffers, seen),
                part_size_bytes=part_size_bytes,
                max_concurrency=max_concurrency,
            )

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """See `ObjectStore.get`."""
        request = Request("get", key)
        with self._around(request):
            body, meta = self.inner.get(key, max_size_bytes=max_size_bytes)
            request.bytes = len(body)
            return body, meta

    def open_range(self, key: str, start: int, end: int) -> WrappedRange:
        """See `ObjectStore.open_range`; the request begins with the first read."""
        request = Request("open_range", key, start=start, end=end)
        return WrappedRange(self.inner.open_range(key, start, end), request, self._around)

    def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        with self._around(Request("head", key)):
            return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See `ObjectStore.list`; the request begins with the first item and ends with the last."""
        with self._around(Request("list", prefix)):
            yield from self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._around(Request("delete", key)):
            self.inner.delete(key)


class WrappedRange:
    """A `RangeBody` around one; it is in `around` from its first read to its last, or its end."""

    def __init__(
        self,
        inner: RangeBody,
        request: Request,
        around: Callable[[Request], AbstractContextManager[None]],
    ) -> None:
        self._inner = inner
        self._request = request
        self._around: Callable[[Request], AbstractContextManager[None]] | None = around
        self._entered = ExitStack()

    def readinto(self, into: memoryview) -> None:
        """See `RangeBody.readinto`."""
        request, around = self._request, self._around
        try:
            if around is not None:
                self._around = None
                self._entered.enter_context(around(request))
            self._inner.readinto(into)
            request.bytes += len(into)
            if (request.start or 0) + request.bytes == request.end:
                self._entered.close()
        except BaseException as error:
            if not self._entered.__exit__(type(error), error, error.__traceback__):
                raise

    def close(self) -> None:
        """See `RangeBody.close`."""
        self._inner.close()
        self._entered.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
