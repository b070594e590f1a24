"""The limiter: how far it falls, that it recovers, and that nobody waits for ever."""

from __future__ import annotations

import math
import secrets
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_objstore.config import AUTO_MOST, MIB, TransferConfig
from dcp_objstore.errors import TransferStalledError
from dcp_objstore.stores.admission.limiter import (
    RETRY_BUDGET,
    AdmissionSlot,
    Limiter,
    admission_slot,
    limiter_at,
    limiter_of,
)
from dcp_objstore.stores.admission.window import Window


class Clock:
    """Seconds that a test sets, and that pass while something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def slot_of(limiter: Limiter, **settings: Any) -> AdmissionSlot:
    """Make a slot for requests that are small, and that have all the time they want."""
    usual = {"verb": "", "concurrency": "auto", "request_bytes": 0, "timeout_seconds": math.inf}
    return AdmissionSlot(limiter, **{"judges_slowness": False, **usual, **settings})


def took(slot: AdmissionSlot, clock: Clock, *seconds: float) -> None:
    """Let requests take so long, one after the other."""
    for each_seconds in seconds:
        slot.begin("x")
        clock.now += each_seconds
        slot.end("x", answered=True)


def judged() -> tuple[Clock, Limiter, AdmissionSlot]:
    """A slot whose requests are judged, and which knows that they take 0.1 s."""
    clock = Clock()
    limiter = Limiter(clock, clock.sleep)
    slot = slot_of(limiter, judges_slowness=True)
    took(slot, clock, *[0.1] * 20)
    return clock, limiter, slot


def filled(limiter: Limiter, count: int) -> Any:
    slot = slot_of(limiter, judges_slowness=True)
    for number in range(count):
        slot.begin(number)
    return slot


def test_a_window_that_is_full_holds_back_until_a_place_is_free():
    limiter = Limiter()
    slot = filled(limiter, 8)
    limiter.note_throttling(time.monotonic())
    held = threading.Thread(target=slot.begin, args=(8,))
    held.start()
    for number in range(4):
        assert held.is_alive()
        slot.end(number, answered=True)
    slot.end(4, answered=True)
    held.join(10)
    assert not held.is_alive()
    assert limiter.in_flight == slot.in_flight == 4


def test_transfers_that_find_their_number_share_one_window():
    limiter = Limiter()
    limiter.note_latency(0.03)
    save, load = (slot_of(limiter) for _ in range(2))
    for number in range(AUTO_MOST // 2):
        assert save.begin(number, wait=False)
        assert load.begin(number, wait=False)
    assert not save.begin("more", wait=False)
    assert not load.begin("more", wait=False)
    save.close()
    assert load.begin("more", wait=False)


@pytest.mark.parametrize("latency_seconds", [0.0005, 0.03])
def test_a_fixed_number_ignores_the_window_until_the_store_throttles(latency_seconds):
    limiter = Limiter()
    limiter.note_latency(latency_seconds)
    fixed = slot_of(limiter, concurrency=99)
    assert fixed.concurrency == 99
    for number in range(99):
        assert fixed.begin(number, wait=False)
    limiter.note_throttling(time.monotonic())
    assert not fixed.begin("more", wait=False)


def test_at_a_near_store_each_transfer_keeps_to_the_number_itself():
    limiter = Limiter()
    limiter.note_latency(0.0005)
    slot = slot_of(limiter)
    assert slot.concurrency == slot.most == 8
    for number in range(9):
        assert slot.begin(number, wait=False)
    limiter.note_throttling(time.monotonic())
    assert not slot.begin("more", wait=False)


@pytest.mark.parametrize("reports", [("open_range",), ("open_range", "put_stream")])
def test_a_stores_slot_knows_its_settings_and_if_throttling_is_reported(reports, monkeypatch):
    store: Any = SimpleNamespace(
        url=f"s3://{secrets.token_hex(4)}/run", endpoint_url=None, reports_throttling=reports
    )
    clock = Clock()
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.Limiter", partial(Limiter, clock))
    limiter = limiter_of(store)
    config = TransferConfig(request_timeout_seconds=200.0)

    def made(**settings: Any) -> AdmissionSlot:
        usual = {"concurrency": "auto", "request_bytes": 32 * MIB}
        return admission_slot(store, "put_stream", config, **{**usual, **settings})

    assert made().timeout_seconds == 200
    assert made(concurrency=99).concurrency == 99
    assert made().bound == 12.5  # 32 MiB each, in 50 s at 8 MiB/s
    limiter.window = Window(bytes_per_second={"put_stream": 16.0 * MIB})
    assert made().concurrency == 25
    slot = made()
    took(slot, clock, *[0.1] * 8, 1.5, 1.5)
    assert limiter.window.is_throttled == ("put_stream" not in reports)


def test_there_is_one_limiter_for_each_bucket_at_each_endpoint():
    name = secrets.token_hex(4)

    def at(url: str, endpoint_url: str | None = None) -> Limiter:
        store: Any = SimpleNamespace(url=url, endpoint_url=endpoint_url)
        return limiter_of(store)

    assert at(f"s3://{name}") is at(f"s3://{name}/a/b") is limiter_at(None, "s3", name)
    others = [at(f"gs://{name}"), at(f"s3://{name}2"), at(f"s3://{name}", "http://there")]
    assert len({id(limiter) for limiter in [at(f"s3://{name}"), *others]}) == 4
    assert limiter_at("http://there", "s3", name) is others[2]


@pytest.mark.parametrize(
    ("ages", "per_second"),
    [
        ([1.0] * 10, 10.0),
        ([1.0] * 5 + [0.0] * 5, 10.0),
        ([2.0] * 10, 5.0),
        ([2.5] * 10 + [1.0] * 10, 10.0),
        ([0.125] * 10, 20.0),  # counted as of half a second
        ([0.5] * 1000, 2000.0),
        ([2.5] * 10, 32.0),  # nothing lately: as many as are in flight
        ([], 32.0),
    ],
)
def test_the_rate_falls_below_what_the_store_has_done_in_the_last_two_seconds(ages, per_second):
    clock = Clock()
    limiter = Limiter(clock)
    filled(limiter, 32)
    for age in ages:
        clock.now = 100.0 - age
        limiter.note_success()
    clock.now = 100.0
    limiter.note_throttling(90.0)
    assert limiter.window.cut_rate == pytest.approx(0.7 * per_second)
    assert (limiter.window.cut_at, limiter.window.size) == (100.0, 16.0)


def test_requests_begin_at_the_rate_and_up_to_50_ms_too_soon():
    clock = Clock()
    limiter = Limiter(clock, clock.sleep)
    limiter.window = Window(cut_rate=2.0, cut_at=1e9)  # two per second, and not yet more
    begun, checks = [], 0

    def check() -> None:
        nonlocal checks
        checks += 1

    for late_seconds in (0.0, 0.03, 0.0, 0.0, 2.0, 0.0, 0.46, 0.0):
        clock.now += late_seconds
        limiter.wait_turn(check)
        begun.append(round(clock.now - 100.0, 3))
    assert begun == [0.0, 0.5, 1.0, 1.5, 3.5, 4.0, 4.46, 4.96]
    # Who waits looks four times per second whether it has to stop.
    assert max(clock.slept) <= 0.25
    assert checks == len(clock.slept)
    clock = Clock()
    clock.now = 0.0
    limiter = Limiter(clock, clock.sleep)
    limiter.window = Window(cut_rate=20.0, cut_at=1e9)
    for _ in range(3):
        limiter.wait_turn()
    assert clock.slept == [0.1]


def test_what_is_on_this_machine_gets_8_requests():
    bucket = secrets.token_hex(4)
    concurrency = [
        slot_of(limiter_at(None, scheme, bucket)).concurrency for scheme in ("file", "memory", "s3")
    ]
    assert concurrency == [8, 8, AUTO_MOST]


def test_a_slot_with_nothing_in_flight_never_waits_for_others():
    limiter = Limiter()
    filled(limiter, 8)
    for _ in range(10):
        limiter.note_throttling(time.monotonic())
    other = slot_of(limiter)
    other.begin("x")
    assert limiter.in_flight == 9


def test_a_request_waits_on_while_places_are_given_back(monkeypatch):
    """Only a store that answers nothing for a time-out is taken to hold its places for ever."""
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.STEP_SECONDS", 0.001)
    clock = Clock()
    limiter = Limiter(clock)
    other = filled(limiter, 8)
    limiter.note_throttling(clock())
    clock.now += 60
    slot = slot_of(limiter, timeout_seconds=12)
    slot.begin(0)
    looks = 0

    def others_go_on() -> None:
        nonlocal looks
        looks += 1
        clock.now += 6
        if looks <= 3:  # another transfer's request takes the place at once
            other.end(looks, answered=True)
            slot_of(limiter).begin("x")

    assert slot.begin(1, others_go_on)
    assert looks == 5


def test_who_stops_waiting_for_the_rate_gives_back_the_place_in_the_window():
    clock = Clock()
    limiter = Limiter(clock)
    slot = slot_of(limiter, judges_slowness=True)
    limiter.note_throttling(clock())
    slot.begin(0)
    slot.end(0, answered=True)

    def check() -> None:
        raise TransferStalledError("stop")

    with pytest.raises(TransferStalledError):
        slot.begin(1, check)
    assert limiter.in_flight == slot.in_flight == 0


def test_a_slot_that_is_closed_gives_back_all_and_late_ends_are_not_counted():
    limiter = Limiter()
    slot = filled(limiter, 5)
    slot.end(0, answered=True)
    slot.close()
    assert limiter.in_flight == 0
    slot.end(1, answered=True)
    slot.begin(7)
    assert limiter.in_flight == 0


@pytest.mark.parametrize("under_way", [True, False])
def test_requests_that_take_a_pause_longer_are_a_sign_but_one_alone_is_none(under_way):
    clock, limiter, slot = judged()
    took(slot, clock, 1.5)
    assert not limiter.window.is_throttled
    slot.begin("slow")
    slot.begin("another")
    clock.now += 1.5
    if under_way:
        slot.judge_ages()
        assert limiter.window.is_throttled
    cut_at = limiter.window.cut_at
    slot.end("slow", answered=True)
    slot.end("another", answered=True)
    assert limiter.window.is_throttled
    assert not under_way or limiter.window.cut_at == cut_at


def test_a_slow_request_counts_once_and_the_next_of_its_number_is_judged_again():
    clock, limiter, slot = judged()
    for is_sign in (False, True):
        slot.begin("slow")
        clock.now += 1.5
        for _ in range(3):
            slot.judge_ages()
            assert limiter.window.is_throttled is is_sign
        slot.end("slow", answered=True)
        assert limiter.window.is_throttled is is_sign


@pytest.mark.parametrize("fast_between", [0, 14, 15])
def test_two_slow_requests_among_16_are_a_sign(fast_between):
    clock, limiter, slot = judged()
    took(slot, clock, 1.5, *[0.1] * fast_between)
    assert not limiter.window.is_throttled
    took(slot, clock, 1.5)
    assert limiter.window.is_throttled == (fast_between < 15)


@pytest.mark.parametrize("waits", [True, False])
def test_requests_in_flight_are_judged_when_another_begins_or_waits(waits, monkeypatch):
    """Those of a store that answers no more would otherwise never be."""
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.STEP_SECONDS", 0.001)
    clock, limiter, slot = judged()
    slot.begin("a")
    slot.begin("b")

    def go_on() -> None:
        clock.now += 1.5
        if limiter.window.is_throttled:
            raise TransferStalledError("enough")

    if waits:
        limiter.window = Window(2.0)
        with pytest.raises(TransferStalledError):
            slot.begin("c", go_on)
    else:
        go_on()
        assert not slot.begin("c", wait=False)
        assert limiter.window.is_throttled


@pytest.mark.parametrize(
    ("usual", "seconds", "other", "is_slow"),
    [
        ([0.5] * 5, 1.5, None, True),
        ([0.5] * 4, 9.0, None, False),  # too few to say
        ([0.5] * 5, 1.375, None, False),  # less than a pause longer
        ([0.5] * 5, 1.39, None, False),
        ([0.01] * 5, 0.9, None, False),
        ([0.01] * 5, 0.95, None, True),
        ([4.0] * 5, 10.0, None, False),  # 2.5 times as long
        ([4.0] * 5, 10.1, None, True),
        ([4.0] * 5, 20.0, "at first", False),  # of two that share the line
        ([4.0] * 5, 20.0, "at last", False),
        ([4.0] * 5, 20.1, "at first", True),
        ([10.0, 10.0, 10.0, 1.0, 10.0], 2.5, None, False),  # the fastest fifth counts
        ([10.0, 10.0, 10.0, 1.0, 10.0], 2.6, None, True),
        ([10.0, 10.0, 10.0, 1.0, 10.0, 10.0], 2.6, None, False),
        ([5.0, 6.0, 7.0, 8.0, 9.0] * 20, 9.0, None, False),  # slow from the start
        ([5.0] * 50 + [0.1] * 32 + [5.0] * 25, 5.0, None, True),  # 7 of the last 32 are fast
        ([5.0] * 50 + [0.1] * 32 + [5.0] * 26, 5.0, None, False),
    ],
)
def test_a_request_is_slow_that_takes_a_hidden_pause_longer_than_usual(
    usual, seconds, other, is_slow
):
    for is_judged in (True, False):
        clock = Clock()
        limiter = Limiter(clock)
        slot, beside = slot_of(limiter, judges_slowness=is_judged), slot_of(limiter)
        for usual_seconds in usual:
            took(slot, clock, usual_seconds)
            limiter.window = Window()
        # While the store throttles, one is a sign, if it was begun since the last cut.
        limiter.window = Window(cut_rate=1e9, cut_at=clock.now)
        if other == "at first":
            beside.begin("x")
        slot.begin("x")
        beside.close()
        if other == "at last":
            slot_of(limiter).begin("x")
        clock.now += seconds
        slot.end("x", answered=True)
        assert (limiter.window.cut_at == clock.now) == (is_slow and is_judged)


def test_retries_share_a_budget_that_successes_refill():
    limiter = Limiter()
    for _ in range(100):
        limiter.note_success()  # in a long calm nothing is saved up
    spent = 0
    while limiter.spend_retry():
        spent += 1
    assert spent == RETRY_BUDGET
    for _ in range(5):
        limiter.note_success()
    assert limiter.spend_retry()
    assert not limiter.spend_retry()


def test_only_a_request_that_was_answered_is_a_success():
    clock = Clock()
    limiter = Limiter(clock)
    while limiter.spend_retry():
        pass
    slot = slot_of(limiter, timeout_seconds=100)
    wide = slot.concurrency
    for answered in (False, True):
        for number in range(5):
            slot.begin(number)
            clock.now += 50  # so near its time-out that fewer may be in flight
            slot.end(number, answered=answered)
        assert limiter.spend_retry() == answered
        assert (slot.concurrency < wide) == answered


def test_a_request_that_is_over_gives_its_place_back_before_it_is_known_how_it_ended():
    limiter = Limiter()
    slot = filled(limiter, 2)
    while limiter.spend_retry():
        pass
    for number in range(2):
        slot.release(number)
    assert limiter.in_flight == 0
    slot.end(0, MIB, answered=False)
    assert limiter.window.round.size_bytes == 0
    for _ in range(2):  # the second time it is not there any more
        slot.end(1, MIB, answered=True)
    assert limiter.window.round.size_bytes == MIB
    assert limiter.window.round.in_flight == 1  # as many as when it was over
    assert limiter.in_flight == 0


def test_retries_of_what_has_not_failed_leave_half_of_the_budget_to_what_has():
    limiter = Limiter()
    for _ in range(int(RETRY_BUDGET / 2)):
        assert limiter.spares_retries
        assert limiter.spend_retry()
    assert not limiter.spares_retries
    limiter.note_success()
    assert limiter.spares_retries
    limiter.note_throttling(time.monotonic())
    assert not limiter.spares_retries


@pytest.mark.parametrize(
    "use",
    [
        lambda limiter, slot: limiter.note_latency(0.001),
        lambda limiter, slot: limiter.note_throttling(100.0),
        lambda limiter, slot: limiter.note_success(),
        lambda limiter, slot: limiter.spend_retry(),
        lambda limiter, slot: limiter.refund_retry(),
        lambda limiter, slot: limiter.wait_turn(),
        lambda limiter, slot: slot.begin(1),
        lambda limiter, slot: slot.moved(1),
        lambda limiter, slot: slot.end(0, answered=True),
        lambda limiter, slot: slot.judge_ages(),
        lambda limiter, slot: slot.close(),
    ],
)
def test_no_thread_sees_what_another_one_has_half_changed(use):
    limiter = Limiter(Clock())
    slot = filled(limiter, 1)
    thread = threading.Thread(target=use, args=(limiter, slot))
    with limiter._changed:
        before = limiter.window, limiter.in_flight, slot.in_flight
        thread.start()
        thread.join(0.02)
        assert thread.is_alive()
        assert (limiter.window, limiter.in_flight, slot.in_flight) == before
    thread.join(30)
    assert not thread.is_alive()
