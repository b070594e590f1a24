"""Threads for requests: how many there are, in which order they work, and what they keep."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from dcp_objstore.errors import CorruptDataError, StoreUnavailableError
from dcp_objstore.threads import run_into, spawn
from dcp_objstore.transfer.workers import DaemonPool, concurrently, in_waves, worker_number


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that were started."""
    names: list[str] = []

    def noted(function: Callable[[], object], name: str) -> object:
        names.append(name)
        return spawn(function, name)

    monkeypatch.setattr("dcp_objstore.transfer.workers.spawn", noted)
    return names


@pytest.mark.parametrize(
    ("items", "wave", "threads"), [(100, 64, 16), (16, 64, 16), (3, 64, 3), (9, 2, 2), (0, 64, 0)]
)
def test_results_come_in_order_of_as_many_threads_as_have_work(items, wave, threads, names):
    assert list(in_waves(lambda item: 2 * item, range(items), wave)) == [*range(0, 2 * items, 2)]
    assert len(names) == threads


def test_no_call_of_a_wave_is_made_before_the_results_of_the_last_one_were_taken():
    done: list[int] = []
    results = in_waves(done.append, range(10), 4)
    for taken in range(1, 11):
        next(results)
        assert len(done) <= (taken + 3) // 4 * 4
    assert sorted(done) == list(range(10))
    done.clear()
    results = in_waves(done.append, range(200))
    next(results)
    deadline = time.monotonic() + 10
    while len(done) < 64 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(done) == 64


def test_a_pool_runs_what_was_submitted_and_ends_its_threads():
    numbers: list[int] = []
    met = threading.Barrier(3)

    def number(base: int) -> int:
        met.wait(30)
        numbers.append(worker_number())
        return base + 1

    with DaemonPool(3, "numbered") as pool:
        futures = [pool.submit(number, base) for base in range(3)]
    assert [future.result(30) for future in futures] == [1, 2, 3]
    assert sorted(numbers) == [0, 1, 2]
    assert worker_number() == 0
    for thread in threading.enumerate():
        if "numbered" in thread.name:
            thread.join(30)
            assert not thread.is_alive()


def test_a_thread_that_waits_keeps_nothing_of_its_last_task():
    class Memory:
        pass

    with DaemonPool(1, "keeping") as pool:
        memory = Memory()
        kept = weakref.ref(memory)
        pool.submit(lambda _: None, memory).result(30)
        del memory
        deadline = time.monotonic() + 10
        while kept() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert kept() is None


def test_an_error_does_not_keep_its_future_alive_until_the_garbage_collector_comes():
    def fail() -> None:
        raise ZeroDivisionError

    future: Future[Any] = Future()
    kept = weakref.ref(future)
    gc.disable()
    try:
        run_into(future, fail)
        assert isinstance(future.exception(), ZeroDivisionError)
        del future
        assert kept() is None
    finally:
        gc.enable()


def test_calls_at_once_overlap_and_all_have_ended_before_the_first_error_is_raised():
    both = threading.Barrier(2)
    assert concurrently(*[lambda: both.wait(60) is None] * 2) == [False, False]
    ended: list[str] = []

    def late() -> None:
        both.wait(60)
        ended.append("late")
        raise StoreUnavailableError("second")

    def early() -> None:
        both.wait(60)
        raise CorruptDataError("first")

    with pytest.raises(CorruptDataError, match="first"):
        concurrently(early, late)
    assert ended == ["late"]


@pytest.mark.parametrize(
    "errors",
    [
        [StoreUnavailableError("no answer in time")],
        [CorruptDataError("planned"), StoreUnavailableError("no answer in time")],
        [KeyboardInterrupt()],
    ],
)
def test_after_ctrl_c_or_no_answer_no_other_call_is_waited_for(errors):
    left, ended = threading.Event(), threading.Event()

    def fail(error: BaseException) -> None:
        raise error

    def hang() -> None:
        left.wait(60)
        ended.set()

    try:
        with pytest.raises(type(errors[0])):
            concurrently(*(partial(fail, error) for error in errors), hang)
        assert not ended.is_set()
    finally:
        left.set()
