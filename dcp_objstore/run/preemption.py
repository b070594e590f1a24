"""`Notice`: signals and checks that say that a job is to end soon."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from dcp_objstore.forking import in_forked_child
from dcp_objstore.observe.report import logger

# A forked child inherits the handlers, and nobody there asks whether a signal came.
_installed: weakref.WeakSet[Notice] = weakref.WeakSet()


def _restore_in_child() -> None:
    for notice in list(_installed):
        notice.restore()


in_forked_child(_restore_in_child)


class Notice:
    """Remembers that one of some signals came, instead of ending the job, or asks a check.

    A handler runs between two instructions of the main thread, also while that holds a lock; so it
    sets one attribute, takes none, and calls a handler in Python that was there before. What that
    one raises, `SystemExit` mostly, is held until the state is safe: see `raise_held`.

    Signals are the business of the process that installs the handlers: a forked child gets back
    what was there before, so that `Process.terminate()` ends it.

    Args:
        signals: which.
        check: returns whether the job is to end; None: signals only.
    """

    def __init__(self, signals: Sequence[signal.Signals], check: Callable[[], bool] | None) -> None:
        self._signals = tuple(signals)
        self._check = check
        self._before: dict[signal.Signals, Any] = {}
        self._signalled = False
        self._warned = False
        self._held: BaseException | None = None

    def came(self) -> bool:
        """Whether notice was given. May take as long as the check does, whose errors are logged."""
        if self._signalled or self._check is None:
            return self._signalled
        try:
            return bool(self._check())
        except Exception as error:  # noqa: BLE001 - the user's own; training goes on
            if not self._warned:
                logger.warning("the preemption_check failed: %r", error)
            self._warned = True
            return False

    def install(self) -> None:
        """Set the handlers. Python lets only the main thread do so; elsewhere a warning is logged
        if there is no check either.
        """
        if threading.current_thread() is threading.main_thread():
            _installed.add(self)
            for number in self._signals:
                self._before.setdefault(number, signal.signal(number, self._handle))
        elif self._check is None and self._signals:
            logger.warning(
                "signals are only caught in the main thread, and there is no preemption_check, so"
                " this run does not see that its job is to end"
            )

    def restore(self) -> None:
        """Set what was there before, unless somebody has changed it since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None: a handler that was not set from Python, which cannot be set again. Ours
                # would swallow the signal from now on.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
        _installed.discard(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            try:
                before(number, frame)
            except BaseException as error:  # noqa: BLE001 - raised by `raise_held`
                self._held = error

    def raise_held(self) -> None:
        """Raise what a handler that was there before has raised, once."""
        held, self._held = self._held, None
        if held is not None:
            raise held
