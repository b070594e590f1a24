"""`Limiter`: how many requests all saves and loads of a process send to a bucket, and how fast.

There is one per bucket and endpoint. A `Window` decides how many requests may be in flight. It
applies to a transfer with a fixed number only while the store throttles. There are two signs of
that. An adapter that retries by itself reports 429 and 503. Where the transport retries out of
sight, as obstore does with parts of uploads, requests take several times as long as before.

Each transfer holds an `AdmissionSlot`. No transfer waits for ever: one with nothing in flight may
always send a request, and none waits longer than a request's time-out while no place is given back.
Over a slow line, places are given back, but a wait may be almost that long.

All retries share one budget: `Limiter.spend_retry`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

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
# Successes of a shorter time than this would make a rate of one or two of them.
_LEAST_SPAN_SECONDS = 0.5
# Of fewer requests than this it is not known how long they usually take.
_FEW = 5
# The first pause of a transport that retries out of sight, which `obstore.clients` sets. A request
# that was sent again takes at least this longer.
HIDDEN_PAUSE_SECONDS = 1.0
# A slow request takes this many times as long as usual, and this much longer.
_SLOW_FACTOR = 2.5
_SLOW_SECONDS = 0.9 * HIDDEN_PAUSE_SECONDS
_SLOW_AMONG = 16  # two slow requests of so many are a sign; one alone may be the network


class _Counted(NamedTuple):
    """A request: when it was begun, and how many were in flight, at a moment that the use names."""

    begun_at: float
    in_flight: int


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
        # Re-entrant, because the callback of a weak reference, which may run in a thread that holds
        # the lock, gives places back.
        self._changed = threading.Condition(threading.RLock())
        self.window = Window()
        self.in_flight = 0
        self._given_back_at = -math.inf  # when a request last gave its place back
        self._next_turn_at = 0.0  # when the rate lets the next request begin
        self._success_times: deque[float] = deque()
        self._budget = RETRY_BUDGET  # the retries that are left

    def note_latency(self, seconds: float) -> None:
        """Record that a small request was answered in so many seconds."""
        with self._changed:
            self.window = self.window.after_small_answer(seconds)

    def note_throttling(self, begun_at: float) -> None:
        """Record that the store throttled a request that was begun at `begun_at`."""
        with self._changed:
            # Without successes the span is infinite, so that their rate is 0.
            now, times = self._clock(), self._recent_success_times()
            span_seconds = max(now - times[0], _LEAST_SPAN_SECONDS) if times else math.inf
            self.window = self.window.after_throttling(
                now, begun_at, self.in_flight, len(times) / span_seconds
            )

    def note_success(self) -> None:
        """Record that a request of a transfer was answered."""
        with self._changed:
            self._recent_success_times().append(self._clock())
            self.refund_retry()

    def _recent_success_times(self) -> deque[float]:
        """Return when the successes of the last two seconds were, in order; forget the others."""
        while self._success_times and self._clock() - self._success_times[0] > _LATELY_SECONDS:
            self._success_times.popleft()
        return self._success_times

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
        while (seconds := self._try_turn()) > 0:
            check()
            self._sleep(min(seconds, STEP_SECONDS))

    def _try_turn(self) -> float:
        """Take the next turn and return 0; or take none, and return the seconds until the next."""
        with self._changed:
            if not self.window.is_throttled:
                return 0.0  # there is no rate, so there are no turns
            now = self._clock()
            # A request may begin up to `_BURST_SECONDS` before its turn.
            if self._next_turn_at - now > _BURST_SECONDS:
                return self._next_turn_at - now
            self._next_turn_at = max(self._next_turn_at, now) + 1 / self.window.rate(now)
            return 0.0

    def _take_place(self, slot: AdmissionSlot, check: Callable[[], None], *, wait: bool) -> bool:
        """Take a place in the window, then wait for a turn of the rate.

        Returns:
            Whether it has a place. False only without `wait`, if none is free.
        """
        with self._changed:
            wait_began_at = self._clock()
            # A transfer with nothing in flight does not wait: nobody might give a place back.
            while slot.in_flight and self.in_flight + 1 > slot.bound:
                idle_seconds = self._clock() - max(wait_began_at, self._given_back_at)
                if idle_seconds >= slot.timeout_seconds:
                    break  # no place was given back for a whole time-out: perhaps none ever is
                if not wait:
                    return False
                check()
                slot.judge_ages()  # while nothing is answered, nothing else judges the requests
                self._changed.wait(STEP_SECONDS)
            self.in_flight += 1
            self.window = self.window.after_begin(self._clock(), self.in_flight)
        try:
            self.wait_turn(check)
        except BaseException:  # what `check` raises, or Ctrl-C
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
        judges_slowness: whether slow requests are a sign that the store is throttling. False where
            the adapter reports throttling.
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
        judges_slowness: bool,
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
        self._judges_slowness = judges_slowness
        # The requests in flight, each with the number in flight when it was begun.
        self._begun: dict[Hashable, _Counted] = {}
        # The requests between `release` and `end`, each with the number in flight at `release`.
        self._released: dict[Hashable, _Counted] = {}
        self._slow: set[Hashable] = set()  # the requests in flight that are judged slow already
        # The seconds that each of the latest requests took, and its share (see `_share`).
        self._seconds: deque[float] = deque(maxlen=2 * _SLOW_AMONG)
        self._shares: deque[float] = deque(maxlen=2 * _SLOW_AMONG)
        # Whether each of the latest requests was slow.
        self._verdicts: deque[bool] = deque(maxlen=_SLOW_AMONG)
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of its requests in flight."""
        return len(self._begun)

    @property
    def concurrency(self) -> int:
        """The number of requests that the transfer may have in flight, if it is the only one."""
        return int(self._allowed) if self._fixed is None else self._fixed

    @property
    def _allowed(self) -> float:
        """The number of requests like this transfer's that the window allows."""
        window = self._limiter.window
        return window.allowed(self._request_bytes, self.timeout_seconds, self._verb)

    @property
    def most(self) -> int:
        """The largest number that the window may allow."""
        return self._limiter.window.most

    @property
    def bound(self) -> float:
        """The most requests of all transfers that may be in flight once this one sends another.

        It is infinite where the window does not count for this transfer.
        """
        window = self._limiter.window
        allowed = self._allowed
        # At a near store whose window is whole, to wait here would cost more time than it saves;
        # each transfer keeps to its `concurrency` by itself.
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
            check: a function that is called while this waits, and may raise.
            wait: whether to wait for a place in the window. The turn is waited for in any case.

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
            if self._closed:  # by another thread, while this one waited: the request has no place
                limiter._give_back(1)
            else:
                self._begun[request] = _Counted(limiter._clock(), limiter.in_flight)
        return True

    def moved(self, size_bytes: int) -> None:
        """Tell the window that a piece of a range has moved."""
        self._note_bytes(size_bytes, self._limiter.in_flight)

    def _note_bytes(self, size_bytes: int, in_flight: int) -> None:
        """Tell the window of bytes that moved while so many requests were in flight."""
        limiter = self._limiter
        with limiter._changed:
            now = limiter._clock()
            limiter.window = limiter.window.after_bytes(now, size_bytes, in_flight, self._verb)

    def release(self, request: Hashable) -> None:
        """Give back the place of a request that is over, and judge how long it took.

        `end` says later whether it was answered.
        """
        limiter = self._limiter
        with limiter._changed:
            begun = self._begun.pop(request, None)
            if begun is None:  # it was released before, or never began
                return
            seconds = limiter._clock() - begun.begun_at
            if request in self._slow:
                self._slow.remove(request)  # `judge_ages` has judged it
            else:
                self._judge(begun.begun_at, is_slow=self._is_slow(seconds, begun.in_flight))
            self._seconds.append(seconds)
            self._shares.append(self._share(seconds, begun.in_flight))
            self._released[request] = _Counted(begun.begun_at, limiter.in_flight)
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
            self.release(request)  # does nothing if the caller did so before
            released = self._released.pop(request, None)
            if released is None or not answered:  # only answers count for the window
                return
            limiter.note_success()
            limiter.window = limiter.window.after_answer(
                limiter._clock(), released.begun_at, released.in_flight, self.timeout_seconds
            )
            if size_bytes:
                self._note_bytes(size_bytes, released.in_flight)

    def judge_ages(self) -> None:
        """Judge the requests in flight by their age; one that is slow is judged only once."""
        with self._limiter._changed:
            now = self._limiter._clock()
            for request, begun in list(self._begun.items()):
                seconds = now - begun.begun_at
                if request not in self._slow and self._is_slow(seconds, begun.in_flight):
                    self._slow.add(request)
                    self._judge(begun.begun_at, is_slow=True)

    def close(self) -> None:
        """Give all places back. Requests that end later are ignored."""
        with self._limiter._changed:
            self._closed = True
            self._limiter._give_back(len(self._begun))
            self._begun.clear()

    def _share(self, seconds: float, first_in_flight: int) -> float:
        """Return the seconds by the number in flight when the request began or now."""
        return seconds / max(first_in_flight, self._limiter.in_flight)

    def _is_slow(self, seconds: float, first_in_flight: int) -> bool:
        """Whether a request takes so much longer than usual that it was sent again out of sight.

        Args:
            seconds: the time that it has taken.
            first_in_flight: the number in flight when it began.
        """
        # `_SLOW_SECONDS` here is a shortcut, because `longest` below is never less. Of fewer than
        # `_FEW` requests it is not known how long they usually take.
        if not self._judges_slowness or seconds < _SLOW_SECONDS or len(self._seconds) < _FEW:
            return False
        # What a fifth of the latest requests do not exceed is usual.
        fifth = (len(self._seconds) - 1) // 5
        usual_seconds, usual_share = sorted(self._seconds)[fifth], sorted(self._shares)[fifth]
        longest = max(_SLOW_FACTOR * usual_seconds, usual_seconds + _SLOW_SECONDS)
        # Where the line is full, each request takes longer in a larger window, but its share, which
        # is its time divided by the requests in flight, stays the same.
        is_above_share = self._share(seconds, first_in_flight) > _SLOW_FACTOR * usual_share
        return seconds > longest and is_above_share

    def _judge(self, begun_at: float, *, is_slow: bool) -> None:
        """Note whether a request was slow. Two slow ones lately are a sign of throttling.

        While the store throttles, a single one is a sign.
        """
        self._verdicts.append(is_slow)
        if is_slow and (sum(self._verdicts) > 1 or self._limiter.window.is_throttled):
            self._limiter.note_throttling(begun_at)


_ON_THIS_MACHINE = {"file", "memory"}


# The limiters by endpoint, scheme and bucket.
_limiters: PerProcess[dict[tuple[str | None, str, str], Limiter]] = PerProcess(dict)


def limiter_at(endpoint_url: str | None, scheme: str, bucket: str) -> Limiter:
    """Return the limiter of a bucket at an endpoint (None: the provider's own)."""
    key = endpoint_url, scheme, bucket
    limiter = _limiters.here.get(key)
    if limiter is None:
        # By `setdefault`, because another thread may have made it meanwhile.
        limiter = _limiters.here.setdefault(key, Limiter())
        if scheme in _ON_THIS_MACHINE:
            limiter.note_latency(0.0)  # these stores are near, and nothing measures it
    return limiter


def limiter_of(store: ObjectStore) -> Limiter:
    """Return the limiter of a store's bucket."""
    scheme, _, rest = store.url.partition("://")
    bucket = rest.partition("/")[0]
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
        judges_slowness=verb not in store.reports_throttling,
        verb=verb,
        concurrency=concurrency,
        request_bytes=request_bytes,
        timeout_seconds=config.request_timeout_seconds,
    )
