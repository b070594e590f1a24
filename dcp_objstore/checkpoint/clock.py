"""Time for the commit rules: a clock that tests can replace, and retries until a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

# No request that changes a marker or `.metadata` begins later than this after the first.
DEADLINE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


def deadline_seconds_for(stall_timeout_seconds: float) -> float:
    """The deadline for small requests of a job that is to fail soon when the store stalls.

    A third: the stores give one small request another third, and the last one begins before the
    deadline and is followed by a read that finds out what became of it.
    """
    return min(DEADLINE_SECONDS, stall_timeout_seconds / 3)


class Clock:
    """Monotonic time and sleep; tests pass a subclass that needs no real time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def utc_now(self) -> datetime:
        """This host's idea of the time. It may be wrong: see rule 9 in `sweep`."""
        return datetime.now(UTC)


SYSTEM_CLOCK = Clock()


class Retries:
    """Pauses between tries: exponential, jittered, and none that begins after the deadline.

    Args:
        deadline_seconds: from now. It bounds when a try may start, not how long a request takes.
        clock: see `Clock`.
        on_retry: called before a pause that was given an error, with the number of the try that
            follows it, from 2, and the error.

    Attributes:
        tries: begun so far: one, and one after each pause.
    """

    def __init__(
        self,
        deadline_seconds: float,
        clock: Clock,
        on_retry: Callable[[int, Exception], None] | None = None,
    ) -> None:
        self.tries = 1
        self._on_retry = on_retry
        self._clock = clock
        self._deadline = clock.monotonic() + deadline_seconds
        self._longest = _FIRST_PAUSE_SECONDS

    def pause(self, error: Exception | None = None) -> bool:
        """Sleep and return True, or return False at once when the deadline has come.

        Args:
            error: of the try before.
        """
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            return False
        self.tries += 1
        if error is not None and self._on_retry is not None:
            self._on_retry(self.tries, error)
        # Full jitter, so that writers that collided do not collide again. No secret hangs on it.
        self._clock.sleep(min(left, random.uniform(0, self._longest)))
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        return True
