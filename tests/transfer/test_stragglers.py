"""A range that takes far longer than the others is asked for again, and its answer dropped."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import CorruptDataError, StoreUnavailableError, TransferStalledError
from dcp_objstore.observe.events import Retried
from dcp_objstore.observe.report import counted
from dcp_objstore.stores import open_store
from dcp_objstore.stores.admission.limiter import RETRY_BUDGET, limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.obstore.direct import DirectLane
from dcp_objstore.stores.protocol import RangeReading
from dcp_objstore.stores.ranges import FetchedSource, Range
from dcp_objstore.transfer.download import _Shared, fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.stragglers import StragglerError, Stragglers
from tests.support.listening import heard_channel, of
from tests.support.proxy import Asked, NetworkProxy
from tests.support.slow_sink import SlowSink

# --- which wait is slow


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Waits:
    """The waits of a transfer, of which some have ended after 0.1 s for each MiB.

    Attributes:
        answers: what `taken` has returned. To be asserted after a wait: one that was taken away
            raises StragglerError in place of a failed assertion.
    """

    def __init__(self, requests: int = 100, ended: int = 20) -> None:
        self.clock = Clock()
        self.stragglers: Stragglers[str] = Stragglers(requests, self.clock)
        self.answers: list[str | None] = []
        for number in range(ended):
            with self.stragglers.waiting(f"ended {number}", (1 + number % 4) * MIB):
                self.clock.now += 0.1 * (1 + number % 4)

    def taken(self, give_up: Callable[[str], bool] = lambda key: True) -> str | None:
        self.answers.append(self.stragglers.take(give_up))
        return self.answers[-1]


def test_a_wait_far_longer_than_the_others_is_taken_byte_for_byte():
    waits = Waits()
    with pytest.raises(StragglerError), waits.stragglers.waiting("four", 4 * MIB):
        waits.clock.now += 1.5
        waits.taken()  # nothing: less than 4 times as long as 4 MiB take
        with pytest.raises(StragglerError), waits.stragglers.waiting("one", MIB):
            waits.clock.now += 0.2
            waits.taken()
            waits.taken()  # nothing: 0.2 s are little
            waits.clock.now += 0.6
            waits.taken()
            waits.taken()
    assert waits.answers == [None, "four", None, "one", None]


def test_among_fast_waits_one_is_slow_only_after_three_quarters_of_a_second():
    waits = Waits(ended=0)
    for _ in range(8):
        with waits.stragglers.waiting("fast", MIB):
            pass
    with pytest.raises(StragglerError), waits.stragglers.waiting("a", MIB):
        waits.clock.now = 0.75
        waits.taken()
        waits.clock.now = 0.76
        waits.taken()
    assert waits.answers == [None, "a"]


@pytest.mark.parametrize(
    ("slow", "seconds", "answer"), [(31, 12, "a"), (32, 12, None), (32, 30, "a"), (33, 30, None)]
)
def test_what_waits_usually_take_is_that_of_the_last_64(slow, seconds, answer):
    waits = Waits()
    for number in range(100 + slow):
        with waits.stragglers.waiting("ended", MIB):
            waits.clock.now += 0.1 if number < 100 else 10
    with contextlib.suppress(StragglerError), waits.stragglers.waiting("a", MIB):
        waits.clock.now += seconds
        waits.taken()
    assert waits.answers == [answer]


def test_bytes_that_waited_in_a_buffer_make_no_other_wait_slow():
    """A worker that reads four slow connections in turn waits for a quarter of the pieces only."""
    waits = Waits(ended=0)
    clock, read_at = waits.clock, dict.fromkeys("abcd", 0.0)
    for key in "abcd" * 4:
        with waits.stragglers.waiting(key, 4 * MIB, since=read_at[key]):
            if key == "a":
                clock.now += 2.5
                assert waits.taken() is None
        read_at[key] = clock.now


def test_whatever_a_wait_that_was_taken_ends_with_its_bytes_are_not_used():
    waits = Waits()
    with pytest.raises(StragglerError), waits.stragglers.waiting("a", MIB):
        waits.clock.now += 9
        waits.taken()
        raise StoreUnavailableError("late")
    assert waits.answers == ["a"]


def test_of_the_slow_waits_the_longest_that_can_be_given_up_is_taken():
    waits = Waits()
    with waits.stragglers.waiting("a", MIB):
        waits.clock.now += 5
        with pytest.raises(StragglerError), waits.stragglers.waiting("b", MIB):
            waits.clock.now += 5
            with waits.stragglers.waiting("c", MIB):
                waits.clock.now += 5
                waits.taken(lambda key: False)
                waits.taken(lambda key: key != "a")
    assert waits.answers == [None, "b"]


def test_no_wait_ends_while_it_is_taken_away():
    """Its bytes would be used, and then those of the second answer as well."""
    waits, began, leave = Waits(), threading.Event(), threading.Event()
    outcomes: list[str] = []

    def wait() -> None:
        try:
            with waits.stragglers.waiting("a", MIB):
                began.set()
                leave.wait(30)
            outcomes.append("used")
        except StragglerError:
            outcomes.append("dropped")

    def give_up(key: str) -> bool:
        leave.set()
        worker.join(0.1)
        return True

    worker = threading.Thread(target=wait)
    worker.start()
    assert began.wait(30)
    waits.clock.now += 9
    try:
        assert waits.taken(give_up) == "a"
    finally:
        worker.join(30)
    assert outcomes == ["dropped"]


def test_no_wait_begins_while_the_waits_are_looked_at():
    waits, begun = Waits(), threading.Event()
    began_meanwhile: list[bool] = []

    def wait() -> None:
        with waits.stragglers.waiting("b", MIB):
            begun.set()

    def give_up(key: str) -> bool:
        worker.start()
        began_meanwhile.append(begun.wait(0.1))
        return False

    worker = threading.Thread(target=wait)
    with waits.stragglers.waiting("a", MIB):
        waits.clock.now += 9
        waits.taken(give_up)
    worker.join(30)
    assert (began_meanwhile, begun.is_set()) == ([False], True)
    assert waits.answers == [None]


def test_nothing_is_slow_before_a_few_waits_have_ended():
    for ended, found in ((7, None), (8, "a")):
        waits = Waits(ended=ended)
        with contextlib.suppress(StragglerError), waits.stragglers.waiting("a", MIB):
            waits.clock.now += 100
            waits.taken()
        assert waits.answers == [found]


@pytest.mark.parametrize(("requests", "most"), [(3, 2), (20, 2), (29, 2), (30, 3), (1000, 100)])
def test_a_tenth_of_the_requests_is_asked_for_again_at_most(requests, most):
    waits, taken = Waits(requests), 0
    for _ in range(most + 3):
        with contextlib.suppress(StragglerError), waits.stragglers.waiting("slow", MIB):
            waits.clock.now += 100
            taken += waits.taken() is not None
        for _ in range(64):
            with waits.stragglers.waiting("usual", MIB):
                waits.clock.now += 0.1
    assert taken == most


def test_a_wait_is_taken_away_only_while_no_worker_is_started():
    """Whether there is room for another worker must not change in between."""
    held: list[bool] = []
    waits = SimpleNamespace(
        stragglers=SimpleNamespace(take=lambda _: held.append(shared.staffing.locked()))
    )
    shared: Any = SimpleNamespace(
        progress=Progress(60),
        _limiter=SimpleNamespace(spares_retries=True),
        staffing=threading.Lock(),
        store_waits=waits,
        local_waits=waits,
        _give_up=None,
    )
    _Shared.look(shared)
    assert held == [True, True]


# --- over a transport that cannot be interrupted

STEP = 1000
HELD = 12 * STEP  # where the range begins whose first answer is late
BODY = np.arange(20 * STEP, dtype=np.uint32).astype(np.uint8)
REQUESTS = [RangeRequest(0, start, start + STEP) for start in range(0, len(BODY), STEP)]


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize(
    ("repeats", "memory", "depth", "room", "is_asked"),
    [
        (0, False, 1, True, True),
        (1, False, 1, True, True),
        (2, False, 1, True, False),  # twice is enough
        (0, True, 1, True, True),
        (0, False, 2, True, True),
        (0, False, 1, False, True),
    ],
)
def test_a_slow_request_goes_to_another_worker_if_that_costs_only_a_workers_memory(
    repeats, memory, depth, room, is_asked, cancelled
):
    """Who goes on waiting must not write to the caller's memory, and hold up no other request."""
    asked: list[bool] = []

    class Body:
        def cancel(self, *, at_once: bool) -> bool:
            asked.append(at_once)
            return cancelled

    fetch: Any = SimpleNamespace(
        repeats=repeats, memory=memory or None, body=Body(), is_handed_over=False
    )
    shared: Any = SimpleNamespace(depth=depth, _has_room=room)
    may_go_on = not memory and depth == 1 and room
    is_given_up = is_asked and (cancelled or may_go_on)
    assert _Shared._give_up(shared, fetch) == is_given_up
    assert asked == [not may_go_on] * is_asked
    assert fetch.repeats == repeats + is_given_up
    assert fetch.is_handed_over == (is_given_up and not cancelled)


class Holding:
    """A store whose first answer for one range comes when it is let go, and with other bytes.

    Attributes:
        asked: where the ranges that were asked for begin.
        again: makes the later answers for the range of what is right.
    """

    endpoint_url = None
    reports_throttling = ("open_range",)
    range_reading = RangeReading()

    def __init__(self, url: str) -> None:
        self.url = f"stub://{url}"
        self.asked: list[int] = []
        self.let_go, self.ended, self.closed = (threading.Event() for _ in range(3))
        self.open: set[Range] = set()
        self.again: Callable[[bytes], bytes] = lambda right: right

    def open_range(self, key: str, start: int, end: int) -> Range:
        opened = Range(FetchedSource(self._fetch), start, end, contextlib.nullcontext)
        self.open.add(opened)
        close = opened.close

        def closed() -> None:
            self.open.discard(opened)
            self.closed.set()
            close()

        opened.close = closed  # type: ignore[method-assign]
        return opened

    def _fetch(self, start: int, end: int) -> bytes:
        self.asked.append(start)
        right = BODY[start:end].tobytes()
        if start != HELD:
            return right
        if self.asked.count(start) > 1:
            return self.again(right)
        self.let_go.wait(30)
        self.ended.set()
        return WRONG


WRONG = b"\xff" * STEP


@pytest.fixture
def holding(request: pytest.FixtureRequest) -> Iterator[Holding]:
    store = Holding(request.node.name)
    yield store
    store.let_go.set()
    join_workers()


def join_workers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_objstore-download"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes 0.1 s may be slow."""
    monkeypatch.setattr("dcp_objstore.transfer.stragglers._LEAST_SECONDS", 0.1)


class Load:
    """Loads what the store holds into `arrived`."""

    def __init__(self, store: Holding) -> None:
        self.store: Any = store
        self.arrived = np.zeros_like(BODY)
        self.consumed: list[int] = []

    def consume(self, request: RangeRequest[None], data: Any) -> None:
        came = np.frombuffer(data, np.uint8)
        if not np.array_equal(came, BODY[request.start : request.end]):
            raise CorruptDataError("damaged")
        self.consumed.append(request.start)
        self.arrived[request.start : request.end] = came

    def run(
        self,
        on_each: Callable[[], None] = lambda: None,
        *,
        stall_timeout_seconds: float = 60.0,
        **settings: Any,
    ) -> None:
        config, progress = TransferConfig(download_concurrency=4), Progress(stall_timeout_seconds)
        ranges = fetch_ranges(
            self.store, ["o"], REQUESTS, self.consume, config, progress, **settings
        )
        with contextlib.closing(ranges):
            for _ in ranges:
                on_each()


@pytest.mark.usefixtures("soon")
def test_a_load_ends_without_the_late_answer_and_its_bytes_reach_no_tensor(holding):
    load = Load(holding)
    load.run()
    assert holding.asked.count(HELD) == 2
    assert len(holding.asked) == len(REQUESTS) + 1
    holding.let_go.set()
    assert holding.ended.wait(10)
    join_workers()
    assert sorted(load.consumed) == [request.start for request in REQUESTS]
    assert np.array_equal(load.arrived, BODY)
    assert limiter_of(load.store).in_flight == 0
    assert not holding.open


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("local", [(), (0,)])
def test_a_late_answer_that_comes_before_the_second_one_ends_no_load(holding, local):
    def second(right: bytes) -> bytes:
        holding.closed.clear()
        holding.let_go.set()
        assert holding.closed.wait(10)
        return right

    holding.again = second
    load = Load(holding)
    load.run(local=local)
    assert holding.asked.count(HELD) == 2
    assert sorted(load.consumed) == [request.start for request in REQUESTS]
    assert np.array_equal(load.arrived, BODY)


@pytest.mark.usefixtures("soon")
def test_a_worker_that_is_left_waiting_keeps_no_other_destination_alive(holding):
    def run() -> list[weakref.ref[Load]]:
        requests = [
            RangeRequest(0, one.start, one.end, [Span(0, one.start, one.end, Load(holding))])
            for one in REQUESTS
        ]
        config, progress = TransferConfig(download_concurrency=4), Progress(60.0)
        ranges = fetch_ranges(holding, ["o"], requests, lambda *_: False, config, progress)
        with contextlib.closing(ranges):
            assert len(list(ranges)) == len(requests)
        return [weakref.ref(one.spans[0].tag) for one in requests]

    kept = run()
    for thread in threading.enumerate():
        if thread.name.startswith("dcp_objstore-download"):
            thread.join(0.5)
    assert not holding.ended.is_set()
    assert [number for number, one in enumerate(kept) if one() is not None] in ([], [HELD // STEP])


@pytest.mark.usefixtures("soon")
def test_a_request_is_asked_for_again_twice_at_most(holding, monkeypatch):
    monkeypatch.setattr("dcp_objstore.transfer.stragglers._REPEATED_SHARE", 1)
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter._REFUND", 0.0)

    def late(right: bytes) -> bytes:
        holding.let_go.wait(30)
        return right

    holding.again = late
    channel, heard = heard_channel()
    with channel.current(), pytest.raises(TransferStalledError):
        Load(holding).run(stall_timeout_seconds=3.0)
    channel.flush()
    assert holding.asked.count(HELD) == 3
    assert [one.attempt for one in of(Retried, heard)] == [2, 3]
    assert limiter_of(Load(holding).store)._budget == RETRY_BUDGET - 2


@pytest.mark.usefixtures("soon")
def test_the_error_of_the_second_answer_is_raised(holding):
    def fail(right: bytes) -> bytes:
        raise StoreUnavailableError("the second one")

    holding.again = fail
    with pytest.raises(StoreUnavailableError, match="the second one"):
        Load(holding).run()
    assert limiter_of(Load(holding).store).in_flight == 0


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("stays", [False, True])
def test_a_second_answer_that_is_damaged_is_fetched_once_more_before_it_counts(holding, stays):
    holding.again = lambda right: WRONG if stays or holding.asked.count(HELD) == 2 else right
    load = Load(holding)
    with pytest.raises(CorruptDataError) if stays else contextlib.nullcontext():
        load.run()
    assert holding.asked.count(HELD) == 3
    assert (HELD in load.consumed) is not stays


@pytest.mark.usefixtures("soon")
def test_a_load_can_be_left_while_a_range_is_asked_for_again(holding):
    asked, go_on = threading.Event(), threading.Event()

    def late(right: bytes) -> bytes:
        asked.set()
        go_on.wait(30)
        return right

    def leave() -> None:
        if len(load.consumed) == len(REQUESTS) - 1:
            holding.let_go.set()
            raise KeyboardInterrupt

    holding.again = late
    load = Load(holding)
    with pytest.raises(KeyboardInterrupt):
        load.run(leave)
    go_on.set()
    join_workers()
    assert HELD not in load.consumed


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("why", ["throttled", "no budget", "other memory", "no idle worker"])
def test_a_request_is_not_asked_for_again(holding, why, monkeypatch):
    load, settings = Load(holding), {}
    limiter = limiter_of(load.store)
    if why == "throttled":
        monkeypatch.setattr(Window, "is_throttled", True)
    elif why == "no budget":
        while limiter.spares_retries:
            limiter.spend_retry()
        monkeypatch.setattr("dcp_objstore.stores.admission.limiter._REFUND", 0.0)
    elif why == "other memory":  # a worker that cannot be interrupted would go on to write there
        memory = memoryview(bytearray(len(BODY)))
        settings["admit"] = lambda request, _: memory[request.start : request.end]
    elif why == "no idle worker":
        monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)
    with pytest.raises(TransferStalledError):
        load.run(stall_timeout_seconds=1.0, **settings)
    assert holding.asked.count(HELD) == 1


def test_a_usual_load_asks_for_nothing_twice():
    holding = Holding("usual")
    holding.let_go.set()
    holding.asked.append(HELD)
    Load(holding).run()
    assert sorted(holding.asked[1:]) == [request.start for request in REQUESTS]


# --- over real transports

MIB_EACH, COUNT = 4, 12


def is_range(asked: Asked) -> bool:
    return asked.method == "GET" and asked.name.endswith(".distcp")


@pytest.mark.parametrize(
    ("transport", "is_cancelled"),
    [("lane", True), ("stream", False), ("boto3", False), ("fsspec", False)],
)
@pytest.mark.usefixtures("soon")
def test_a_straggler_is_asked_for_again_over_each_transport(
    transport, is_cancelled, monkeypatch, caplog
):
    # On a busy machine others may be slow, too.
    monkeypatch.setattr("dcp_objstore.transfer.stragglers._REPEATED_SHARE", 1)
    if transport == "stream":
        monkeypatch.setattr(DirectLane, "is_used", False)
    given = {"transport": transport} if transport in ("boto3", "fsspec") else {}
    config = dos.TransferConfig(request_size_bytes=4 * MIB, **given)
    saved = {str(n): torch.randn(MIB_EACH * MIB // 4) for n in range(COUNT)}
    heard: list[dos.observe.events.AnyEvent] = []
    with SlowSink(keep=True) as sink, NetworkProxy(sink.storage_options) as proxy:
        options = proxy.storage_options
        dos.save(saved, "s3://bucket/step-1", storage_options=options, progress=False)
        numbers = itertools.count(1)
        held = proxy.hold(
            lambda asked: is_range(asked) and next(numbers) == 5, side="answer", after_bytes=MIB
        )
        found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        with caplog.at_level(logging.INFO, logger="dcp_objstore"):
            report = dos.load(
                found,
                "s3://bucket/step-1",
                storage_options=options,
                config=config,
                on_event=heard.append,
            )
        assert held.reached
        if is_cancelled:
            held.wait_left()
        held.release()
        join_workers()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert report.slow_ranges >= 1
    assert sum(map(is_range, proxy.asked)) == report.requests + report.slow_ranges
    told = [one for one in heard if isinstance(one, dos.observe.events.Retried)]
    assert [one.what for one in told] == ["slow range"] * report.slow_ranges
    (loaded,) = (one for one in heard if isinstance(one, dos.observe.events.Loaded))
    assert loaded.report == report
    assert f"{counted(report.slow_ranges, 'slow range')} asked for again" in caplog.text


@pytest.mark.usefixtures("soon")
def test_a_straggler_is_asked_for_again_into_the_memory_that_it_was_given():
    """As ranks that hand ranges to one another and devices have it."""
    body = np.random.default_rng(0).integers(0, 256, 12 * MIB, dtype=np.uint8)
    memory, numbers = np.zeros_like(body), itertools.count(1)
    requests = [RangeRequest[None](0, start, start + MIB) for start in range(0, 12 * MIB, MIB)]
    with SlowSink(keep=True) as sink, NetworkProxy(sink.storage_options) as proxy:
        store = open_store("s3://bucket/step-1", proxy.storage_options)
        store.put("o", body)
        held = proxy.hold(
            lambda asked: asked.method == "GET" and next(numbers) == 3,
            side="answer",
            after_bytes=MIB // 2,
        )
        ranges = fetch_ranges(
            store,
            ["o"],
            requests,
            lambda *_: None,
            TransferConfig(download_concurrency=4),
            Progress(30),
            admit=lambda request, _: memoryview(memory)[request.start : request.end],
        )
        assert len(list(ranges)) == len(requests)
        held.wait_left()
    assert np.array_equal(memory, body)
