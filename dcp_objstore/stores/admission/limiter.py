"""`Limiter`: how many requests all saves and loads of a process send to a bucket, and how fast.

There is one per bucket and endpoint. A `Window` decides how many requests may be in flight. It
applies to a transfer with a fixed number only while the store throttles. There are two signs of
that. An adapter that retries by itself reports 429 and 503. Where the transport retries out of
sight, as obstore does with parts of uploads, requests take several times as long as before.

Each transfer holds an `AdmissionSlot`. No transfer waits for ever: one with nothing in flight may
always send a request, and none waits longer than a request's time-out while no place is given back.
Over a slow line, that may take almost as long.

All retries share one budget: `Limiter.spend_retry`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from dcp_objstore.config import Concurrency, TransferConfig
from dcp_objstore.forking import PerProcess
from dcp_objstore.stores.admission.window import Window
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.threads import STEP_SECONDS

# Retries of this process that may be under way on credit, as in the SDKs of AWS (500 tokens at 5
# each): an outage of half a minute takes some 8 for each of 8 connections.
RETRY_BUDGET = 100.0
_REFUND = 0.2  # a success gives this back: about every fifth request may be a retry for ever
# Burst tolerance: a request may start this late without delaying the next.
_BURST_SECONDS = 0.05
# The successes per second are those of this time: longer than the pauses before retries.
_LATELY_SECONDS = 2.0
_LEAST_SPAN_SECONDS = 0.5
_FEW = 5
# The first pause of a transport that retries out of sight, which `obstore.clients` sets. A request
# that was sent again takes at least this longer.
HIDDEN_PAUSE_SECONDS = 1.0
_SLOW_FACTOR = 2.5
_SLOW_SECONDS = 0.9 * HIDDEN_PAUSE_SECONDS
_SLOW_AMONG = 16  # two slow requests of so many are a sign; one alone may be the network


class Limiter:
    """Limit the requests to one bucket.

    Safe to use from many threads, and from the callbacks of weak references.

    Attributes:
        window: the window at this moment.
        in_flight: the number of requests in flight, of all transfers.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        # Re-entrant, because places are given back by weak references.
        self._changed = threading.Condition(threading.RLock())
        self.window = Window()
        self.in_flight = 0
        self._given_back_at = -math.inf
        self._next_at = 0.0
        self._done: deque[float] = deque()
        self._budget = RETRY_BUDGET

    def heard(self, seconds: float) -> None:
        """Record that a small request was answered in so many seconds."""
        with self._changed:
            self.window = self.window.heard(seconds)

    def throttled(self, begun_at: float) -> None:
        """Record that the store put off a request that was begun at `begun_at`."""
        with self._changed:
            now, done = self._clock(), self._done_lately()
            span_seconds = max(now - done[0], _LEAST_SPAN_SECONDS) if done else math.inf
            self.window = self.window.throttled(
                now, begun_at, self.in_flight, len(done) / span_seconds
            )

    def succeeded(self) -> None:
        """Record that a request of a transfer was answered."""
        with self._changed:
            self._done_lately().append(self._clock())
            self.refund_retry()

    def _done_lately(self) -> deque[float]:
        """Return when the successes lately were, the first one first; forget the others."""
        while self._done and self._clock() - self._done[0] > _LATELY_SECONDS:
            self._done.popleft()
        return self._done

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
        return not self.window.is_throttled and self._budget > RETRY_BUDGET / 2

    def refund_retry(self) -> None:
        """Give a part of a retry back to the budget, for a request that was answered."""
        with self._changed:
            self._budget = min(RETRY_BUDGET, self._budget + _REFUND)

    def wait_turn(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the rate allows a request. `check` is called while it waits, and may raise."""
        while (seconds := self._turn()) > 0:
            check()
            self._sleep(min(seconds, STEP_SECONDS))

    def _turn(self) -> float:
        """Take the next turn and return 0, or return the seconds until then."""
        with self._changed:
            if not self.window.is_throttled:
                return 0.0
            now = self._clock()
            if self._next_at - now > _BURST_SECONDS:
                return self._next_at - now
            self._next_at = max(self._next_at, now) + 1 / self.window.rate(now)
            return 0.0

    def _take_place(self, slot: AdmissionSlot, check: Callable[[], None], *, wait: bool) -> bool:
        """Take a place in the window, and wait for the turn; False if there is none."""
        with self._changed:
            began_at = self._clock()
            while slot.in_flight and self.in_flight + 1 > slot.bound:
                idle_seconds = self._clock() - max(began_at, self._given_back_at)
                if idle_seconds >= slot.timeout_seconds:
                    break
                if not wait:
                    return False
                check()
                slot.judge_ages()
                self._changed.wait(STEP_SECONDS)
            self.in_flight += 1
            self.window = self.window.begun(self._clock(), self.in_flight)
        try:
            self.wait_turn(check)
        except BaseException:
            self._give_back(1)
            raise
        return True

    def _give_back(self, places: int) -> None:
        with self._changed:
            self.in_flight -= places
            self._given_back_at = self._clock()
            self._changed.notify_all()


class AdmissionSlot:
    """The requests of one transfer. `close` gives back all its places; call it in any case.

    Args:
        limiter: the bucket's limiter.
        judged: whether slow requests are a sign that the store is throttling. False where the
            adapter reports throttling.
        verb: the verb of `ObjectStore`.
        concurrency: the transfer's concurrency. The window counts for one that is not "auto" only
            while the store throttles.
        request_bytes: the size of its largest request.
        timeout_seconds: the time-out of one request.

    Attributes:
        timeout_seconds: the time-out of one request.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        judged: bool,
        verb: str,
        concurrency: Concurrency,
        request_bytes: int,
        timeout_seconds: float,
    ) -> None:
        self._limiter = limiter
        self._verb = verb
        self._fixed = None if concurrency == "auto" else concurrency
        self._request_bytes = request_bytes
        self.timeout_seconds = timeout_seconds
        self._judged = judged
        # When, and how many were in flight then.
        self._begun: dict[Hashable, tuple[float, int]] = {}
        # When it was begun, and how many were in flight when it was released.
        self._released: dict[Hashable, tuple[float, int]] = {}
        self._slow: set[Hashable] = set()
        # Seconds, and seconds by the number then in flight.
        self._took: deque[tuple[float, float]] = deque(maxlen=2 * _SLOW_AMONG)
        self._verdicts: deque[bool] = deque(maxlen=_SLOW_AMONG)
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of its requests in flight."""
        return len(self._begun)

    @property
    def concurrency(self) -> int:
        """The number of requests that the transfer may have in flight, if it is the only one."""
        if self._fixed is not None:
            return self._fixed
        return int(self._allowed)

    @property
    def _allowed(self) -> float:
        window = self._limiter.window
        return window.allowed(self._request_bytes, self.timeout_seconds, self._verb)

    @property
    def most(self) -> int:
        """The largest number that the window may allow."""
        return self._limiter.window.most

    @property
    def bound(self) -> float:
        """The number that all transfers may have in flight before this one has to wait."""
        window = self._limiter.window
        allowed = self._allowed
        # At a near store each transfer keeps to the number itself: waiting here takes more time.
        is_wide_and_near = window.is_near and allowed >= window.most
        if not window.is_throttled and (self._fixed is not None or is_wide_and_near):
            return math.inf
        return allowed

    def begin(
        self, request: Hashable, check: Callable[[], None] = lambda: None, *, wait: bool = True
    ) -> bool:
        """Wait until a request may begin.

        Args:
            request: what identifies the request.
            check: a function that is called while waiting, and may raise.
            wait: whether to wait for a place in the window.

        Returns:
            Whether it has begun. False only without `wait`, if there is no place.
        """
        limiter = self._limiter
        if request in self._begun:
            return True
        self.judge_ages()
        if not limiter._take_place(self, check, wait=wait):
            return False
        with limiter._changed:
            if self._closed:
                limiter._give_back(1)
            else:
                self._begun[request] = limiter._clock(), limiter.in_flight
        return True

    def moved(self, size_bytes: int) -> None:
        """Tell the window that a piece of a range has moved."""
        self._moved(size_bytes, self._limiter.in_flight)

    def _moved(self, size_bytes: int, in_flight: int) -> None:
        limiter = self._limiter
        with limiter._changed:
            now = limiter._clock()
            limiter.window = limiter.window.moved(now, size_bytes, in_flight, self._verb)

    def release(self, request: Hashable) -> None:
        """Give back the place of a request that is over. `end` says later how it ended."""
        limiter = self._limiter
        with limiter._changed:
            begun = self._begun.pop(request, None)
            if begun is None:
                return
            begun_at, among = begun
            seconds = limiter._clock() - begun_at
            if request in self._slow:
                self._slow.remove(request)
            else:
                self._judge(begun_at, is_slow=self._is_slow(seconds, among))
            self._took.append((seconds, self._share(seconds, among)))
            self._released[request] = begun_at, limiter.in_flight
            limiter._give_back(1)

    def end(self, request: Hashable, size_bytes: int = 0, *, answered: bool) -> None:
        """End a request. No error is raised if it has ended before or never began.

        Args:
            request: what identifies the request.
            size_bytes: the bytes that the request moved. Default 0: they were reported to `moved`.
            answered: whether the store answered the request.
        """
        limiter = self._limiter
        with limiter._changed:
            self.release(request)
            released = self._released.pop(request, None)
            if released is None or not answered:
                return
            begun_at, in_flight = released
            limiter.succeeded()
            limiter.window = limiter.window.answered(
                limiter._clock(), begun_at, in_flight, self.timeout_seconds
            )
            if size_bytes:
                self._moved(size_bytes, in_flight)

    def judge_ages(self) -> None:
        """Judge the requests in flight by their age."""
        with self._limiter._changed:
            now = self._limiter._clock()
            for request, (begun_at, among) in list(self._begun.items()):
                if request not in self._slow and self._is_slow(now - begun_at, among):
                    self._slow.add(request)
                    self._judge(begun_at, is_slow=True)

    def close(self) -> None:
        """Give all places back. Requests that end later are ignored."""
        with self._limiter._changed:
            self._closed = True
            self._limiter._give_back(len(self._begun))
            self._begun.clear()

    def _share(self, seconds: float, among: int) -> float:
        """Return the seconds of a request by the number in flight when it began or now."""
        return seconds / max(among, self._limiter.in_flight)

    def _is_slow(self, seconds: float, among: int) -> bool:
        if not self._judged or seconds < _SLOW_SECONDS or len(self._took) < _FEW:
            return False
        # Where the line is full, a larger window alone makes each request take longer.
        fifth = (len(self._took) - 1) // 5
        usual = sorted(took for took, _ in self._took)[fifth]
        usual_share = sorted(share for _, share in self._took)[fifth]
        longest = max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS)
        return seconds > longest and self._share(seconds, among) > _SLOW_FACTOR * usual_share

    def _judge(self, begun_at: float, *, is_slow: bool) -> None:
        self._verdicts.append(is_slow)
        if is_slow and (sum(self._verdicts) > 1 or self._limiter.window.is_throttled):
            self._limiter.throttled(begun_at)


_ON_THIS_MACHINE = {"file", "memory"}


# The limiters by endpoint, scheme and bucket.
_limiters: PerProcess[dict[tuple[str | None, str, str], Limiter]] = PerProcess(dict)


def limiter_at(endpoint_url: str | None, scheme: str, bucket: str) -> Limiter:
    """Return the limiter of a bucket at an endpoint (None: the provider's own)."""
    place = endpoint_url, scheme, bucket
    limiter = _limiters.here.get(place)
    if limiter is None:
        limiter = _limiters.here.setdefault(place, Limiter())  # another thread may ask for it, too
        if scheme in _ON_THIS_MACHINE:
            limiter.heard(0.0)
    return limiter


def limiter_of(store: ObjectStore) -> Limiter:
    """Return the limiter of a store's bucket."""
    scheme, _, place = store.url.partition("://")
    bucket = place.partition("/")[0]
    return limiter_at(store.endpoint_url, scheme, bucket)


def admission_slot(
    store: ObjectStore,
    verb: str,
    config: TransferConfig,
    *,
    concurrency: Concurrency,
    request_bytes: int,
) -> AdmissionSlot:
    """Make a slot for a transfer's requests of one verb, the largest of which has `request_bytes`.

    Slow requests count as throttled, unless the adapter reports throttling for this verb.
    """
    return AdmissionSlot(
        limiter_of(store),
        judged=verb not in store.reports_throttling,
        verb=verb,
        concurrency=concurrency,
        request_bytes=request_bytes,
        timeout_seconds=config.request_timeout_seconds,
    )
