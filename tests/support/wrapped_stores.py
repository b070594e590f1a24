"""Stores around a store: they record, inject faults and change bytes.

They compose: `RecordingStore(FaultStore(store, plan))`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dcp_objstore.stores.base import as_buffers
from dcp_objstore.stores.protocol import (
    Capabilities,
    CopySource,
    ObjectMeta,
    ObjectStore,
    Precondition,
    RangeBody,
    Version,
)
from dcp_objstore.stores.wrappers import WrappedStore

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

# What the fixture `through` takes: a wrapper around every store that is opened from now on.
Through = Callable[[Callable[[ObjectStore], ObjectStore]], None]
Verb = Literal["put", "put_stream", "copy", "get", "open_range", "head", "list", "delete"]


@dataclass(slots=True)
class Request:
    """One request, recorded when it has ended.

    Attributes:
        verb: the method's name.
        key: the object, or the prefix for `list`.
        bytes: length of the body sent or received, or of what was copied; 0 for `head`, `list` and
            `delete`.
        start: first byte of a range, else None.
        end: end of a range, else None.
    """

    verb: Verb
    key: str
    bytes: int = 0
    start: int | None = None
    end: int | None = None


class Lacking(WrappedStore):
    """A store without some of its capabilities."""

    def __init__(self, inner: ObjectStore, *names: str) -> None:
        super().__init__(inner)
        self._capabilities = replace(inner.capabilities, **dict.fromkeys(names, False))

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities


class WatchedStore(WrappedStore):
    """Hands every verb on within `_around`, which subclasses override."""

    def _around(self, request: Request) -> AbstractContextManager[None]:
        """What happens around a request; raising here raises instead of, or after, it."""
        return nullcontext()

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write an object in one request."""
        size = sum(memoryview(piece).nbytes for piece in as_buffers(data))
        with self._around(Request("put", key, size)):
            return self.inner.put(key, data, precondition=precondition, retry=retry)

    def put_stream(
        self, key: str, buffers: Iterator[Buffer], *, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        """Write an object from an iterator of buffers."""
        request = Request("put_stream", key)

        def seen(buffer: Buffer) -> Buffer:
            request.bytes += memoryview(buffer).nbytes
            return buffer

        with self._around(request):
            return self.inner.put_stream(
                key,
                map(seen, buffers),
                part_size_bytes=part_size_bytes,
                max_concurrency=max_concurrency,
            )

    def copy(
        self,
        key: str,
        sources: Sequence[CopySource],
        *,
        part_size_bytes: int,
        max_concurrency: int,
        moved: Callable[[int], None],
    ) -> Version:
        """Write one object of ranges of other objects, which the store copies."""
        request = Request("copy", key, sum(one.end - one.start for one in sources))
        with self._around(request):
            return self.inner.copy(
                key,
                sources,
                part_size_bytes=part_size_bytes,
                max_concurrency=max_concurrency,
                moved=moved,
            )

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Read a small object, with its metadata."""
        request = Request("get", key)
        with self._around(request):
            body, meta = self.inner.get(key, max_size_bytes=max_size_bytes)
            request.bytes = len(body)
            return body, meta

    def open_range(self, key: str, start: int, end: int) -> WatchedRange:
        """Open a range of an object. The request begins with the first read."""
        request = Request("open_range", key, start=start, end=end)
        return WatchedRange(self.inner.open_range(key, start, end), request, self._around)

    def head(self, key: str) -> ObjectMeta:
        """Return the metadata of an object."""
        with self._around(Request("head", key)):
            return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Iterate over the objects; the request begins with the first and ends with the last."""
        with self._around(Request("list", prefix)):
            yield from self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is no error."""
        with self._around(Request("delete", key)):
            self.inner.delete(key)


class WatchedRange:
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
        """Fill `into` with the next bytes of the range."""
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

    def hold(self, check: Callable[[Version], None]) -> None:
        """Have the state of the object checked with each answer."""
        self._inner.hold(check)

    def descriptor_to_poll(self) -> int | None:
        """Return what is to be polled until the answer has begun."""
        return self._inner.descriptor_to_poll()

    def cancel(self, *, at_once: bool) -> bool:
        """End a `readinto` that another thread is in, with an error."""
        return self._inner.cancel(at_once=at_once)

    def close(self) -> None:
        """Give up what was not read."""
        self._inner.close()
        self._entered.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Fault:
    """An error to raise `before` the effect (nothing happens) or `after` it (no answer comes)."""

    when: Literal["before", "after"]
    error: BaseException


Plan = Callable[[Verb, str, int], Fault | None]


class RecordingStore(WatchedStore):
    """Keeps a record of every request, in the order in which they ended.

    Attributes:
        requests: the record, which stores may share; safe to read while requests run.
    """

    def __init__(self, inner: ObjectStore, requests: list[Request] | None = None) -> None:
        super().__init__(inner)
        self.requests = [] if requests is None else requests

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        try:
            yield
        finally:
            self.requests.append(request)  # atomic under the GIL


class FaultStore(WatchedStore):
    """Raises what a plan says.

    Args:
        inner: the store.
        plan: called as `plan(verb, key, nth)` before every request, `nth` counting from 1 per
            verb and key; returns a `Fault` or None.
    """

    def __init__(self, inner: ObjectStore, plan: Plan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        with self._lock:
            self._counts[request.verb, request.key] += 1
            nth = self._counts[request.verb, request.key]
        fault = self._plan(request.verb, request.key, nth)
        if fault is not None and fault.when == "before":
            raise fault.error
        yield
        if fault is not None:
            raise fault.error


def refusing(ending: str, error: BaseException) -> Callable[[ObjectStore], ObjectStore]:
    """A wrapper for `through`: PUTs of keys with this ending raise the error."""

    def plan(verb: Verb, key: str, _: int) -> Fault | None:
        return Fault("before", error) if verb == "put" and key.endswith(ending) else None

    return lambda store: FaultStore(store, plan)


Change = Callable[[str, int, memoryview], None]


class ChangingStore(WatchedStore):
    """Changes what ranges give.

    Args:
        inner: the store.
        change: called with the key, the offset in the object and the bytes there, to be changed.
    """

    def __init__(self, inner: ObjectStore, change: Change) -> None:
        super().__init__(inner)
        self._change = change

    def open_range(self, key: str, start: int, end: int) -> WatchedRange:
        opened = super().open_range(key, start, end)
        read = opened.readinto
        at = start

        def readinto(into: memoryview) -> None:
            nonlocal at
            read(into)
            self._change(key, at, into)
            at += len(into)

        opened.readinto = readinto  # type: ignore[method-assign]
        return opened
