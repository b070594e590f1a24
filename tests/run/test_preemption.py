"""How a job learns that it must end, and what a signal does besides."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_objstore.run import preemption
from dcp_objstore.run.preemption import Preemption, PreemptionWatch
from dcp_objstore.threads import wait_in_steps

pytestmark = pytest.mark.usefixtures("usual_signals")


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None])
def before(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What SIGINT does, if anything, before a watch is installed."""
    at_first = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, request.param or signal.SIG_DFL)
    yield request.param
    signal.signal(signal.SIGINT, at_first)


def test_a_signal_announces_the_end_and_what_was_done_before_comes_back(before):
    watch = PreemptionWatch(Preemption(signals=[signal.SIGINT], check=lambda: False))
    assert not watch.announced()
    watch.install()
    if before is None:  # a handler that Python did not install
        watch._before[signal.SIGINT] = None
    assert not watch.announced()
    signal.raise_signal(signal.SIGINT)
    assert watch.announced(), "whatever the check says"
    watch.raise_held()  # nothing: there was no handler, or Python's own
    watch.restore()
    assert signal.getsignal(signal.SIGINT) == (before or signal.SIG_DFL)


def test_what_an_earlier_handler_raises_is_raised_once_later():
    def leave(number: int, frame: Any) -> None:
        assert frame is not None
        raise SystemExit(number)

    at_first = signal.signal(signal.SIGUSR2, leave)
    watch = PreemptionWatch(Preemption(signals=[signal.SIGUSR2]))
    watch.install()
    try:
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(SystemExit) as caught:
            watch.raise_held()
        assert caught.value.code == signal.SIGUSR2
        watch.raise_held()
        watch.restore()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, at_first)


@pytest.mark.parametrize(
    ("before", "others", "acts"),
    [
        (signal.SIG_DFL, [], True),
        (signal.SIG_DFL, [signal.SIGUSR1], True),
        (signal.SIG_DFL, [signal.SIGUSR1, signal.SIGUSR2], False),
        (signal.SIG_IGN, [], False),
    ],
)
def test_a_chained_handler_gives_an_uncaught_signal_its_default_action(
    monkeypatch, before, others, acts
):
    number, acted = signal.SIGUSR2, []
    at_first = {one: signal.getsignal(one) for one in (number, signal.SIGUSR1)}
    signal.signal(number, before)
    watch = PreemptionWatch(Preemption(signals=[number]))
    watch.install()
    chained: Any = signal.getsignal(number)
    watch.restore()
    catching = [PreemptionWatch(Preemption(signals=[one])) for one in others]

    def theirs(*received: Any) -> None:
        chained(*received)

    def act(raised: int) -> None:  # the default action would end this process
        acted.append((raised, signal.getsignal(number)))

    try:
        for other in catching:
            other.install()
        signal.signal(number, theirs)
        with monkeypatch.context() as patched:
            patched.setattr(signal, "raise_signal", act)
            os.kill(os.getpid(), number)
        assert acted == ([(number, signal.SIG_DFL)] if acts else [])
        assert signal.getsignal(number) is theirs
        for other in catching:
            other.restore()
    finally:
        for one, handler in at_first.items():
            signal.signal(one, handler)


def test_a_check_is_asked_until_it_says_yes_and_its_errors_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(preemption, "_CHECK_EVERY_SECONDS", 0.001)
    answers: Iterator[Any] = iter([OSError("first"), 0, OSError("second"), "yes"])

    def check() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = PreemptionWatch(Preemption(signals=(), check=check))
    assert wait_in_steps(lambda _: watch.announced(), 30, step_seconds=0.01)
    assert list(answers) == []
    assert [one.getMessage() for one in caplog.records] == [
        "the check for preemption failed: OSError('first')"
    ]


def test_a_check_that_blocks_keeps_no_signal_from_being_seen_and_is_mentioned_once(
    caplog, monkeypatch
):
    """As the documented way to ask GCE's metadata server does, until the machine is taken."""
    asked, taken = threading.Event(), threading.Event()

    def check() -> bool:
        asked.set()
        return taken.wait(60)

    watch = PreemptionWatch(Preemption(signals=[signal.SIGUSR2], check=check))
    at_first = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    watch.install()
    try:
        assert not watch.announced()
        assert asked.wait(30)
        assert not watch.announced()
        assert not caplog.records
        monkeypatch.setattr(preemption, "_SLOW_CHECK_SECONDS", 0.0)
        assert not watch.announced()
        assert not watch.announced()
        assert [record.getMessage().count("has not returned") for record in caplog.records] == [1]
        signal.raise_signal(signal.SIGUSR2)
        assert watch.announced()
    finally:
        watch.restore()
        signal.signal(signal.SIGUSR2, at_first)
        taken.set()


def test_a_check_says_yes_when_it_returns_at_last():
    taken = threading.Event()
    watch = PreemptionWatch(Preemption(signals=(), check=taken.wait))
    assert not watch.announced()
    taken.set()
    assert wait_in_steps(lambda _: watch.announced(), 30, step_seconds=0.01)


@pytest.mark.parametrize("how", ["restored", "collected"])
def test_a_check_is_not_called_for_ever(monkeypatch, how):
    monkeypatch.setattr(preemption, "_CHECK_EVERY_SECONDS", 0.001)
    called = threading.Event()
    watch: PreemptionWatch | None = PreemptionWatch(
        Preemption(signals=(), check=called.set)  # type: ignore[arg-type]
    )
    assert watch is not None
    others = set(threading.enumerate())
    watch.announced()
    assert called.wait(30)
    (thread,) = (
        one
        for one in set(threading.enumerate()) - others
        if one.name == "dcp_objstore-preemption-check"
    )
    if how == "restored":
        watch.restore()
    else:
        watch = None
    thread.join(30)
    assert not thread.is_alive()


def test_a_signal_whose_action_python_takes_is_put_off_to_the_end():
    at_first = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    watch = PreemptionWatch(Preemption(signals=[signal.SIGUSR2]))
    watch.install()
    try:
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(KeyboardInterrupt):
            watch.end()
        watch.end()  # once
    finally:
        signal.signal(signal.SIGUSR2, at_first)


def test_the_handler_that_a_program_installs_in_the_block_stays():
    at_first = signal.getsignal(signal.SIGUSR2)

    def theirs(*_: object) -> None: ...

    watch = PreemptionWatch(Preemption(signals=[signal.SIGUSR2]))
    watch.install()
    signal.signal(signal.SIGUSR2, theirs)
    watch.restore()
    try:
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, at_first)


def test_a_watch_that_is_installed_twice_gives_the_earlier_handler_back():
    before = signal.getsignal(signal.SIGTERM)
    watch = PreemptionWatch(Preemption())
    watch.install()
    watch.install()
    watch.restore()
    assert signal.getsignal(signal.SIGTERM) == before


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
