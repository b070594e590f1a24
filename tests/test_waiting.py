"""Waiting in steps: which threads wake, what ends a wait; and what a forked child renews."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dcp_objstore import threads
from dcp_objstore.forking import PerProcess, close_here, in_forked_child, open_here
from dcp_objstore.threads import (
    STEP_SECONDS,
    result_of,
    run_into,
    spawn,
    take,
    wait_for,
    wait_in_steps,
)


def in_background(function: Callable[[], object]) -> object:
    future: Future[object] = Future()
    spawn(lambda: run_into(future, function), "test")
    return future.result(30)


class Waits:
    """Notes how long each step may take; the last of them brings what is waited for."""

    def __init__(self, steps: int) -> None:
        self.seconds: list[float | None] = []
        self._steps = steps

    def __call__(self, seconds: float | None) -> bool:
        self.seconds.append(seconds)
        return len(self.seconds) == self._steps


def test_the_main_thread_waits_in_steps_and_looks_between_them():
    waits, looked = Waits(3), []
    assert wait_in_steps(waits, check=lambda: looked.append(len(waits.seconds)))
    assert waits.seconds == [STEP_SECONDS] * 3
    assert looked == [1, 2]


def test_the_last_step_is_what_is_left_of_the_time(monkeypatch):
    now, waited, looked = [0.0], [], []

    def wait(seconds: float | None) -> bool:
        assert seconds is not None
        waited.append(seconds)
        now[0] += seconds
        return False

    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for timeout_seconds, steps in ((0.625, [0.25, 0.25, 0.125]), (0.5, [0.25, 0.25]), (-1, [0])):
        assert not wait_in_steps(wait, timeout_seconds, check=lambda: looked.append(now[0]))
        assert (waited, len(looked)) == (steps, len(steps) - 1)
        for noted in (waited, looked):
            noted.clear()


def test_only_the_main_thread_has_a_thread_wait_for_it():
    def where(*args: int, **settings: int) -> tuple[object, ...]:
        return threading.current_thread().name, args, settings

    assert wait_for(where, 1, n=2) == ("dcp_objstore-request", (1,), {"n": 2})
    assert in_background(lambda: wait_for(where, 1, n=2)) == ("dcp_objstore-test", (1,), {"n": 2})


def test_another_thread_does_not_wake_unless_it_has_something_to_look_at():
    waits = Waits(1)
    assert in_background(lambda: wait_in_steps(waits))
    assert waits.seconds == [None]
    waits = Waits(1)
    assert in_background(lambda: wait_in_steps(waits, 20))
    assert waits.seconds == [20]
    waits = Waits(3)
    assert in_background(lambda: wait_in_steps(waits, step_seconds=7))
    assert waits.seconds == [7, 7, 7]


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_waiting_ends_with_its_time(seconds):
    assert not wait_in_steps(threading.Event().wait, seconds)
    with pytest.raises(TimeoutError):
        result_of(Future(), seconds)


def test_an_error_of_the_look_ends_the_waiting():
    def look() -> None:
        raise InterruptedError

    def wait() -> object:
        return take(queue.SimpleQueue[None](), check=look, step_seconds=0.01)

    with pytest.raises(InterruptedError):
        wait()
    with pytest.raises(InterruptedError):
        in_background(wait)


def test_a_result_that_is_a_time_out_is_not_taken_for_one_of_the_waiting():
    failed: Future[None] = Future()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        result_of(failed, check=pytest.fail)


def test_none_can_be_taken():
    source = queue.SimpleQueue[None]()
    threading.Timer(STEP_SECONDS * 1.5, source.put, [None]).start()
    take(source)
    assert source.empty()


class Owned:
    """A lock that notes where it is freed."""

    freed: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __del__(self) -> None:
        self.freed.append(os.getpid())


def test_a_forked_child_has_an_object_of_its_own_and_the_parent_keeps_its():
    owned = PerProcess(Owned)
    renewed: list[int] = []
    in_forked_child(lambda: renewed.append(os.getpid()))
    owned.here.lock.acquire()
    child = os.fork()
    if not child:
        is_own = owned.here.lock.acquire(timeout=5) and renewed == [os.getpid()]
        os._exit(0 if is_own and not Owned.freed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert owned.here.lock.locked()
    assert not renewed


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def test_a_file_of_this_process_alone_is_closed_in_a_forked_child(tmp_path):
    before = os.umask(0)
    opened = open_here(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    number = open_here(tmp_path / "b", os.O_CREAT | os.O_RDWR, 0o600)
    os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o666, 0o600]
    close_here(number)
    shared = os.open(tmp_path / "b", os.O_RDONLY)
    assert shared == number, "which the child keeps"
    child = os.fork()
    if not child:
        os._exit(0 if is_open(shared) and not is_open(opened) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    close_here(opened)
    os.close(shared)
