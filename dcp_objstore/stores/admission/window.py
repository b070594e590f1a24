"""`Window`: how many requests may be in flight, and how fast they may begin, as a pure value.

The right number differs by machine, store and hour:

- A store that answers a small request within 5 ms is on this machine or next to it. There 8
  requests move what the processor can, and more only take memory.
- One that answers later needs up to 64, because each connection has its own rate. So does one
  to which this process has sent no small request: in a job, one rank sends them for all.
- No more bytes are in flight than the measured rate moves within a quarter of the time-out, and no
  more than 1 GiB. Until a rate was measured, 8 MiB/s are assumed.

Where the window became smaller, it is doubled after some rounds of answers, and stays so if that
moves more bytes per second. A round is as many answers as the window is large. One in which the
window was not used says nothing: something else limits the transfer.

The window gets smaller for two reasons:

- A request takes more than a quarter of its time-out. Then too much for the line is in flight.
- A store that says 429 or 503 SlowDown limits requests per second, often by a bucket of tokens that
  hides the limit for the first few. The window is halved, and there is a rate: requests begun per
  second. (A window of 1 cannot slow down a store that answers in 5 ms: that is 200 requests a
  second.) The rate falls to 0.7 of what the store has lately done, and rises as a cubic, as in the
  adaptive mode of AWS's SDKs: slowly near the last limit, then fast.

After a cut the window grows by one per window of answers, as in TCP. Throttled or slow answers to
requests that were begun before the last cut have the same cause, so they cut nothing more.
`Limiter` adds locks and clocks.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from dcp_objstore.config import AUTO_MOST, MIB

LEAST_WINDOW = 1.0
LEAST_RATE_PER_SECOND = 1.0
# The rate ends after this time without a throttled request.
OPEN_AFTER_SECONDS = 60.0

_FAR_SECONDS = 0.005
_NEAR_MOST = 8
_LEAST_ROUND_SECONDS = 0.02
# A round of fewer bytes is too short to measure the speed of the network.
_LEAST_ROUND_BYTES = 8 * MIB
# A pause this long separates two transfers.
_PAUSE_SECONDS = 0.1
# The factor by which a larger window that is tried is larger.
_GAIN = 2.0
# The factor by which a window of twice the size must move more at least; 2 is the most.
_WORTHWHILE = 1.15
# The rounds that are measured: requests that begin together end together, so that one round alone
# may have a wave more or less.
_ROUNDS = 4
# A round in which fewer than this share of the window were in flight says nothing of it.
_USED = 0.75
# A request that takes more than this share of its time-out is slow.
_SLOW = 0.25
# The speed that is assumed until one was measured.
_ASSUMED_BYTES_PER_SECOND = 8 * MIB
# The most bytes in flight. A line that becomes slow, down to 7 MiB/s, answers them in time.
_MOST_BYTES = 1024 * MIB
# What is left of the window and of the rate after a cut.
_THROTTLED_WINDOW, _THROTTLED_RATE = 0.5, 0.7
# The rate has tripled after this time.
_RECOVERY_SECONDS = 10.0


class _Round(msgspec.Struct, frozen=True, gc=False):
    """The answers since `began_at`, the last one at `last_at`; the most that were in flight."""

    began_at: float = -math.inf
    last_at: float = -math.inf
    answers: int = 0
    size_bytes: int = 0
    in_flight: int = 0


class _Try(msgspec.Struct, frozen=True, gc=False):
    """A larger window is tried.

    Attributes:
        size_before: the size to go back to.
        bytes_per_second: the rate at that size.
        is_measured: whether a round has passed since, so that the answers to requests of the
            smaller window have arrived.
    """

    size_before: float
    bytes_per_second: float
    is_measured: bool = False


class Window(msgspec.Struct, frozen=True):
    """The bounds on a bucket's requests. Times are monotonic seconds.

    Attributes:
        size: the number of requests in flight that `allowed` starts from.
        latency_seconds: the least time in which a small request was answered; infinite if that is
            not known.
        bytes_per_second: the most that a round moved, by verb: a line may be slow one way only.
        round: what was answered since the window last changed.
        trying: a larger window, or None.
        cut_rate: the requests per second right after the last cut; `rate` is that of now.
        cut_at: the time of the last cut.
    """

    size: float = AUTO_MOST
    latency_seconds: float = math.inf
    bytes_per_second: dict[str, float] = {}
    round: _Round = _Round()
    trying: _Try | None = None
    cut_rate: float = math.inf
    cut_at: float = -math.inf

    @property
    def is_near(self) -> bool:
        """Whether the store is known to answer at once."""
        return self.latency_seconds < _FAR_SECONDS

    @property
    def most(self) -> int:
        """The largest window at this store."""
        return _NEAR_MOST if self.is_near else AUTO_MOST

    @property
    def is_throttled(self) -> bool:
        """Whether there is a rate."""
        return self.cut_rate < math.inf

    def allowed(
        self, request_bytes: int = 0, timeout_seconds: float = math.inf, verb: str = ""
    ) -> float:
        """Return the number of requests that may be in flight.

        Args:
            request_bytes: the size of the largest request. Default: negligible.
            timeout_seconds: the time-out of one request. Default: none.
            verb: the verb of `ObjectStore`.
        """
        most: float = self.most
        if request_bytes:
            # The bytes in flight are those that the line moves in a quarter of the time-out.
            known = self.bytes_per_second.get(verb, 0.0)
            line_bytes = _SLOW * timeout_seconds * max(known, _ASSUMED_BYTES_PER_SECOND)
            most = min(most, min(line_bytes, _MOST_BYTES) / request_bytes)
        return max(LEAST_WINDOW, min(self.size, most))

    def rate(self, now: float) -> float:
        """Return the number of requests that may be begun per second; infinite if not throttled.

        It grows after a cut: after 0, 10 and 20 s it is 1, 3 and 11 times `cut_rate`.
        """
        waited = max(0.0, now - self.cut_at) / _RECOVERY_SECONDS
        return self.cut_rate * (1 + waited + waited**3)

    def after_small_answer(self, seconds: float) -> Window:
        """Return the window after a small request was answered in so many seconds."""
        return replace(self, latency_seconds=min(self.latency_seconds, seconds))

    def after_begin(self, now: float, in_flight: int) -> Window:
        """Return the window after a request was begun; `in_flight` includes it."""
        if in_flight > 1 or now - self.round.last_at < _PAUSE_SECONDS:
            return self
        # A new transfer may be of another kind: it is not compared with the last one.
        return replace(self, trying=None, round=_Round(now, now))

    def after_bytes(self, now: float, size_bytes: int, in_flight: int, verb: str = "") -> Window:
        """Return the window after bytes were moved. They count for the round, and may end it.

        Args:
            now: the time.
            size_bytes: the size of a part, or of a piece of a range.
            in_flight: the number of requests in flight, that of these bytes included.
            verb: the verb of `ObjectStore`. If a round has bytes of several verbs, all count for
                the last one.
        """
        last = self.round
        grown = _Round(
            began_at=last.began_at,
            last_at=now,
            answers=last.answers + 1,
            size_bytes=last.size_bytes + size_bytes,
            in_flight=max(last.in_flight, in_flight),
        )
        seconds = now - grown.began_at
        known = self.bytes_per_second.get(verb, 0.0)  # 0: nothing was measured yet
        # One round is enough for a first measurement, and for the answers to requests that were
        # sent before the window became larger.
        is_one_enough = not known or (self.trying and not self.trying.is_measured)
        # Fewer than `size` are in flight if they are so large that `allowed` gives less.
        needed_answers = min(self.size, grown.in_flight) * (1 if is_one_enough else _ROUNDS)
        # A round of few bytes is no first measurement.
        is_small = not known and grown.size_bytes < _LEAST_ROUND_BYTES
        if grown.answers < needed_answers or seconds < _LEAST_ROUND_SECONDS or is_small:
            return replace(self, round=grown)  # the round goes on
        measured = grown.size_bytes / seconds
        lines = {**self.bytes_per_second, verb: max(measured, known)}
        after = replace(self, round=_Round(now, now), bytes_per_second=lines)
        # A throttled window grows by answers alone, and one that was not used is not compared.
        if self.is_throttled or grown.in_flight < _USED * self.allowed():
            return after
        return after._after_round(measured)

    def after_answer(
        self, now: float, begun_at: float, in_flight: int, timeout_seconds: float
    ) -> Window:
        """Return the window after a request was answered.

        Args:
            now: the time.
            begun_at: the time at which it was sent.
            in_flight: the number of requests in flight, itself included.
            timeout_seconds: its time-out.
        """
        window = self
        # The rate ends a minute after the last cut.
        if now - self.cut_at > OPEN_AFTER_SECONDS:
            window = replace(self, cut_rate=math.inf)
        seconds = now - begun_at
        if seconds > _SLOW * timeout_seconds:
            if begun_at < self.cut_at:
                return window  # the last cut had the same cause
            # The slowest request of a transfer ends alone, but was not alone on the line.
            busy = max(in_flight, self.round.in_flight)
            size = min(self.allowed(), busy) * _SLOW * timeout_seconds / seconds
            return replace(window, size=max(LEAST_WINDOW, size), trying=None, cut_at=now)
        # A window of answers adds one request. If nothing is throttled, answers add requests only
        # up to a near store's window; `_after_round` tries larger ones.
        most = window.most if window.is_throttled else _NEAR_MOST
        return replace(window, size=max(window.size, min(window.size + 1 / window.size, most)))

    def after_throttling(
        self, now: float, begun_at: float, in_flight: int, done_per_second: float
    ) -> Window:
        """Return the window after the store throttled a request (429 or 503).

        Args:
            now: the time.
            begun_at: the time at which it was sent. A request from before the last cut says nothing
                new.
            in_flight: the number of requests in flight, itself included.
            done_per_second: the successes per second lately. If it is 0, the number in flight
                counts in its place.
        """
        if begun_at < self.cut_at:
            return self
        size = min(self.allowed(), in_flight) * _THROTTLED_WINDOW
        rate = min(self.rate(now), done_per_second or in_flight) * _THROTTLED_RATE
        return replace(
            self,
            size=max(LEAST_WINDOW, size),
            trying=None,
            cut_rate=max(LEAST_RATE_PER_SECOND, rate),
            cut_at=now,
        )

    def _after_round(self, bytes_per_second: float) -> Window:
        """Return the next window: a larger one, or the earlier one if this one gained nothing."""
        tried = self.trying
        if tried is not None and not tried.is_measured:
            # The requests of this round were begun in the smaller window; the next round counts.
            return replace(self, trying=replace(tried, is_measured=True))
        if tried is not None and bytes_per_second < _WORTHWHILE * tried.bytes_per_second:
            return replace(self, size=tried.size_before, trying=None)  # it gained nothing
        # There was no trial, or the larger window moves more: try one that is larger still.
        size = min(_GAIN * self.size, self.most)
        if size <= self.size:  # it is as large as it may be already
            return replace(self, trying=None)
        return replace(self, size=size, trying=_Try(self.size, bytes_per_second))
