"""The end of the program while a save runs in the background.

Python ends a program in this order: the handlers of `threading`, the threads that are not daemons,
`atexit`. One of the first makes `concurrent.futures` refuse work, and asyncio looks host names up
there, so s3fs and gcsfs fail from then on. So a save is waited for before that.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its handler runs after ours, in reverse order
import contextlib
import copy
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

from dcp_objstore.errors import DcpObjstoreError, RankFailedError

TOO_LATE = "the program ended while it was uploading; call result() of the save first"

_ended = threading.Event()


def has_ended() -> bool:
    """Return whether the program has ended: at most saves in the background go on."""
    return _ended.is_set()


def at_program_end(wait: Callable[[], object]) -> None:
    """Call `wait` when the program ends, in the main thread, while all of Python still works."""

    def end() -> None:
        _ended.set()
        wait()

    # `_register_atexit` is private; Python 3.9 to 3.14 have it. Without it (AttributeError), Python
    # still waits for the threads. RuntimeError: the program has ended already.
    with contextlib.suppress(AttributeError, RuntimeError):
        threading._register_atexit(end)  # type: ignore[attr-defined]


def show_lost(url: str | None, error: BaseException, why: str) -> None:
    """Print that a checkpoint was not saved, and have the program end with exit status 120."""
    stream = sys.stderr
    try:
        print(f"dcp_objstore: {url} was NOT saved: {why}:", file=stream)
        if isinstance(error, DcpObjstoreError) and not isinstance(error, RankFailedError):
            # A copy has no traceback. None is shown: the error is no bug, and its text says enough.
            error = copy.copy(error)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr = cast(TextIO, _FailingAtExit(stream))  # makes the exit status 120


class _FailingAtExit:
    """A standard error stream that makes the exit status 120, for a program that lost a save.

    At exit Python changes the status in one case only: to 120, if a standard stream cannot be
    flushed (see `sys.exit`). An error of an `atexit` handler is only printed. So this wraps the
    real stream and behaves like it until Python flushes it for the last time.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def closed(self) -> bool:
        """Always False, because Python does not flush a closed stream."""
        return False

    def flush(self) -> None:
        """Flush the stream; raise if the interpreter is finalizing."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys.is_finalizing():
            raise RuntimeError("the last save in the background failed")


# So that `has_ended` is true even if nothing else is called when the program ends.
at_program_end(lambda: None)
