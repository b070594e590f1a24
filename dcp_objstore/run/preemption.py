"""`Preemption`: how a job learns that it must end; `PreemptionWatch` notices it."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from dcp_objstore.forking import in_forked_child
from dcp_objstore.observe.report import logger

# The watches that record signals. A forked child inherits their handlers, but nothing there checks
# whether a signal came.
_installed: weakref.WeakSet[PreemptionWatch] = weakref.WeakSet()


def _restore_in_child() -> None:
    for watch in list(_installed):
        watch.restore()


in_forked_child(_restore_in_child)


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How a job learns that it must end, and what its `CheckpointManager` does then.

        preemption = dos.Preemption(signals=[signal.SIGTERM, signal.SIGUSR1])
        run = dos.CheckpointManager("s3://bucket/run", preemption=preemption)

    Args:
        signals: the signals that mean that the job must end; none, to catch none. They are caught
            inside the manager's block, until it is left or `close` is called, if this is the main
            thread. A handler that your program has installed before is called, too; what it raises
            (such as `SystemExit`) is raised by `step` after the state was saved, or on leaving the
            block. Default: SIGTERM.
        check: a function that returns whether the job must end, for machines that announce it in
            another way. Called a few times a second, in its own thread.
        save: when the ranks have agreed that the job must end, `step` saves and waits for the
            commit. Default True.
    """

    signals: Sequence[signal.Signals] = (signal.SIGTERM,)
    check: Callable[[], bool] | None = None
    save: bool = True


BY_SIGTERM: Final = Preemption()


class PreemptionWatch:
    """Records that a signal came, so that it does not end the job, or calls a check.

    A handler runs between two instructions of the main thread, even while that holds a lock. So it
    takes no lock: it sets one attribute and calls the Python handler that was installed before.
    What that handler raises, mostly `SystemExit`, is held until the state is safe; `raise_held`
    raises it.

    Other handlers may hold this one: those of a watch or of the program that were installed later,
    to call it. So after `restore` it does what was done before it was installed.

    Signals concern only the process that installs the handlers: a forked child gets the earlier
    handlers back, so that `Process.terminate()` ends it.

    Args:
        preemption: the signals to catch, and the check.
    """

    def __init__(self, preemption: Preemption) -> None:
        self._signals = tuple(preemption.signals)
        self._check = preemption.check
        self._before: dict[signal.Signals, Any] = {}
        self._signalled = False
        self._warned = False
        self._held: BaseException | None = None

    def announced(self) -> bool:
        """Return whether the job must end. Calls the check, and logs its errors."""
        if self._signalled or self._check is None:
            return self._signalled
        try:
            return bool(self._check())
        except Exception as error:  # noqa: BLE001 - the user's function failed; training goes on
            if not self._warned:
                logger.warning("the check for preemption failed: %r", error)
            self._warned = True
            return False

    def install(self) -> None:
        """Install the handlers.

        Python lets only the main thread do so. In another thread, log a warning if there is no
        check either.
        """
        if threading.current_thread() is threading.main_thread():
            _installed.add(self)
            for number in self._signals:
                self._before.setdefault(number, signal.signal(number, self._handle))
        elif self._check is None and self._signals:
            logger.warning(
                "signals are only caught in the main thread, and there is no check, so"
                " this run does not notice that its job must end"
            )

    def restore(self) -> None:
        """Install the earlier handlers again, except where the program has changed them since."""
        _installed.discard(self)
        for watch in list(_installed):  # those that were installed later do not call this one
            for number in watch._before.keys() & self._before.keys():
                if watch._before[number] == self._handle:
                    watch._before[number] = self._before[number]
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may install handlers
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None stands for a handler that was not installed from Python; it cannot be
                # installed again.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        if self not in _installed:
            self._pass_on(number, frame)
            return
        self._signalled = True
        if callable(before) and before is not signal.default_int_handler:
            try:
                before(number, frame)
            except BaseException as error:  # noqa: BLE001 - raised by `raise_held`
                self._held = error

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the process did on this signal before the handler was installed."""
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN and not any(number in watch._before for watch in _installed):
            present = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # mostly the end of the process
            signal.signal(number, present)

    def raise_held(self) -> None:
        """Raise, once, what an earlier handler has raised."""
        held, self._held = self._held, None
        if held is not None:
            raise held
