"""A bucket in memory as an S3 server has it, and the `ObjectStore` in front of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import xxhash

from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dcp_objstore.stores.protocol import (
    Capabilities,
    IfAbsent,
    IfVersion,
    ObjectMeta,
    Precondition,
    RangeReading,
    Version,
)
from dcp_objstore.stores.ranges import FetchedSource, Range

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


@dataclass
class _Pending:
    key: str
    initiated: datetime
    parts: dict[int, bytes] = field(default_factory=dict)


class Bucket:
    """Objects and uploads by full key. Equal content has an equal ETag, as on S3."""

    now: Callable[[], datetime] = staticmethod(lambda: datetime.now(UTC))

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, ObjectMeta]] = {}
        self.uploads: dict[str, _Pending] = {}
        self._numbers = 0
        self._lock = threading.RLock()

    def copy(self) -> Bucket:
        """As it is now."""
        twin = Bucket()
        twin.objects = dict(self.objects)
        twin.uploads = {
            name: replace(pending, parts=dict(pending.parts))
            for name, pending in self.uploads.items()
        }
        twin._numbers = self._numbers
        return twin

    def age(self, **units: float) -> None:
        """Let time pass: all that is here becomes so much older (see `timedelta`)."""
        by = timedelta(**units)
        for key, (body, meta) in self.objects.items():
            self.objects[key] = body, replace(meta, last_modified=meta.last_modified - by)
        for pending in self.uploads.values():
            pending.initiated -= by

    def keys(self, root: str) -> list[str]:
        """Keys below a prefix, relative to it."""
        return sorted(key.removeprefix(root) for key in self.objects if key.startswith(root))

    def put(self, key: str, body: bytes, precondition: Precondition | None = None) -> Version:
        """One PUT, or the completion of an upload."""
        with self._lock:
            current = self.objects.get(key)
            absent = isinstance(precondition, IfAbsent) and current is not None
            changed = isinstance(precondition, IfVersion) and (
                current is None or current[1].version != precondition.version
            )
            if absent or changed:
                raise PreconditionFailedError("412", object_key=key)
            version = Version(f'"{xxhash.xxh3_128_hexdigest(body)}"')
            meta = ObjectMeta(key, len(body), version, self.now())
            self.objects[key] = body, meta
            return version

    def get(self, key: str) -> tuple[bytes, ObjectMeta]:
        """Body and metadata."""
        with self._lock:
            found = self.objects.get(key)
        if found is None:
            raise ObjectNotFoundError("404", object_key=key)
        return found

    def list(self, prefix: str) -> list[ObjectMeta]:
        """In the order of the keys."""
        with self._lock:
            return [self.objects[key][1] for key in sorted(self.objects) if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        """Absent or not."""
        with self._lock:
            self.objects.pop(key, None)

    def begin(self, key: str) -> str:
        """A multipart upload; its id."""
        with self._lock:
            self._numbers += 1
            name = f"upload-{self._numbers}"
            self.uploads[name] = _Pending(key, self.now())
            return name

    def part(self, name: str, number: int, body: bytes) -> None:
        """One part of it."""
        with self._lock:
            self.uploads[name].parts[number] = body

    def complete(self, name: str) -> Version:
        """The object comes to be."""
        with self._lock:
            pending = self.uploads.pop(name)
            return self.put(
                pending.key, b"".join(body for _, body in sorted(pending.parts.items()))
            )

    def abort(self, name: str) -> None:
        """Gone or not."""
        with self._lock:
            self.uploads.pop(name, None)


class BucketStore:
    """An `ObjectStore` below a root of a bucket. Subclasses step in where requests are made.

    Args:
        bucket: where the objects are.
        url: that the store says it has.
        root: what the keys have before them in the bucket.
    """

    def __init__(self, bucket: Bucket, url: str, root: str = "") -> None:
        self.bucket, self.url, self.root = bucket, url, root
        self.capabilities = Capabilities(copies=False)
        self.endpoint_url: str | None = None
        self.reports_throttling = ()
        self.range_reading = RangeReading()

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        """Make one request; `key` is that of the bucket."""
        return effect()

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        body = b"".join(map(bytes, data)) if isinstance(data, (list, tuple)) else bytes(data)
        full = self.root + key
        if isinstance(precondition, IfVersion) and precondition.version.e_tag is None:
            raise InputError("a conditional write needs the ETag")  # as our adapter says
        return self._request("put", full, lambda: self.bucket.put(full, body, precondition))

    def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectMeta]:
        full = self.root + key
        body, meta = self._request("get", full, lambda: self.bucket.get(full))
        if len(body) > max_size_bytes:
            raise CorruptDataError("too large", object_key=key)
        return body, replace(meta, key=key)

    def open_range(self, key: str, start: int, end: int) -> Range:
        def fetch(start: int, end: int) -> memoryview:
            body, _ = self.get(key, max_size_bytes=2**63)
            if end > len(body):
                raise CorruptDataError("too short", object_key=key)
            return memoryview(body)[start:end]

        return Range(FetchedSource(fetch), start, end, nullcontext)

    def head(self, key: str) -> ObjectMeta:
        full = self.root + key
        _, meta = self._request("head", full, lambda: self.bucket.get(full))
        return replace(meta, key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        full = self.root + prefix
        found = self._request("list", full, lambda: self.bucket.list(full))
        return iter([replace(meta, key=meta.key.removeprefix(self.root)) for meta in found])

    def delete(self, key: str) -> None:
        full = self.root + key
        self._request("delete", full, lambda: self.bucket.delete(full))
