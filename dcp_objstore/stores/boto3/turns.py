"""Turns: under `moto.mock_aws` one request at a time, so that a conditional PUT is atomic there.

moto answers in the thread that asks and has no locks: of several threads that create the same
object, two can win, as `checkpoint.probe` soon finds out. Real requests take no turns: botocore
calls the handlers of `before-send`, of which moto's is one, before it sends anything.
"""

from __future__ import annotations

import os
import threading
from typing import Any

# A turn that is never given back (Ctrl-C within the fake) delays the next requests; no more.
_PATIENCE_SECONDS = 5.0


class _Turn:
    def __init__(self) -> None:
        self._free = threading.Lock()
        self._taken_by: int | None = None

    def take(self) -> None:
        if self._taken_by != threading.get_ident() and self._free.acquire(
            timeout=_PATIENCE_SECONDS
        ):
            self._taken_by = threading.get_ident()

    def give_back(self) -> None:
        if self._taken_by == threading.get_ident():
            self._taken_by = None
            self._free.release()


# Of the process, as moto's backend is.
_turn = _Turn()


def _renew_after_fork() -> None:
    global _turn  # noqa: PLW0603  the parent's may be held by a thread that is not here
    _turn = _Turn()


os.register_at_fork(after_in_child=_renew_after_fork)


def take_turns(client: Any) -> None:
    """Have each request of a boto3 client be answered alone, if it is answered in the process."""
    events = client.meta.events
    events.register_first("before-send.s3", lambda **_: _turn.take())
    # botocore calls the handlers of the longer name first; moto's is at the shorter one.
    events.register_last("before-send", lambda **_: _turn.give_back())
    # What the fake raises comes here instead.
    events.register_first("needs-retry.s3", lambda **_: _turn.give_back())
