"""Time for the commit rules: how long a change is tried, and what it says at the end."""

from __future__ import annotations

import pytest

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, Clock, pause_or_raise
from dcp_objstore.errors import RetryableError
from dcp_objstore.stores import StoreSpec
from tests.support.checkpoints import memory_url


def slept(seconds: float) -> None:
    raise AssertionError(f"slept for {seconds} seconds")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses are as users have them, but no time passes in them."""
    monkeypatch.setattr("time.sleep", slept)


class Fast(Clock):
    """It passes only while somebody sleeps."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        super().__init__(deadline_seconds)
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("stall", "deadline"), [(0.3, 0.1), (90, 30), (180, 60), (600, 60)])
def test_a_job_gives_a_change_a_third_of_its_time_out(stall, deadline):
    assert Clock.of_job(stall).deadline_seconds == pytest.approx(deadline)


def test_a_change_is_tried_until_the_deadline_in_growing_pauses():
    clock = Fast(20.0)
    tries = clock.tries()
    store = StoreSpec(memory_url()).open()
    with pytest.raises(RetryableError, match="others kept changing") as caught:
        for _ in range(1000):
            pause_or_raise(store, tries)
    assert caught.value.url == store.url
    assert clock.now == pytest.approx(1020.0), "no try begins later, and none is left out"
    assert 0.05 <= clock.slept[0] <= 0.1
    assert 2.5 <= max(clock.slept) <= 5.0


@pytest.mark.parametrize(("most", "seconds"), [(5.0, 5.0), (100.0, 20.0)])
def test_an_earlier_deadline_counts_and_each_retry_is_told(most, seconds):
    clock, told = Fast(20.0), []
    tries = clock.tries(lambda number, error, begun_at: told.append(number), most_seconds=most)
    while tries.pause(ValueError("busy")):
        pass
    assert clock.now == pytest.approx(1000.0 + seconds)
    assert told == list(range(2, len(clock.slept) + 2))
