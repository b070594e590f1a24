"""The limiter: how far it falls, that it recovers, and that nobody waits for ever."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dcp_objstore.config import AUTO_MOST
from dcp_objstore.errors import TransferStalledError
from dcp_objstore.stores.admission.limiter import RETRY_BUDGET, AdmissionSlot, Limiter, limiter_at


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(limiter: Limiter, count: int) -> Any:
    slot = AdmissionSlot(limiter, judged=True)
    for number in range(count):
        slot.begin(number)
    return slot


def test_a_window_that_is_full_holds_back_until_a_place_is_free() -> None:
    limiter = Limiter()
    slot = filled(limiter, 8)
    limiter.throttled(limiter._clock())
    held = threading.Thread(target=slot.begin, args=(8,))
    held.start()
    for number in range(4):
        assert held.is_alive()
        slot.end(number)
    slot.end(4)
    held.join(10)
    assert not held.is_alive()
    assert limiter.in_flight == slot.in_flight == 4


def test_transfers_that_find_their_number_share_one_window() -> None:
    limiter = Limiter()
    limiter.heard(0.03)
    save, load = (AdmissionSlot(limiter, judged=False) for _ in range(2))
    for number in range(AUTO_MOST // 2):
        assert save.begin(number, wait=False)
        assert load.begin(number, wait=False)
    assert not save.begin("more", wait=False)
    assert not load.begin("more", wait=False)
    save.close()
    assert load.begin("more", wait=False)


def test_a_fixed_number_ignores_the_window_until_the_store_throttles() -> None:
    limiter = Limiter()
    limiter.heard(0.0005)
    fixed = AdmissionSlot(limiter, judged=False, concurrency=64)
    assert fixed.concurrency == 64
    for number in range(64):
        assert fixed.begin(number, wait=False)
    limiter.throttled(limiter._clock())
    assert not fixed.begin("more", wait=False)


def test_before_anything_was_measured_large_requests_are_few() -> None:
    limiter, mib = Limiter(), 1 << 20
    slots = [
        AdmissionSlot(limiter, judged=False, request_bytes=size * mib, timeout_seconds=150)
        for size in (1, 32, 583, 5000)
    ]
    assert [slot.concurrency for slot in slots] == [AUTO_MOST, 9, 1, 1]


def test_what_is_on_this_machine_gets_8_requests() -> None:
    bucket = secrets.token_hex(4)
    concurrency = [
        AdmissionSlot(limiter_at(None, scheme, bucket), judged=False).concurrency
        for scheme in ("file", "memory", "s3")
    ]
    assert concurrency == [8, 8, AUTO_MOST]


def test_a_slot_with_nothing_in_flight_never_waits_for_others() -> None:
    limiter = Limiter()
    filled(limiter, 8)
    for _ in range(10):
        limiter.throttled(limiter._clock())
    other = AdmissionSlot(limiter, judged=False)
    other.begin("x")
    assert limiter.in_flight == 9


def test_requests_that_hold_all_places_and_never_end_stop_no_other_for_ever() -> None:
    """As a transport that gathers all buffers before it sends any."""
    limiter = Limiter()
    filled(limiter, 8)
    limiter.throttled(limiter._clock())
    slot = AdmissionSlot(limiter, judged=True, timeout_seconds=0.1)
    slot.begin(0)
    slot.begin(1)
    assert slot.in_flight == 2


def test_a_request_waits_on_while_places_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a store that answers nothing for a time-out is taken to hold its places for ever."""
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter.STEP_SECONDS", 0.001)
    clock = Clock()
    limiter = Limiter(clock)
    other = filled(limiter, 8)
    limiter.throttled(clock())
    clock.now += 60
    slot = AdmissionSlot(limiter, judged=False, timeout_seconds=10)
    slot.begin(0)
    looks = 0

    def others_go_on() -> None:
        nonlocal looks
        looks += 1
        clock.now += 6
        if looks <= 3:  # another transfer's request takes the place at once
            other.end(looks)
            with limiter._changed:
                limiter.in_flight += 1

    assert slot.begin(1, others_go_on)
    assert looks == 5


def test_a_near_store_over_a_line_too_slow_for_8_large_requests_gets_fewer() -> None:
    limiter = Limiter()
    limiter.heard(0.0005)
    slot = AdmissionSlot(limiter, judged=False, request_bytes=32 << 20, timeout_seconds=32)
    assert slot.concurrency == slot.bound == 2  # in 8 s at 8 MiB/s
    slot = AdmissionSlot(limiter, judged=False, request_bytes=32 << 20, timeout_seconds=150)
    assert slot.concurrency == 8


def test_where_requests_take_long_no_more_begin_than_the_window_allows() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = AdmissionSlot(limiter, judged=False, request_bytes=32 << 20, timeout_seconds=150)
    allowed = slot.concurrency
    for number in range(allowed):
        slot.begin(number)

    def wait() -> None:
        clock.now += 60
        if clock.now > 200:
            slot.end(0, answered=False)

    slot.begin("more", wait)
    assert limiter.in_flight == allowed


def test_waiting_ends_with_what_the_check_raises_and_takes_no_place() -> None:
    limiter = Limiter()
    slot = filled(limiter, 2)
    limiter.throttled(limiter._clock())

    def check() -> None:
        raise TransferStalledError("stop")

    with pytest.raises(TransferStalledError):
        slot.begin(2, check)
    assert limiter.in_flight == 2


def test_who_stops_waiting_for_the_rate_gives_back_the_place_in_the_window() -> None:
    limiter = Limiter(Clock())
    slot = AdmissionSlot(limiter, judged=True)
    limiter.throttled(limiter._clock())
    slot.begin(0)
    slot.end(0)

    def check() -> None:
        raise TransferStalledError("stop")

    with pytest.raises(TransferStalledError):
        slot.begin(1, check)
    assert limiter.in_flight == slot.in_flight == 0


def test_a_slot_that_is_closed_gives_back_all_and_late_ends_are_not_counted() -> None:
    limiter = Limiter()
    slot = filled(limiter, 5)
    slot.end(0)
    slot.close()
    assert limiter.in_flight == 0
    slot.end(1)
    slot.begin(7)
    assert limiter.in_flight == 0


@pytest.mark.parametrize("under_way", [True, False])
def test_parts_that_take_a_pause_longer_than_the_others_slow_it_down_and_one_alone_does_not(
    under_way: bool,
) -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = AdmissionSlot(limiter, judged=True)
    for number in range(8):
        slot.begin(number)
        clock.now += 0.1
        slot.end(number)
    slot.begin("slow")
    clock.now += 1.5
    slot.end("slow")
    assert not limiter.window.is_throttled
    slot.begin("slow")
    slot.begin("another")
    clock.now += 1.5
    if under_way:
        slot.look()
        assert limiter.window.is_throttled
    cut_at = limiter.window.cut_at
    slot.end("slow")
    slot.end("another")
    assert limiter.window.is_throttled
    assert not under_way or limiter.window.cut_at == cut_at


def test_a_part_is_judged_again_that_has_the_number_of_one_that_was_slow() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = AdmissionSlot(limiter, judged=True)
    for number in range(64):
        slot.begin(number)
        clock.now += 0.1
        slot.end(number)
    for is_sign in (False, True):  # one alone is none
        slot.begin("slow")
        clock.now += 1.5
        slot.look()
        assert limiter.window.is_throttled is is_sign
        slot.end("slow")


def test_parts_that_take_longer_because_more_are_in_flight_are_no_sign() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = AdmissionSlot(limiter, judged=True)
    for number in range(16):
        slot.begin(number)
        clock.now += 1
        slot.end(number)
    for number in range(8):
        slot.begin(number)
    clock.now += 8
    for number in range(8):
        slot.end(number)
    assert not limiter.window.is_throttled


def test_what_is_slow_is_measured_by_the_fastest_fifth() -> None:
    slot = AdmissionSlot(Limiter(), judged=True)
    slot._took.extend([*[(10.0, 10.0)] * 4, (1.0, 0.5)])  # in whatever order they ended
    assert not slot._is_slow(2.5, 1)
    assert slot._is_slow(2.6, 1)
    slot._took.append((10.0, 10.0))  # now the second one is no longer of the fastest fifth
    assert not slot._is_slow(2.6, 1)


def test_requests_that_are_slow_from_the_start_are_no_sign() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = AdmissionSlot(limiter, judged=True)
    for number in range(100):
        slot.begin(number)
        clock.now += 5 + number % 5
        slot.end(number)
    assert not limiter.window.is_throttled


def test_retries_share_a_budget_that_successes_refill() -> None:
    limiter = Limiter()
    for _ in range(100):
        limiter.succeeded()  # in a long calm nothing is saved up
    spent = 0
    while limiter.spend_retry():
        spent += 1
    assert spent == RETRY_BUDGET
    for _ in range(5):
        limiter.succeeded()
    assert limiter.spend_retry()
    assert not limiter.spend_retry()


def test_only_a_request_that_was_answered_is_a_success() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    while limiter.spend_retry():
        pass
    slot = AdmissionSlot(limiter, judged=False, timeout_seconds=100)
    wide = slot.concurrency
    for answered in (False, True):
        for number in range(5):
            slot.begin(number)
            clock.now += 50  # so near its time-out that fewer may be in flight
            slot.end(number, answered=answered)
        assert limiter.spend_retry() == answered
        assert (slot.concurrency < wide) == answered


def test_retries_of_what_has_not_failed_leave_half_of_the_budget_to_what_has() -> None:
    limiter = Limiter()
    for _ in range(int(RETRY_BUDGET / 2)):
        assert limiter.spares_retries
        assert limiter.spend_retry()
    assert not limiter.spares_retries
    limiter.succeeded()
    assert limiter.spares_retries
    limiter.throttled(limiter._clock())
    assert not limiter.spares_retries


@pytest.mark.parametrize(
    "use",
    [
        lambda limiter, slot: limiter.heard(0.001),
        lambda limiter, slot: limiter.throttled(limiter._clock()),
        lambda limiter, slot: limiter.succeeded(),
        lambda limiter, slot: limiter.spend_retry(),
        lambda limiter, slot: limiter.refund_retry(),
        lambda limiter, slot: limiter.wait_turn(),
        lambda limiter, slot: slot.begin(1),
        lambda limiter, slot: slot.begin(0),
        lambda limiter, slot: slot.moved(1),
        lambda limiter, slot: slot.end(0),
        lambda limiter, slot: slot.look(),
        lambda limiter, slot: slot.close(),
    ],
)
def test_no_thread_sees_what_another_one_has_half_changed(
    use: Callable[[Limiter, AdmissionSlot], object],
) -> None:
    limiter = Limiter()
    slot = filled(limiter, 1)
    began = {name: value for name, value in vars(limiter).items() if name != "_changed"}
    before = (began, list(limiter._done), dict(slot._begun), slot._closed)
    thread = threading.Thread(target=use, args=(limiter, slot))
    with limiter._changed:
        thread.start()
        thread.join(0.02)
        now = {name: value for name, value in vars(limiter).items() if name != "_changed"}
        assert (now, list(limiter._done), dict(slot._begun), slot._closed) == before
    thread.join(30)
    assert not thread.is_alive()
