"""How a job learns that it must end, and what a signal does besides."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from dcp_objstore.run.preemption import Preemption, PreemptionWatch
from dcp_objstore.threads import run_into, wait_in_steps

pytestmark = pytest.mark.usefixtures("usual_signals")

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give back the handlers that a test has installed."""
    before = {number: signal.getsignal(number) for number in (USR1, USR2, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def came() -> list[int]:
    """The signals that came to the handler that the program had before any watch."""
    numbers: list[int] = []
    signal.signal(USR2, lambda number, _: numbers.append(number))
    return numbers


def watching(*signals: signal.Signals, **settings: Any) -> PreemptionWatch:
    """A watch that is installed."""
    watch = PreemptionWatch(Preemption(signals=signals or (USR2,), **settings))
    watch.install()
    return watch


def chain(number: signal.Signals) -> Any:
    """Install a handler that calls the one before it, as many scripts do."""
    before: Any = signal.getsignal(number)

    def handle(*received: Any) -> None:
        before(*received)

    signal.signal(number, handle)
    return handle


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_a_signal_announces_the_end_and_what_was_done_before_comes_back(before):
    signal.signal(signal.SIGINT, before)
    watch = watching(signal.SIGINT, check=lambda: False)
    watch.install()  # twice
    assert not watch.announced()
    signal.raise_signal(signal.SIGINT)
    assert watch.announced(), "whatever the check says"
    watch.raise_held()  # nothing: there was no handler, or Python's own
    watch.restore()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_handler_that_python_did_not_install_becomes_the_default_action(monkeypatch):
    really = signal.signal

    def install(*args: Any) -> None:
        really(*args)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", install)
        watch = watching()
    watch.restore()
    assert signal.getsignal(USR2) == signal.SIG_DFL


def test_what_an_earlier_handler_raises_is_raised_once_later():
    def leave(number: int, frame: Any) -> None:
        assert frame is not None
        raise SystemExit(number)

    signal.signal(USR2, leave)
    watch = watching()
    signal.raise_signal(USR2)
    with pytest.raises(SystemExit) as caught:
        watch.raise_held()
    assert caught.value.code == USR2
    watch.raise_held()
    watch.restore()
    with pytest.raises(SystemExit):
        signal.raise_signal(USR2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_in_whatever_order_watches_end_a_signal_then_does_what_it_did_before(came, order):
    original = signal.getsignal(USR2)
    watches = [watching() for _ in range(3)]
    for place in order[:2]:
        watches[place].restore()
    signal.raise_signal(USR2)
    assert watches[order[2]].announced()
    watches[order[2]].restore()
    signal.raise_signal(USR2)
    assert came == [USR2] * 2
    assert signal.getsignal(USR2) is original


def test_a_watch_that_another_thread_has_restored_catches_no_more_signals(came):
    watch = watching()
    restored: Future[None] = Future()
    threading.Thread(target=run_into, args=(restored, watch.restore)).start()
    restored.result(30)
    signal.raise_signal(USR2)
    assert not watch.announced()
    assert came == [USR2]


def test_a_chained_handler_does_what_was_done_before_the_watch(came):
    watch = watching()
    theirs = chain(USR2)
    watch.restore()
    signal.raise_signal(USR2)
    assert came == [USR2]
    assert signal.getsignal(USR2) is theirs


@pytest.mark.parametrize(
    ("before", "others", "acts"),
    [
        (signal.SIG_DFL, [], True),
        (signal.SIG_DFL, [USR1], True),
        (signal.SIG_DFL, [USR1, USR2], False),
        (signal.SIG_IGN, [], False),
    ],
)
def test_a_chained_handler_gives_an_uncaught_signal_its_default_action(
    monkeypatch, before, others, acts
):
    acted = []
    signal.signal(USR2, before)
    watch = watching()
    chained: Any = signal.getsignal(USR2)
    watch.restore()
    catching = [watching(other) for other in others]

    def theirs(*received: Any) -> None:
        chained(*received)

    def act(raised: int) -> None:  # the default action would end this process
        acted.append((raised, signal.getsignal(USR2)))

    signal.signal(USR2, theirs)
    monkeypatch.setattr(signal, "raise_signal", act)
    os.kill(os.getpid(), USR2)
    assert acted == ([(USR2, signal.SIG_DFL)] if acts else []), f"{catching} catch it"
    assert signal.getsignal(USR2) is theirs


def test_a_signal_whose_action_python_takes_is_put_off_to_the_end():
    signal.signal(USR2, signal.default_int_handler)
    watch = watching()
    signal.raise_signal(USR2)
    with pytest.raises(KeyboardInterrupt):
        watch.end()
    watch.end()  # once


@pytest.mark.parametrize(
    ("of_job", "warns"),
    [
        (Preemption(), True),
        (Preemption(check=lambda: False), False),
        (Preemption(signals=()), False),
    ],
)
def test_a_manager_in_another_thread_warns_if_nothing_can_announce_preemption(
    caplog, of_job, warns
):
    before = signal.getsignal(signal.SIGTERM)
    beside = threading.Thread(target=PreemptionWatch(of_job).install)
    beside.start()
    beside.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert ("main thread" in caplog.text) == warns


# --- a check


def test_a_check_is_asked_until_it_says_yes_and_its_errors_are_logged_once(caplog):
    answers: Iterator[Any] = iter([OSError("first"), 0, OSError("second"), "yes"])

    def check() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = PreemptionWatch(Preemption(signals=(), check=check), check_every_seconds=0.001)
    assert wait_in_steps(lambda _: watch.announced(), 30, step_seconds=0.01)
    assert list(answers) == []
    assert [one.getMessage() for one in caplog.records] == [
        "the check for preemption failed: OSError('first')"
    ]


def test_a_check_that_blocks_keeps_no_signal_from_being_seen_and_is_mentioned_once(caplog):
    """As the documented way to ask GCE's metadata server does, until the machine is taken."""
    asked, taken = threading.Event(), threading.Event()

    def check() -> bool:
        asked.set()
        return taken.wait(60)

    for slow_seconds, mentions in ((30.0, 0), (0.0, 1)):
        asked.clear()
        settings = Preemption(signals=[USR2], check=check)
        watch = PreemptionWatch(settings, slow_check_seconds=slow_seconds)
        watch.install()
        assert not watch.announced()
        assert asked.wait(30)
        assert not watch.announced()
        assert not watch.announced()
        told = [record.getMessage().count("has not returned") for record in caplog.records]
        assert sum(told) == mentions
    signal.raise_signal(USR2)
    assert watch.announced()
    watch = PreemptionWatch(Preemption(signals=(), check=check))
    assert not watch.announced()
    taken.set()
    assert wait_in_steps(lambda _: watch.announced(), 30, step_seconds=0.01)


@pytest.mark.parametrize("how", ["restored", "collected"])
def test_a_check_is_not_called_for_ever(how):
    called = threading.Event()
    settings = Preemption(signals=(), check=called.set)  # type: ignore[arg-type]
    watch: PreemptionWatch | None = PreemptionWatch(settings, check_every_seconds=0.001)
    assert watch is not None
    others = set(threading.enumerate())
    watch.announced()
    assert called.wait(30)
    threads = [one for one in set(threading.enumerate()) - others if "preemption" in one.name]
    if how == "restored":
        watch.restore()
    else:
        watch = None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert threads
