"""`WrappedStore`: a store around a store, of which subclasses change single verbs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from dcp_objstore.stores.protocol import (
    Capabilities,
    CopySource,
    ObjectMeta,
    ObjectStore,
    Precondition,
    RangeBody,
    RangeReading,
    Version,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


class WrappedStore:
    """Hands everything on to the inner store."""

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

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        """Write an object in one request."""
        return self.inner.put(key, data, precondition=precondition, retry=retry)

    def put_stream(
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
    ) -> Version:
        """Write an object from an iterator of buffers."""
        return self.inner.put_stream(
            key, buffers, part_size_bytes=part_size_bytes, max_concurrency=max_concurrency
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
        return self.inner.copy(
            key,
            sources,
            part_size_bytes=part_size_bytes,
            max_concurrency=max_concurrency,
            moved=moved,
        )

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Read a small object, with its metadata."""
        return self.inner.get(key, max_size_bytes=max_size_bytes)

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open a range of an object."""
        return self.inner.open_range(key, start, end)

    def head(self, key: str) -> ObjectMeta:
        """Return the metadata of an object."""
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Iterate over the objects below a prefix."""
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is no error."""
        self.inner.delete(key)
