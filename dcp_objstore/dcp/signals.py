"""Signals that ask a job to end soon, remembered instead of ending it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dcp_objstore.errors import ConfigError


class CaughtSignals:
    """Handlers that note that one of some signals came.

    A handler runs between two instructions of the main thread, also while that holds a lock; so it
    sets one attribute, takes none, and calls a handler in Python that was there before.

    Args:
        signals: which. Python lets only the main thread set handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self.came = False

    def install(self) -> None:
        """Set the handlers; once is enough.

        Raises:
            ConfigError: this is not the main thread.
        """
        for number in self._signals:
            if number not in self._before:
                try:
                    self._before[number] = signal.signal(number, self._handle)
                except ValueError as error:
                    raise ConfigError(
                        "only the main thread can wait for a signal; begin the run there, or pass"
                        " preemption_signals=() and a preemption_check"
                    ) from error

    def restore(self) -> None:
        """Set what was there before, unless somebody has changed it since."""
        for number, before in self._before.items():
            # None: a handler that was not set from Python; it cannot be set again.
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
