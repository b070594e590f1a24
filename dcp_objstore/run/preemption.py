"""`Preemption`: how a job learns that it must end; `PreemptionWatch` notices it."""

from __future__ import annotations

import math
import signal
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final

from dcp_objstore.forking import in_forked_child
from dcp_objstore.observe.report import logger
from dcp_objstore.threads import in_main_thread, spawn

# The watches that record signals. A forked child inherits their handlers, but nothing there checks
# whether a signal came.
_installed: weakref.WeakSet[PreemptionWatch] = weakref.WeakSet()


def _restore_in_child() -> None:
    for watch in list(_installed):
        watch.restore()


in_forked_child(_restore_in_child)


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """The way a job learns that it must end, and what its `CheckpointManager` does then.

        preemption = dos.Preemption(signals=[signal.SIGTERM, signal.SIGUSR1])
        run = dos.CheckpointManager("s3://bucket/run", preemption=preemption)

    Args:
        signals: the signals that mean that the job must end; none, to catch none. They are caught
            inside the manager's block, until it is left or `close` is called, if this is the main
            thread. A handler that your program has installed before is called, too; what it raises
            (such as `SystemExit`) is raised by `step` after the state was saved, or on leaving the
            block. A signal that no `step` has answered is passed on when the block has been left.
            Default: SIGTERM.
        check: a function that returns whether the job must end, for machines that announce it in
            another way. Called a few times a second in its own thread, until it returns True. It
            may block until the end is announced; signals and timed saves do not wait for it.
        save: when the ranks have agreed that the job must end, `step` saves and waits for the
            commit. Default True.
    """

    signals: Sequence[signal.Signals] = (signal.SIGTERM,)
    check: Callable[[], bool] | None = None
    save: bool = True


BY_SIGTERM: Final = Preemption()


class PreemptionWatch:
    """Records that a signal came, so that it does not end the job, or that a check said so.

    A handler runs between two instructions of the main thread, even while that holds a lock. So it
    takes no lock: it sets attributes and calls the Python handler that was installed before. What
    that handler raises, mostly `SystemExit`, is held until the state is safe; `raise_held` raises
    it. An action that is not a Python function, mostly the end of the process, is put off; `end`
    takes it, unless `answer` was called.

    Other handlers may hold this one: those of a watch or of the program that were installed later,
    to call it. So after `restore` it does what was done before it was installed.

    Signals concern only the process that installs the handlers: a forked child gets the earlier
    handlers back, so that `Process.terminate()` ends it.

    Args:
        preemption: the signals to catch, and the check.
        check_every_seconds: the pause between two calls of the check.
        slow_check_seconds: a check that takes longer is mentioned once.
    """

    def __init__(
        self,
        preemption: Preemption,
        *,
        check_every_seconds: float = 0.25,
        slow_check_seconds: float = 30.0,
    ) -> None:
        self._check_every_seconds = check_every_seconds
        self._slow_check_seconds = slow_check_seconds
        self._signals = tuple(preemption.signals)
        self._check = preemption.check
        # The handlers that were installed before, by signal.
        self._before: dict[signal.Signals, Any] = {}
        # The signals that came, and for which `end` does what the process did on them before.
        self._put_off: set[int] = set()
        self._answered = False  # whether `answer` was called
        self._announced = False  # whether a signal or the check has said that the job must end
        # When the call of the check that is under way began; inf between two calls, None before
        # the first one.
        self._called_at: float | None = None
        self._warned: set[str] = set()  # the texts of the warnings that were logged
        self._ended = False  # whether `restore` was called
        self._handler_error: BaseException | None = None  # what an earlier handler has raised

    def announced(self) -> bool:
        """Return whether the job must end. The first call starts the thread of the check."""
        if self._check is not None and self._called_at is None:
            keep_checking = partial(_keep_checking, weakref.ref(self), self._check_every_seconds)
            spawn(keep_checking, "preemption-check")
            self._called_at = time.monotonic()
        # Without a call under way, the difference is minus infinity.
        elif time.monotonic() - (self._called_at or math.inf) >= self._slow_check_seconds:
            self._warn(
                "the check for preemption has not returned for %d s; signals and timed saves do not"
                " wait for it",
                self._slow_check_seconds,
            )
        return self._announced

    def _asks_again(self) -> bool:
        """Call the check; return whether to call it again. Only the thread of the check does this.

        Once the job must end or the watch has ended, it returns False and calls nothing.
        """
        if self._check is None or self._announced or self._ended:
            return False
        self._called_at = time.monotonic()
        try:
            if self._check():
                self._announced = True
        except Exception as error:  # noqa: BLE001 - the user's function failed; training goes on
            self._warn("the check for preemption failed: %r", error)
        self._called_at = math.inf
        return True

    def _warn(self, text: str, value: object) -> None:
        """Log a warning, each text once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, value)

    def install(self) -> None:
        """Install the handlers.

        Python lets only the main thread do so. In another thread, log a warning if there is no
        check either.
        """
        if in_main_thread():
            _installed.add(self)
            for number in self._signals:
                # If this watch is installed again, the handler before is its own: the first counts.
                self._before.setdefault(number, signal.signal(number, self._handle))
        elif self._check is None and self._signals:
            logger.warning(
                "signals are only caught in the main thread, and there is no check, so"
                " this run does not notice that its job must end"
            )

    def restore(self) -> None:
        """Install the earlier handlers again, except where the program has changed them since."""
        self._ended = True
        _installed.discard(self)
        # A watch that was installed later has this one's handler as its earlier one. From now on it
        # has the handler that this one found.
        for watch in list(_installed):
            for number in watch._before.keys() & self._before.keys():
                if watch._before[number] == self._handle:
                    watch._before[number] = self._before[number]
        if not in_main_thread():
            return  # only the main thread may install handlers
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None stands for a handler that was not installed from Python; it cannot be
                # installed again.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it, and put off whatever would end the process (see the class)."""
        before = self._before.get(signal.Signals(number))
        if self not in _installed:  # restored, but a handler that was installed later calls this
            self._pass_on(number, frame)
            return
        self._announced = True
        # `default_int_handler`, which raises KeyboardInterrupt, is put off like a default action.
        if not callable(before) or before is signal.default_int_handler:
            self._put_off.add(number)
            return
        try:
            before(number, frame)
        except BaseException as error:  # noqa: BLE001 - raised by `raise_held`
            self._handler_error = error

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the process did on this signal before the handler was installed."""
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        # While another watch catches the signal, that one decides what becomes of it.
        elif before != signal.SIG_IGN and not any(number in watch._before for watch in _installed):
            present = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # mostly the end of the process
            signal.signal(number, present)

    def answer(self) -> None:
        """Record that the program now knows that it must end, so no signal needs to end it."""
        for watch in _installed:
            watch._answered = True

    def raise_held(self) -> None:
        """Raise, once, what an earlier handler has raised."""
        error, self._handler_error = self._handler_error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Restore the earlier handlers, then let the signals that were put off take effect.

        After `answer` they have no effect, because the program knows that it must end. Otherwise
        the process may end here, or this raises what an earlier handler raises or has raised. So an
        error that is already being raised is logged before.
        """
        self.restore()
        put_off = set() if self._answered else self._put_off
        self._put_off = set()
        error = sys.exception()
        if error is not None and (put_off or self._handler_error is not None):
            logger.error("a signal ends this program, in which this was raised:", exc_info=error)
        for number in put_off:
            if in_main_thread():
                self._pass_on(number, None)
            else:
                # `restore` could not remove `_handle`, which passes the signal on in the main
                # thread.
                signal.raise_signal(number)
        self.raise_held()


def _keep_checking(ref: weakref.ref[PreemptionWatch], every_seconds: float) -> None:
    """Call a watch's check until it need not be called; hold no watch in between."""
    while (watch := ref()) is not None and watch._asks_again():
        del watch
        time.sleep(every_seconds)
