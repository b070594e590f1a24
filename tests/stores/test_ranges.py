"""`Range`: front to back, whatever number of answers it takes; asked again where it broke."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from dcp_objstore.errors import CorruptDataError, InputError, StoreUnavailableError
from dcp_objstore.stores.ranges import (
    BrokenOffError,
    FetchedSource,
    Range,
    RangeSource,
    ReceivedChunks,
    RetriedSource,
)

MIB = 1 << 20
BODY = random.Random(4).randbytes(1000)


class Piecemeal:
    """An answer that gives a few bytes at once, and breaks off or ends after `limit` of them."""

    def __init__(self, source: Source, start: int, limit: int, *, ends: bool) -> None:
        self.source, self.at, self.left, self.ends = source, start, limit, ends

    def readinto(self, into: memoryview) -> int:
        if not self.left:
            if self.ends:
                return 0
            raise BrokenOffError("planned")
        count = min(len(into), self.left, self.source.random.randint(1, 40))
        into[:count] = BODY[self.at : self.at + count]
        self.at += count
        self.left -= count
        return count

    def cancel(self, *, at_once: bool) -> bool:
        return False

    def close(self) -> None:
        self.source.open.remove(self)


class Source(RangeSource):
    def __init__(self, limit: Callable[[int], int], *, ends: bool = False, failures: int = 99):
        self.random = random.Random(1)
        self.limit, self.ends, self.failures = limit, ends, failures
        self.asked: list[tuple[int, int]] = []
        self.open: list[Piecemeal] = []

    def ask(self, start: int, end: int) -> Piecemeal:
        assert not self.open, "the one before is closed first"
        self.asked.append((start, end))
        self.open.append(Piecemeal(self, start, self.limit(end - start), ends=self.ends))
        return self.open[0]

    def failed(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
        self.failures -= 1
        if self.failures < 0:
            raise StoreUnavailableError("too often") from error


def opened(source: RangeSource, start: int = 0, end: int = len(BODY)) -> Range:
    return Range(source, start, end, nullcontext)


def read(body: Range, size: int) -> bytes:
    into = memoryview(bytearray(size))
    body.readinto(into)
    return bytes(into)


@pytest.mark.parametrize("ends", [True, False])
def test_the_rest_is_asked_for_from_the_byte_where_an_answer_ended(ends: bool) -> None:
    source = Source(lambda left: min(left, 300), ends=ends)
    body = opened(source, 100, 1000)
    assert read(body, 450) + read(body, 450) == BODY[100:]
    assert source.asked == [(100, 1000), (400, 1000), (700, 1000)]
    assert source.failures == (99 if ends else 97)
    assert not source.open, "it is closed with its last byte"


def test_what_broke_off_too_often_is_an_error_after_which_nothing_more_is_read() -> None:
    source = Source(lambda left: 0, failures=2)
    body = opened(source)
    with pytest.raises(StoreUnavailableError, match="too often"):
        read(body, 10)
    assert source.asked == [(0, 1000)] * 3
    assert not source.open
    with pytest.raises(Exception, match="closed"):
        read(body, 10)
    assert len(source.asked) == 3


def test_a_source_is_told_whether_bytes_of_the_answer_that_broke_off_have_come() -> None:
    """Those of an earlier answer say nothing of the store's state now."""
    source = Source(limits := iter([300, 0, 0, 1000]).__next__)
    told: list[bool] = []
    source.limit = lambda _: limits()
    source.failed = lambda error, asked_at, *, had_begun: told.append(had_begun)  # type: ignore[method-assign]
    with Range(source, 0, 1000, nullcontext) as body:
        body.readinto(memoryview(bytearray(1000)))
    assert told == [True, False, False]


def test_a_range_that_cannot_be_cancelled_at_once_is_read_on_or_asks_for_nothing_more() -> None:
    source = Source(lambda left: min(left, 300))
    with opened(source) as body:
        assert read(body, 10) == BODY[:10]
        assert not body.cancel(at_once=True)
        assert read(body, 10) == BODY[10:20]
        assert not body.cancel(at_once=False)
        with pytest.raises(InputError, match="closed"):
            read(body, 10)
    assert source.asked == [(0, 1000)]


@pytest.mark.parametrize("waits_for", ["an answer", "a chunk"])
def test_what_comes_of_a_library_after_a_range_was_cancelled_is_not_written(waits_for: str) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        assert go_on.wait(10)

    def chunks() -> Iterator[bytes]:
        if waits_for == "a chunk":
            wait()
        yield BODY

    class Library(RangeSource):
        def ask(self, start: int, end: int) -> ReceivedChunks:
            if waits_for == "an answer":
                wait()
            return ReceivedChunks(chunks())

        def failed(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
            pytest.fail("asked again")

    into = bytearray(len(BODY))
    body = opened(Library())
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(body.readinto, memoryview(into))
        assert waiting.wait(10)
        assert not body.cancel(at_once=False)
        go_on.set()
        with pytest.raises(InputError, match="closed"):
            reading.result(10)
    assert not any(into)


def test_an_answer_is_closed_where_the_reader_stops() -> None:
    source = Source(lambda left: left)
    with opened(source) as body:
        assert read(body, 10) == BODY[:10]
        assert source.open
    assert not source.open


def test_an_answer_that_was_asked_for_ahead_is_read_first_and_closed_if_it_is_not() -> None:
    source = Source(lambda left: left)
    ahead = source.ask(0, 1000)
    assert read(Range(source, 0, 1000, nullcontext, ahead), 1000) == BODY
    assert source.asked == [(0, 1000)]
    with Range(source, 0, 1000, nullcontext, source.ask(0, 1000)):
        pass
    assert not source.open


def test_a_library_that_gives_whole_bodies_is_asked_for_8_mib_at_once() -> None:
    asked: list[tuple[int, int]] = []
    data = random.Random(5).randbytes(20 * MIB)

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        return data[start:end]

    body = opened(FetchedSource(fetch), 3, len(data))
    assert read(body, 5 * MIB) + read(body, len(data) - 3 - 5 * MIB) == data[3:]
    assert asked == [(3, 8 * MIB + 3), (8 * MIB + 3, 16 * MIB + 3), (16 * MIB + 3, len(data))]
    for wrong in (b"", b"12", b"1234"):
        with pytest.raises(CorruptDataError):
            read(opened(FetchedSource(lambda *_, wrong=wrong: wrong), 0, 3), 3)


def test_only_bytes_that_have_come_begin_the_time_for_retries_anew() -> None:
    """A store that answers each request and sends nothing must not be asked for ever."""
    tries, requests = Mock(), Mock()
    requests.tries.return_value = tries
    source = RetriedSource(requests, "k", Mock())
    error = BrokenOffError("planned")
    source.failed(error, 1.0, had_begun=False)
    tries.restart_clock.assert_not_called()
    source.failed(error, 2.0, had_begun=True)
    tries.restart_clock.assert_called_once_with()
    assert [call.args for call in requests.again.call_args_list] == [
        (tries, error, 1.0),
        (tries, error, 2.0),
    ]
