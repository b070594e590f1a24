"""`Range`: a body that is read front to back; what broke off is asked for again.

An adapter says how one request is made (`RangeSource.ask`). This is the only place where the rest
of a body that broke off is asked for, from the byte where it broke.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from dcp_objstore.config import MIB
from dcp_objstore.errors import CorruptDataError, InputError, PreconditionFailedError
from dcp_objstore.stores.protocol import ObjectStore, RangeReading, Version
from dcp_objstore.threads import wait_for

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.stores.retries import Requests

REPLACED = "another writer replaced the object while it was being read; read it again"
_FETCHED_BYTES = 8 * MIB
# How sources that ask by `FetchedSource` read. A body counts twice: libraries collect its pieces
# before they join them.
FETCHED_READING = RangeReading(memory_bytes=2 * _FETCHED_BYTES)


class BrokenOffError(Exception):
    """The connection was lost, or nothing came for too long, during the body of an answer."""


class Answer(Protocol):
    """The body of the answer to one request for a range."""

    def readinto(self, into: memoryview) -> int:
        """Put the next bytes at the front of `into`.

        Returns:
            How many. 0 if the answer has ended: it was for the first part of the range only, and
            the rest is to be asked for.

        Raises:
            Whatever the transport does; `RangeSource.wait_to_ask_again` knows it.
        """
        ...

    def version(self) -> Version | None:
        """Return the state of the object that the bytes so far are of; None if it is not known.

        Raises:
            PreconditionFailedError: the object was changed since it was opened.
        """
        return None

    def descriptor_to_poll(self) -> int | None:
        """Return what `RangeBody.descriptor_to_poll` does."""
        return None

    def cancel(self, *, at_once: bool) -> bool:  # noqa: ARG002
        """End a `readinto` of another thread; see `RangeBody.cancel`."""
        return False

    def close(self) -> None:
        """Give the connection back; close it if there is more to come over it."""
        ...


class RangeSource(ABC):
    """A source of ranges of one object.

    Attributes:
        is_held: whether the answers will be asked for their version; `Range.hold` sets it.
    """

    is_held = False

    def ask_ahead(self, start: int, end: int) -> Answer | None:  # noqa: ARG002
        """Send the request for bytes `[start, end)` if that needs no waiting; it never fails.

        Returns:
            The answer, to be read or closed. None, as by default: `ask` for it.
        """
        return None

    @abstractmethod
    def ask(self, start: int, end: int) -> Answer:
        """Ask for bytes `[start, end)`, or for the first part of them. A failure is final.

        Called where `ask_ahead` has sent nothing.
        """

    def wait_to_ask_again(
        self,
        error: Exception,
        asked_at: float,  # noqa: ARG002
        *,
        had_begun: bool,  # noqa: ARG002
    ) -> None:
        """Return when it is time to ask for the rest of a range, or raise. By default, raise.

        Args:
            error: the error of `Answer.readinto`.
            asked_at: the time at which the request was sent (monotonic).
            had_begun: whether some bytes of the answer have come. Then the time since the range was
                opened says nothing of the store: the reader may have been busy with the bytes.
        """
        raise error


class Range:
    """A `RangeBody` over any number of requests.

    Args:
        source: what asks for ranges of the object.
        start: the byte at which the range begins.
        end: the byte before which it ends.
        errors: what makes the context of each read, which translates what is raised.
        answer: the answer to a request for the whole range that was sent already. None: a request
            is sent by the first `readinto`.
    """

    def __init__(
        self,
        source: RangeSource,
        start: int,
        end: int,
        errors: Callable[[], AbstractContextManager[object]],
        answer: Answer | None = None,
    ) -> None:
        self._source = source
        self._position, self._end = start, end
        self._errors = errors
        self._answer = answer
        self._check_version: Callable[[Version], None] | None = None
        # When the present answer was asked for, and from which byte on.
        self._asked_at = time.monotonic()
        self._asked_from = start
        self._closed = False
        # A dropped answer must not be cancelled: another one may use its connection by then.
        self._drop_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what was not read."""
        self._closed = True
        self._drop_answer()

    def hold(self, check: Callable[[Version], None]) -> None:
        """Have the state of the object checked with each answer."""
        self._check_version = check
        self._source.is_held = True

    def descriptor_to_poll(self) -> int | None:
        """Return what to poll until the answer has begun; None if there is nothing."""
        return None if self._answer is None else self._answer.descriptor_to_poll()

    def cancel(self, *, at_once: bool) -> bool:
        """End a `readinto` that another thread is in, with an error; see `RangeBody.cancel`."""
        with self._drop_lock:
            # `_closed` is set before the answer is read, and `_read_some` sets the answer before it
            # reads `_closed`. So one of the two threads sees what the other one did.
            self._closed |= not at_once
            cancelled = self._answer is not None and self._answer.cancel(at_once=at_once)
            self._closed |= cancelled
            return cancelled

    def readinto(self, into: memoryview) -> None:
        """Fill `into` with the next bytes of the range."""
        with self._errors():
            self._check_open()
            left_bytes = self._end - self._position
            if len(into) > left_bytes:
                raise InputError(
                    f"{len(into)} bytes asked for, but the range has {left_bytes} left"
                )
            try:
                while into:
                    received_bytes = self._read_some(into)
                    self._position += received_bytes
                    into = into[received_bytes:]
            except BaseException:
                self.close()
                raise
            if self._position == self._end:  # another range may use the connection from now on
                self._drop_answer()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("the range is closed")

    def _read_some(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; ask for the rest where there is no answer.

        Returns:
            How many. 0 if the answer has ended or broken off: the next call asks for the rest.
        """
        self._check_open()
        if self._answer is None:
            start, end = self._position, self._end
            self._asked_at, self._asked_from = time.monotonic(), start
            self._answer = self._source.ask_ahead(start, end) or self._source.ask(start, end)
            self._check_open()  # it may have been cancelled before there was an answer to cancel
        try:
            received_bytes = self._answer.readinto(into)
        except Exception as error:  # noqa: BLE001  `wait_to_ask_again` raises it, or an error for it
            self._drop_answer()
            self._check_open()  # a request that was cancelled has not failed
            self._source.wait_to_ask_again(
                error, self._asked_at, had_begun=self._position > self._asked_from
            )
            return 0
        # Without bytes there is no state to check.
        if received_bytes and self._check_version is not None:
            version = self._answer.version()
            if version is not None:
                self._check_version(version)
        if not received_bytes:
            self._drop_answer()
        return received_bytes

    def _drop_answer(self) -> None:
        with self._drop_lock:
            answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()


class RetriedSource(RangeSource):
    """Asks by requests that are sent once and, where that may help, again.

    Args:
        requests: the requests to the bucket.
        key: the key of the object, in the bucket.
        ask_once: a function that sends a request for a range, by its start and end.
    """

    def __init__(
        self, requests: Requests, key: str, ask_once: Callable[[int, int], Answer]
    ) -> None:
        self._requests = requests
        self._ask_once = ask_once
        self._tries = requests.tries("open_range", key)

    def ask(self, start: int, end: int) -> Answer:
        """Ask for bytes `[start, end)`, or for the first part of them."""
        return self._requests.run(self._tries, partial(self._ask_once, start, end))

    def wait_to_ask_again(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
        """Wait until the rest may be asked for, or raise."""
        if had_begun:
            self._tries.restart_clock()
        self._requests.wait_to_try_again(self._tries, error, asked_at)


class FetchedSource(RangeSource):
    """Asks a library that gives bodies as a whole, at most 8 MiB at a time.

    Args:
        fetch: a function that returns the bytes of a range, by its start and end.
        current_version: a function that asks for the version of the object. Default: it is not
            known.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Buffer],
        current_version: Callable[[], Version] | None = None,
    ) -> None:
        self._fetch = fetch
        self._current_version = current_version

    def ask(self, start: int, end: int) -> Answer:
        """Ask for bytes `[start, end)`, or for the first part of them.

        The library tells no version with the bytes. So if the range is held to a version, the
        version is asked for before and after the bytes.
        """
        end = min(end, start + _FETCHED_BYTES)
        current_version = self._current_version if self.is_held else None
        version = None if current_version is None else current_version()
        body = memoryview(self._fetch(start, end))
        check_length(len(body), start, end)
        if current_version is not None and current_version() != version:
            raise PreconditionFailedError(REPLACED)
        return ReceivedChunks(iter((body,)), version)


class ReceivedChunks(Answer):
    """An `Answer` that a library gives in its own memory.

    Args:
        chunks: the bytes, in their order; none is empty.
        version: the state of the object that they are of. Default: it is not known.
    """

    def __init__(self, chunks: Iterator[Buffer], version: Version | None = None) -> None:
        self._chunks = chunks
        self._version = version
        self._rest = memoryview(b"")
        self._copying = threading.Lock()  # held while bytes are written, so `cancel` waits for that
        self._is_cancelled = False

    def version(self) -> Version | None:
        """Return the state of the object that the bytes are of."""
        return self._version

    def readinto(self, into: memoryview) -> int:
        """Read the next bytes to the front of `into`; return how many.

        Raises:
            BrokenOffError: it was cancelled.
        """
        if not self._rest:
            self._rest = memoryview(b"")  # an empty view of a chunk would keep it in memory
            self._rest = memoryview(next(self._chunks, b""))  # empty after the last chunk
        some = self._rest[: len(into)]
        with self._copying:
            if self._is_cancelled:
                raise BrokenOffError("cancelled")
            into[: len(some)] = some
        self._rest = self._rest[len(some) :]
        return len(some)

    def cancel(self, *, at_once: bool) -> bool:
        """Write nothing more, unless that is to be `at_once`: the library cannot be interrupted."""
        with self._copying:
            self._is_cancelled |= not at_once
        return False

    def close(self) -> None:
        """Drop the chunks that were not read."""
        self._chunks, self._rest = iter(()), memoryview(b"")


def check_length(received_bytes: int, start: int, end: int) -> None:
    """Raise `CorruptDataError` unless as many bytes came as the range `[start, end)` has."""
    if received_bytes != end - start:
        raise CorruptDataError(f"bytes [{start}, {end}) asked for, but {received_bytes} bytes came")


def read_range(store: ObjectStore, key: str, start: int, end: int) -> bytearray:
    """Read bytes `[start, end)` of an object into new memory; Ctrl-C ends the wait for them.

    Raises:
        As `ObjectStore.open_range` and `RangeBody.readinto`.
    """

    def read() -> bytearray:
        with store.open_range(key, start, end) as body:
            into = bytearray(end - start)
            body.readinto(memoryview(into))
        return into

    return wait_for(read)
