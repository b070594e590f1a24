"""`Progress`: how far a transfer is, whether it has stalled, and whether it must stop.

One `Progress` belongs to one save or load on one rank. Worker threads report bytes to it, the
controlling thread watches it, and generators of buffers ask it whether to go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dcp_objstore.errors import TransferStalledError

if TYPE_CHECKING:
    from dcp_objstore.observe.dispatch import Channel


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
        is_silence_told: whether the user was told that the store does not answer.
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
        # Re-entrant: bytes are reported by weak references, which may be dropped anywhere.
        self._lock = threading.RLock()
        self._stop: BaseException | None = None
        self.moved_bytes = 0
        self.is_silence_told = False

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

    def check_stalled(self, what: str) -> None:
        """Raise if nothing has moved for the stall time-out.

        Args:
            what: the name of the transfer, for the error.

        Raises:
            TransferStalledError: nothing has moved for that long.
        """
        idle_seconds = self._clock() - self._last_move_at
        if idle_seconds > self.stall_timeout_seconds:
            raise TransferStalledError(
                f"{what}: no part was completed for {idle_seconds:.0f} s"
                f" (TransferConfig.stall_timeout_seconds={self.stall_timeout_seconds:g});"
                f" {self.moved_bytes} bytes were moved before. Check the network and the store,"
                " then try again"
            )
