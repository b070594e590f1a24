"""`Tries`: send a request again that the transport sends once.

For reads and small writes, which can simply be sent again. A throttled request slows the whole
process down (`Limiter`), all retries share one budget, and each is reported to the save or load
that the request belongs to. The pauses grow and are jittered: each is random between the first and
three times the last one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from dcp_objstore.errors import DcpObjstoreError
from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.stores.admission.limiter import Limiter
from dcp_objstore.stores.obstore.errors import is_throttling, is_transient, translate_obstore

T = TypeVar("T")

# With a base of 2 the jitter would eat up the growth: ten retries of a refused connection took
# 1.5 to 8.5 s, so a store that restarted failed every save. With these, 7 to 64 s, half of them
# above 28 s.
FIRST_PAUSE_SECONDS = 0.4
LONGEST_PAUSE_SECONDS = 10.0
PAUSE_BASE = 3


class Tries:
    """The tries of one request.

    Args:
        limiter: of the bucket.
        key: in the bucket.
        max_retries: of this request.
        patience_seconds: no retry begins later than this after the first try.
    """

    def __init__(
        self, limiter: Limiter, key: str, max_retries: int, patience_seconds: float
    ) -> None:
        self._limiter = limiter
        self._key = key
        self._max_retries = max_retries
        self.patience_seconds = patience_seconds
        self._began = time.monotonic()
        self._retries = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def run(
        self,
        request: Callable[[], T],
        may_retry: Callable[[Exception], bool] = lambda _error: True,
    ) -> T:
        """`request()`, sent again while it fails for a reason that may pass.

        Args:
            may_retry: asked of such a failure, whether it may be sent again.

        Raises:
            What `request` raises; our error for the last failure where it was sent again in vain.
        """
        self._limiter.wait_turn()
        while True:
            begun_at = time.monotonic()
            try:
                return request()
            except Exception as error:
                if not is_transient(error) or not may_retry(error):
                    raise
                elapsed_seconds = time.monotonic() - self._began
                found = translate_obstore(error, self._retries, elapsed_seconds)
                self.failed(found, throttled=is_throttling(error), begun_at=begun_at)

    @property
    def retries(self) -> int:
        """Made so far."""
        return self._retries

    def failed(self, error: DcpObjstoreError, *, throttled: bool, begun_at: float) -> None:
        """A try failed: return when it is time for the next one.

        Raises:
            `error`, with what was done about it: there is to be no next one.
        """
        if throttled:
            self._limiter.throttled(begun_at)
        elapsed_seconds = time.monotonic() - self._began
        last = self._retries >= self._max_retries or elapsed_seconds > self.patience_seconds
        spent = not last and not self._limiter.spend_retry()
        if last or spent:
            if spent:
                error.message += (
                    "; the retries that all requests of this process to the store share are used"
                    " up, so there is trouble beyond this request"
                )
            raise error
        self._retries += 1
        # No secret hangs on it.
        self._pause_seconds = (
            FIRST_PAUSE_SECONDS
            if self._retries == 1
            else min(
                LONGEST_PAUSE_SECONDS,
                random.uniform(FIRST_PAUSE_SECONDS, PAUSE_BASE * self._pause_seconds),
            )
        )
        pause_seconds = self._pause_seconds * random.uniform(0.5, 1.0)
        emit_retry(self._key, self._retries + 1, error.message, self._began)
        time.sleep(pause_seconds)
        self._limiter.wait_turn()
