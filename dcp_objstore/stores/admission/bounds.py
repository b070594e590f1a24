"""`Bounds`: how many requests a store may be sent, and how fast, as a value without a clock.

A store that says 429 or 503 SlowDown limits requests per second, and often by a bucket of tokens
that hides the limit for the first few. So there are two bounds, open until the store throttles:

- The window: requests in flight. It is halved, and then widened by one per window of successes, as
  TCP does. It never falls below 1.
- The rate: requests begun per second. A window of 1 alone cannot slow down a store that answers in
  5 ms: that is 200 requests a second. The rate falls to 0.7 of what the store has lately done, and
  rises as a cubic, as in the adaptive mode of AWS's SDKs: slowly near the last limit, then fast.

Requests that were begun before the last cut are answered for the same shortage, so they change
nothing. `Limiter` adds locks and clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_WINDOW = 1.0
LEAST_RATE_PER_SECOND = 1.0
_WINDOW_FACTOR = 0.5
_RATE_FACTOR = 0.7
# The rate has tripled after this time.
_RECOVERY_SECONDS = 10.0
# The limits end after this time without a throttled request.
OPEN_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Two bounds, and the time of the last cut. Times are monotonic seconds.

    Attributes:
        window: requests in flight; infinite while nothing has been throttled.
        cut_rate: requests per second right after the last cut; `rate` is the one of now.
        cut_at: when that was.
    """

    window: float = math.inf
    cut_rate: float = math.inf
    cut_at: float = -math.inf

    @property
    def is_open(self) -> bool:
        """Whether there is no bound."""
        return self.window == math.inf

    def rate(self, now: float) -> float:
        """Requests that may be begun per second."""
        if self.is_open:
            return math.inf
        waited = max(0.0, now - self.cut_at) / _RECOVERY_SECONDS
        return self.cut_rate * (1 + waited + waited**3)

    def throttled(
        self, now: float, begun_at: float, in_flight: int, done_per_second: float
    ) -> Bounds:
        """After a request that the store put off.

        Args:
            begun_at: when it was sent. Before the last cut: it tells nothing new.
            in_flight: requests, itself included.
            done_per_second: successes lately; 0: not known.
        """
        if begun_at < self.cut_at:
            return self
        busy = max(1, in_flight)
        lately = done_per_second if done_per_second > 0 else float(busy)
        return Bounds(
            max(LEAST_WINDOW, min(self.window, busy) * _WINDOW_FACTOR),
            max(LEAST_RATE_PER_SECOND, min(self.rate(now), lately) * _RATE_FACTOR),
            now,
        )

    def succeeded(self, now: float) -> Bounds:
        """After a request that was answered."""
        if self.is_open:
            return self
        if now - self.cut_at > OPEN_AFTER_SECONDS:
            return Bounds()
        return Bounds(self.window + 1 / self.window, self.cut_rate, self.cut_at)
