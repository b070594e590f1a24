"""A bucket in memory as an S3 server has it, and two stores in front of it.

A `BucketStore` makes every request through `_request`, where a subclass steps in. A `MemoryStore`
has places to step in: its `on_put` sees each PUT before it has an effect and decides what becomes
of it: nothing special (None), `LOST` (no effect, no answer), `UNANSWERED` (takes effect, no
answer), `DELAYED` (no answer; takes effect when the test calls `deliver`), or an error that is
raised instead. It may also act on the store first, as somebody else would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, Clock
from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import (
    Capabilities,
    CopySource,
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


def joined(data: Buffer | Sequence[Buffer]) -> bytes:
    """The body of a PUT, which may come in pieces."""
    return b"".join(map(bytes, data)) if isinstance(data, (list, tuple)) else bytes(data)


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
        body, full = joined(data), self.root + key
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


class Fate(Enum):
    LOST = auto()
    UNANSWERED = auto()
    DELAYED = auto()


LOST, UNANSWERED, DELAYED = Fate.LOST, Fate.UNANSWERED, Fate.DELAYED


@dataclass(frozen=True)
class Put:
    key: str
    data: bytes
    precondition: Precondition | None
    retry: bool
    number: int  # of all PUTs of this key, from 1


OnPut = Callable[[Put], Fate | BaseException | None]


def in_turn(key: str, *fates: Fate | BaseException | Callable[[Put], object] | None) -> OnPut:
    """Meet the PUTs of a key with these fates, in turn; later ones pass.

    A function acts at once, as somebody else would, and may return a fate.
    """
    left = list(fates)

    def decide(put: Put) -> Fate | BaseException | None:
        if put.key != key or not left:
            return None
        fate = left.pop(0)
        if callable(fate):
            fate = fate(put)
        return fate if isinstance(fate, (Fate, BaseException)) else None

    return decide


class TickingClock(Clock):
    """Time passes only in `sleep`, and there at once."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        super().__init__(deadline_seconds)
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 0.01)


class MemoryStore(BucketStore):
    def __init__(self, url: str = "memory://test/run/step-1") -> None:
        super().__init__(Bucket(), url)
        self.objects = self.bucket.objects
        self.requests: list[tuple[str, str]] = []
        self.puts: list[Put] = []
        self.on_put: OnPut | None = None
        self.on_get: Callable[[str], None] | None = None
        self.on_list: Callable[[], None] | None = None
        self.on_delete: Callable[[str], None] | None = None
        # What a weaker server would do with a precondition.
        self.ignores: tuple[type[Precondition], ...] = ()
        self._delayed: list[Put] = []
        self._lock = threading.RLock()

    def body(self, key: str) -> bytes:
        return self.objects[key][0]

    def put(
        self,
        key: str,
        data: Buffer | Sequence[Buffer],
        *,
        precondition: Precondition | None = None,
        retry: bool = True,
    ) -> Version:
        body = joined(data)
        with self._lock:
            self.requests.append(("put", key))
            number = 1 + sum(put.key == key for put in self.puts)
            put = Put(key, body, precondition, retry, number)
            self.puts.append(put)
        fate = self.on_put(put) if self.on_put else None
        if isinstance(fate, BaseException):
            raise fate
        if fate is DELAYED:
            self._delayed.append(put)
        if fate is None:
            return self.apply(put)
        if fate is UNANSWERED:
            self.apply(put)
        raise StoreUnavailableError("no answer")

    def deliver(self) -> list[bool]:
        """Let the delayed PUTs arrive, in order; say which took effect."""
        arrived, self._delayed = self._delayed, []
        outcomes = []
        for put in arrived:
            try:
                self.apply(put)
            except PreconditionFailedError:
                outcomes.append(False)
            else:
                outcomes.append(True)
        return outcomes

    def apply(self, put: Put) -> Version:
        ignored = isinstance(put.precondition, self.ignores)
        return self.bucket.put(put.key, put.data, None if ignored else put.precondition)

    def put_stream(
        self, key: str, buffers: Iterator[Buffer], *, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        return self.put(key, list(buffers))

    def copy(self, key: str, sources: Sequence[CopySource], **_: object) -> Version:
        raise UnsupportedError("this store copies nothing")

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        self.requests.append((verb, key))
        if verb == "get" and self.on_get:
            self.on_get(key)
        elif verb == "list" and self.on_list:
            self.on_list()
        elif verb == "delete" and self.on_delete:
            self.on_delete(key)
        return effect()


class Below(BucketStore):
    """A prefix of a `MemoryStore`, for somebody whose requests all pass through `ask`."""

    def __init__(
        self,
        store: MemoryStore,
        name: str,
        ask: Callable[[Callable[[], Any]], Any] = lambda request: request(),
    ) -> None:
        url = f"{store.url}/{name}".rstrip("/")
        super().__init__(store.bucket, url, f"{name}/" if name else "")
        self._store, self._ask = store, ask

    def put(self, key: str, data: Buffer | Sequence[Buffer], **settings: Any) -> Version:
        return self._ask(lambda: self._store.put(self.root + key, data, **settings))

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        return self._ask(lambda: self._store._request(verb, key, effect))
