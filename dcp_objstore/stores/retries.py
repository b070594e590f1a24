"""Retries: when a request that failed is sent again, for every store and for the commit rules.

`RetryPolicy` says how often, until when and after which pauses. `Tries` is the one loop. `Requests`
holds what the requests to one bucket share: a throttled request slows the whole process down
(`Limiter`), all retries share one budget, a server that never answered is given up sooner, and each
retry is reported to the save or load that the request belongs to.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from dcp_objstore.config import MIB, TransferConfig
from dcp_objstore.errors import DcpObjstoreError, ForkedProcessError
from dcp_objstore.observe.dispatch import emit_retry
from dcp_objstore.stores.admission.limiter import Limiter, limiter_at
from dcp_objstore.stores.errors import Failure
from dcp_objstore.stores.urls import StoreUrl

T = TypeVar("T")

# The patience before a server has ever answered: a wrong endpoint is likelier than an outage.
FIRST_PATIENCE_SECONDS = 5.0
# A read may wait this long for the next bytes. For writes there is no such limit: transports count
# it from the start of the request, so it would cut uploads off, not only stalled ones.
READ_PROGRESS_SECONDS = 30.0
# A request with a longer body than this gets the time for a part of an upload.
SMALL_BYTES = 4 * MIB
# A small request has at least so long, however short the stall time-out is.
_LEAST_SMALL_TIMEOUT_SECONDS = 3.0
# A pause is doubled at most this often: a power of 2 ends somewhere, the number of retries may not.
_MOST_DOUBLINGS = 30

# Not Python's own generator: a retry would change the numbers that the program draws.
_random = random.SystemRandom()


class MonotonicClock(Protocol):
    """The time, and sleep, as the module `time` has them."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Sleep for this many seconds."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of tries, their deadline, and the pauses between them.

    By default, ten retries of a refused connection take 31 to 62 s, so a store that restarts within
    half a minute does not fail a save. Pauses that are random between a fixed first one and twice
    the last one hardly grow: ten of them took 1.5 to 8.5 s, and each restart failed the save.

    Attributes:
        max_retries: the number of retries; None: only the time bounds them.
        patience_seconds: no retry begins later than this after the first try.
        first_pause_seconds: the longest that the first pause may be. Each next one may be twice as
            long.
        longest_pause_seconds: the longest that any pause may be.
    """

    max_retries: int | None
    patience_seconds: float
    first_pause_seconds: float = 0.4
    longest_pause_seconds: float = 10.0

    def pause_seconds(self, retry: int) -> float:
        """Return the pause before a retry, numbered from 1.

        It is random between half of what it may be and all of it, so that clients that failed
        together do not come back together. No secret depends on it.
        """
        doublings = min(retry - 1, _MOST_DOUBLINGS)
        most = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0**doublings)
        return most * _random.uniform(0.5, 1.0)


def small_policy(config: TransferConfig) -> RetryPolicy:
    """Return the policy of small requests (marker, index, listing).

    A small request is given up within a third of the stall time-out, so that a save fails soon if
    the store stalls.
    """
    seconds = min(config.retry_timeout_seconds, config.stall_timeout_seconds / 3)
    return RetryPolicy(config.max_retries, seconds)


class Tries:
    """The tries of one request, or of one change that takes several requests.

    Args:
        policy: the bounds on when a retry may begin, not on how long it takes; counted from now.
        limiter: the bucket's limiter, which slows down when the store throttles, and has the budget
            of retries.
        clock: the time to go by.
        on_retry: a function that is called before each pause that follows an error, with the number
            of the next try (from 2), the error, and the time of the first try.
        refunds: whether an answer gives a part of a retry back to the limiter's budget.

    Attributes:
        policy: the bounds of the retries. They may be replaced by less patient ones.
        retries: the number of retries so far.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        limiter: Limiter | None = None,
        clock: MonotonicClock = time,
        on_retry: Callable[[int, Exception, float], None] | None = None,
        refunds: bool = False,
    ) -> None:
        self.policy = policy
        self.retries = 0
        self._limiter = limiter
        self._clock = clock
        self._on_retry = on_retry
        self._refunds = refunds
        self._began_at = clock.monotonic()

    def restart_clock(self) -> None:
        """Count the time from now, because a part of what was asked for has come."""
        self._began_at = self._clock.monotonic()

    def pause(self, error: Exception | None = None) -> bool:
        """Sleep and return True, or return False at once if no retry is allowed.

        Args:
            error: the error of the last try, if it raised one.
        """
        left_seconds = self._left_seconds()
        if left_seconds <= 0:
            return False
        self.retries += 1
        if error is not None and self._on_retry is not None:  # told the number of the next try
            self._on_retry(self.retries + 1, error, self._began_at)
        self._clock.sleep(min(left_seconds, self.policy.pause_seconds(self.retries)))
        return True

    def run(
        self,
        request: Callable[[], T],
        judge: Callable[[Exception], Failure],
        *,
        repeatable: bool = True,
    ) -> T:
        """Call `request`, again while it fails for a reason that may pass.

        Args:
            request: a function that sends it once.
            judge: a function that says what an exception of `request` means.
            repeatable: False for what must not be sent again if it may have taken effect.

        Raises:
            What `request` raises, if it must not be sent again. If it may be, but no retry is left,
            the error that the last exception means.
        """
        if self._limiter is not None:
            self._limiter.wait_turn()
        while True:
            begun_at = self._clock.monotonic()
            try:
                answer = request()
            except DcpObjstoreError:
                raise  # an adapter raises these for an answer that came, so it is final
            except Exception as error:  # noqa: BLE001  transports have no type in common
                self.wait_to_try_again(error, judge(error), begun_at, repeatable=repeatable)
            else:
                # For a request of a transfer, its `AdmissionSlot` notes the answer instead.
                if self._refunds and self._limiter is not None:
                    self._limiter.refund_retry()
                    self._limiter.note_latency(self._clock.monotonic() - begun_at)
                return answer

    def wait_to_try_again(
        self, error: Exception, failure: Failure, begun_at: float, *, repeatable: bool = True
    ) -> None:
        """Return when it is time for the next try, after one that raised `error`.

        Args:
            error: the exception of the transport.
            failure: the meaning of the exception.
            begun_at: the time at which the try began.
            repeatable: False for what must not be sent again if it may have taken effect.

        Raises:
            As `run`.
        """
        if not failure.may_pass or not (repeatable or failure.had_no_effect):
            raise error
        if failure.throttled and self._limiter is not None:
            self._limiter.note_throttling(begun_at)
        is_budget_spent = False
        # Only a retry that there is time for is taken from the budget.
        if self._limiter is not None and self._left_seconds() > 0:
            is_budget_spent = not self._limiter.spend_retry()
        if is_budget_spent or not self.pause(failure.error):
            if self.retries:
                why = "the store was throttling; " if failure.throttled else ""
                seconds = self._clock.monotonic() - self._began_at
                failure.error.message += f" ({why}{self.retries} retries in {seconds:.1f} s)"
            if is_budget_spent:
                failure.error.message += (
                    "; the retries that all requests of this process to the store share are used"
                    " up, so there is trouble beyond this request"
                )
            raise failure.error from error
        if self._limiter is not None:
            self._limiter.wait_turn()

    def _left_seconds(self) -> float:
        """The time within which a retry may begin; 0 if none may."""
        if self.retries == self.policy.max_retries:
            return 0.0
        return self.policy.patience_seconds - (self._clock.monotonic() - self._began_at)


_first_pid: int | None = None  # the process that made the first clients, this one or an ancestor


def guard_fork() -> None:
    """Raise `ForkedProcessError` in a child forked after its parent used clients.

    The threads of the clients' libraries do not survive a fork, so every request would hang. The
    first call notes that this process uses clients.
    """
    global _first_pid  # noqa: PLW0603  the threads are of the process
    pid = os.getpid()
    if _first_pid is None:
        _first_pid = pid
    elif _first_pid != pid:
        raise ForkedProcessError(
            f"process {pid} was forked from process {_first_pid}, which had opened a store;"
            " requests would hang here. Start it with multiprocessing.get_context('spawn')"
        )


class Requests:
    """The state that the requests to one bucket share.

    Args:
        config: time-outs and retries; those of small requests by `small_policy`.
        judge: a function that says what an exception of the transport means.
        endpoint_url: the server; None for the provider's own.
        url: a URL of the bucket.

    Attributes:
        endpoint_url: the server; None for the provider's own.
        reached: whether the server has ever answered, in whatever way.
        small_timeout_seconds: the time-out of one try of a small request.
    """

    # The verbs of transfers, whose `AdmissionSlot` notes the answers; those of others refund here.
    _verbs_in_slots: tuple[str, ...] = ("open_range", "put_stream", "copy")

    def __init__(
        self,
        config: TransferConfig,
        judge: Callable[[Exception], Failure],
        endpoint_url: str | None,
        url: StoreUrl,
    ) -> None:
        self.reached = False
        self.endpoint_url = endpoint_url
        self._judge = judge
        self._bucket = (url.scheme, url.bucket)
        self._policy = RetryPolicy(config.max_retries, config.retry_timeout_seconds)
        self._small_policy = small_policy(config)
        # A small request has a third of the stall time-out, but never less than a few seconds.
        self.small_timeout_seconds = min(
            config.request_timeout_seconds,
            max(config.stall_timeout_seconds / 3, _LEAST_SMALL_TIMEOUT_SECONDS),
        )

    @property
    def limiter(self) -> Limiter:
        """The bucket's limiter in this process; a forked child has another one."""
        return limiter_at(self.endpoint_url, *self._bucket)

    def tries(self, verb: str, key: str, size_bytes: int = 0) -> Tries:
        """Make the tries of one request.

        Args:
            verb: the verb of `ObjectStore`.
            key: the key of the object, in the bucket.
            size_bytes: the size of what is sent.
        """
        # A range counts as large, whatever its size is.
        is_large = size_bytes > SMALL_BYTES or verb == "open_range"
        return Tries(
            self._policy if is_large else self._small_policy,
            limiter=self.limiter,
            on_retry=partial(_report, key),
            refunds=verb not in self._verbs_in_slots,
        )

    def run(self, tries: Tries, request: Callable[[], T], *, repeatable: bool = True) -> T:
        """Do what `Tries.run` does, and give up soon on a server that never answered."""
        judge = partial(self._judge_try, tries)
        result = tries.run(request, judge, repeatable=repeatable)
        self.reached = True
        return result

    def wait_to_try_again(self, tries: Tries, error: Exception, begun_at: float) -> None:
        """Do what the method of `Tries` does, and give up soon on a server that never answered."""
        if isinstance(error, DcpObjstoreError):
            raise error  # found by the adapter in an answer that came
        tries.wait_to_try_again(error, self._judge_try(tries, error), begun_at)

    def _judge_try(self, tries: Tries, error: Exception) -> Failure:
        """Return what a failed try means; shorten the retries if the server has never answered.

        A server that never answered is probably the wrong URL, so the user should learn it soon.
        """
        failure = self._judge(error)
        self.reached = self.reached or failure.answered
        if not self.reached:
            seconds = min(FIRST_PATIENCE_SECONDS, tries.policy.patience_seconds)
            tries.policy = replace(tries.policy, patience_seconds=seconds)
        return failure


def _report(key: str, number: int, error: Exception, began_at: float) -> None:
    """Tell the save or load that a request for a key is sent for the `number`th time."""
    text = error.message if isinstance(error, DcpObjstoreError) else str(error)
    emit_retry(key, number, text, began_at)
