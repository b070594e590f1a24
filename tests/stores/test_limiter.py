"""The limiter: how far it falls, that it recovers, and that nobody waits for ever."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dcp_objstore.errors import TransferStalledError
from dcp_objstore.stores.admission.bounds import (
    LEAST_RATE_PER_SECOND,
    LEAST_WINDOW,
    OPEN_AFTER_SECONDS,
    Bounds,
)
from dcp_objstore.stores.admission.limiter import RETRY_BUDGET, Limiter

# What happens, how much later, and for a throttled request: how long ago it was begun, how many
# are in flight, what was done per second.
EVENTS = st.lists(
    st.tuples(
        st.booleans(),
        st.floats(0, 30),
        st.floats(0, 60),
        st.integers(0, 200),
        st.floats(0, 1e4),
    ),
    max_size=60,
)


@given(EVENTS)
def test_the_bounds_only_fall_by_what_was_throttled_and_never_below_the_least(
    events: list[tuple[bool, float, float, int, float]],
) -> None:
    bounds, now = Bounds(), 0.0
    for throttled, later, ago, in_flight, lately in events:
        now += later
        rate = bounds.rate(now)
        if throttled:
            found = bounds.throttled(now, now - ago, in_flight, lately)
            if now - ago < bounds.cut_at:
                assert found == bounds
            else:
                assert found.window <= max(LEAST_WINDOW, bounds.window / 2)
                assert found.rate(now) <= max(LEAST_RATE_PER_SECOND, 0.7 * rate)
        else:
            found = bounds.succeeded(now)
            assert found.window >= bounds.window
            assert found.rate(now) >= rate
        assert found.window >= LEAST_WINDOW
        assert found.rate(now) >= LEAST_RATE_PER_SECOND
        bounds = found


@given(EVENTS, st.integers(1, 8))
def test_whatever_happened_it_recovers(
    events: list[tuple[bool, float, float, int, float]], per_second: int
) -> None:
    bounds, now = Bounds(), 0.0
    for throttled, later, ago, in_flight, lately in events:
        now += later
        bounds = (
            bounds.throttled(now, now - ago, in_flight, lately)
            if throttled
            else bounds.succeeded(now)
        )
    for _ in range(int(OPEN_AFTER_SECONDS * per_second) + 2):
        now += 1 / per_second
        bounds = bounds.succeeded(now)
    assert bounds.is_open
    assert bounds.rate(now) == math.inf


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(limiter: Limiter, count: int) -> Any:
    slot = limiter.slot(judged=True)
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


def test_a_slot_with_nothing_in_flight_never_waits_for_others() -> None:
    limiter = Limiter()
    filled(limiter, 8)
    for _ in range(10):
        limiter.throttled(limiter._clock())
    other = limiter.slot(judged=False)
    other.begin("x")
    assert limiter.in_flight == 9


def test_whoever_holds_all_places_and_never_ends_stops_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a transport that gathers all buffers before it sends any."""
    monkeypatch.setattr("dcp_objstore.stores.admission.limiter._LONGEST_HOLD_SECONDS", 0.1)
    limiter = Limiter()
    slot = filled(limiter, 2)
    limiter.throttled(limiter._clock())
    slot.begin(2)
    assert slot.in_flight == 3


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
    slot = limiter.slot(judged=True)
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


def test_parts_that_take_a_pause_longer_than_the_others_slow_it_down_and_one_alone_does_not() -> (
    None
):
    clock = Clock()
    limiter = Limiter(clock)
    slot = limiter.slot(judged=True)
    for number in range(8):
        slot.begin(number)
        clock.now += 0.1
        slot.end(number)
    slot.begin("slow")
    clock.now += 1.5
    slot.end("slow")
    assert limiter.bounds.is_open
    slot.begin("slow")
    slot.begin("another")
    clock.now += 1.5
    slot.look()  # they are still under way
    assert not limiter.bounds.is_open
    found = limiter.bounds
    slot.end("slow")
    slot.end("another")
    assert limiter.bounds.cut_at == found.cut_at


def test_requests_that_are_slow_from_the_start_are_no_sign() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    slot = limiter.slot(judged=True)
    for number in range(100):
        slot.begin(number)
        clock.now += 5 + number % 5
        slot.end(number)
    assert limiter.bounds.is_open


def test_retries_share_a_budget_that_successes_refill() -> None:
    limiter = Limiter()
    spent = 0
    while limiter.spend_retry():
        spent += 1
    assert spent == RETRY_BUDGET
    for _ in range(5):
        limiter.succeeded()
    assert limiter.spend_retry()
    assert not limiter.spend_retry()
