"""Time for the commit rules: a clock that tests can replace, and tries until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from dcp_objstore.stores.retries import RetryPolicy, Tries

# No request that changes a marker or `.metadata` begins later than this after the first.
DEADLINE_SECONDS = 60.0
# Writers that collide are fewer, and nearer to success, than requests to a store that is away.
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


def tries_until(
    deadline_seconds: float,
    clock: Clock = SYSTEM_CLOCK,
    on_retry: Callable[[int, Exception, float], None] | None = None,
) -> Tries:
    """Make the tries of one change: none begins later than the deadline, counted from now.

    Several requests, and several steps of the change, share them. They take nothing from the budget
    of retries that requests to the bucket share: a commit must not fail for what a load has spent.

    Args:
        deadline_seconds: bounds when a try may start, not how long it takes.
        clock: the time to go by.
        on_retry: see `Tries`.
    """
    policy = RetryPolicy(
        None,
        deadline_seconds,
        first_pause_seconds=_FIRST_PAUSE_SECONDS,
        longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
    )
    return Tries(policy, clock=clock, on_retry=on_retry)
