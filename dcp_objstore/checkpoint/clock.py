"""Time for the commit rules: a clock that tests can replace, and pauses until a deadline."""

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
    """Return the deadline for small requests of a job that must fail soon if the store stalls.

    It is a third of the stall time-out. The stores give one small request another third: the last
    request begins before the deadline, and a read follows it to find out what became of it.
    """
    return min(DEADLINE_SECONDS, stall_timeout_seconds / 3)


class Clock:
    """The time, and sleep. Tests pass a subclass that needs no real time."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds."""
        time.sleep(seconds)

    def utc_now(self) -> datetime:
        """Return the time by this host's clock, which may be wrong (rule 9 in `sweep`)."""
        return datetime.now(UTC)


SYSTEM_CLOCK = Clock()


class Retries:
    """Pauses between tries: exponential, jittered, and none that begins after the deadline.

    Args:
        deadline_seconds: counted from now; bounds when a try may start, not how long it takes.
        clock: the time to go by.
        on_retry: called before each pause that follows an error, with the number of the next try
            (from 2) and the error.

    Attributes:
        tries: the number of tries so far: 1, plus one for each pause.
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
        """Sleep and return True, or return False at once if the deadline has passed.

        Args:
            error: what the last try raised, if anything.
        """
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            return False
        self.tries += 1
        if error is not None and self._on_retry is not None:
            self._on_retry(self.tries, error)
        # Full jitter, so that writers that collided do not collide again. Nothing here is secret.
        self._clock.sleep(min(left, random.uniform(0, self._longest)))
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        return True
