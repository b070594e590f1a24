"""Processes that work on a bucket in memory and can be killed at any request to it.

A multipart upload is several requests (begin, each part, complete, abort), so it can be cut between
them. A process that was killed reaches the bucket no more, whatever its clean-up code tries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dcp_objstore.stores.protocol import UnfinishedUpload, Version
from tests.support.memory_store import Bucket, BucketStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
When = Literal["before", "after"]


class KilledError(BaseException):
    """What code of a killed process sees until its thread ends. Nothing hears of it."""


@dataclass(frozen=True)
class Cut:
    """Where a process dies: before or after the effect of its n-th request, counted from 1."""

    number: int
    when: When


class Turns:
    """One rank uploads before the others: which is first would else be drawn by the system."""

    def __init__(self, requests: int) -> None:
        self._left = requests  # of the first rank's upload
        self._over = threading.Event()

    def count(self) -> None:
        """A request of the first rank's upload has ended."""
        self._left -= 1
        if self._left <= 0:
            self.give_up()

    def give_up(self) -> None:
        """The first rank has uploaded, or has died."""
        self._over.set()

    def wait(self) -> None:
        """Another rank is about to upload."""
        assert self._over.wait(60), "the first rank hangs"


class Process:
    """Counts the requests of one process, and dies at one of them.

    Args:
        cut: where it dies.
        on_death: called then.
        turns: shared by the ranks of a job; None: they upload at once.
        first: it is the one that uploads first.

    Attributes:
        requests: verb and full key of each that it began.
        killed: it is dead: no request has an effect any more.
    """

    def __init__(
        self,
        cut: Cut | None = None,
        on_death: Callable[[], None] = lambda: None,
        turns: Turns | None = None,
        *,
        first: bool = False,
    ) -> None:
        self.cut = cut
        self.on_death = on_death
        self.turns, self.first = turns, first
        self.requests: list[tuple[str, str]] = []
        self.killed = False
        self._lock = threading.RLock()

    def kill(self) -> None:
        """From now on it reaches nothing. A request that is under way ends first."""
        with self._lock:
            self.killed = True

    def request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        """One request; the cut falls before or after its effect."""
        turns = self.turns if uploads(key) else None
        if turns is not None and not self.first:
            turns.wait()
        answer = self._send(verb, key, effect)
        if turns is not None and self.first:
            turns.count()
        return answer

    def _send(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        with self._lock:
            if self.killed:
                raise KilledError
            self.requests.append((verb, key))
            now = self.cut is not None and len(self.requests) == self.cut.number
            if now and self.cut is not None and self.cut.when == "before":
                self._die()
            try:
                return effect()
            finally:
                if now:
                    self._die()

    def _die(self) -> None:
        self.killed = True
        self.on_death()
        raise KilledError


def uploads(key: str) -> bool:
    """Whether a request is part of a rank's upload."""
    return key.endswith(".distcp")


class Connection(BucketStore):
    """A bucket as one process has it."""

    def __init__(self, bucket: Bucket, process: Process, url: str) -> None:
        super().__init__(bucket, url, url.partition("://")[2].partition("/")[2] + "/")
        self.process = process

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        return self.process.request(verb, key, effect)

    def put_stream(
        self, key: str, buffers: Iterator[Buffer], *, part_size_bytes: int, max_concurrency: int
    ) -> Version:
        """Parts one after the other, so that a cut always falls in the same place."""
        full = self.root + key
        name = self._request("begin", full, lambda: self.bucket.begin(full))
        try:
            number, pending = 0, bytearray()
            for buffer in buffers:
                pending += memoryview(buffer)
                while len(pending) >= part_size_bytes:
                    number += 1
                    self._part(name, full, number, bytes(pending[:part_size_bytes]))
                    del pending[:part_size_bytes]
            if pending:
                self._part(name, full, number + 1, bytes(pending))
        except BaseException:
            self._request("abort", full, lambda: self.bucket.abort(name))
            raise
        return self._request("complete", full, lambda: self.bucket.complete(name))

    def _part(self, name: str, full: str, number: int, body: bytes) -> None:
        self._request("part", full, lambda: self.bucket.part(name, number, body))

    def uploads(self) -> ConnectionUploads:
        """Its multipart uploads."""
        return ConnectionUploads(self, self.root)


class ConnectionUploads:
    """As `stores.uploads.s3.S3Uploads`."""

    def __init__(self, connection: Connection, root: str) -> None:
        self.connection, self.prefix = connection, root

    def below(self, prefix: str) -> ConnectionUploads:
        root = f"{self.prefix}{prefix}/" if prefix else self.prefix
        return ConnectionUploads(self.connection, root)

    def list(self) -> list[UnfinishedUpload]:
        def effect() -> list[UnfinishedUpload]:
            return [
                UnfinishedUpload(
                    pending.key.removeprefix(self.prefix),
                    name,
                    pending.initiated,
                    sum(map(len, pending.parts.values())),
                )
                for name, pending in self.connection.bucket.uploads.items()
                if pending.key.startswith(self.prefix)
            ]

        return self.connection.process.request("list uploads", self.prefix, effect)

    def abort(self, upload: UnfinishedUpload) -> None:
        self.connection.process.request(
            "abort",
            self.prefix + upload.key,
            lambda: self.connection.bucket.abort(upload.upload_id),
        )


class Here:
    """Which bucket this thread, and those that it starts, work on, and as which process."""

    bucket: Bucket
    process: Process

    def __getattr__(self, name: str) -> Any:
        return _HERE[name].get()

    def __setattr__(self, name: str, value: Any) -> None:
        _HERE[name].set(value)


_HERE: dict[str, ContextVar[Any]] = {name: ContextVar(name) for name in ("bucket", "process")}
here = Here()
