"""`KeptStager`: staging for `dcp.async_save`, one save at a time.

If a writer is not a stager itself, DCP makes a new stager for every save and copies into new memory
each time. DCP does not tell a writer when a save has ended. `KeptStager` finds out from the thread
that runs the save and from the copy that the thread holds.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.groups import count_ranks, gone_error, has_gone, world_group
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import ConfigError, SaveInProgressError
from dcp_objstore.observe.dispatch import staged_event
from dcp_objstore.observe.events import Staged
from dcp_objstore.observe.report import log_failure
from dcp_objstore.threads import STEP_SECONDS, ready_for_program_end, wait_in_steps
from dcp_objstore.torch_private import StagesAtOnce
from dcp_objstore.write.program_end import TOO_LATE, has_ended, show_lost
from dcp_objstore.write.staging.state import StagedState, stage, staging_memory

# The thread of a save may still run for a moment after its result was returned.
_GRACE_SECONDS = 0.5
# The finalizer of a copy runs just before its tensors are freed and DCP's thread ends.
_LAST_SECONDS = 0.02

OnBusy = Literal["wait", "raise"]


class _BackgroundSave:
    """A background save, from its staging to its end.

    The save has ended when its thread has ended or starts another save, or when nothing holds the
    copy any more. (If the copy was sent to a child process, only the thread counts: it waits for
    the child.) DCP may fail before it calls the writer, and the error then holds the copy. As long
    as the thread is unknown, any thread that DCP may have started since the staging counts.
    """

    def __init__(self, state: StagedState) -> None:
        """Begin to follow the save of this copy, in the thread that has staged it."""
        self.thread: threading.Thread | None = None
        self.staging_thread = threading.current_thread()
        self._group = world_group()
        self._ranks = count_ranks(self._group)  # torch cannot count those of a destroyed group
        # The threads that cannot be that of this save, which DCP starts after the staging.
        self._earlier_threads = weakref.WeakSet(threading.enumerate())
        self._in_child = False  # whether the copy was sent to a child process
        # Set when nothing holds the copy any more.
        self._dropped = threading.Event()
        weakref.finalize(state, self._dropped.set).atexit = False

    def note_thread(self, *, in_child: bool = False) -> None:
        """Note that this thread runs the save, unless it is the thread that staged it."""
        here = threading.current_thread()
        if self.thread is None and here is not self.staging_thread:
            self.thread = here
            self._in_child = in_child

    def has_ended(self) -> bool:
        """Return whether the save has ended, so that another one may begin."""
        thread = self.thread
        if thread is None:
            # It is not known which thread runs the save. DCP makes an executor for each save, so
            # any executor's thread that was begun since the staging may be it. No child process has
            # the copy, because the thread that sends it there is known from then on.
            newer = (one for one in threading.enumerate() if one not in self._earlier_threads)
            return self._dropped.is_set() or not any("Executor" in one.name for one in newer)
        # If the thread of the save asks, it begins another save, so this one has ended.
        if not thread.is_alive() or thread is threading.current_thread():
            return True
        # If a child process saves, this process may drop the copy before the save has ended.
        return not self._in_child and self._dropped.is_set()

    def has_lost_ranks(self) -> bool:
        """Return whether this thread runs the save, and its process group was destroyed."""
        runs_here = self.thread is threading.current_thread()
        return runs_here and has_gone(self._group) and self._ranks > 1

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for the end of the save; return whether it has ended within the time-out."""
        # In steps in any thread, because no single event covers every way in which it may end.
        if not wait_in_steps(self._has_ended_within, timeout_seconds, step_seconds=STEP_SECONDS):
            return False
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_LAST_SECONDS)  # so that it has freed the copy, for the next save
        return True

    def _has_ended_within(self, seconds: float | None) -> bool:
        """Wait for the end of the save, at most so long; return whether it has ended."""
        if self.has_ended():
            return True
        if self.thread is not None:
            self.thread.join(seconds)
        else:
            self._dropped.wait(seconds)
        return self.has_ended()


class KeptStager(StagesAtOnce):
    """A DCP `AsyncStager` that keeps its memory; a base class of the writer.

    Args:
        on_busy: what `stage` does while an earlier save of this writer is running: "wait" for its
            end, or "raise" SaveInProgressError.

    Raises:
        ConfigError: `on_busy` is neither "wait" nor "raise".
    """

    def __init_subclass__(cls) -> None:
        """Make writers of a class notice when a process-mode save sends them to its child."""
        super().__init_subclass__()
        # For each class, because `multiprocessing` pickles by the exact class.
        ForkingPickler.register(cls, _reduce_for_child)

    def __init__(self, on_busy: OnBusy = "wait") -> None:
        if on_busy not in ("wait", "raise"):
            raise ConfigError(f"on_busy must be 'wait' or 'raise', got {on_busy!r}")
        self._on_busy = on_busy
        self._background: _BackgroundSave | None = None
        self._staged_event: Staged | None = None  # an event that was not emitted yet

    def stage(self, state_dict: Mapping[str, Any], **_: Any) -> StagedState:
        """Return a copy of the state in host memory. `dcp.async_save` calls it.

        The memory is leased until the save has released it, and then reused.

        Raises:
            SaveInProgressError: an earlier save is running, and `on_busy` is "raise". Raised on
                this rank only. If ranks may differ in what is running,
                `dcp_objstore.async_save` makes them agree.
        """
        url, rank = getattr(self, "checkpoint_id", None), current_rank()
        with plugin_errors(rank, url):
            earlier = self._background
            # Even with "raise", wait a moment for a thread that is about to end. None: no limit.
            patience_seconds = _GRACE_SECONDS if self._on_busy == "raise" else None
            if earlier is not None and not earlier.wait(patience_seconds):
                raise SaveInProgressError(
                    "an earlier save with this writer is still running in the background; wait for"
                    " its future, or use a second writer"
                )
            began_at = time.monotonic()
            staged = stage(state_dict)
            self._staged_event = staged_event(str(url), rank or 0, staged.size_bytes, began_at)
            self._background = _BackgroundSave(staged)
            ready_for_program_end()
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has already copied everything."""

    def close(self) -> None:
        """Free the memory that no save holds; the next save allocates it again."""
        staging_memory().release()

    def _note_thread(self, *, in_child: bool = False) -> None:
        """Note that the save in the background, if there is one, runs in this thread."""
        if self._background is not None:
            self._background.note_thread(in_child=in_child)

    def _wait_for_earlier(self) -> None:
        """Wait, at the first call of a save, until the save in the background has ended.

        This must come before any collective of the new save, which could otherwise mix with one of
        the background save in the same group.
        """
        background = self._background
        # In any other thread the call belongs to the background save, which cannot wait for itself.
        if background is not None and background.staging_thread is threading.current_thread():
            background.wait(None)
        self._note_thread()

    def _check_ranks(self) -> None:
        """Refuse to save only this rank's part: without a process group DCP assumes one rank.

        Raises:
            InputError: the process group was destroyed after the staging.
        """
        if self._background is not None and self._background.has_lost_ranks():
            raise gone_error(getattr(self, "checkpoint_id", None))

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log an error of a background save, because its future may never be asked."""
        background = self._background
        try:
            yield
        except BaseException as error:
            if background is not None and background.thread is threading.current_thread():
                url = getattr(self, "checkpoint_id", None)
                log_failure(url, error)
                if has_ended():  # nothing asks for the future any more
                    show_lost(url, error, TOO_LATE)
            raise


def _reduce_for_child(writer: KeptStager) -> Any:
    """Pickle a writer for a child process, to which the thread of the save sends it."""
    writer._note_thread(in_child=True)
    return writer.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
