"""`Silence`: whether the store still answers while the parts of an upload are under way.

It stands alone because it is a protocol of its own between the threads of an upload. A transport
that sends parts again by itself says nothing until it gives up, and a slow line is as silent as a
dead server. So when no part has ended for some seconds, the store is asked for the metadata of the
object that is being written. Whatever it answers shows that it is there. The tries of that request
are reported as `Retried`, with the reason.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from dcp_objstore.errors import StoreUnavailableError
from dcp_objstore.observe.events import NoAnswer
from dcp_objstore.observe.report import counted, logger
from dcp_objstore.transfer.workers import run_in_thread
from dcp_objstore.waiting import STEP_SECONDS

if TYPE_CHECKING:
    from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
    from dcp_objstore.transfer.progress import Progress

# The store is asked after the first of these times without an answer, and the user is told after
# the second.
_ASK_SECONDS = 3.0
_TELL_SECONDS = 5.0


class Silence:
    """What is known of a store that may have stopped answering, for the upload of one object.

    Args:
        store: the store.
        key: the key of the object.
        progress: the progress of the save, whose user is told once.

    Attributes:
        key, progress: as given.
    """

    def __init__(self, store: ObjectStore, key: str, progress: Progress) -> None:
        self._store, self.key, self.progress = store, key, progress
        self._question: Future[ObjectMeta] | None = None
        self._error: BaseException | None = None
        self._is_long = False
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """Record a sign of life, which in a long silence only the answer to the question is."""
        if not self._is_long:
            self._heard_at = time.monotonic()
            self.progress.alive()

    def wait(self) -> None:
        """Wait while the silence is long: parts that are begun then would only fail, too."""
        while self._is_long:
            self.progress.check_stopped()
            time.sleep(STEP_SECONDS)

    def look(self, parts: int, *, is_open: bool) -> None:
        """Ask the store, tell the user, or give up, when it is time to.

        Args:
            parts: the number of parts under way.
            is_open: whether any request is.

        Raises:
            TransferStalledError: nothing has moved for the stall time-out.
            StoreUnavailableError: no part is under way any more, and the store has not answered the
                question with all its tries.
        """
        self.progress.check_stalled(f"upload of {self.key}")
        asked = self._question
        if asked is not None and asked.done():
            self._question, self._error = None, asked.exception()
            if not isinstance(self._error, StoreUnavailableError):
                self._error, self._is_long, self._heard_at = None, False, time.monotonic()
        seconds = time.monotonic() - self._heard_at
        if self._question is None and (self._error or (is_open and seconds > _ASK_SECONDS)):
            self._question = run_in_thread(partial(self._store.head, self.key), "question")
        if asked is not None and seconds > _TELL_SECONDS:
            self._is_long = True
            self._tell(parts, seconds)
        if isinstance(self._error, StoreUnavailableError) and not parts:
            self._error.message = (
                f"PUT of parts of {self.key}: no answer for {seconds:.0f} s, nor to other requests"
                f" since: {self._error.message}"
            )
            raise self._error

    def _tell(self, parts: int, seconds: float) -> None:
        """Warn once in a save, and emit an event."""
        progress, limit = self.progress, self.progress.stall_timeout_seconds
        if progress.is_silence_told:
            return
        progress.is_silence_told = True
        logger.warning(
            f"{self._store.url}: no answer for {seconds:.0f} s, {counted(parts, 'part')} of"
            f" {self.key} under way; waiting for the store for {limit - seconds:.0f} s more at"
            f" most (TransferConfig.stall_timeout_seconds={limit:g})"
        )
        if (channel := progress.channel) is not None:
            fields = {"object_key": self.key, "parts": parts, "wait_seconds": limit - seconds}
            channel.emit(NoAnswer, self._heard_at, **fields)
