"""A simulator of stores with ceilings, and of ranks whose requests a `Window` admits.

Time is a number that is counted up, randomness has a seed: every run gives the same. A request
waits for the latency, then its body passes at the rate of its connection, or at an equal part of
what the machine's link allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from dcp_objstore.stores.admission.window import Window

MIB = 1024**2


@dataclass(frozen=True)
class Fixed:
    """A fixed number of requests in flight."""

    size: float

    def allowed(self, request_bytes: int, timeout_seconds: float) -> float:
        del request_bytes, timeout_seconds
        return self.size


@dataclass(frozen=True, kw_only=True)
class SimulatedStore:
    """A store and the link to it.

    Attributes:
        latency_seconds: to the first byte.
        mib_per_second: of one connection.
        link_mib_per_second: of all connections together.
        noise: standard deviation of the logarithm of each request's latency and rate.
        slow_share: of requests that take 20 times as long.
        requests_per_second: above which it answers 503; None: no limit.
        burst: tokens of that limit's bucket.
    """

    latency_seconds: float = 0.030
    mib_per_second: float = 60.0
    link_mib_per_second: float = 1.2 * 1024
    noise: float = 0.0
    slow_share: float = 0.0
    requests_per_second: float | None = None
    burst: float = 10.0


@dataclass
class _Request:
    size_mib: float
    begun_at: float
    first_byte_at: float
    mib_per_second: float
    left_mib: float
    refused: bool
    told_mib: float = 0.0


@dataclass
class Rank:
    """One process, and what became of its transfer.

    Attributes:
        admits: a `Window` or `Fixed`.
        sizes_mib: of its requests.
        piece_mib: what is reported at a time, as loads do; None: whole requests, as saves do.
        timeout_seconds: for one request.
        starts_at: seconds.
        most: requests in flight that its memory allows.
        sent, refused, timed_out: requests.
        ended_at: when the last was answered.
        windows: what was allowed, at each answer.
        busy: the number in flight, at each answer.
        done: when each request was answered, and its size in MiB.
    """

    admits: Window | Fixed
    sizes_mib: list[float]
    piece_mib: float | None = None
    timeout_seconds: float = 150.0
    starts_at: float = 0.0
    most: int = 10_000
    sent: int = 0
    refused: int = 0
    timed_out: int = 0
    ended_at: float = 0.0
    windows: list[float] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    done: list[tuple[float, float]] = field(default_factory=list)
    _flying: list[_Request] = field(default_factory=list)
    _waiting: list[tuple[float, float]] = field(default_factory=list)  # to be sent again: when
    _next_at: float = 0.0

    @property
    def mib_per_second(self) -> float:
        return sum(size for _, size in self.done) / (self.ended_at - self.starts_at)

    @property
    def has_ended(self) -> bool:
        return not (self.sizes_mib or self._flying or self._waiting)

    def take(self, now: float, draw: random.Random) -> Iterator[float]:
        """Yield the sizes of the requests that begin now."""
        del draw
        while now >= self.starts_at:
            due = [one for one in self._waiting if one[0] <= now]
            if not (due or self.sizes_mib) or len(self._flying) >= self.most:
                return
            if self._flying and len(self._flying) + 1 > self._allowed():
                return
            if isinstance(self.admits, Window):
                if self.admits.is_throttled:
                    if self._next_at - now > 0.05:
                        return
                    self._next_at = max(self._next_at, now) + 1 / self.admits.rate(now)
                self.admits = self.admits.after_begin(now, len(self._flying) + 1)
            if due:
                self._waiting.remove(due[0])
                yield due[0][1]
            else:
                yield self.sizes_mib.pop()

    def _allowed(self) -> float:
        largest = max(self.sizes_mib, default=0)
        return self.admits.allowed(int(largest * MIB), self.timeout_seconds)

    def move(self, now: float, request: _Request) -> None:
        """Tell the window of the pieces that have come, and of the rest with the last one."""
        came = request.size_mib - max(0.0, request.left_mib)
        piece = request.size_mib if self.piece_mib is None else self.piece_mib
        while isinstance(self.admits, Window) and request.told_mib < request.size_mib:
            some = min(piece, request.size_mib - request.told_mib)
            if came < request.told_mib + some:
                return
            request.told_mib += some
            self.admits = self.admits.after_bytes(now, int(some * MIB), len(self._flying))

    def answer(self, now: float, request: _Request, draw: random.Random) -> None:
        self.busy.append(len(self._flying))
        self._flying.remove(request)
        if now - request.begun_at > self.timeout_seconds:
            self.timed_out += 1
            self._waiting.append((now + 1, request.size_mib))
        elif request.refused:
            self.refused += 1
            self._waiting.append((now + draw.uniform(0.05, 0.5), request.size_mib))
            if isinstance(self.admits, Window):
                lately = [at for at, _ in self.done if now - at <= 2]
                per_second = len(lately) / max(now - lately[0], 0.5) if lately else 0.0
                busy = len(self._flying) + 1
                self.admits = self.admits.after_throttling(now, request.begun_at, busy, per_second)
        else:
            self.done.append((now, request.size_mib))
            self.ended_at = now
            if isinstance(self.admits, Window):
                self.admits = self.admits.after_answer(
                    now, request.begun_at, len(self._flying) + 1, self.timeout_seconds
                )
        self.windows.append(self._allowed())


def simulate(
    store: SimulatedStore, ranks: list[Rank], *, seed: int = 0, step_seconds: float = 0.001
) -> None:
    """Let the ranks make their transfers on one link."""
    draw, now = random.Random(seed), 0.0
    tokens = store.burst
    while not all(rank.has_ended for rank in ranks):
        if store.requests_per_second is not None:
            tokens = min(store.burst, tokens + store.requests_per_second * step_seconds)
        for rank in draw.sample(ranks, len(ranks)):
            for size_mib in rank.take(now, draw):
                refused = store.requests_per_second is not None and tokens < 1
                tokens -= not refused
                rank.sent += 1
                rank._flying.append(_drawn(store, draw, now, size_mib, refused))
        now += step_seconds
        moving = [
            one
            for rank in ranks
            for one in rank._flying
            if one.first_byte_at <= now and not one.refused
        ]
        for one, rate in zip(moving, _shares(store, moving), strict=True):
            one.left_mib -= rate * min(step_seconds, now - one.first_byte_at)
        for rank in ranks:
            for one in list(rank._flying):
                if one.first_byte_at <= now and not one.refused:
                    rank.move(now, one)
                late = now - one.begun_at > rank.timeout_seconds
                if late or (one.first_byte_at <= now and (one.refused or one.left_mib <= 0)):
                    rank.answer(now, one, draw)


def _drawn(
    store: SimulatedStore, draw: random.Random, now: float, size_mib: float, refused: bool
) -> _Request:
    slow = 20 if draw.random() < store.slow_share else 1
    latency = store.latency_seconds * draw.lognormvariate(0, store.noise) * slow
    rate = store.mib_per_second * draw.lognormvariate(0, store.noise) / slow
    return _Request(size_mib, now, now + latency, rate, size_mib, refused)


def _shares(store: SimulatedStore, moving: list[_Request]) -> list[float]:
    """What each connection gets: its rate, or an equal part of what the others leave."""
    shares = [one.mib_per_second for one in moving]
    left = store.link_mib_per_second
    if sum(shares) <= left:
        return shares
    for position, number in enumerate(sorted(range(len(shares)), key=shares.__getitem__)):
        shares[number] = min(shares[number], left / (len(shares) - position))
        left -= shares[number]
    return shares
