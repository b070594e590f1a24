"""The end of a save in the background, as its writer can see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_objstore as dos
from dcp_objstore.errors import (
    CheckpointExistsError,
    ConfigError,
    InputError,
    SaveInProgressError,
)
from dcp_objstore.observe.events import Staged
from dcp_objstore.write.staging import stager
from dcp_objstore.write.staging.state import StagedState, stage
from tests.support.checkpoints import cause, memory_url


class Waiting:
    """A thread that waits until it may end."""

    def __init__(self, name: str) -> None:
        self.go_on = threading.Event()
        self.thread = threading.Thread(target=self.go_on.wait, args=(30,), name=name)
        self.thread.start()

    def end(self) -> None:
        self.go_on.set()
        self.thread.join(30)


@pytest.fixture
def threads() -> Iterator[Any]:
    begun: list[Waiting] = []

    def begin(name: str) -> Waiting:
        begun.append(Waiting(name))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def background_save(copied: StagedState) -> Any:
    return stager._BackgroundSave(copied)


# Which thread runs it -----------------------------------------------------------------------------


def test_as_long_as_its_thread_is_unknown_a_later_one_of_an_executor_counts(threads):
    threads("ThreadPoolExecutor-0_0")
    state = stage({"t": torch.ones(1)})
    save = background_save(state)
    assert save.has_ended(), "none that could run it was begun since"
    threads("training")
    assert save.has_ended()
    later = threads("ThreadPoolExecutor-1_0")
    assert not save.has_ended()
    assert not save.wait(0)
    later.end()
    assert save.has_ended()
    assert save.wait(0)


def test_the_first_other_thread_that_calls_the_writer_runs_the_save():
    state = stage({"t": torch.ones(1)})
    save = background_save(state)
    save.note_thread()
    assert save.thread is None, "it was staged here"
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        thread = first.submit(threading.current_thread).result(30)
        first.submit(save.note_thread).result(30)
        second.submit(save.note_thread).result(30)
        assert save.thread is thread
        assert not second.submit(save.has_ended).result(30)
        assert first.submit(save.has_ended).result(30), "that it asks itself shows that it is free"
    assert save.has_ended()


def test_a_wait_for_a_save_ends_with_its_thread_or_its_copy(threads, monkeypatch):
    monkeypatch.setattr("dcp_objstore.threads.STEP_SECONDS", 0.01)
    for known in (True, False):
        copies = [stage({"t": torch.ones(1)})]
        save = background_save(copies[0])
        other = threads("ThreadPoolExecutor-2_0")
        if known:
            save.thread = other.thread
        assert not save.wait(0.01)
        threading.Timer(0.05, copies.clear).start()
        assert save.wait(30)
        assert other.thread.is_alive()
        held = stage({"t": torch.ones(1)})
        save = background_save(held)
        save.thread = other.thread
        threading.Timer(0.05, other.go_on.set).start()
        assert save.wait(30)


def test_a_thread_that_waits_sees_each_way_in_which_a_save_may_end(threads):
    held = stage({"t": torch.ones(1)})
    save = background_save(held)
    executor = threads("ThreadPoolExecutor-3_0")
    waiting = threading.Thread(target=save.wait, args=(90,))
    waiting.start()
    executor.end()  # it has not called the writer, and the copy is still there
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_save_loses_its_ranks_only_in_its_own_thread_and_group(monkeypatch):
    state = stage({"t": torch.ones(1)})
    monkeypatch.setattr(stager, "has_gone", lambda group: gone)
    monkeypatch.setattr(stager, "count_ranks", lambda group: ranks)
    for here in (True, False):
        for gone in (True, False):
            for ranks in (1, 2):
                save = background_save(state)
                save.thread = threading.current_thread() if here else None
                assert save.has_lost_ranks() == (here and gone and ranks == 2)


# The writer ---------------------------------------------------------------------------------------


def test_a_word_that_on_busy_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="on_busy"):
        dos.ObjectStoreWriter(memory_url(), on_busy="ignore")  # type: ignore[arg-type]


def test_a_closed_writer_keeps_only_the_memory_that_a_save_holds(memory):
    writer = dos.ObjectStoreWriter(memory_url())
    staged = writer.stage({"t": torch.ones(3)})
    writer.close()
    assert memory.allocated_bytes == 64 * 1024
    del staged
    writer.close()
    assert memory.allocated_bytes == 0


def test_a_save_whose_copy_is_gone_has_ended_though_its_thread_goes_on(monkeypatch):
    monkeypatch.setattr(stager, "_GRACE_SECONDS", 0.01)
    ready: list[None] = []
    monkeypatch.setattr(stager, "ready_for_program_end", lambda: ready.append(None))
    writer = dos.ObjectStoreWriter(memory_url(), on_busy="raise")
    copies = [writer.stage({"t": torch.ones(1)})]
    assert ready == [None]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(writer.storage_meta).result(30)
        with pytest.raises(SaveInProgressError):
            writer.stage({"t": torch.ones(1)})
        copies.clear()
        writer.stage({"t": torch.ones(1)})


def test_a_writer_tells_with_the_save_of_the_copy_before_it():
    events: list[Any] = []
    url, before_ns = memory_url(), time.time_ns()
    writer = dos.ObjectStoreWriter(url, on_event=events.append, progress=False)
    dcp.async_save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True).result()  # type: ignore[union-attr]
    (staged,) = [event for event in events if isinstance(event, Staged)]
    assert (staged.size_bytes, staged.url, staged.rank) == (12, url, 0)
    assert before_ns - 10**9 < staged.start_ns < time.time_ns()
    dcp.save({"t": torch.ones(3)}, storage_writer=writer, checkpoint_id=memory_url(), no_dist=True)
    assert sum(isinstance(event, Staged) for event in events) == 1


def test_a_save_of_one_rank_whose_group_was_destroyed_is_refused():
    url = memory_url()
    writer = dos.ObjectStoreWriter(url)
    writer._background = SimpleNamespace(  # type: ignore[assignment]
        has_lost_ranks=lambda: True, staging_thread=None, thread=None, note_thread=lambda **_: None
    )
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"t": torch.ones(1)}, storage_writer=writer, no_dist=True)
    error = cause(caught.value)
    assert isinstance(error, InputError)
    assert error.url == url
    with pytest.raises(dos.errors.CheckpointNotFoundError):
        dos.open(url)


@pytest.mark.parametrize("ended", [False, True])
def test_a_background_saves_error_is_logged_and_shown_if_nobody_asks(ended, monkeypatch, caplog):
    shown: list[Any] = []
    monkeypatch.setattr(stager, "show_lost", lambda *lost: shown.append(lost))
    monkeypatch.setattr(stager, "has_ended", lambda: ended)
    url, state = memory_url(), {"t": torch.ones(1)}
    dos.save(state, url, progress=False)
    writer = dos.ObjectStoreWriter(url, progress=False)
    future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
    assert future.exception(30) is not None
    assert caplog.text.count(f"saving {url} in the background failed") == 1
    assert [(at, type(error), why) for at, error, why in shown] == [
        (url, CheckpointExistsError, stager.TOO_LATE)
    ] * ended
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert caplog.text.count("in the background failed") == 1, "what is raised here is not lost"
    assert len(shown) == ended
