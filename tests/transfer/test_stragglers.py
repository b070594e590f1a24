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
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import CorruptDataError, StoreUnavailableError, TransferStalledError
from dcp_objstore.observe.events import Loaded, Retried
from dcp_objstore.observe.report import counted
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.obstore.direct import DirectLane
from dcp_objstore.stores.ranges import Range
from dcp_objstore.transfer.download import _Shared, fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span
from dcp_objstore.transfer.stragglers import StragglerError, Stragglers
from tests.support.campaign import cases
from tests.support.listening import Heard, heard_channel, of
from tests.support.proxy import Asked, NetworkProxy
from tests.support.slow_sink import SlowSink
from tests.support.stub_stores import (
    Stub,
    earlier_downloads,  # noqa: F401  a fixture
    join_downloads,
    memory_store,
    requests_of,
)

# --- which wait is slow


class Waits:
    """The waits of a transfer, of which some have ended after 0.1 s for each MiB.

    Attributes:
        answers: what `taken` has returned. To be asserted after a wait: one that was taken away
            raises StragglerError in place of a failed assertion.
    """

    def __init__(self, requests: int = 100, ended: int = 20) -> None:
        self.now = 0.0
        self.stragglers: Stragglers[str] = Stragglers(requests, lambda: self.now)
        self.answers: list[str | None] = []
        for number in range(ended):
            with self.waiting(f"ended {number}", 1 + number % 4):
                self.now += 0.1 * (1 + number % 4)

    def waiting(self, key: str, mib: int = 1) -> contextlib.AbstractContextManager[None]:
        return self.stragglers.waiting(key, mib * MIB)

    def end_after(self, seconds: float, key: str = "a") -> str | None:
        """Return whether a wait is taken away at this age."""
        with contextlib.suppress(StragglerError), self.waiting(key):
            self.now += seconds
            self.taken()
        return self.answers[-1]

    def taken(self, give_up: Callable[[str], bool] = lambda key: True) -> str | None:
        self.answers.append(self.stragglers.take(give_up))
        return self.answers[-1]


def test_a_wait_far_longer_than_the_others_is_taken_byte_for_byte():
    waits = Waits()
    with pytest.raises(StragglerError), waits.waiting("four", 4):
        waits.now += 1.5
        waits.taken()  # nothing: less than 4 times as long as 4 MiB take
        with pytest.raises(StragglerError), waits.waiting("one"):
            waits.now += 0.2
            waits.taken()
            waits.taken()  # nothing: 0.2 s are little
            waits.now += 0.6
            waits.taken()
            waits.taken()
        raise StoreUnavailableError("late")  # whatever it ends with, its bytes are not used
    assert waits.answers == [None, "four", None, "one", None]


@pytest.mark.parametrize(
    ("usual", "seconds", "answer"),
    [
        # Among fast waits, one is slow only after three quarters of a second.
        ([0] * 8, 0.75, None),
        ([0] * 8, 0.76, "a"),
        # Nothing is slow before eight waits have ended.
        ([0.1] * 7, 100, None),
        ([0.1] * 8, 100, "a"),
        # The last 64 say what is usual.
        ([0.1] * 100 + [10] * 31, 12, "a"),
        ([0.1] * 100 + [10] * 32, 12, None),
        ([0.1] * 100 + [10] * 32, 30, "a"),
        ([0.1] * 100 + [10] * 33, 30, None),
    ],
)
def test_a_wait_is_slow_compared_with_those_that_have_ended_lately(usual, seconds, answer):
    waits = Waits(ended=0)
    for took in usual:
        with waits.waiting("ended", 0):  # a small one counts as one for a MiB
            waits.now += took
    assert waits.end_after(seconds) == answer


def test_bytes_that_waited_in_a_buffer_make_no_other_wait_slow():
    """A worker that reads four slow connections in turn waits for a quarter of the pieces only."""
    waits, read_at = Waits(ended=0), dict.fromkeys("abcd", 0.0)
    for key in "abcd" * 4:
        with waits.stragglers.waiting(key, 4 * MIB, since=read_at[key]):
            if key == "a":
                waits.now += 2.5
                assert waits.taken() is None
        read_at[key] = waits.now


def test_of_the_slow_waits_the_longest_that_can_be_given_up_is_taken():
    waits = Waits()
    with waits.waiting("a"):
        waits.now += 5
        with pytest.raises(StragglerError), waits.waiting("b"):
            waits.now += 5
            with waits.waiting("c"):
                waits.now += 5
                waits.taken(lambda key: False)
                waits.taken(lambda key: key != "a")
    assert waits.answers == [None, "b"]


def test_no_wait_begins_or_ends_while_one_is_taken_away():
    """Bytes of one that ends would be used, and then those of the second answer as well."""
    waits, began, leave = Waits(), threading.Event(), threading.Event()
    outcomes: list[str] = []

    def wait() -> None:
        with contextlib.suppress(StragglerError):
            with waits.waiting("a"):
                began.set()
                leave.wait(30)
            outcomes.append("used")

    def begin() -> None:
        with waits.waiting("b"):
            outcomes.append("begun")

    def give_up(key: str) -> bool:
        leave.set()
        other.start()
        for thread in (worker, other):
            thread.join(0.1)
        outcomes.append("taken")
        return True

    worker, other = (threading.Thread(target=target) for target in (wait, begin))
    worker.start()
    assert began.wait(30)
    waits.now += 9
    try:
        assert waits.taken(give_up) == "a"
    finally:
        worker.join(30)
        other.join(30)
    assert outcomes == ["taken", "begun"]


@pytest.mark.parametrize(("requests", "most"), [(3, 2), (20, 2), (29, 2), (30, 3), (300, 30)])
def test_a_tenth_of_the_requests_is_asked_for_again_at_most(requests, most):
    waits = Waits(requests)
    for _ in range(most + 3):
        waits.end_after(100)
        for _ in range(64):
            with waits.waiting("usual"):
                waits.now += 0.1
    assert sum(answer is not None for answer in waits.answers) == most


def test_a_wait_is_taken_away_only_while_no_worker_is_started(monkeypatch):
    """Whether there is room for another worker must not change in between."""
    held: list[bool] = []

    def noted(stragglers: object, give_up: Any) -> None:
        held.append(give_up.__self__.staffing.locked())

    monkeypatch.setattr(Stragglers, "take", noted)
    requests, config = requests_of(10, 1), TransferConfig()
    for _ in fetch_ranges(
        memory_store(bytes(10)), ["o"], requests, lambda *_: None, config, Progress(60)
    ):
        pass
    assert held
    assert all(held)


# --- over a transport that cannot be interrupted

STEP = 1000
HELD = 12 * STEP  # where the range begins whose first answer is late
BODY = np.arange(40 * STEP, dtype=np.uint32).astype(np.uint8)
REQUESTS = requests_of(len(BODY), STEP)
WRONG = b"\xff" * STEP


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize(
    ("case", "is_asked", "may_go_on"),
    [
        ({}, True, True),
        ({"repeats": 1}, True, True),
        ({"repeats": 2}, False, False),  # twice is enough
        ({"memory": memoryview(bytearray(1))}, True, False),
        ({"depth": 2}, True, False),
        ({"_has_room": False}, True, False),
    ],
)
def test_a_slow_request_goes_to_another_worker_if_that_costs_only_a_workers_memory(
    case, is_asked, may_go_on, cancelled
):
    """Who goes on waiting must not write to the caller's memory, and hold up no other request."""
    cancel = Mock(return_value=cancelled)
    fetch: Any = SimpleNamespace(repeats=0, memory=None, body=Mock(cancel=cancel))
    fetch.is_handed_over = False
    shared: Any = SimpleNamespace(depth=1, _has_room=True)
    for name, setting in case.items():
        setattr(fetch if hasattr(fetch, name) else shared, name, setting)
    repeats, is_given_up = fetch.repeats, is_asked and (cancelled or may_go_on)
    assert _Shared._give_up(shared, fetch) == is_given_up
    assert [call.kwargs for call in cancel.mock_calls] == [{"at_once": not may_go_on}] * is_asked
    assert fetch.repeats == repeats + is_given_up
    assert fetch.is_handed_over == (is_given_up and not cancelled)


class Holding(Stub):
    """A store whose first answer for one range comes when it is let go, and with other bytes.

    Attributes:
        asked: where the ranges that were asked for begin.
        again: makes the later answers for the range of what is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.let_go, self.ended, self.closed = (threading.Event() for _ in range(3))
        self.open: set[Range] = set()
        self.again: Callable[[bytes], bytes] = lambda right: right

    def open_range(self, key: str, start: int, end: int) -> Range:
        opened = super().open_range(key, start, end)
        self.open.add(opened)
        close = opened.close

        def closed() -> None:
            self.open.discard(opened)
            self.closed.set()
            close()

        opened.close = closed
        return opened

    def fetch(self, start: int, end: int) -> bytes:
        self.asked.append(start)
        right = BODY[start:end].tobytes()
        if start != HELD:
            return right
        if self.asked.count(start) > 1:
            return self.again(right)
        self.let_go.wait(30)
        self.ended.set()
        return WRONG


@pytest.fixture
def holding() -> Iterator[Any]:
    store = Holding()
    yield store
    store.let_go.set()
    join_downloads()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes 0.1 s may be slow, which is looked at as often."""
    monkeypatch.setattr("dcp_objstore.transfer.stragglers._LEAST_SECONDS", 0.1)
    monkeypatch.setattr("dcp_objstore.transfer.download.STEP_SECONDS", 0.1)


class Load:
    """Loads what the store holds into `arrived`."""

    def __init__(self, store: Any) -> None:
        self.store = store
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
@pytest.mark.parametrize("local", [(), (0,)])
@pytest.mark.parametrize("late", ["before the second answer", "after the load"])
def test_a_late_answer_ends_no_load_and_its_bytes_reach_no_tensor(holding, late, local):
    def second(right: bytes) -> bytes:
        if late == "before the second answer":
            holding.closed.clear()
            holding.let_go.set()
            assert holding.closed.wait(10)
        return right

    holding.again = second
    load = Load(holding)
    load.run(local=local)
    assert sorted(holding.asked) == sorted([HELD, *(request.start for request in REQUESTS)])
    holding.let_go.set()
    assert holding.ended.wait(10)
    join_downloads()
    assert sorted(load.consumed) == [request.start for request in REQUESTS]
    assert np.array_equal(load.arrived, BODY)
    assert limiter_of(holding).in_flight == 0
    assert not holding.open


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
            thread.join(0.2)
    assert not holding.ended.is_set()
    assert [number for number, one in enumerate(kept) if one() is not None] in ([], [HELD // STEP])


@pytest.mark.usefixtures("soon")
def test_a_request_is_asked_for_again_twice_at_most_from_the_budget_of_retries(
    holding, monkeypatch
):
    limiter, spent = limiter_of(holding), []
    monkeypatch.setattr(limiter, "spend_retry", lambda: spent.append(1) or True)

    def late(right: bytes) -> bytes:
        holding.let_go.wait(30)
        return right

    holding.again = late
    channel, heard = heard_channel()
    with channel.current(), pytest.raises(TransferStalledError):
        Load(holding).run(stall_timeout_seconds=0.8)
    channel.flush()
    assert holding.asked.count(HELD) == 3
    assert [one.attempt for one in of(Retried, heard)] == [2, 3]
    assert len(spent) == 2


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("second", "third", "asked"),
    [("damaged", "right", 3), ("damaged", "damaged", 3), ("refused", "", 2)],
)
def test_a_second_answer_that_is_damaged_is_fetched_once_more_and_an_error_raised(
    holding, second, third, asked
):
    def again(right: bytes) -> bytes:
        answer = second if holding.asked.count(HELD) == 2 else third
        if answer == "refused":
            raise StoreUnavailableError("the second one")
        return right if answer == "right" else WRONG

    holding.again = again
    load = Load(holding)
    error = StoreUnavailableError if second == "refused" else CorruptDataError
    with contextlib.nullcontext() if third == "right" else pytest.raises(error):
        load.run()
    assert holding.asked.count(HELD) == asked
    assert (HELD in load.consumed) is (third == "right")
    holding.let_go.set()
    join_downloads()
    assert limiter_of(holding).in_flight == 0


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("why", ["throttled", "no budget", "no idle worker"])
def test_a_request_is_not_asked_for_again(holding, why, monkeypatch):
    if why == "throttled":
        monkeypatch.setattr(Window, "is_throttled", True)
    elif why == "no budget":
        while limiter_of(holding).spend_retry():
            pass
    elif why == "no idle worker":
        monkeypatch.setattr("dcp_objstore.transfer.download.worker_count", lambda *_, **__: 1)
    with pytest.raises(TransferStalledError):
        Load(holding).run(stall_timeout_seconds=0.4)
    assert holding.asked.count(HELD) == 1


# --- over real transports

MIB_EACH, COUNT = 4, 12


def is_range(asked: Asked) -> bool:
    return asked.method == "GET" and asked.name.endswith(".distcp")


@pytest.mark.parametrize(
    "transport", cases(["lane", "stream", "boto3", "fsspec"], default=["lane", "stream"])
)
@pytest.mark.usefixtures("soon")
def test_a_straggler_is_asked_for_again_over_each_transport(transport, monkeypatch, caplog):
    # On a busy machine others may be slow, too.
    monkeypatch.setattr("dcp_objstore.transfer.stragglers._REPEATED_SHARE", 1)
    if transport == "stream":
        monkeypatch.setattr(DirectLane, "is_used", False)
    given = {"transport": transport} if transport in ("boto3", "fsspec") else {}
    config = dos.TransferConfig(request_size_bytes=MIB_EACH * MIB, **given)
    saved = {str(n): torch.randn(MIB_EACH * MIB // 4) for n in range(COUNT)}
    heard = Heard()
    with SlowSink(keep=True) as sink, NetworkProxy(sink.storage_options) as proxy:
        place = ("s3://bucket/step-1",)
        options = proxy.storage_options
        dos.save(saved, *place, storage_options=options, progress=False)
        numbers = itertools.count(1)
        held = proxy.hold(
            lambda asked: is_range(asked) and next(numbers) == 5,
            side="answer",
            after_bytes=MIB // 2,
        )
        found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        with caplog.at_level(logging.INFO, logger="dcp_objstore"):
            report = dos.load(found, *place, storage_options=options, config=config, on_event=heard)
        assert held.reached
        if transport == "lane":  # the request is cancelled
            held.wait_left()
        held.release()
        join_downloads()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert report.slow_ranges >= 1
    assert sum(map(is_range, proxy.asked)) == report.requests + report.slow_ranges
    assert [one.what for one in of(Retried, heard)] == ["slow range"] * report.slow_ranges
    (loaded,) = of(Loaded, heard)
    assert loaded.report == report
    assert f"{counted(report.slow_ranges, 'slow range')} asked for again" in caplog.text
