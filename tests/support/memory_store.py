"""A store in memory with every guarantee of `ObjectStore`, and places to step in.

`on_put` sees each PUT before it has an effect and decides what becomes of it: nothing special
(None), `LOST` (no effect, no answer), `UNANSWERED` (takes effect, no answer), `DELAYED` (no
answer; takes effect when the test calls `deliver`), or an error that is raised instead. It may
also act on the store first, as somebody else would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, Clock
from dcp_objstore.errors import PreconditionFailedError, StoreUnavailableError, UnsupportedError
from dcp_objstore.stores.protocol import CopySource, Precondition, Version
from tests.support.memory_bucket import Bucket, BucketStore, T

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
        body = b"".join(map(bytes, data)) if isinstance(data, (list, tuple)) else bytes(data)
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
        self,
        key: str,
        buffers: Iterator[Buffer],
        *,
        part_size_bytes: int,
        max_concurrency: int,
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
