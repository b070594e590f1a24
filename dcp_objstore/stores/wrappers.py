"""`WrappedStore`: a store around another one; subclasses, such as `PinnedStore`, change verbs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar, cast

from dcp_objstore.errors import PreconditionFailedError
from dcp_objstore.stores.protocol import (
    Capabilities,
    ObjectMeta,
    ObjectStore,
    RangeBody,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import REPLACED

F = TypeVar("F", bound=Callable[..., Any])


def _passed_on(verb: F) -> F:
    """Make a method that calls the verb of this name of the inner store."""

    @functools.wraps(verb)
    def call(self: WrappedStore, *args: Any, **settings: Any) -> Any:
        return getattr(self.inner, verb.__name__)(*args, **settings)

    return cast("F", call)


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

    put = _passed_on(ObjectStore.put)
    put_stream = _passed_on(ObjectStore.put_stream)
    copy = _passed_on(ObjectStore.copy)
    get = _passed_on(ObjectStore.get)
    open_range = _passed_on(ObjectStore.open_range)
    head = _passed_on(ObjectStore.head)
    list = _passed_on(ObjectStore.list)
    delete = _passed_on(ObjectStore.delete)


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
        """Iterate over the objects below a prefix; check their versions if a listing tells them.

        Raises:
            PreconditionFailedError: another writer replaced an object.
        """
        # A store without conditional updates may give empty versions, which tell nothing.
        claims = self.capabilities
        tells_versions = claims.listed_versions and claims.conditional_update
        for meta in self.inner.list(prefix):
            if tells_versions:
                self._check(meta.key, meta.version)
            yield meta

    def _check(self, key: str, version: Version) -> None:
        """Raise unless an object is in the state that is known, or becomes known now."""
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
