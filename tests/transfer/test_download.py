"""Downloads: what is fetched arrives, within the memory allowed; what fails ends, and is let go."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typing_extensions import Buffer

from dcp_objstore.config import AUTO_MOST, MIB, TransferConfig
from dcp_objstore.errors import (
    CorruptDataError,
    InputError,
    StoreUnavailableError,
    TransferStalledError,
)
from dcp_objstore.observe.events import RangeRead, Retried
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.protocol import ObjectStore, RangeBody, RangeReading
from dcp_objstore.stores.wrappers import WrappedStore
from dcp_objstore.threads import spawn
from dcp_objstore.transfer import download as module
from dcp_objstore.transfer.download import _Gate, fetch_ranges
from dcp_objstore.transfer.memory import new_memory
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, plan_requests
from dcp_objstore.transfer.stragglers import Stragglers
from tests.support.listening import heard_channel, of
from tests.support.stub_stores import (
    Stub,
    earlier_downloads,  # noqa: F401  a fixture
    join_downloads,
    memory_store,
    requests_of,
)
from tests.support.wrapped_stores import ChangingStore, RecordingStore

BLOCK = 4  # in this file
Request = RangeRequest[None]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.transfer.download.BLOCK_SIZE_BYTES", BLOCK)


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)


def use_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("dcp_objstore.transfer.download.processors", lambda: count)


def blocks_of(size_bytes: int, request_size_bytes: int) -> list[Request]:
    """Requests for all of an object, in whole blocks."""
    places = range(0, size_bytes, BLOCK)
    wanted = [Span(0, at, min(size_bytes, at + BLOCK), None) for at in places]
    return [*plan_requests(wanted, request_size_bytes=request_size_bytes)]


def load(
    store: Any,
    requests: Sequence[Request],
    consume: Callable[[Request, Buffer], Any] = lambda *_: None,
    progress: Progress | None = None,
    config: TransferConfig | None = None,
    on_each: Callable[[], object] = lambda: None,
    **settings: Any,
) -> list[Request]:
    fetched = fetch_ranges(
        store,
        ["o", "o"],
        requests,
        consume,
        config or TransferConfig(),
        progress or Progress(60),
        **settings,
    )
    found = []
    with contextlib.closing(fetched) as arriving:
        for request in arriving:
            on_each()
            found += [] if request is None else [request]
    return found


class Ahead(WrappedStore):
    """Its ranges can be sent ahead; it notes which are opened, read and open."""

    range_reading = RangeReading(ahead=True)

    def __init__(self, body: bytes) -> None:
        super().__init__(memory_store(body))
        self.seen: list[tuple[str, int]] = []
        self.read_into: list[memoryview] = []
        self.open: set[RangeBody] = set()

    def open_range(self, key: str, start: int, end: int) -> RangeBody:
        self.seen.append(("open", start))
        body = super().open_range(key, start, end)
        fill, close = body.readinto, body.close

        def readinto(into: memoryview) -> None:
            self.seen.append(("read", start))
            self.read_into.append(into)
            fill(into)

        def closed() -> None:
            self.open.discard(body)
            close()

        body.readinto, body.close = readinto, closed
        self.open.add(body)
        return body


# --- how many workers read, and what each has under way


@pytest.mark.parametrize(
    ("cores", "takes_gil", "depths"),
    [
        (1, False, (8, 8, 2)),
        (2, False, (4, 8, 2)),
        (3, False, (2, 8, 2)),
        (64, False, (2, 8, 2)),
        (2, True, (8, 8, 2)),
        (4, True, (4, 8, 2)),
        (64, True, (2, 8, 2)),
    ],
)
def test_a_worker_has_few_requests_under_way_if_each_worker_has_a_processor(
    cores, takes_gil, depths, one_worker, monkeypatch
):
    use_processors(monkeypatch, cores)
    for ahead in (True, False):
        for concurrency, depth in zip((8, 64, 1), depths, strict=True):
            store = Ahead(bytes(100))
            store.range_reading = RangeReading(ahead=ahead, takes_gil=takes_gil)
            load(
                store, requests_of(100, 5), config=TransferConfig(download_concurrency=concurrency)
            )
            opened = [*itertools.takewhile(lambda seen: seen[0] == "open", store.seen)]
            assert len(opened) == (depth if ahead else 1)


@pytest.mark.parametrize("local", [(), (1,)])
def test_a_worker_reads_its_requests_in_turn_a_piece_at_a_time(local, one_worker, monkeypatch):
    use_processors(monkeypatch, 2)
    made = Mock(wraps=new_memory)
    monkeypatch.setattr("dcp_objstore.transfer.download.new_memory", made)
    data = bytes(range(64))
    store = Ahead(data)
    requests = blocks_of(64, 8)
    requests[1].object_number = 1
    came = bytearray(len(data))

    def consume(piece: Request, body: Buffer) -> None:
        came[piece.start : piece.end] = body

    config = TransferConfig(download_concurrency=8)
    assert load(store, requests, consume, config=config, local=local) == requests
    assert came == data
    made.assert_called_once_with(4)  # it is kept from piece to piece
    starts = [request.start for request in requests]
    turns = [(what, start) for what in ("open", "read") for start in starts[:4]]
    assert store.seen[: len(turns)] == turns
    assert store.seen.count(("open", starts[-1])) == 1


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_mapped_also_where_the_system_or_its_kernel_has_no_huge_pages(known, monkeypatch):
    """Memory from malloc would stay in each thread's arena: 64 MiB of every rank on 2 cores."""
    if known:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = new_memory(5000)
    memory[4999] = 7
    assert type(memory) is mmap.mmap
    assert bytes(memory) == bytes(4999) + b"\x07"


def test_a_worker_that_has_nothing_under_way_waits_for_memory():
    store = Ahead(bytes(40))
    admission: dict[str, Any] = {"admit": lambda *_: None, "may_begin": lambda _: False}
    config = TransferConfig(download_concurrency=1)
    assert len(load(store, requests_of(40, 4), config=config, **admission)) == 10
    assert [what for what, _ in store.seen] == ["open", "read"] * 10


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_what_must_wait_for_memory_is_begun_when_nothing_before_it_is_unread(
    slots, one_worker, monkeypatch
):
    """Otherwise a thread would wait for memory that only it can free."""
    use_processors(monkeypatch, 1)
    store = Ahead(bytes(range(40)))
    requests = blocks_of(40, 4)
    in_slots = requests[:7]
    free, filled = [memoryview(bytearray(4)) for _ in range(slots)], {}

    def admit(request: Request, progress: Progress) -> memoryview | None:
        if request not in in_slots:
            return None
        assert free, "it waits for ever"
        filled[request.start] = free.pop()
        return filled[request.start]

    def consume(request: Request, body: Buffer) -> None:
        assert bytes(body) == bytes(range(request.start, request.end))
        if request in in_slots:
            free.append(filled.pop(request.start))
            assert memoryview(body).obj is free[-1].obj

    found = load(
        store,
        requests,
        consume,
        config=TransferConfig(download_concurrency=8),
        admit=admit,
        may_begin=lambda request: request not in in_slots or bool(free),
        in_place=lambda request: pytest.fail("it has memory") if request in in_slots else None,
    )
    assert len(found) == len(requests)
    opened = list(itertools.takewhile(lambda seen: seen[0] == "open", store.seen))
    assert len(opened) == slots


def test_what_one_thread_has_under_way_never_shares_a_row_of_the_trace(one_worker):
    ends = [0, 24, *range(28, 49, 4)]  # the first one takes six turns
    requests = []
    for start, end in pairwise(ends):
        spans = [Span(0, at, at + BLOCK, None) for at in range(start, end, BLOCK)]
        requests.append(RangeRequest(0, start, end, spans))
    channel, heard = heard_channel()
    progress = Progress(60, channel)
    load(
        Ahead(bytes(48)), requests, progress=progress, config=TransferConfig(download_concurrency=8)
    )
    channel.flush()
    rows: dict[int, list[tuple[int, int]]] = {}
    for read in of(RangeRead, heard):
        rows.setdefault(read.worker, []).append((read.start_ns, read.end_ns))
    assert len(rows) > 1
    told = [(read.offset, read.offset + read.size_bytes) for read in of(RangeRead, heard)]
    assert sorted(told) == list(pairwise(ends))
    assert progress.moved_bytes == 48
    for times in rows.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(times)))


class Meeting(RecordingStore):
    """Its first reads of `threads` threads wait for one another.

    Attributes:
        names: the threads that have read.
    """

    range_reading = RangeReading()

    def __init__(self, inner: ObjectStore, threads: int) -> None:
        super().__init__(inner)
        self.names: set[str] = set()
        self.most = threading.Barrier(threads)

    @contextlib.contextmanager
    def _around(self, request):
        name = threading.current_thread().name
        if name not in self.names:
            self.names.add(name)
            self.most.wait(10)
        yield


@pytest.mark.parametrize(
    ("window", "sizes", "local", "settings", "threads"),
    [
        (Window(8.0), [1] * 64, (), {}, 8),
        (Window(64.0), [1] * 80, (), {}, AUTO_MOST),
        # A thread for each request is enough.
        (Window(8.0), [1] * 3, (), {}, 3),
        # The window is as narrow as the largest request makes it: 2 in half a second at 8 MiB/s.
        (Window(8.0), [2 * MIB, *[1] * 64], (), {"request_timeout_seconds": 2.0}, 2),
        # Each has two requests under way.
        (Window(8.0), [1] * 64, (), {"ahead": True}, 4),
        (Window(7.0), [1] * 64, (), {"ahead": True, "download_concurrency": 7}, 4),
        # There is memory for five.
        (Window(64.0), [1] * 64, (), {"memory_bytes": 3 * MIB // 2}, 5),
        # As many read copies on this machine as it has processors, however narrow the window is.
        (Window(1.0), [2 * MIB, *[1] * 8], (1,), {"processors": 3}, 3),
        (Window(8.0), [MIB, *[1] * 8], (0,), {"request_timeout_seconds": 1.0}, 8),
        (Window(64.0), [1] * 64, (0, 1), {"processors": 3}, 3),
        (Window(64.0), [1] * 2, (0, 1), {"processors": 3}, 2),
        (Window(64.0), [1] * 64, (0, 1), {"processors": 3, "download_concurrency": 2}, 2),
        # A copy is there at once: none is asked for ahead.
        (
            *(Window(64.0), [1] * 64, (0, 1)),
            {"processors": 3, "download_concurrency": 4, "ahead": True},
            3,
        ),
    ],
)
def test_as_many_threads_read_as_requests_may_be_in_flight(
    window, sizes, local, settings, threads, monkeypatch
):
    """The first request reads the object 0, all others the object 1."""
    use_processors(monkeypatch, settings.pop("processors", 64))
    ends = list(itertools.accumulate(sizes))
    inner = memory_store(bytes(ends[-1]))
    limiter_of(inner).window = window
    store = Meeting(inner, threads)
    store.range_reading = RangeReading(
        ahead=settings.pop("ahead", False), memory_bytes=settings.pop("memory_bytes", 0)
    )
    requests = [
        RangeRequest[None](min(number, 1), end - size, end)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    config = TransferConfig(**settings)
    found = load(store, requests, config=config, local=local, budget_bytes=8 * MIB)
    assert len(found) == len(requests)
    assert len(store.names) == threads


def test_more_threads_read_once_the_window_is_wider_each_started_by_one_thread_alone(monkeypatch):
    started: list[tuple[str, bool]] = []

    def noted(run: Any, name: str) -> Any:
        started.append((name, run.func.__self__.shared.staffing.locked()))
        return spawn(run, name)

    monkeypatch.setattr("dcp_objstore.transfer.download.spawn", noted)
    store = memory_store(bytes(100))
    limiter_of(store).window = Window(1.0)
    assert len(load(store, requests_of(100, 1))) == 100
    assert started == [(f"download-{number}", True) for number in range(8)]


def test_where_no_more_threads_can_be_started_a_load_ends_and_gives_back_its_places(monkeypatch):
    store, held = Stub(), threading.Event()

    def few(function: Callable[[], object], name: str) -> Any:
        if name.endswith("2"):
            raise RuntimeError("can't start new thread")
        return spawn(function, name)

    monkeypatch.setattr("dcp_objstore.transfer.download.spawn", few)
    consumed: list[Request] = []
    with pytest.raises(RuntimeError, match="thread"):
        load(
            store,
            requests_of(800, 100),
            lambda request, _: consumed.append(request),
            admit=lambda *_: held.wait(10) and None,  # until the load has ended
        )
    held.set()
    join_downloads()
    assert not consumed
    assert limiter_of(store).in_flight == 0


@pytest.mark.parametrize("local", [(), (0,)])
def test_a_load_tells_the_window_what_the_line_moves_but_not_this_machine(local):
    store = memory_store(bytes(40))
    limiter = limiter_of(store)
    while limiter.spend_retry():
        pass
    load(store, requests_of(40, 4), config=TransferConfig(download_concurrency=1), local=local)
    assert limiter.window.round.size_bytes == (0 if local else 40)
    assert limiter.spend_retry() is not bool(local), "answers refund retries"


# --- while it goes on


def test_each_request_that_has_ended_is_an_occasion_to_look_for_a_slow_one():
    """Where many end, the calling thread never waits for long."""
    progress = Progress(60)
    progress.check_stalled = Mock()
    load(memory_store(bytes(100)), requests_of(100, 1), progress=progress)
    assert progress.check_stalled.call_count >= 100


def test_a_piece_takes_the_time_since_the_one_before_was_read(monkeypatch):
    """Its bytes came meanwhile into a buffer; what it waits for itself says too little."""
    since: list[tuple[float, float]] = []
    consumed: list[float] = []

    @contextlib.contextmanager
    def waiting(stragglers, fetch, size_bytes, **given):
        since.append((given["since"], time.monotonic()))
        yield

    monkeypatch.setattr(Stragglers, "waiting", waiting)
    began_at = time.monotonic()
    load(memory_store(bytes(12)), blocks_of(12, 12), lambda *_: consumed.append(time.monotonic()))
    assert began_at <= since[0][0] <= since[0][1]
    for (read_at, _), was_consumed_at, (at, now) in zip(since, consumed, since[1:], strict=False):
        assert read_at <= was_consumed_at <= at <= now


def test_a_large_body_that_arrives_piece_by_piece_is_no_stall():
    now = 0.0

    def slow(key: str, at: int, came: memoryview) -> None:
        nonlocal now
        now += 0.9
        progress.check_stalled("o")

    progress = Progress(1.0, clock=lambda: now)
    store = ChangingStore(memory_store(bytes(24)), slow)
    requests = blocks_of(24, 24)
    assert load(store, requests, progress=progress) == requests
    assert now > 3


@pytest.mark.parametrize("ahead", [True, False])
def test_what_needs_no_look_is_received_where_it_belongs_a_block_at_a_time(ahead):
    """But not from a store whose transport could still write there after a failure."""
    body = bytes(range(22))
    store = Ahead(body)
    store.range_reading = RangeReading(ahead=ahead)
    arrived, consumed = bytearray(22), []

    def in_place(request: Request) -> memoryview | None:
        return memoryview(arrived)[request.start : request.end] if request.start else None

    def consume(request: Request, data: Buffer) -> None:
        consumed.append(request.end)
        arrived[request.start : request.end] = data

    requests = blocks_of(22, 8)
    found = load(store, requests, consume, in_place=in_place)
    assert sorted(request.start for request in found) == [0, 8, 16]
    assert arrived == body
    assert max(map(len, store.read_into)) == BLOCK
    assert (max(consumed) == requests[0].end) is ahead
    in_place_reads = sum(memory.obj is arrived for memory in store.read_into)
    assert len(consumed) + in_place_reads == len(store.read_into)


def test_a_worker_reads_the_answer_that_has_begun_and_waits_for_no_other(monkeypatch):
    """A server that serves one request at a time begins the others only once that was read.

    This one serves the last request first. To read another one then is to wait for ever.
    """
    use_processors(monkeypatch, 1)
    waiting: dict[int, int] = {}
    read: list[int] = []

    def serve_next() -> None:
        if waiting:
            os.write(waiting.pop(max(waiting)), b"x")

    class OneAtATime(Stub):
        range_reading = RangeReading(ahead=True)

        def open_range(self, key: str, start: int, end: int) -> Any:
            begun, waiting[start] = os.pipe()

            def readinto(into: memoryview) -> None:
                assert select.select([begun], [], [], 0)[0], "it would wait for ever"
                into[:] = bytes([start]) * len(into)
                read.append(start)
                serve_next()

            if start == 20:
                serve_next()
            return Mock(descriptor_to_poll=lambda: begun, readinto=readinto)

    consumed: dict[int, bytes] = {}
    load(
        OneAtATime(),
        requests_of(30, 10),
        lambda request, data: consumed.setdefault(request.start, bytes(data)) and None,
        config=TransferConfig(download_concurrency=3),
    )
    assert read == [20, 10, 0]
    assert consumed == {start: bytes([start]) * 10 for start in (0, 10, 20)}


@pytest.mark.parametrize(
    ("needs_no_wait", "order", "first_wait_ms"), [(None, [0, 10, 20], 20), (10, [10, 20, 0], 0)]
)
def test_where_no_answer_begins_only_the_first_is_waited_for(
    monkeypatch, needs_no_wait, order, first_wait_ms
):
    use_processors(monkeypatch, 1)
    monkeypatch.setattr(module, "STEP_SECONDS", 0.02)
    monkeypatch.setattr(module, "_ANY_ANSWER_SECONDS", 0.05)
    read, waits_ms, silent = list[int](), list[float](), os.pipe()[0]

    class Silent(Stub):
        range_reading = RangeReading(ahead=True)

        def open_range(self, key: str, start: int, end: int) -> Any:
            awaited = None if start == needs_no_wait else silent
            return Mock(descriptor_to_poll=lambda: awaited, readinto=lambda _: read.append(start))

    class Noted:
        def __init__(self) -> None:
            self._inner = select.poll()
            self.register = self._inner.register

        def poll(self, wait_ms: float) -> list[tuple[int, int]]:
            waits_ms.append(wait_ms)
            return self._inner.poll(wait_ms)

    monkeypatch.setattr(module, "select", SimpleNamespace(poll=Noted, POLLIN=select.POLLIN))
    load(Silent(), requests_of(30, 10), config=TransferConfig(download_concurrency=3))
    assert read == order
    assert waits_ms[0] == first_wait_ms
    assert set(waits_ms[1:]) == {20}, "in steps, and not in a circle"
    assert len(waits_ms) < 12


# --- damage


@pytest.mark.parametrize(("local", "most_tries"), [((), 2), ((0,), 3)])
def test_a_damaged_copy_on_this_machine_is_followed_by_two_answers_of_the_store(local, most_tries):
    store = Ahead(bytes(100))
    consumed = 0

    def damaged(*_: Any) -> None:
        nonlocal consumed
        consumed += 1
        assert len(store.open) == 1  # the answer before is closed
        if consumed <= bad:
            raise CorruptDataError(f"damaged {consumed}")

    for bad in (most_tries - 1, most_tries):
        consumed = 0
        channel, heard = heard_channel()
        raises = pytest.raises(CorruptDataError, match=f"damaged {bad}")
        with channel.current(), raises if bad == most_tries else contextlib.nullcontext():
            load(store, requests_of(100, 100), damaged, local=local)
        channel.flush()
        assert consumed == most_tries
        told = [(one.attempt, one.error, one.what, one.object_key) for one in of(Retried, heard)]
        assert told == [
            (number + 1, f"CorruptDataError: damaged {number}", "range", "o")
            for number in range(1, most_tries)
        ]
        assert not store.open


def test_each_damaged_block_of_a_body_is_fetched_once_more_before_it_counts():
    body = bytes(range(14))
    store = RecordingStore(memory_store(body))
    seen: list[tuple[int, int]] = []

    def each_is_bad_once(request: Request, data: Buffer) -> None:
        assert bytes(data) == body[request.start : request.end]
        seen.append((request.start, request.end))
        if seen.count(seen[-1]) == 1:
            raise CorruptDataError("damaged")

    load(store, blocks_of(14, 16), each_is_bad_once)
    assert seen == [(0, 4), (0, 4), (4, 8), (4, 8), (8, 12), (8, 12), (12, 14), (12, 14)]
    asked = [(one.start, one.end) for one in store.requests if one.verb == "open_range"]
    assert asked == [(0, 14), (0, 14), (4, 14), (8, 14), (12, 14)]


# --- failures


def test_a_stalled_download_raises_instead_of_waiting_for_ever():
    let_go = threading.Event()

    class Silent(Stub):
        def fetch(self, start: int, end: int) -> bytes:
            let_go.wait(30)
            return bytes(end - start)

    with pytest.raises(TransferStalledError):
        load(Silent(), requests_of(10, 5), progress=Progress(0.1))
    let_go.set()


def test_the_first_error_of_a_download_ends_all_workers():
    calls: list[int] = []

    class Failing(Stub):
        def fetch(self, start: int, end: int) -> bytes:
            calls.append(start)
            time.sleep(0.01)
            raise StoreUnavailableError("down")

    with pytest.raises(StoreUnavailableError):
        load(Failing(), requests_of(1000, 1), config=TransferConfig(download_concurrency=8))
    join_downloads()
    assert len(calls) <= 16


def test_what_was_asked_ahead_is_let_go_when_a_load_fails():
    store = Ahead(bytes(24))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load(store, blocks_of(24, 4), fail, config=TransferConfig(download_concurrency=2))
    assert len(store.seen) > 2
    assert not store.open
    assert limiter_of(store).in_flight == 0
    assert limiter_of(store).window.round.answers == 0


def leave() -> None:
    raise ValueError("the caller's")


def test_a_download_that_fails_is_raised_once_no_worker_writes_nor_will():
    """What was loaded into belongs to the caller again."""
    writing, raised = threading.Barrier(3), threading.Event()
    consumed: list[tuple[int, bool]] = []

    class LastIsSlow(Stub):
        def fetch(self, start: int, end: int) -> bytes:
            assert start < 15 or raised.wait(30)
            return bytes(end - start)

    def consume(request: Request, _: Buffer) -> None:
        writing.wait(30)
        if not request.start:
            raise ZeroDivisionError
        consumed.append((request.start, raised.wait(0.02 * request.start)))  # one after the other

    with pytest.raises(ZeroDivisionError):
        load(LastIsSlow(), requests_of(20, 5), consume)
    raised.set()
    join_downloads()
    assert consumed == [(5, False), (10, False)]


def test_no_worker_reaches_the_callers_memory_while_the_gate_closes():
    gate, entered = _Gate(Progress(60)), threading.Event()
    entered_meanwhile: list[bool] = []

    def enter() -> None:
        with gate.writing():
            entered.set()

    def cancel(*, at_once: bool) -> bool:
        worker.start()
        entered_meanwhile.append(entered.wait(0.1))
        return False

    worker = threading.Thread(target=enter)
    with gate.writing(Mock(cancel=cancel)):
        gate.close()
    worker.join(30)
    assert (entered_meanwhile, entered.is_set()) == ([False], True)


@pytest.mark.parametrize("comes", ["before", "after", "never"])
def test_nothing_is_received_in_place_any_more_once_a_download_has_failed(comes):
    """What is under way is ended, and waited for; what begins later does not begin.

    What a silent server keeps busy is not waited for: its bytes would not be written.
    """
    raised, receiving = threading.Event(), threading.Barrier(3)
    written_after: list[bool] = []

    class Opens(Stub):
        range_reading = RangeReading(ahead=True)

        def open_range(self, key: str, start: int, end: int) -> Any:
            assert not start or comes != "after" or raised.wait(10)
            cancelled = raised if comes == "never" else threading.Event()

            def readinto(into: memoryview) -> None:
                if comes != "after":
                    receiving.wait(10)
                if start:
                    assert cancelled.wait(10), "it would go on receiving"
                    time.sleep(0.002 * start)  # one ends after the other
                    written_after.append(raised.is_set())
                    raise InputError("the range is closed")

            def cancel(*, at_once: bool) -> bool:
                assert not at_once  # else a transport that cannot be interrupted would ask again
                if comes != "never":
                    cancelled.set()
                return comes != "never"

            return Mock(descriptor_to_poll=lambda: None, readinto=readinto, cancel=cancel)

    memory = memoryview(bytearray(15))
    with pytest.raises(ValueError, match="the caller's"):
        load(
            Opens(),
            requests_of(15, 5),
            lambda *_: pytest.fail("consumed"),
            on_each=leave,
            admit=lambda *_: None,  # so each worker has one under way
            in_place=lambda request: memory[request.start : request.end],
        )
    raised.set()
    join_downloads()
    assert written_after == {"before": [False] * 2, "after": [], "never": [True] * 2}[comes]
