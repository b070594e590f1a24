"""Time for the commit rules: a clock that tests can replace, and tries until a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from dcp_objstore.errors import RetryableError
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.retries import RetryPolicy, Tries

# No request that changes a marker or `.metadata` begins later than this after the first.
DEADLINE_SECONDS = 60.0
# Shorter pauses than before the retries of a request: a writer that another one was faster than
# succeeds soon, but a store that does not answer may need a while.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class Clock:
    """The time, sleep, and how long a change is tried. Tests pass one that needs no real time.

    Args:
        deadline_seconds: no request that changes something begins later than this after the first
            one. A request that is under way then may take the transport's time-out longer.
            Default 60.
    """

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.deadline_seconds = deadline_seconds

    @classmethod
    def of_job(cls, stall_timeout_seconds: float) -> Clock:
        """Return the clock of a job that must fail soon if the store stalls.

        The deadline is a third of the stall time-out. The stores give one small request another
        third: the last request begins before the deadline, and a read follows it to find out what
        became of it.
        """
        return cls(min(DEADLINE_SECONDS, stall_timeout_seconds / 3))

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds."""
        time.sleep(seconds)

    def utc_now(self) -> datetime:
        """Return the time by this host's clock, which may be wrong (rule 9 in `sweep`)."""
        return datetime.now(UTC)

    def tries(
        self,
        on_retry: Callable[[int, Exception, float], None] | None = None,
        *,
        most_seconds: float = math.inf,
    ) -> Tries:
        """Make the tries of one change: none begins later than the deadline, counted from now.

        Several requests, and several steps of the change, share them. They take nothing from the
        budget of retries that requests to the bucket share: a commit must not fail for what a load
        has spent.

        Args:
            on_retry: what `Tries` calls before each retry.
            most_seconds: the seconds until the deadline, if fewer than this clock's.
        """
        # None: the number of retries has no bound.
        policy = RetryPolicy(
            None,
            min(self.deadline_seconds, most_seconds),
            first_pause_seconds=_FIRST_PAUSE_SECONDS,
            longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
        )
        return Tries(policy, clock=self, on_retry=on_retry)


SYSTEM_CLOCK = Clock()


def pause_or_raise(
    store: ObjectStore,
    tries: Tries,
    text: str = "others kept changing this checkpoint until the deadline; try again",
) -> None:
    """Pause before the next try of a change, after another job has made its own first.

    Raises:
        RetryableError: the deadline has passed; `text` is its message.
    """
    if not tries.pause():
        raise RetryableError(text, url=store.url)
