"""`Progress`: how far a transfer is, whether it has stalled, and whether it must stop. `Silence`:
whether the store still answers.

One `Progress` belongs to one save or load on one rank. Worker threads report bytes to it, the
controlling thread watches it, and generators of buffers ask it whether to go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from dcp_objstore.errors import StoreUnavailableError, TransferStalledError
from dcp_objstore.observe.events import NoAnswer
from dcp_objstore.observe.report import counted, logger
from dcp_objstore.threads import STEP_SECONDS, run_in_thread

if TYPE_CHECKING:
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore

# The store is asked after the first of these times without an answer, and the user is told after
# the second.
_ASK_SECONDS = 3.0
_REPORT_SECONDS = 5.0


class Progress:
    """Bytes moved so far, the time of the last movement, and a request to stop.

    Args:
        stall_timeout_seconds: `check_stalled` raises if nothing moved for this long.
        channel: the channel for the events of parts and ranges. Default: none are emitted.
        clock: a function that returns monotonic seconds.

    Attributes:
        stall_timeout_seconds: as given.
        channel: the channel, or None if it has no listener for parts and ranges.
        moved_bytes: bytes that have reached their destination so far.
        is_silence_reported: whether the user was told that the store does not answer.
    """

    def __init__(
        self,
        stall_timeout_seconds: float,
        channel: Channel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stall_timeout_seconds = stall_timeout_seconds
        self.channel = channel if channel is not None and channel.detailed else None
        self._clock = clock
        self._last_move_at = clock()
        # Re-entrant: callbacks of weak references report bytes, and they run at any moment, even
        # in a thread that holds the lock.
        self._lock = threading.RLock()
        self._stop: BaseException | None = None
        self.moved_bytes = 0
        self.is_silence_reported = False

    def moved(self, count_bytes: int) -> None:
        """Report that `count_bytes` more bytes have reached their destination."""
        with self._lock:
            self.moved_bytes += count_bytes
            self._last_move_at = self._clock()

    def alive(self) -> None:
        """Report work that moves no bytes yet (resolving data, copying from a device)."""
        self._last_move_at = self._clock()

    def stop(self, error: BaseException) -> None:
        """Ask every worker to stop with `error`; the first request counts."""
        with self._lock:
            if self._stop is None:
                self._stop = error

    def check_stopped(self) -> None:
        """Raise the error that `stop` was called with, if it was called."""
        if self._stop is not None:
            raise self._stop

    def check_stalled(self, name: str) -> None:
        """Raise if nothing has moved for the stall time-out.

        Args:
            name: the name of the transfer, for the error.

        Raises:
            TransferStalledError: nothing has moved for that long.
        """
        idle_seconds = self._clock() - self._last_move_at
        if idle_seconds > self.stall_timeout_seconds:
            raise TransferStalledError(
                f"{name}: no part was completed for {idle_seconds:.0f} s"
                f" (TransferConfig.stall_timeout_seconds={self.stall_timeout_seconds:g});"
                f" {self.moved_bytes} bytes were moved before",
                advice="check the network and the store, then try again",
            )


class Silence:
    """Whether the store still answers while the parts of an object are under way.

    A transport that sends parts again by itself says nothing until it gives up, and a slow line is
    as silent as a dead server. So when no part has ended for some seconds, the store is asked for
    the metadata of the object that is being written. This request is called the question. Any
    answer to it shows that the store is there. Its tries are reported as `Retried`, with a reason.

    Args:
        store: the store.
        key: the key of the object.
        progress: the progress of the save, whose user is told once.

    Attributes:
        key, progress: as given.
    """

    def __init__(self, store: ObjectStore, key: str, progress: Progress) -> None:
        self._store, self.key, self.progress = store, key, progress
        # The question that is under way, or whose outcome `check` has not looked at yet.
        self._question: Future[ObjectMeta] | None = None
        # The error of the last question that `check` has looked at; None if it was answered.
        self._question_error: StoreUnavailableError | None = None
        # Set once a silence in which the store was asked has lasted for `_REPORT_SECONDS`, until a
        # question is answered.
        self._is_long_silence = False
        self._heard_at = time.monotonic()  # the time of the last sign of life

    def heard(self) -> None:
        """Record a sign of life. In a long silence, only the answer to a question counts as one."""
        if not self._is_long_silence:
            self._heard_at = time.monotonic()
            self.progress.alive()

    def wait(self) -> None:
        """Wait while the silence is long: parts that are begun then would only fail, too."""
        while self._is_long_silence:
            self.progress.check_stopped()
            time.sleep(STEP_SECONDS)

    def check(self, parts: int, *, is_open: bool) -> None:
        """Ask the question, tell the user, or give up, when it is time to; called again and again.

        Args:
            parts: the number of parts under way.
            is_open: whether any request is open.

        Raises:
            TransferStalledError: nothing has moved for the stall time-out.
            StoreUnavailableError: in a long silence, no part is under way any more, and all tries
                of a question have failed.
        """
        self.progress.check_stalled(f"upload of {self.key}")
        question = self._question
        if question is not None and question.done():
            # An error that is no StoreUnavailableError is an answer: the store is there.
            self._question, error = None, question.exception()
            self._question_error = error if isinstance(error, StoreUnavailableError) else None
            if self._question_error is None:
                self._is_long_silence, self._heard_at = False, time.monotonic()
        seconds = time.monotonic() - self._heard_at
        is_time_to_ask = is_open and seconds > _ASK_SECONDS
        # After a question that was not answered, the next one is asked at once.
        if self._question is None and (self._question_error or is_time_to_ask):
            self._question = run_in_thread(partial(self._store.head, self.key), "question")
        # A question that was asked just now does not count: it may still be answered at once.
        if question is not None and seconds > _REPORT_SECONDS:
            self._is_long_silence = True
            self._report_once(parts, seconds)
        if self._is_long_silence and self._question_error is not None and not parts:
            self._question_error.message = (
                f"PUT of parts of {self.key}: no answer for {seconds:.0f} s, nor to other requests"
                f" since: {self._question_error.message}"
            )
            raise self._question_error

    def _report_once(self, parts: int, seconds: float) -> None:
        """Warn the user and emit an event, once in a save."""
        progress, limit = self.progress, self.progress.stall_timeout_seconds
        if progress.is_silence_reported:
            return
        progress.is_silence_reported = True
        logger.warning(
            f"{self._store.url}: no answer for {seconds:.0f} s, {counted(parts, 'part')} of"
            f" {self.key} under way; waiting for the store for {limit - seconds:.0f} s more at"
            f" most (TransferConfig.stall_timeout_seconds={limit:g})"
        )
        if progress.channel is not None:
            progress.channel.emit(
                NoAnswer,
                self._heard_at,
                object_key=self.key,
                parts=parts,
                wait_seconds=limit - seconds,
            )
