"""`Limiter`: how many requests all saves and loads of a process send to a bucket, and how fast.

There is one per bucket and endpoint. While nothing is throttled, it costs a lock per request. It
slows requests down (see `Bounds`) when the store throttles. There are two signs of that. An adapter
that retries by itself reports 429 and 503. Where the transport retries out of sight, as obstore
does with parts of uploads, requests take several times as long as before.

Each transfer holds an `AdmissionSlot`. No transfer waits for ever: one with nothing in flight may
always send a request, and none waits longer than 5 s for a free place.

All retries share one budget: `Limiter.spend_retry`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.admission.bounds import Bounds
from dcp_objstore.waiting import STEP_SECONDS

if TYPE_CHECKING:
    from dcp_objstore.stores.protocol import ObjectStore

# Retries of this process that may be under way on credit, as in the SDKs of AWS (500 tokens at 5
# each): an outage of half a minute takes some 8 for each of 8 connections.
RETRY_BUDGET = 100.0
_REFUND = 0.2  # per success: about every fifth request may be a retry for ever
_LONGEST_HOLD_SECONDS = 5.0
# Burst tolerance: a request may start this late without delaying the next.
_BURST_SECONDS = 0.05
# What counts as lately, for the successes per second: longer than the pauses before retries.
_LATELY_SECONDS = 2.0
_LEAST_SPAN_SECONDS = 0.5
_FEW = 5
# The first pause of a transport that retries out of sight, which `obstore.clients` sets. A request
# that was sent again takes at least this longer.
HIDDEN_PAUSE_SECONDS = 1.0
_SLOW_FACTOR = 2.5
_SLOW_SECONDS = 0.9 * HIDDEN_PAUSE_SECONDS
_SLOW_AMONG = 16  # of so many, two slow ones tell; one alone may be the network


class Limiter:
    """Limit the requests to one bucket.

    Safe to use from many threads, and from the callbacks of weak references.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Re-entrant, because places are given back by weak references.
        self._changed = threading.Condition(threading.RLock())
        self._bounds = Bounds()
        self._in_flight = 0
        self._next_at = 0.0
        self._done: deque[float] = deque(maxlen=256)
        self._budget = RETRY_BUDGET

    @property
    def bounds(self) -> Bounds:
        """The bounds at this moment."""
        return self._bounds

    @property
    def in_flight(self) -> int:
        """The number of requests in flight, of all transfers."""
        return self._in_flight

    def slot(self, *, judged: bool) -> AdmissionSlot:
        """Make a transfer's slot.

        Args:
            judged: whether slow requests are a sign that the store is throttling. False where the
                adapter reports throttling.
        """
        return AdmissionSlot(self, judged=judged)

    def throttled(self, begun_at: float) -> None:
        """Record that the store put off a request that was begun at `begun_at`."""
        with self._changed:
            now = self._clock()
            lately = [at for at in self._done if now - at <= _LATELY_SECONDS]
            span_seconds = max(now - lately[0], _LEAST_SPAN_SECONDS) if lately else 1.0
            self._bounds = self._bounds.throttled(
                now, begun_at, self._in_flight, len(lately) / span_seconds
            )

    def succeeded(self) -> None:
        """Record that a request of a transfer was answered."""
        with self._changed:
            now = self._clock()
            self._done.append(now)
            self.refund_retry()
            self._bounds = self._bounds.succeeded(now)

    def spend_retry(self) -> bool:
        """Take one retry from the budget that all requests share; False if it is used up."""
        with self._changed:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True

    @property
    def spares_retries(self) -> bool:
        """Whether a request may be sent again that has not failed.

        Nothing is throttled, and half of the budget is left for what fails.
        """
        return self._bounds.is_open and self._budget > RETRY_BUDGET / 2

    def refund_retry(self) -> None:
        """Give a part of a retry back to the budget, for a request that was answered."""
        with self._changed:
            self._budget = min(RETRY_BUDGET, self._budget + _REFUND)

    def wait_turn(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the rate allows a request. `check` is called meanwhile, and may raise."""
        while (seconds := self._turn()) > 0:
            check()
            with self._changed:
                self._changed.wait(min(seconds, STEP_SECONDS))

    def _turn(self) -> float:
        """Take the next turn and return 0, or return the seconds until then."""
        with self._changed:
            if self._bounds.is_open:
                return 0.0
            now = self._clock()
            if self._next_at - now > _BURST_SECONDS:
                return self._next_at - now
            self._next_at = max(self._next_at, now) + 1 / self._bounds.rate(now)
            return 0.0

    def _wait_place(self, slot: AdmissionSlot, check: Callable[[], None]) -> None:
        """Wait for a place in the window and take it; then wait for the turn."""
        with self._changed:
            began = self._clock()
            while (
                slot.in_flight
                and self._in_flight >= self._bounds.window
                and self._clock() - began < _LONGEST_HOLD_SECONDS
            ):
                check()
                slot.look()
                self._changed.wait(STEP_SECONDS)
            self._in_flight += 1
        try:
            self.wait_turn(check)
        except BaseException:
            self._give_back(1)
            raise

    def _give_back(self, places: int) -> None:
        with self._changed:
            self._in_flight -= places
            self._changed.notify_all()


class AdmissionSlot:
    """The requests of one transfer. `close` gives back all its places; call it in any case."""

    def __init__(self, limiter: Limiter, *, judged: bool) -> None:
        self._limiter = limiter
        self._judged = judged
        self._begun: dict[Hashable, float] = {}
        self._slow: set[Hashable] = set()
        self._took: deque[float] = deque(maxlen=2 * _SLOW_AMONG)
        self._verdicts: deque[bool] = deque(maxlen=_SLOW_AMONG)
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of its requests in flight."""
        return len(self._begun)

    def begin(self, request: Hashable, check: Callable[[], None] = lambda: None) -> None:
        """Wait until a request may begin. `check` is called while waiting, and may raise."""
        limiter = self._limiter
        if request in self._begun:
            return
        self.look()
        limiter._wait_place(self, check)
        with limiter._changed:
            if self._closed:
                limiter._give_back(1)
            else:
                self._begun[request] = limiter._clock()

    def end(self, request: Hashable, *, answered: bool = True) -> None:
        """End a request. One that has ended before, or never began, is no error."""
        limiter = self._limiter
        with limiter._changed:
            begun_at = self._begun.pop(request, None)
            if begun_at is None:
                return
            seconds = limiter._clock() - begun_at
            if request in self._slow:
                self._slow.remove(request)
            else:
                self._judge(begun_at, seconds)
            self._took.append(seconds)
            limiter._give_back(1)
            if answered:
                limiter.succeeded()

    def look(self) -> None:
        """Judge the requests in flight by their age."""
        with self._limiter._changed:
            now = self._limiter._clock()
            for request, begun_at in list(self._begun.items()):
                if request not in self._slow and self._is_slow(now - begun_at):
                    self._slow.add(request)
                    self._judge(begun_at, now - begun_at)

    def close(self) -> None:
        """Give all places back. Requests that end later are ignored."""
        with self._limiter._changed:
            self._closed = True
            self._limiter._give_back(len(self._begun))
            self._begun.clear()

    def _is_slow(self, seconds: float) -> bool:
        if not self._judged or seconds < _SLOW_SECONDS or len(self._took) < _FEW:
            return False
        usual = sorted(self._took)[(len(self._took) - 1) // 5]
        return seconds > max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS)

    def _judge(self, begun_at: float, seconds: float) -> None:
        slow = self._is_slow(seconds)
        known = any(self._verdicts)
        self._verdicts.append(slow)
        if slow and (known or not self._limiter.bounds.is_open):
            self._limiter.throttled(begun_at)


# By endpoint, scheme and bucket.
_limiters: PerProcess[dict[tuple[str | None, str, str], Limiter]] = PerProcess(dict)


def limiter_at(endpoint_url: str | None, scheme: str, bucket: str) -> Limiter:
    """Return the limiter of a bucket at an endpoint (None: the provider's own)."""
    return _limiters.here.setdefault((endpoint_url, scheme, bucket), Limiter())


def limiter_of(store: ObjectStore) -> Limiter:
    """Return the limiter of a store's bucket."""
    scheme, _, place = store.url.partition("://")
    bucket = place.partition("/")[0]
    return limiter_at(store.endpoint_url, scheme, bucket)


def admission_slot(store: ObjectStore, verb: str) -> AdmissionSlot:
    """Make a slot for a transfer's requests of one verb.

    Slow requests count as throttled, unless the adapter reports throttling for this verb.
    """
    return limiter_of(store).slot(judged=verb not in store.reports_throttling)


def reports_retries(store: ObjectStore) -> bool:
    """Whether the adapter reports every retry of a read; some transports retry out of sight."""
    return "open_range" in store.reports_throttling
