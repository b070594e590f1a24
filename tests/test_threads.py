"""Daemon threads, and the stock of them for the end of a program."""

from __future__ import annotations

import contextvars
import threading
from types import SimpleNamespace

import pytest

import dcp_objstore as dos
from dcp_objstore import threads
from dcp_objstore.forking import PerProcess
from dcp_objstore.threads import spawn

_asked = contextvars.ContextVar("asked", default="")


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> threads._Stock:
    """A stock of two threads in a program that has ended, as on Python 3.12.0 to 3.12.2."""
    monkeypatch.setattr(threads, "_STOCK", 2)
    stock = threads._Stock()
    stock.fill()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    holder = PerProcess.__new__(PerProcess)
    holder.here = stock
    monkeypatch.setattr(threads, "_stock", holder)
    monkeypatch.setattr(threading.Thread, "start", refused)
    return stock


def test_if_no_thread_starts_the_threads_in_stock_take_turns(stock):
    _asked.set("by the caller")
    seen: list[tuple[str, str]] = []

    def note() -> None:
        seen.append((threading.current_thread().name, _asked.get()))

    for number in range(5):  # more than there are threads
        task = spawn(note, f"test-{number}")
        task.join(30)
        assert not task.is_alive()
        assert stock._idle.acquire(timeout=30)  # the thread is back
        stock._idle.release()
    assert seen == [(f"dcp_objstore-test-{number}", "by the caller") for number in range(5)]


def test_a_function_for_which_no_thread_is_left_is_refused_not_queued(stock):
    go_on = threading.Event()
    held = [spawn(lambda: go_on.wait(30), "held") for _ in range(2)]
    with pytest.raises(dos.errors.InputError, match=r"result\(\)"):
        spawn(lambda: None, "one too many")
    go_on.set()
    for task in held:
        task.join(30)


def test_too_many_threads_are_not_taken_for_the_end_of_the_program(stock, monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        spawn(lambda: None, "test")


@pytest.mark.parametrize(
    ("version", "is_filled"),
    [((3, 11, 9), 0), ((3, 12, 0), 1), ((3, 12, 2), 1), ((3, 12, 3), 0), ((3, 13, 0), 0)],
)
def test_the_stock_is_filled_only_where_python_starts_no_thread_at_its_end(
    version, is_filled, stock, monkeypatch
):
    monkeypatch.setattr(threads, "sys", SimpleNamespace(version_info=version))
    fills: list[None] = []
    monkeypatch.setattr(stock, "fill", lambda: fills.append(None))
    threads.ready_for_program_end()
    assert len(fills) == is_filled
