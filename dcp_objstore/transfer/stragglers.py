"""`Stragglers`: find the wait for bytes that takes far longer than the others of its transfer.

Pure bookkeeping: workers say when they begin and end to wait for a piece of a body, and the thread
that watches the transfer takes a wait away from its worker to ask again.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dcp_objstore.config import MIB
from dcp_objstore.contexts import contextmanager

T = TypeVar("T")

# A wait is slow if it takes so many times as long as the median of the last ones, byte for byte,
# but not before the first figure. Connections that share a busy link differ by 2 to 3 times.
_SLOW_FACTOR = 4.0
_LEAST_SECONDS = 0.75
# A smaller wait counts as one for this much: its bytes take hardly any time.
_LEAST_COUNTED_BYTES = MIB
# How many of the last waits make up the median, and how many there must be.
_LATEST_WAITS = 64
_LEAST_WAITS = 8
# At most one request in so many of a transfer is asked for again, and two of a small one.
_REPEATED_SHARE = 10
_LEAST_REPEATS = 2


class StragglerError(Exception):
    """The wait was taken away from this thread: it must not use the bytes."""


class Stragglers(Generic[T]):
    """The waits of one transfer's workers. Safe to use from many threads."""

    def __init__(self, requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        # How many requests may still be asked for again.
        self._repeats_left = max(_LEAST_REPEATS, requests // _REPEATED_SHARE)
        self._clock = clock
        self._lock = threading.Lock()
        # When each wait under way began, and its counted bytes; the longest wait first.
        self._waits: dict[T, tuple[float, int]] = {}
        # How many seconds the latest waits took for each counted byte.
        self._byte_times: deque[float] = deque(maxlen=_LATEST_WAITS)

    @contextmanager
    def waiting(self, key: T, size_bytes: int, since: float = math.inf) -> Iterator[None]:
        """Wait for bytes in this block.

        Args:
            key: what identifies the wait, for `take`.
            size_bytes: the number of bytes.
            since: the time at which the bytes began to come, if that was before the block. How long
                bytes usually take is learnt from this time: the block alone would seem too fast,
                because it does not wait for bytes that a buffer has already.

        Raises:
            StragglerError: the wait was taken away, whatever the block raised.
        """
        began_at, counted_bytes = self._clock(), max(size_bytes, _LEAST_COUNTED_BYTES)
        with self._lock:
            self._waits[key] = began_at, counted_bytes
        try:
            yield
        finally:
            with self._lock:
                is_mine = self._waits.pop(key, None) is not None  # `take` has not removed it
                self._byte_times.append((self._clock() - min(since, began_at)) / counted_bytes)
            if not is_mine:
                raise StragglerError

    def take(self, give_up: Callable[[T], bool]) -> T | None:
        """Take the longest slow wait that can be given up away from its worker.

        Args:
            give_up: a function that is called with the key of each slow wait, the longest first,
                until it returns True: this wait is given up. No wait begins or ends during a call.

        Returns:
            The key of the wait that was given up, or None.
        """
        with self._lock:
            if not self._repeats_left or len(self._byte_times) < _LEAST_WAITS:
                return None
            now = self._clock()
            slow_seconds_per_byte = _SLOW_FACTOR * statistics.median(self._byte_times)
            for key, (began_at, counted_bytes) in self._waits.items():
                slow_seconds = max(_LEAST_SECONDS, slow_seconds_per_byte * counted_bytes)
                if now - began_at > slow_seconds and give_up(key):
                    del self._waits[key]
                    self._repeats_left -= 1
                    return key
        return None
