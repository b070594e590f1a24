"""Stores around a store: they record, inject faults and add latency.

They compose: `RecordingStore(FaultStore(LatencyStore(store, 0.05), plan))`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.wrappers import Request, Verb, WrappedRange, WrappedStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class Fault:
    """An error to raise instead of an answer.

    Attributes:
        when: `before` the effect (nothing happens), `after` it (the answer is lost), or, for
            `put_stream` only, `during` it: in the iterator, which aborts the upload.
        error: what to raise.
        after_buffers: with `during`: how many buffers pass first.
    """

    when: Literal["before", "after", "during"]
    error: BaseException
    after_buffers: int = 1


Plan = Callable[[Verb, str, int], Fault | None]


class RecordingStore(WrappedStore):
    """Keeps a record of every request, in the order in which they ended.

    Attributes:
        requests: the record; safe to read while requests run.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.requests: list[Request] = []

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        request.thread = threading.current_thread().name
        try:
            yield
        except BaseException as error:
            request.error = error
            raise
        finally:
            self.requests.append(request)  # atomic under the GIL


class FaultStore(WrappedStore):
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
        self._during: dict[int, Fault] = {}

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        with self._lock:
            self._counts[request.verb, request.key] += 1
            nth = self._counts[request.verb, request.key]
        fault = self._plan(request.verb, request.key, nth)
        if fault is None:
            yield
            return
        if fault.when == "before":
            raise fault.error
        if fault.when == "after":
            yield
            raise fault.error
        if request.verb != "put_stream":
            raise ValueError(f"a fault 'during' needs put_stream, not {request.verb}")
        self._during[id(request)] = fault
        try:
            yield
        finally:
            del self._during[id(request)]
        raise fault.error  # the stream ended before `after_buffers`

    def _on_buffer(self, request: Request, buffer: Buffer) -> None:
        fault = self._during.get(id(request))
        if fault is not None and request.buffers >= fault.after_buffers:
            raise fault.error


Change = Callable[[str, int, memoryview], None]


class ChangingStore(WrappedStore):
    """Changes what ranges give.

    Args:
        inner: the store.
        change: called with the key, the offset in the object and the bytes there, to be changed.
    """

    def __init__(self, inner: ObjectStore, change: Change) -> None:
        super().__init__(inner)
        self._change = change

    def open_range(self, key: str, start: int, end: int) -> WrappedRange:
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


class LatencyStore(WrappedStore):
    """Waits before every request.

    Args:
        inner: the store.
        seconds: how long, or a function of (verb, key).
        sleep: what waits; for tests with a clock of their own.
    """

    def __init__(
        self,
        inner: ObjectStore,
        seconds: float | Callable[[Verb, str], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._sleep = sleep

    @contextmanager
    def _around(self, request: Request) -> Iterator[None]:
        seconds = self._seconds
        self._sleep(seconds(request.verb, request.key) if callable(seconds) else seconds)
        yield
