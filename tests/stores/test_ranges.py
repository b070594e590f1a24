"""`Range`: front to back, whatever number of answers it takes; asked again where it broke."""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dcp_objstore.stores import IfVersion, ObjectStore, Version, open_store
from dcp_objstore.stores.protocol import Capabilities
from dcp_objstore.stores.ranges import (
    FETCHED_READING,
    BrokenOffError,
    FetchedSource,
    Range,
    RangeSource,
    ReceivedChunks,
    RetriedSource,
    read_range,
)
from dcp_objstore.stores.wrappers import PinnedStore, WrappedStore, is_same_state

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

    def wait_to_ask_again(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
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
def test_the_rest_is_asked_for_from_the_byte_where_an_answer_ended(ends):
    source = Source(lambda left: min(left, 300), ends=ends)
    body = opened(source, 100, 1000)
    assert read(body, 450) + read(body, 450) == BODY[100:]
    assert source.asked == [(100, 1000), (400, 1000), (700, 1000)]
    assert source.failures == (99 if ends else 97)
    assert not source.open, "it is closed with its last byte"


def test_what_broke_off_too_often_is_an_error_after_which_nothing_more_is_read():
    source = Source(lambda left: 0, failures=2)
    body = opened(source)
    with pytest.raises(StoreUnavailableError, match="too often"):
        read(body, 10)
    assert source.asked == [(0, 1000)] * 3
    assert not source.open
    with pytest.raises(Exception, match="closed"):
        read(body, 10)
    assert len(source.asked) == 3


def test_a_source_is_told_whether_bytes_of_the_answer_that_broke_off_have_come():
    """Those of an earlier answer say nothing of the store's state now."""
    source = Source(limits := iter([300, 0, 0, 1000]).__next__)
    told: list[bool] = []
    source.limit = lambda _: limits()
    source.wait_to_ask_again = lambda error, asked_at, *, had_begun: told.append(had_begun)  # type: ignore[method-assign]
    with Range(source, 0, 1000, nullcontext) as body:
        body.readinto(memoryview(bytearray(1000)))
    assert told == [True, False, False]


@pytest.mark.parametrize("waits_for", ["an answer", "a chunk"])
def test_what_comes_of_a_library_after_a_range_was_cancelled_is_not_written(waits_for):
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

        def wait_to_ask_again(self, error: Exception, asked_at: float, *, had_begun: bool) -> None:
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


def test_an_answer_that_was_asked_for_ahead_is_read_first_and_closed_if_it_is_not():
    source = Source(lambda left: left)
    ahead = source.ask(0, 1000)
    assert read(Range(source, 0, 1000, nullcontext, ahead), 1000) == BODY
    assert source.asked == [(0, 1000)]
    with Range(source, 0, 1000, nullcontext, source.ask(0, 1000)):
        pass
    assert not source.open


def test_a_library_that_gives_whole_bodies_is_asked_for_8_mib_at_once():
    asked: list[tuple[int, int]] = []
    data = random.Random(5).randbytes(20 * MIB)

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        return data[start:end]

    body = opened(FetchedSource(fetch), 3, len(data))
    assert read(body, 5 * MIB) + read(body, len(data) - 3 - 5 * MIB) == data[3:]
    assert asked == [(3, 8 * MIB + 3), (8 * MIB + 3, 16 * MIB + 3), (16 * MIB + 3, len(data))]
    assert FETCHED_READING.memory_bytes == 16 * MIB  # libraries join a body of its pieces
    for wrong in (b"", b"12", b"1234"):
        with pytest.raises(CorruptDataError, match=rf"\[1, 4\) .* {len(wrong)} bytes came"):
            read(opened(FetchedSource(lambda *_, wrong=wrong: wrong), 1, 4), 3)


def test_only_bytes_that_have_come_begin_the_time_for_retries_anew():
    """A store that answers each request and sends nothing must not be asked for ever."""
    tries, requests = Mock(), Mock()
    requests.tries.return_value = tries
    source = RetriedSource(requests, "k", Mock())
    error = BrokenOffError("planned")
    source.wait_to_ask_again(error, 1.0, had_begun=False)
    tries.restart_clock.assert_not_called()
    source.wait_to_ask_again(error, 2.0, had_begun=True)
    tries.restart_clock.assert_called_once_with()
    assert [call.args for call in requests.wait_to_try_again.call_args_list] == [
        (tries, error, 1.0),
        (tries, error, 2.0),
    ]


def test_a_request_that_needs_no_waiting_is_sent_ahead_and_no_other_one():
    class Ahead(Source):
        def ask_ahead(self, start: int, end: int) -> Piecemeal | None:
            return super().ask(start, end) if start else None

    source = Ahead(lambda left: min(left, 600))
    asked = Mock(wraps=source.ask)
    source.ask = asked  # type: ignore[method-assign]
    assert read(opened(source), 1000) == BODY
    assert source.asked == [(0, 1000), (600, 1000)]
    asked.assert_called_once_with(0, 1000)


class Interruptible(Piecemeal):
    """Can be cancelled, or says that it cannot, and does what it is told to while it is."""

    can = True
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, source: Source, start: int, limit: int) -> None:
        super().__init__(source, start, limit, ends=False)
        self.cancels: list[bool] = []
        self.closed = False

    def descriptor_to_poll(self) -> int | None:
        return 7

    def cancel(self, *, at_once: bool) -> bool:
        self.cancels.append(at_once)
        self.meanwhile()
        return self.can

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("can", [True, False])
def test_a_range_is_closed_by_a_cancel_unless_that_had_to_be_at_once_and_cannot(at_once, can):
    answer = Interruptible(Source(lambda left: left), 0, 1000)
    answer.can = can
    body = Range(answer.source, 0, 1000, nullcontext, answer)
    assert read(body, 10) == BODY[:10]
    assert body.cancel(at_once=at_once) is can
    assert answer.cancels == [at_once]
    if at_once and not can:
        assert read(body, 10) == BODY[10:20]
    else:
        with pytest.raises(InputError, match="closed"):
            read(body, 10)
    body.close()
    # Nothing opens it again, and an answer that was dropped is not cancelled.
    assert not body.cancel(at_once=True)
    assert answer.cancels == [at_once]
    with pytest.raises(InputError, match="closed"):
        read(body, 10)


def test_a_range_tells_what_to_poll_until_its_answer_has_begun():
    answer = Interruptible(Source(lambda left: left), 0, 1000)
    body = Range(answer.source, 0, 1000, nullcontext, answer)
    assert body.descriptor_to_poll() == answer.descriptor_to_poll() == 7
    body.close()
    assert body.descriptor_to_poll() is None
    assert opened(answer.source).descriptor_to_poll() is None


def test_an_answer_is_not_closed_while_it_is_cancelled():
    """Its connection would be given back, and the next request over it be cancelled."""
    answer = Interruptible(Source(lambda left: left), 0, 1000)
    body = Range(answer.source, 0, 1000, nullcontext, answer)
    closing = threading.Thread(target=body.close)
    closed_meanwhile: list[bool] = []

    def close() -> None:
        closing.start()
        closing.join(0.05)
        closed_meanwhile.append(answer.closed)

    answer.meanwhile = close
    assert body.cancel(at_once=False)
    closing.join(30)
    assert (closed_meanwhile, answer.closed) == ([False], True)


def test_a_range_that_is_cancelled_between_two_pieces_reads_no_further():
    class Cancels(Piecemeal):
        def readinto(self, into: memoryview) -> int:
            assert not body.cancel(at_once=False)
            return super().readinto(into[:10])

    source = Source(lambda left: left)
    answer = Cancels(source, 0, 1000, ends=False)
    source.open.append(answer)
    body = Range(source, 0, 1000, nullcontext, answer)
    with pytest.raises(InputError, match="closed"):
        read(body, 100)
    assert 0 < answer.at <= 10
    assert not source.open


def test_a_pinned_objects_state_is_checked_with_each_answer():
    class Versioned(Piecemeal):
        def version(self) -> Any:
            came.append(self.at)
            return versions[len(came) - 1]

    class Versions(Source):
        def ask(self, start: int, end: int) -> Piecemeal:
            self.open.append(Versioned(self, start, min(end - start, 400), ends=True))
            return self.open[0]

    source = Versions(lambda left: left)
    source.random = Mock(randint=lambda *_: 1000)
    came: list[int] = []
    versions: list[Any] = ["a", None, "b"]
    checked: list[Any] = []
    body = opened(source)
    assert not source.is_held
    body.hold(checked.append)
    assert source.is_held
    assert read(body, 1000) == BODY
    assert came == [400, 800, 1000]
    assert checked == ["a", "b"]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_a_library_of_whole_bodies_is_asked_for_the_state_before_and_after(is_held, changes):
    order: list[str] = []

    def fetch(start: int, end: int) -> bytes:
        order.append("fetch")
        return BODY[start:end]

    def look() -> Any:
        order.append("look")
        return len(order) if changes else "the same"

    body, seen = opened(FetchedSource(fetch, look)), []
    if is_held:
        body.hold(seen.append)
    if is_held and changes:
        with pytest.raises(PreconditionFailedError):
            read(body, 1000)
    else:
        assert read(body, 1000) == BODY
    assert order == (["look", "fetch", "look"] if is_held else ["fetch"])
    assert seen == ["the same"] * (is_held and not changes)
    unknown = opened(FetchedSource(fetch))
    unknown.hold(seen.append)
    assert read(unknown, 1000) == BODY
    assert "look" not in order[3:]


def test_chunks_are_read_in_any_steps_and_freed_before_the_next_one_comes():
    refs: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def chunks() -> Iterator[Any]:
        for start in range(0, 1000, 250):
            alive.append(sum(ref() is not None for ref in refs))
            chunk = np.frombuffer(BODY[start : start + 250], np.uint8)
            refs.append(weakref.ref(chunk))
            yield chunk
            del chunk

    answer = ReceivedChunks(chunks())
    came = bytearray()
    while True:
        into = memoryview(bytearray(90))
        count = answer.readinto(into)
        assert not any(into[count:])
        if not count:
            break
        came += into[:count]
    assert came == BODY
    assert alive == [0, 0, 0, 0]
    answer = ReceivedChunks(chunks())
    answer.readinto(memoryview(bytearray(1)))
    assert refs[-1]() is not None
    answer.close()
    assert refs[-1]() is None
    assert answer.readinto(memoryview(bytearray(1))) == 0


def test_a_chunk_is_not_written_while_another_thread_cancels():
    for use in ("readinto", "cancel"):
        answer, into = ReceivedChunks(iter([b"1234"])), bytearray(4)
        calls = {
            "readinto": lambda answer=answer, into=into: answer.readinto(memoryview(into)),
            "cancel": lambda answer=answer: answer.cancel(at_once=False),
        }
        thread = threading.Thread(target=calls[use])
        with answer._copying:
            thread.start()
            thread.join(0.02)
            assert not any(into)
            assert not answer._is_cancelled
        thread.join(30)
        assert bytes(into) == (b"1234" if use == "readinto" else bytes(4))
        assert answer._is_cancelled == (use == "cancel")
    # It stays cancelled.
    assert not answer.cancel(at_once=True)
    with pytest.raises(BrokenOffError):
        answer.readinto(memoryview(into))


READS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k", max_size_bytes=9),
    "open_range": lambda store: read_range(store, "k", 0, 1),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list()),
}


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (Version('"a"'), Version('"a"'), True),
        (Version('"a"'), Version("a"), True),
        (Version('W/"a"'), Version('"a"'), True),
        (Version("W/a"), Version('W/"a"'), True),
        (Version('"a"', "1"), Version('"a"', "2"), True),
        (Version('"a"', "1"), Version('"b"', "1"), False),
        (Version('"a"', "1"), Version(None, "1"), True),
        (Version(None, "1"), Version('"a"', "2"), False),
        (Version(), Version(), True),
    ],
)
def test_states_are_the_same_by_their_etags_or_else_by_their_versions(first, second, is_same):
    assert is_same_state(first, second) is is_same
    assert is_same_state(second, first) is is_same


def test_a_version_is_read_and_sent_as_servers_write_it():
    for e_tag, version, expected in (
        (None, None, Version()),
        ("", "null", Version()),
        ("a", "1", Version('"a"', "1")),
        ('"a"', None, Version('"a"')),
    ):
        assert Version.of(e_tag, version) == expected
    for e_tag, bare, sent in ((None, True, None), ('W/"a"', False, '"a"'), ('"a"', True, "a")):
        assert IfVersion(Version(e_tag), bare).e_tag == sent


def test_whatever_told_the_state_of_an_object_first_no_verb_takes_another():
    inner = open_store(f"memory://{secrets.token_hex(4)}")
    for first, then in itertools.product(READS.values(), repeat=2):
        store = PinnedStore(inner, {})
        inner.put("k", b"x")
        first(store)
        then(store)
        inner.put("k", b"y")
        with pytest.raises(PreconditionFailedError):
            then(store)


@pytest.mark.parametrize("lacking", ["listed_versions", "conditional_update", None])
def test_a_listing_is_held_to_versions_only_where_it_tells_those_of_a_head(lacking):
    class Lacking(WrappedStore):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(**({} if lacking is None else {lacking: False}))

    inner = open_store(f"memory://{secrets.token_hex(4)}")
    store = PinnedStore(Lacking(inner), {})
    for body in (b"x", b"y"):
        inner.put("k", body)
        if lacking is None and body == b"y":
            with pytest.raises(PreconditionFailedError) as caught:
                list(store.list())
            assert (caught.value.object_key, caught.value.url) == ("k", store.url)
        else:
            assert [meta.key for meta in store.list()] == ["k"]
