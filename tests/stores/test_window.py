"""The window: it finds how many requests a store needs, in a simulator with stores that differ."""

from __future__ import annotations

import dataclasses
import math
import statistics

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dcp_objstore.config import AUTO_MOST
from dcp_objstore.stores.admission.window import (
    LEAST_RATE_PER_SECOND,
    LEAST_WINDOW,
    OPEN_AFTER_SECONDS,
    Window,
    _Try,
)
from tests.support.campaign import cases
from tests.support.simulated_store import Fixed, Rank, SimulatedStore, simulate

S3 = SimulatedStore(noise=0.2)  # 30 ms, 60 MiB/s per connection, 1.2 GiB/s in all
LOOPBACK = SimulatedStore(
    latency_seconds=0.0002, mib_per_second=2000, link_mib_per_second=2000, noise=0.1
)
# A small request was answered: late, at once.
FAR, NEAR = Window().after_small_answer(0.03), Window().after_small_answer(0.0005)
FIXED = (8, 16, 24, 32)


def transfer(
    store: SimulatedStore,
    gib: float,
    admits: Window | Fixed,
    *,
    seed: int = 0,
    mib: float = 32.0,
    piece_mib: float | None = 4.0,
    timeout_seconds: float = 150.0,
    step_seconds: float = 0.002,
) -> Rank:
    rank = Rank(
        admits, [mib] * int(gib * 1024 / mib), piece_mib=piece_mib, timeout_seconds=timeout_seconds
    )
    simulate(store, [rank], seed=seed, step_seconds=step_seconds)
    return rank


def to_best(
    store: SimulatedStore, gib: float, window: Window, piece_mib: float | None, mib: float = 32
) -> float:
    """Return the throughput as a part of the best fixed number's, medians of three runs."""

    def median(admits: Window | Fixed) -> float:
        return statistics.median(
            transfer(store, gib, admits, seed=seed, piece_mib=piece_mib, mib=mib).mib_per_second
            for seed in range(3)
        )

    return median(window) / max(median(Fixed(size)) for size in FIXED)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("gib", cases([1, 4], default=[1]))
@pytest.mark.parametrize("piece_mib", [4.0, None])
def test_the_first_transfer_has_085_of_the_best_fixed_numbers_throughput(gib, piece_mib, noise):
    store = dataclasses.replace(S3, noise=noise)
    mib = 16 if gib == 1 and piece_mib is None else 32  # parts of a save; see `plan_parts`
    assert to_best(store, gib, FAR, piece_mib, mib) >= 0.85


def test_a_transfer_begins_with_a_request_after_a_pause_in_which_none_was_in_flight():
    assert Window().after_begin(0.0, 1).round.began_at == 0.0
    window = Window(8.0, trying=_Try(4.0, 1e6)).after_begin(0.0, 1).after_bytes(0.0, 4 << 20, 1)
    assert window.round.answers == 1
    assert window.after_begin(0.09, 1) == window  # no pause yet
    assert window.after_begin(9.0, 2) == window  # one that takes long is of the same transfer
    for now in (0.1, 9.0):
        begun = window.after_begin(now, 1)
        assert (begun.round.answers, begun.round.began_at, begun.trying) == (0, now, None)
    assert window.after_begin(0.1, 1).after_begin(0.15, 1).round.began_at == 0.1


@pytest.mark.parametrize(
    ("window", "mib", "verb", "allowed"),
    [
        (Window(), 0, "", AUTO_MOST),
        (Window().after_small_answer(0.005), 0, "", AUTO_MOST),
        (Window().after_small_answer(0.0049), 0, "", 8),
        (Window().after_small_answer(0.0049).after_small_answer(1.0), 0, "", 8),
        (Window(5.5), 0, "", 5.5),
        (Window(0.5), 0, "", 1),
        (FAR, 32, "", 9.375),  # in a quarter of 150 s at 8 MiB/s
        (FAR, 300, "", 1),
        (FAR, 5000, "", 1),
        (FAR, 4, "", AUTO_MOST),
        (NEAR, 32, "", 8),
        (Window(5.5), 32, "", 5.5),
        (Window(bytes_per_second={"put": 4 * 2**20}), 32, "put", 9.375),
        (Window(bytes_per_second={"put": 16 * 2**20}), 32, "put", 18.75),
        (Window(bytes_per_second={"put": 16 * 2**20}), 32, "get", 9.375),
        (Window(bytes_per_second={"put": 1e9}), 32, "put", 32),  # 1 GiB
    ],
)
def test_no_more_are_in_flight_than_the_store_needs_and_the_line_answers_in_time(
    window, mib, verb, allowed
):
    assert window.allowed(mib << 20, 150, verb) == allowed


def _moved(window: Window, answers: int, mib: float, in_flight: int, seconds: float) -> Window:
    """Return the window after a round of `seconds`, in which each answer has so many bytes."""
    began_at = window.round.began_at
    for number in range(1, answers + 1):
        now = began_at + seconds * number / answers
        window = window.after_bytes(now, int(mib * 2**20), in_flight, "put")
    return window


@pytest.mark.parametrize(
    ("answers", "mib", "in_flight", "seconds", "mib_per_second"),
    [
        (4, 2, 4, 1.0, 8),
        (3, 4, 4, 1.0, None),
        (8, 2, 64, 1.0, 16),  # a window of 8
        (7, 2, 64, 1.0, None),
        (4, 2 - 2**-20, 4, 1.0, None),  # less than 8 MiB
        (4, 2, 4, 0.03125, 256),
        (4, 2, 4, 0.02, 400),
        (4, 2, 4, 0.015625, None),
    ],
)
def test_a_line_is_known_after_a_round_that_says_something_of_it(
    answers, mib, in_flight, seconds, mib_per_second
):
    window = _moved(Window(8.0).after_begin(0.0, 1), answers, mib, in_flight, seconds)
    if mib_per_second is None:
        assert window.bytes_per_second == {}
        assert window.round.answers == answers
    else:
        assert window.bytes_per_second == {"put": mib_per_second * 2**20}
        assert (window.round.began_at, window.round.last_at) == (seconds, seconds)
        assert (window.round.answers, window.round.size_bytes, window.round.in_flight) == (0, 0, 0)


def test_a_round_is_as_long_as_the_most_that_were_in_flight():
    window = Window(8.0).after_begin(0.0, 1)
    for now, in_flight in ((1, 4), (2, 2), (3, 1)):
        window = window.after_bytes(now, 8 << 20, in_flight)
        assert (window.round.answers, window.round.in_flight) == (now, 4)
        assert (window.round.began_at, window.round.last_at) == (0.0, now)
    assert window.after_bytes(4, 8 << 20, 1).bytes_per_second == {"": 8 << 20}


def test_of_a_known_line_four_rounds_are_measured_and_the_best_counts():
    window = Window(8.0, bytes_per_second={"put": 2.0**20, "get": 7.0}).after_begin(0.0, 1)
    measured = _moved(window, 16, 1, 4, 1.0)
    assert measured.bytes_per_second == {"put": 16 * 2.0**20, "get": 7.0}
    assert _moved(window, 15, 1, 4, 1.0).bytes_per_second == window.bytes_per_second
    # However few bytes they have.
    assert _moved(window, 16, 0.125, 4, 1.0).bytes_per_second["put"] == 2 * 2.0**20
    assert _moved(measured, 16, 1, 4, 2.0).bytes_per_second == measured.bytes_per_second


@pytest.mark.parametrize(
    ("window", "in_flight", "size"),
    [
        (Window(8.0), 6, 16.0),  # three quarters of it are used
        (Window(8.0), 5, 8.0),
        (Window(8.0, cut_rate=50.0), 8, 8.0),
        (Window(40.0), 40, AUTO_MOST),
        (Window(64.0), 64, 64.0),
        (Window(5.0, 0.001), 5, 8.0),
        (Window(8.0, 0.001), 8, 8.0),
    ],
)
def test_a_window_that_is_used_is_doubled_as_far_as_the_store_needs(window, in_flight, size):
    after = _moved(window.after_begin(0.0, 1), 64, 1, in_flight, 1.0)
    assert after.size == size
    assert (after.trying is not None) == (size > window.size)


@pytest.mark.parametrize(
    ("mib_per_second", "size"), [(22.9, 8.0), (23.0, 32.0), (40.0, 32.0), (10.0, 8.0)]
)
def test_a_larger_window_must_move_15_per_cent_more_than_the_one_before(mib_per_second, size):
    window = _moved(Window(8.0).after_begin(0.0, 1), 8, 2.5, 8, 1.0)
    assert window.trying == _Try(8.0, 20 * 2**20, is_measured=False)
    assert window.size == 16
    settled = _moved(window, 16, 1, 16, 1.0)  # those that were begun before
    assert settled.trying == _Try(8.0, 20 * 2**20, is_measured=True)
    assert settled.size == 16
    judged = _moved(settled, 64, mib_per_second / 16, 16, 4.0)
    assert judged.size == size
    assert (judged.trying is None) == (size == 8)


@pytest.mark.parametrize("timeout_seconds", [16.0, 150.0])
@pytest.mark.parametrize("window", cases([FAR, NEAR, Window()], default=[FAR, NEAR]))
@pytest.mark.parametrize("link_mib_per_second", cases([20, 6, 3], default=[3]))
def test_on_a_slow_line_no_request_times_out(window, timeout_seconds, link_mib_per_second):
    store = dataclasses.replace(S3, link_mib_per_second=link_mib_per_second)
    gib = 1 if link_mib_per_second == 20 else 0.5
    rank = transfer(
        store,
        gib,
        window,
        piece_mib=None,
        mib=16 if timeout_seconds < 100 else 32,
        timeout_seconds=timeout_seconds,
        step_seconds=0.02,
    )
    assert rank.timed_out == 0
    assert rank.mib_per_second >= 0.85 * link_mib_per_second


def test_slow_requests_that_were_begun_before_a_cut_cut_no_further():
    window = Window().after_answer(100.0, 0.0, 32, 150)
    assert window.size < Window().size
    assert window.after_answer(101.0, 1.0, 32, 150) == window  # it was on the line with the first
    assert window.after_answer(200.0, 100.0, 32, 150).size < window.size


@pytest.mark.parametrize(
    ("window", "seconds", "in_flight", "size"),
    [
        (FAR, 75.0, 32, 16.0),  # twice a quarter of the time-out
        (FAR, 75.0, 99, 32.0),
        (FAR, 37.5, 32, 64.0),
        (FAR, 150.0, 2, 1.0),
        (NEAR, 75.0, 32, 4.0),
        (Window(4.0), 1.0, 1, 4.25),
        (Window(7.9, 0.001), 1.0, 1, 8.0),
        (Window(8.0), 1.0, 1, 8.0),  # a round decides
        (Window(16.0), 1.0, 1, 16.0),
        (Window(16.0, cut_rate=9.0), 1.0, 1, 16.0625),
        (Window(64.0, cut_rate=9.0), 1.0, 1, 64.0),
        (Window(8.0, 0.001, cut_rate=9.0), 1.0, 1, 8.0),
    ],
)
def test_a_request_of_a_quarter_of_its_time_out_cuts_the_window(window, seconds, in_flight, size):
    is_slow = seconds > 37.5
    trying = _Try(4.0, 1.0)
    window = msgspec.structs.replace(window, trying=trying, cut_at=20.0)
    after = window.after_answer(20.0 + seconds, 20.0, in_flight, 150)
    assert after.size == size
    assert after.trying == (None if is_slow else trying)
    assert after.cut_at == (20.0 + seconds if is_slow else 20.0)


def test_a_slow_request_counts_as_one_of_those_of_its_round():
    window = FAR.after_begin(0.0, 1).after_bytes(1.0, 1, 32)
    assert window.after_answer(75.0, 0.0, 1, 150).size == 16.0
    assert window.after_answer(75.0, 0.0, 48, 150).size == 24.0


@pytest.mark.parametrize(
    ("window", "in_flight", "size"), [(FAR, 32, 16), (FAR, 99, 32), (NEAR, 32, 4), (FAR, 1, 1)]
)
def test_a_throttled_request_halves_the_window_or_what_is_in_flight(window, in_flight, size):
    after = msgspec.structs.replace(window, trying=_Try(4.0, 1.0)).after_throttling(
        100.0, 99.0, in_flight, 50.0
    )
    assert (after.size, after.trying, after.cut_at) == (size, None, 100.0)
    # One that was begun before the cut says nothing new.
    assert after.after_throttling(101.0, 99.9, in_flight, 1.0) == after
    assert after.after_throttling(101.0, 100.0, in_flight, 1.0).cut_rate == 1.0


def test_the_rate_follows_the_successes_lately_or_else_what_is_in_flight():
    rates = [
        FAR.after_throttling(100.0, 99.0, 64, lately).cut_rate for lately in (50.0, 1.0, 0.5, 0.0)
    ]
    assert rates == [35.0, 1.0, 1.0, pytest.approx(0.7 * 64)]
    # But it rises only with the time.
    again = FAR.after_throttling(100.0, 99.0, 64, 50.0).after_throttling(100.0, 100.0, 64, 1000.0)
    assert again.cut_rate == pytest.approx(0.7 * 35)


def test_a_rate_ends_a_minute_after_the_last_throttled_request():
    window = FAR.after_throttling(100.0, 99.0, 64, 50.0)
    assert [window.rate(at) for at in (90.0, 100.0, 105.0)] == [35.0, 35.0, 1.625 * 35.0]
    assert window.rate(110.0) == 3 * 35.0
    still = window.after_answer(100.0 + OPEN_AFTER_SECONDS, 159.9, 1, 150)
    assert still.is_throttled
    assert still.size > window.size
    after = window.after_answer(100.1 + OPEN_AFTER_SECONDS, 160.0, 1, 150)
    assert not after.is_throttled
    assert after.rate(161.0) == math.inf


ONE_BY_ONE = [0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1]


def _shares(ranks: list[Rank]) -> list[float]:
    """Return each rank's part of a fair share, while all are under way."""
    since = max(rank.starts_at for rank in ranks) + 0.5
    until = min(rank.ended_at for rank in ranks)
    moved = [sum(size for at, size in rank.done if since <= at <= until) for rank in ranks]
    return [one / statistics.mean(moved) for one in moved]


@pytest.mark.parametrize("noise", cases([0.0, 0.4], default=[0.4]))
def test_of_eight_ranks_on_one_link_none_has_less_than_half_of_its_fair_share(noise):
    ranks = [Rank(FAR, [8.0] * 128, piece_mib=4.0, starts_at=start) for start in ONE_BY_ONE]
    store = dataclasses.replace(S3, noise=noise)
    simulate(store, ranks, seed=3, step_seconds=0.005)
    assert min(_shares(ranks)) >= 0.5
    seconds = max(rank.ended_at for rank in ranks)
    assert 8 * 128 * 8 / seconds >= 0.85 * store.link_mib_per_second


@pytest.mark.parametrize("store", [S3, LOOPBACK])
def test_a_store_of_20_answers_a_second_gets_at_most_13_of_the_requests(store):
    throttling = dataclasses.replace(store, requests_per_second=20.0)
    for seed in range(3):
        rank = transfer(throttling, 1, FAR if store is S3 else NEAR, seed=seed, mib=8)
        assert rank.sent <= 1.3 * len(rank.done) == 1.3 * 128


# What happens, how much later, how long ago the request was begun, how many are in flight, what was
# done per second, how large it was.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["heard", "begun", "moved", "answered", "throttled"]),
        st.floats(0, 30),
        st.floats(0, 60),
        st.integers(0, 200),
        st.floats(0, 1e4),
        st.integers(0, 1 << 35),
    ),
    max_size=80,
)
Event = tuple[str, float, float, int, float, int]


def _after(window: Window, now: float, event: Event) -> Window:
    what, _, ago, in_flight, lately, size_bytes = event
    if what == "heard":
        return window.after_small_answer(ago / 1000)
    if what == "begun":
        return window.after_begin(now, in_flight)
    if what == "moved":
        return window.after_bytes(now, size_bytes, in_flight)
    if what == "answered":
        return window.after_answer(now, now - ago, in_flight, 150)
    return window.after_throttling(now, now - ago, in_flight, lately)


@calm
@given(EVENTS)
def test_it_stays_within_its_bounds_and_throttling_halves_it(events):
    window, now = Window(), 0.0
    for event in events:
        now += event[1]
        allowed, rate = window.allowed(), window.rate(now)
        found = _after(window, now, event)
        if event[0] == "throttled":
            if now - event[2] < window.cut_at:
                assert found == window
            else:
                assert found.allowed() <= max(LEAST_WINDOW, allowed / 2)
                assert found.rate(now) <= max(LEAST_RATE_PER_SECOND, 0.7 * rate)
        assert LEAST_WINDOW <= found.allowed() <= AUTO_MOST
        assert 1 <= found.allowed(event[5], event[2]) <= AUTO_MOST
        assert found.rate(now) >= LEAST_RATE_PER_SECOND
        window = found


@calm
@given(EVENTS, st.integers(1, 8))
def test_whatever_happened_it_recovers(events, per_second):
    window, now = Window(), 0.0
    for event in events:
        now += event[1]
        window = _after(window, now, event)
    for _ in range(int(OPEN_AFTER_SECONDS * per_second) + 2):
        now += 1 / per_second
        window = window.after_answer(now, now - 0.1, 1, 150)
    assert not window.is_throttled
    assert window.rate(now) == math.inf
    assert window.allowed() >= 8
