"""`WrappedStore`: a store around a store, of which subclasses change verbs; `PinnedStore`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from typing_extensions import Buffer

from dcp_objstore.errors import PreconditionFailedError
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
from dcp_objstore.stores.ranges import REPLACED


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
        """Remove an object. No error is raised if it is absent."""
        self.inner.delete(key)


class PinnedStore(WrappedStore):
    """Reads each object in one state only: that of the first answer that tells it.

    An object that is read in many ranges, and that others may replace during the read, is then
    read as it was or not at all.

    Args:
        inner: the store.
        versions: the state of each object by its key, as far as it is known. Those that become
            known are added.
    """

    def __init__(self, inner: ObjectStore, versions: dict[str, Version]) -> None:
        super().__init__(inner)
        self._versions = versions

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        """Return an object and its metadata.

        Raises:
            PreconditionFailedError: another writer replaced the object.
        """
        body, meta = self.inner.get(key, max_size_bytes=max_size_bytes)
        self._check(key, meta.version)
        return body, meta

    def head(self, key: str) -> ObjectMeta:
        """Return the metadata of an object.

        Raises:
            PreconditionFailedError: another writer replaced the object.
        """
        meta = self.inner.head(key)
        self._check(key, meta.version)
        return meta

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        """Open a range of an object. `readinto` raises if the object is in another state.

        Raises:
            PreconditionFailedError: by `readinto`: another writer replaced the object.
        """
        body = self.inner.open_range(key, start, end)
        body.hold(partial(self._check, key))
        return body

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Iterate over the objects below a prefix. What it tells of versions counts, too.

        Raises:
            PreconditionFailedError: another writer replaced an object.
        """
        tells = self.capabilities.listed_versions and self.capabilities.conditional_update
        for meta in self.inner.list(prefix):
            if tells:
                self._check(meta.key, meta.version)
            yield meta

    def _check(self, key: str, version: Version) -> None:
        # `setdefault` of a dict is atomic.
        if not is_same_state(self._versions.setdefault(key, version), version):
            raise PreconditionFailedError(REPLACED, object_key=key, url=self.url)


def is_same_state(version: Version, other: Version) -> bool:
    """Whether two tokens are of the same state, by ETag if both have one.

    Some servers send ETags with quotes in one kind of answer, and without them in another. What
    compresses on the way marks them as weak (RFC 9110, section 8.8.3).
    """
    if version.e_tag is None or other.e_tag is None:
        return version.version == other.version
    return version.e_tag.removeprefix("W/").strip('"') == other.e_tag.removeprefix("W/").strip('"')
