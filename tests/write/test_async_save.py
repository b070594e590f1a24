"""The turns of saves in the background, and what becomes of the errors that nobody asks for."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError, wait
from typing import Any

import pytest
import torch

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    InputError,
    RankFailedError,
    SaveInProgressError,
)
from dcp_objstore.observe.events import AnyEvent, Failed, Staged
from dcp_objstore.write import async_save as async_api
from dcp_objstore.write.staging.state import Staging
from tests.support.checkpoints import memory_url

Handle = dos.AsyncSaveHandle


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> async_api._Saves:
    """Those of the process, for this test alone."""
    fresh = async_api._Saves()
    monkeypatch.setattr(async_api._saves, "here", fresh)
    return fresh


def state(value: float = 1.0) -> dict[str, Any]:
    return {"t": torch.full((3,), value)}


def taken() -> str:
    """The URL of a checkpoint that is there already: a save to it fails."""
    url = memory_url()
    dos.save(state(), url, progress=False)
    return url


def end(handle: Handle, error: BaseException | None = None) -> Handle:
    handle._end(None, error)
    return handle


def ended(error: BaseException | None = None) -> Handle:
    return end(Handle(f"memory://x/{error}"), error)


class Turns:
    """Whom saves wait for before their turn.

    Attributes:
        waited_for: the saves, in their order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *handles: Handle) -> None:
        self.waited_for: list[Handle] = []
        self.interrupt = False
        self._handles = {handle._ended: handle for handle in handles}
        monkeypatch.setattr(async_api, "wait_until", self._wait)

    def _wait(self, event: threading.Event) -> None:
        self.waited_for.append(self._handles[event])
        if self.interrupt:
            raise KeyboardInterrupt

    def wait(self, handle: Handle) -> list[Handle]:
        self.waited_for.clear()
        handle._wait_for_turn()
        return self.waited_for


class Held:
    """Holds saves as they begin to upload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        run_save = async_api.run_save

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(30)
            return run_save(*args)

        monkeypatch.setattr(async_api, "run_save", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    hold = Held(monkeypatch)
    yield hold
    hold.go_on.set()


# The handle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_a_result_was_asked_for_once_it_was_there(ask):
    future: Any = dos.AsyncSaveHandle("memory://x/step-1").upload_completion
    assert not future.cancel(), "a save cannot be cancelled"
    with pytest.raises(FutureTimeoutError):
        getattr(future, ask)(0)
    assert not future.seen
    future.set_exception(ValueError("no"))
    if ask == "result":
        with pytest.raises(ValueError, match="no"):
            future.result(0)
    else:
        assert isinstance(future.exception(0), ValueError)
    assert future.seen


def test_all_who_wait_for_a_save_are_woken_though_a_callback_ends_the_thread():
    handle = Handle("memory://x/step-1")

    def leave(_: Future[Any]) -> None:
        raise SystemExit

    handle.staging_completion.add_done_callback(leave)
    handle.upload_completion.add_done_callback(leave)
    with pytest.raises(SystemExit):
        end(handle, ValueError("no"))
    assert handle.done()
    assert isinstance(handle.upload_completion.exception(0), ValueError)
    assert isinstance(handle.staging_completion.exception(0), ValueError)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_callback_may_ask_for_the_outcome_and_begin_the_next_save(held, fails, staged):
    """It runs in the thread that saves, where nothing may wait for that thread."""
    url, after = taken() if fails else memory_url(), memory_url()
    handle = dos.async_save(state(), url, wait_for_staging=staged)
    said: Future[Any] = Future()

    def callback(_: Future[Any]) -> None:
        assert handle.done()
        assert handle.staged(0) is None
        said.set_result((handle.exception(0), dos.async_save(state(), after)))

    handle.upload_completion.add_done_callback(callback)
    held.go_on.set()
    error, following = said.result(30)
    assert isinstance(error, CheckpointExistsError) if fails else error is None
    assert following.result(30).url == after
    assert dos.open(after).keys()


def test_a_callback_that_would_wait_for_its_own_save_is_told_so(held):
    """One of the copy, which the thread that saves calls before it uploads."""
    copying, said = threading.Event(), []
    finish = Staging.finish

    def finish_later(staging: Staging) -> None:
        assert copying.wait(30)
        finish(staging)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Staging, "finish", finish_later)
        handle = dos.async_save(state(), memory_url(), wait_for_staging=False)

        def callback(_: Future[Any]) -> None:
            for wait in (handle.result, lambda: dos.async_save(state(), memory_url())):
                with pytest.raises(InputError, match="upload_completion"):
                    wait()
            said.append(True)

        handle.staging_completion.add_done_callback(callback)
        copying.set()
        held.go_on.set()
        handle.result(30)
    assert said == [True]


def test_a_copy_that_was_made_stays_made_though_its_save_fails():
    handle = dos.async_save(state(), taken())
    assert handle.staging_completion.done()
    assert isinstance(handle.exception(30), CheckpointExistsError)
    assert handle.staged(0) is None
    assert handle.staging_completion.exception(0) is None
    with pytest.raises(CheckpointExistsError):
        handle.result(30)


def test_a_save_says_when_its_copy_was_made_and_how_large_it_is(through):
    events: list[Any] = []
    opened_in: list[threading.Thread] = []
    through(lambda store: opened_in.append(threading.current_thread()) or store)
    url, before_ns = memory_url(), time.time_ns()
    dos.async_save(state(), url, on_event=events.append).result(30)
    (staged,) = [event for event in events if isinstance(event, Staged)]
    assert (staged.size_bytes, staged.url, staged.rank) == (12, url, 0)
    assert before_ns - 10**9 < staged.start_ns < time.time_ns()
    assert opened_in[0] is threading.current_thread(), "a child forked later could not import it"


# Turns --------------------------------------------------------------------------------------------


def test_a_save_waits_for_all_that_run_or_whose_error_nobody_knows(saves, monkeypatch):
    running, failed, done, known, last = (Handle(f"memory://x/{n}") for n in range(5))
    end(failed, ValueError())
    end(done)
    end(known, OSError()).exception(0)
    for handle in (running, failed, done, known):
        saves.add(handle)
    assert saves.unsettled == [running, failed, known]
    saves.add(last)
    assert saves.unsettled == [running, failed, last]
    turns = Turns(monkeypatch, running, failed)
    assert turns.wait(last) == [failed, running]
    assert turns.wait(last) == []


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save_once(saves, caplog):
    url = taken()
    asked = dos.async_save(state(), url)
    assert isinstance(asked.upload_completion.exception(30), CheckpointExistsError)
    failed = dos.async_save(state(), url)  # not the error that was asked for
    with pytest.raises(CheckpointExistsError) as caught:
        dos.async_save(state(), memory_url())
    assert caught.value.url == url
    assert caplog.text.count(f"saving {url} in the background failed") == 2
    third = memory_url()
    dos.async_save(state(), third).result(30)
    assert saves.unsettled[0] is not failed
    assert dos.open(third).keys() == {"t"}


def test_the_save_after_a_failed_one_waits_for_those_before_it_too(saves, monkeypatch):
    """Ctrl-C has ended the wait of the second: the first still runs as the third begins."""
    first, second, third = (Handle(f"memory://x/{n}") for n in (1, 2, 3))
    for handle in (first, second, third):
        saves.add(handle)
    turns = Turns(monkeypatch, first, second)
    turns.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        turns.wait(second)
    turns.interrupt = False
    assert turns.wait(third) == [second, first]


def test_a_foreign_error_is_raised_by_the_next_save_with_its_type(saves):
    saves.latest = ended(ZeroDivisionError("by hand"))
    with pytest.raises(RankFailedError, match="ZeroDivisionError: by hand") as caught:
        dos.async_save(state(), memory_url())
    assert caught.value.url == saves.latest.url


def test_ctrl_c_while_a_save_waits_for_the_one_before_loses_no_error_of_that(
    saves, held, monkeypatch
):
    url = taken()
    first = dos.async_save(state(), url)
    assert held.reached.wait(30)

    def interrupted(event: threading.Event, *_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(async_api, "wait_until", interrupted)
        with pytest.raises((KeyboardInterrupt, RankFailedError)):
            dos.async_save(state(), memory_url())
    assert saves.latest is first
    held.go_on.set()
    with pytest.raises(CheckpointExistsError):
        dos.async_save(state(), memory_url())


def test_a_save_refused_because_another_runs_leaves_that_one_and_its_error(saves, held):
    first = dos.async_save(state(), taken(), on_busy="raise")
    assert held.reached.wait(30)
    url = memory_url()
    with pytest.raises(SaveInProgressError) as caught:
        dos.async_save(state(), url, on_busy="raise")
    assert caught.value.url == url
    assert first.url in str(caught.value)
    assert saves.latest is first
    held.go_on.set()
    assert wait([first.upload_completion], 30).done
    with pytest.raises(CheckpointExistsError):
        dos.async_save(state(), memory_url(), on_busy="raise")


class Meeting(async_api.BackgroundSaves):
    """Two threads look for the latest save at the same time, unless a lock forbids it."""

    def __init__(self) -> None:
        self._latest: Handle | None = None
        self._looks = threading.local()
        self._first, self._second = threading.Barrier(2), threading.Barrier(2)

    @property
    def latest(self) -> Handle | None:  # type: ignore[override]
        latest, looks = self._latest, getattr(self._looks, "count", 0)
        self._looks.count = looks + 1
        if looks == 0:
            self._first.wait(30)
        elif looks == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._second.wait(0.3)
        return latest

    @latest.setter
    def latest(self, handle: Handle) -> None:
        self._latest = handle


def test_of_two_threads_that_begin_a_save_at_once_one_finds_the_other(saves, held):
    meeting = Meeting()

    def begin() -> Handle | SaveInProgressError:
        try:
            return async_api.begin_save(meeting, state(), memory_url(), on_busy="raise")
        except SaveInProgressError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        begun = [one.result(30) for one in [pool.submit(begin) for _ in range(2)]]
    held.go_on.set()
    (handle,) = [one for one in begun if isinstance(one, Handle)]
    assert meeting._latest is handle
    handle.result(30)


def test_a_save_that_ctrl_c_ends_as_it_gets_its_turn_holds_up_no_other(saves, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(async_api._Saves, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dos.async_save(state(), memory_url())
    assert isinstance(saves.latest.exception(0), KeyboardInterrupt)


def test_a_word_that_on_busy_does_not_know_is_refused_before_anything_waits(saves):
    with pytest.raises(ConfigError, match="on_busy"):
        dos.async_save(state(), memory_url(), on_busy="ignore")  # type: ignore[arg-type]
    assert saves.latest is None


# The copy -----------------------------------------------------------------------------------------


def test_a_copy_that_is_not_waited_for_is_whole_when_staged_returns(monkeypatch):
    finish, begun, go_on = Staging.finish, threading.Event(), threading.Event()

    def finish_late(self: Staging) -> None:
        begun.set()
        assert go_on.wait(30)
        finish(self)

    monkeypatch.setattr(Staging, "finish", finish_late)
    copied, url = state(), memory_url()
    handle = dos.async_save(copied, url, wait_for_staging=False)
    assert begun.wait(30)
    with pytest.raises(TimeoutError, match="still being copied"):
        handle.staged(0.0)
    assert not handle.staging_completion.done()
    for ask in (handle.exception, handle.result):
        with pytest.raises(TimeoutError, match="still running"):
            ask(0.0)
    go_on.set()
    handle.staged(30)
    copied["t"].zero_()
    assert handle.upload_completion.result(30).url == url
    assert dos.open(url).read("t")["t"].tolist() == [1.0] * 3


def test_a_copy_that_failed_by_a_time_out_is_not_called_unfinished():
    handle = Handle("memory://x/step-1")
    handle.staging_completion.set_exception(TimeoutError("the device's own"))
    with pytest.raises(TimeoutError, match="the device's own"):
        handle.staged(30)


def test_a_save_that_ctrl_c_ended_as_its_thread_began_commits_nothing(saves, monkeypatch, caplog):
    late: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "dcp_objstore-async-save":
            return start(thread)
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    url = memory_url()
    with pytest.raises(KeyboardInterrupt):
        dos.async_save(state(), url)
    monkeypatch.undo()
    late[0].start()  # it was, before the call heard of Ctrl-C
    late[0].join(30)
    assert "KeyboardInterrupt" in str(saves.latest.exception(30))
    assert caplog.text.count("in the background failed") == 1, "it is run by one of the two"
    with pytest.raises(CheckpointNotFoundError):
        dos.open(url)


def test_ctrl_c_during_the_copy_is_raised_here_and_ends_the_save(saves, monkeypatch):
    url = memory_url()

    def interrupted(self: Staging) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dos.async_save(state(), url)
    assert saves.latest is not None
    error = saves.latest.exception(30)
    assert isinstance(error, RankFailedError)
    assert "KeyboardInterrupt" in error.message
    assert error.url == url
    with pytest.raises(CheckpointNotFoundError):
        dos.open(url)


@pytest.mark.parametrize("step", ["__init__", "finish"])
def test_a_copy_that_fails_fails_its_save_alone(step, saves, monkeypatch):
    def broken(self: Staging, *_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Staging, step, broken)
        told: list[AnyEvent] = []
        handle = dos.async_save(state(), memory_url(), wait_for_staging=False, on_event=told.append)
        for ask in (handle.staged, handle.result):
            with pytest.raises(RankFailedError, match="no memory"):
                ask(30)
        assert [type(event) for event in told].count(Failed) == 1
    dos.async_save(state(), memory_url()).result(30)


def test_the_copy_is_gone_before_its_save_counts_as_ended(saves, monkeypatch):
    """The next save needs its memory."""
    copies: list[weakref.ref[Any]] = []
    gone: list[bool] = []
    run_save, end = async_api.run_save, Handle._end

    def noted(writer: Any, staged: Any, *args: Any) -> Any:
        copies.append(weakref.ref(staged))
        return run_save(writer, staged, *args)

    def ending(handle: Handle, *outcome: Any) -> None:
        if copies[-1]() is not None:
            gc.collect()  # a planner of torch 2.9 is in a cycle with it
        gone.append(copies[-1]() is None)
        end(handle, *outcome)

    monkeypatch.setattr(async_api, "run_save", noted)
    monkeypatch.setattr(Handle, "_end", ending)
    dos.async_save(state(), memory_url()).result(30)
    assert dos.async_save(state(), taken()).exception(30) is not None
    assert gone == [True, True]


# The end of the program ---------------------------------------------------------------------------


def test_a_program_that_ends_waits_for_every_save_and_shows_unseen_errors(saves, monkeypatch):
    running, late = Handle("memory://x/running"), Handle("memory://x/late")
    known, unknown = ended(ValueError("known")), ended(OSError("unknown"))
    for handle in (unknown, known, running, late):
        saves.add(handle)
    known.exception(0)
    waited = threading.Thread(target=async_api._wait_for_all)
    waited.start()
    end(running)
    waited.join(0.1)
    assert waited.is_alive(), "one of two has ended"
    monkeypatch.setattr(async_api, "has_ended", lambda: True)
    end(late, ZeroDivisionError("late"))
    waited.join(30)
    assert not waited.is_alive()
    shown: list[Any] = []
    monkeypatch.setattr(async_api, "show_lost", lambda *lost: shown.append(lost))
    async_api._show_unseen_errors()
    assert [(url, str(error), why.split(";")[0][:24]) for url, error, why in shown] == [
        (unknown.url, "unknown", "the background save fail"),
        (late.url, "late", "the program ended while "),
    ]


def test_a_save_that_begins_after_the_program_has_ended_is_waited_for_by_its_call(
    saves, monkeypatch
):
    begun: list[bool] = []
    monkeypatch.setattr(
        async_api, "ready_for_program_end", lambda: begun.append(saves.latest.done())
    )
    monkeypatch.setattr(async_api, "has_ended", lambda: True)
    url = memory_url()
    handle = dos.async_save(state(), url)
    assert handle.done()
    assert begun == [False], "what a save needs at that time is there before"
    assert dos.open(url).keys() == {"t"}
