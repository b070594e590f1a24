"""`KeptStager`: how a writer stages for `dcp.async_save`, one save at a time.

DCP makes a new stager for every save with a writer that is none itself, and copies into new
memory each time. It does not tell a writer when a save has ended; the thread that runs it, and the
copy that it holds, do.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.distributed.groups import (
    count_ranks,
    current_rank,
    gone_error,
    has_gone,
    world_group,
)
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import ConfigError, SaveInProgressError
from dcp_objstore.observe import hooks
from dcp_objstore.observe.report import log_failure
from dcp_objstore.torch_private import StagesAtOnce
from dcp_objstore.waiting import STEP_SECONDS, wait_in_steps
from dcp_objstore.write.staging.state import StagedState, stage, staging_memory

if TYPE_CHECKING:
    from dcp_objstore.observe.events import Staged

# A save whose result was returned may still be about to end its thread.
_GRACE_SECONDS = 0.5
# It is told that a copy goes just before its tensors do; a thread of DCP's ends then, too.
_LAST_SECONDS = 0.02

OnBusy = Literal["wait", "raise"]


class _BackgroundSave:
    """A save from its staging to its end.

    It has ended when its thread has, or has come back with something else, or when nobody holds
    the copy any more. (A copy that was sent to a child process says nothing: the thread waits for
    the child.) DCP may fail before it calls the writer, and the error then holds the copy: as long
    as the thread is not known, it is one of those that DCP may have started since the staging.
    """

    def __init__(self, state: StagedState) -> None:
        self.thread: threading.Thread | None = None
        self.staged_in = threading.current_thread()
        self._group = world_group()
        self._before = weakref.WeakSet(threading.enumerate())
        self._in_child = False
        self._dropped = threading.Event()
        weakref.finalize(state, self._dropped.set).atexit = False

    def runs_here(self, *, in_child: bool = False) -> None:
        """Called by whatever runs the save; the thread that staged it waits or saves otherwise."""
        here = threading.current_thread()
        if self.thread is None and here is not self.staged_in:
            self.thread = here
            self._in_child = in_child

    def has_ended(self) -> bool:
        """Whether another save may begin."""
        thread = self.thread
        if thread is None:
            return self._dropped.is_set() or not any(map(self._may_run_it, threading.enumerate()))
        if not thread.is_alive() or thread is threading.current_thread():
            return True
        return not self._in_child and self._dropped.is_set()

    def has_lost_ranks(self) -> bool:
        """Whether this thread runs it, and the process group of its ranks has been destroyed."""
        runs_here = self.thread is threading.current_thread()
        return runs_here and has_gone(self._group) and count_ranks(self._group) > 1

    def _may_run_it(self, thread: threading.Thread) -> bool:
        """Whether it is a thread of an executor (DCP makes one for each save) begun since then."""
        return thread not in self._before and "Executor" in thread.name

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for its end, at most so long; whether it has ended."""
        # In steps in any thread, as no one thing tells of each way in which it may end.
        if not wait_in_steps(self._look, timeout_seconds, step_seconds=STEP_SECONDS):
            return False
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_LAST_SECONDS)
        return True

    def _look(self, seconds: float | None) -> bool:
        if self.has_ended():
            return True
        if self.thread is not None:
            self.thread.join(seconds)
        else:
            self._dropped.wait(seconds)
        return self.has_ended()


class KeptStager(StagesAtOnce):
    """DCP's `AsyncStager`, into memory that is kept; a base of the writer.

    Args:
        on_busy: what `stage` does while an earlier save of this writer is under way: "wait" for
            its end, or "raise" with SaveInProgressError.

    Raises:
        ConfigError: `on_busy` is neither.
    """

    def __init__(self, on_busy: OnBusy = "wait") -> None:
        if on_busy not in ("wait", "raise"):
            raise ConfigError(f"on_busy must be 'wait' or 'raise', got {on_busy!r}")
        self._on_busy = on_busy
        self._background: _BackgroundSave | None = None
        self._staged: Staged | None = None  # not told of yet

    def stage(self, state_dict: Mapping[str, Any], **_: Any) -> StagedState:
        """A copy of the state in host memory; called by `dcp.async_save`.

        The memory is leased until the save has let go of it, and then used again.

        Raises:
            SaveInProgressError: see `on_busy`. On this rank only: where ranks may differ in what
                they have under way, `dcp_objstore.async_save` has them agree.
        """
        url = getattr(self, "checkpoint_id", None)
        with plugin_errors(current_rank(), url):
            earlier = self._background
            if earlier is not None:
                if not earlier.wait(_GRACE_SECONDS if self._on_busy == "raise" else None):
                    raise SaveInProgressError(
                        "an earlier save with this writer is under way in the background; wait for"
                        " its future, or use a second writer"
                    )
                self._background = None
            began_at = time.monotonic()
            staged = stage(state_dict)
            self._staged = hooks.staged(str(url), current_rank() or 0, staged.size_bytes, began_at)
            self._background = _BackgroundSave(staged)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Free the memory that no save holds; the next one allocates it again."""
        staging_memory().release()

    def _runs_here(self, *, in_child: bool = False) -> None:
        if self._background is not None:
            self._background.runs_here(in_child=in_child)

    def _take_turn(self) -> None:
        """At the first call of a save: the one in the background goes first.

        Before any collective of this save, which could meet one of that save's in the same group.
        """
        background = self._background
        if background is not None and background.staged_in is threading.current_thread():
            background.wait(None)
        self._runs_here()

    def _check_ranks(self) -> None:
        """Refuse to save a part: without a process group DCP takes this rank to be alone.

        Raises:
            InputError: the process group was destroyed after the staging.
        """
        if self._background is not None and self._background.has_lost_ranks():
            raise gone_error(getattr(self, "checkpoint_id", None))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log what fails in the background: nobody may ever ask the future."""
        background = self._background
        try:
            yield
        except BaseException as error:
            if background is not None and background.thread is threading.current_thread():
                log_failure(getattr(self, "checkpoint_id", None), error)
            raise


def _reduce_for_child(writer: KeptStager) -> Any:
    writer._runs_here(in_child=True)
    return writer.__reduce_ex__(2)


def note_children(kind: type[KeptStager]) -> None:
    """Have writers of this class know when a process-mode save sends them to its child."""
    ForkingPickler.register(kind, _reduce_for_child)
