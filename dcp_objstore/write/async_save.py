"""`async_save`: copy the state at once, then upload and commit it in the background.

A process uploads one such save at a time: its saves take turns in the order in which they were
begun, which is the same on all ranks. The memory of the copy is kept for the next save, and
belongs to the running save until that has ended. The upload runs in a thread of this process; the
transport does not hold the GIL while bytes move.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import Any, Literal, TypeVar, cast

import torch.distributed as dist

from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.config import LocalFolder, TransferConfig
from dcp_objstore.distributed.failures import (
    capture,
    drop_state,
    every_rank,
    meeting,
    raise_on_all,
)
from dcp_objstore.distributed.groups import CALLS, SAVES, own_group, world_group
from dcp_objstore.distributed.plugin import reporting_failures, typed, url_of
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    InputError,
    RankFailedError,
    SaveInProgressError,
)
from dcp_objstore.forking import PerProcess
from dcp_objstore.observe.dispatch import staged_event
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import SaveReport, log_failure
from dcp_objstore.state.state_dict import ConvertedState
from dcp_objstore.threads import ready_for_program_end, result_of, wait_until
from dcp_objstore.write.api import MakePlanner, run_save
from dcp_objstore.write.planner import AgreeingSavePlanner
from dcp_objstore.write.program_end import TOO_LATE, at_program_end, has_ended, show_lost
from dcp_objstore.write.staging.state import Staging, staging_memory
from dcp_objstore.write.writer import ObjectStoreWriter

T = TypeVar("T")

_EVERY_RANK = every_rank("dcp_objstore.async_save")


class BackgroundSaves:
    """The background saves of the program, or of one manager: each begins after the one before.

    A save that fails is raised by the next of them, unless its result was asked for.

    Attributes:
        latest: the save that was begun last, or None.
    """

    def __init__(self) -> None:
        self.latest: AsyncSaveHandle | None = None


class _Saves(BackgroundSaves):
    """All saves of this process; `latest` is the last that the program began by `async_save`.

    Attributes:
        lock: the lock that is held while a save begins or ends.
        unsettled: all saves, those of managers too, that run, or whose error nothing has asked for,
            in the order of their turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.unsettled: list[AsyncSaveHandle] = []

    def add(self, handle: AsyncSaveHandle) -> None:
        """Give a save its turn after all others. The caller holds the lock."""
        self.unsettled = [save for save in self.unsettled if not save._is_settled]
        handle._before = self.unsettled[-1] if self.unsettled else None
        self.unsettled.append(handle)


# The parent's save goes on in the parent, in a thread that a forked child does not have.
_saves = PerProcess(_Saves)


class _WatchedFuture(Future[T]):
    """A future that records whether its result or exception was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.set_running_or_notify_cancel()  # a save cannot be cancelled

    def result(self, timeout: float | None = None) -> T:
        """Return the result, as `Future.result` does, and record that it was asked for."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, as `Future.exception` does, and record that it was asked for."""
        error = super().exception(timeout)
        self.seen = True
        return error


class AsyncSaveHandle:
    """A handle on a save that runs in the background.

        handle = dos.async_save(state, "s3://bucket/run/step-1500")
        handle.staged()  # from here on the state may change
        report = handle.result()  # the checkpoint is committed

    A program that ends during the save waits for it. If the save fails and nothing asks for its
    outcome, the next `async_save` raises the error. If there is no next one, the error is printed
    when the program ends, and the exit status is 120. (In a child that `multiprocessing` forks, the
    error is only logged.)

    Attributes:
        url: URL of the checkpoint.
        staging_completion: a future that is done when the state was copied, named as in
            `torch.distributed.checkpoint.async_save`.
        upload_completion: a future of the save's report, named as in
            `torch.distributed.checkpoint.async_save`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.staging_completion: Future[None] = _WatchedFuture()
        self.upload_completion: Future[SaveReport] = _WatchedFuture()
        self._ended = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # the thread that saves, once it has begun
        # Whether this handle was asked for the error, or the next save has raised it.
        self._raised = False
        self._before: AsyncSaveHandle | None = None  # the save that has its turn just before
        self._outlived = False  # whether the program had ended when the save ended

    def __repr__(self) -> str:
        outcome = "failed" if self._error else "done"
        return f"<AsyncSaveHandle {self.url} {outcome if self.done() else 'running'}>"

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state was copied, after which training may change it.

        Returns at once, unless `async_save` was called with `wait_for_staging=False`.

        Args:
            timeout: how long to wait, in seconds. Default: until the copy is complete.

        Raises:
            TimeoutError: the copy is not complete within `timeout`.
            DcpObjstoreError: the copy failed; `result` raises the same error on every rank.
        """
        try:
            result_of(self.staging_completion, timeout)
        except FutureTimeoutError:
            if self.staging_completion.done():  # the copy itself failed with a time-out
                raise
            raise TimeoutError(f"the state for {self.url} is still being copied") from None

    def done(self) -> bool:
        """Whether the save has ended, with or without success."""
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save and return its error, or None if it is committed.

        Args:
            timeout: how long to wait, in seconds. Default: until the save ends.

        Raises:
            TimeoutError: the save has not ended within `timeout`. It goes on.
        """
        self._wait(timeout)
        self._raised = True
        return self._error

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the commit and return the report, the same on every rank.

        Args:
            timeout: how long to wait, in seconds. Default: until the save ends.

        Raises:
            TimeoutError: the save has not ended within `timeout`. It goes on; ask again while
                `done()` is False. (A save that stalled fails with TransferStalledError, which is a
                TimeoutError, too.)
            DcpObjstoreError: the save failed, as `dcp_objstore.save` would raise it.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._report is not None
        return self._report

    def _wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the end of the save.

        Raises:
            InputError: a callback of `staging_completion` makes this call. It runs in the thread
                that saves, which would wait for itself.
            TimeoutError: the save has not ended within the time-out.
        """
        # A callback of `upload_completion` runs there, too, but the save has ended by then.
        if not self.done() and threading.current_thread() is self._thread:
            raise InputError(
                "a callback of `staging_completion` waits for the save, which waits for it",
                advice="wait in a callback of `upload_completion`",
                url=self.url,
            )
        if not wait_until(self._ended, timeout_seconds):
            raise TimeoutError(f"the save of {self.url} is still running")

    @property
    def _is_settled(self) -> bool:
        """Whether the save has ended, and an error of it was asked for."""
        return self.done() and not self._has_unseen_error

    @property
    def _has_unseen_error(self) -> bool:
        """Whether the save has failed and nothing has asked for the error."""
        seen = self._raised or cast(_WatchedFuture[SaveReport], self.upload_completion).seen
        return self._error is not None and not seen

    def _wait_for_turn(self) -> None:
        """Wait until all saves that were begun before have ended."""
        while self._before is not None:
            wait_until(self._before._ended)
            self._before = self._before._before  # not None if it has failed before its turn

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        """Record the outcome, wake all who wait for it, and call the callbacks of the futures.

        The callbacks come last, because they may ask for the outcome or begin the next save.
        """
        self._report, self._error = report, error
        self._outlived = has_ended()

        def complete(future: Future[Any]) -> None:
            if future.done():  # it is `staging_completion`, and the state was copied
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(report)

        self._ended.set()
        # `staging_completion` comes first, and both are completed even if a callback raises.
        with contextlib.ExitStack() as stack:
            stack.callback(complete, self.upload_completion)
            stack.callback(complete, self.staging_completion)


def async_save(
    state: Mapping[str, Any],
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = False,
    on_event: OnEvent | None = None,
    trace: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    user_metadata: Mapping[str, object] | None = None,
    stock_metadata: bool = True,
    allow_unfenced: bool = False,
    claim: RunClaim | None = None,
    base: str | None = None,
    on_busy: Literal["wait", "raise"] = "wait",
    wait_for_staging: bool = True,
    local: LocalFolder = None,
) -> AsyncSaveHandle:
    """Copy the state to host memory, return, and save the copy in the background.

        handle = dos.async_save(state, "s3://bucket/run/step-1530")
        train(state)  # the copy is being uploaded
        handle.result()

    Call it on every rank. The copy takes as much host memory as this rank's shards; the memory is
    kept for the next save (pinned if there is a GPU). Collectives of the save run in separate gloo
    groups, which the first call makes. The ranks begin a save, or refuse it, together. Call
    `handle.result()` before `torch.distributed.destroy_process_group()`: without the groups a
    running save fails with an InputError that says so, and commits nothing.

    Args:
        state: a dict, nested as you like, of modules, optimizers, Stateful objects, tensors,
            DTensors and plain values.
        url: URL of the checkpoint, the same on every rank.
        on_busy: what to do while an earlier save is running: "wait" for it (default), or "raise"
            SaveInProgressError. Saves of a `CheckpointManager` do not count: this one is copied at
            once, and uploaded when they have ended.
        wait_for_staging: return once the state was copied, so that it may be changed at once. If
            False, the copy is made after the call returns, and nothing that is saved may be changed
            before `handle.staged()` has returned: call that just before the optimizer's next step.
        progress: show a progress bar, which would overwrite the training's output. Default False.
        process_group: the ranks that save together. Default: all ranks.
        overwrite: replace a committed checkpoint at this URL. Default False: refuse.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: taken from the environment.
        config: sizes, concurrency and time-outs.
        on_event: callable that receives each event of the save on this rank, in another
            thread. `ObjectStoreWriter` describes how it is called.
        trace: name of a local file to write a trace of the save to. `ObjectStoreWriter` describes
            how ranks name their files.
        user_metadata: small JSON values to store in the commit marker (metrics, step, config).
        stock_metadata: after the commit, write `.metadata`, by which stock torch finds the
            checkpoint. `ObjectStoreWriter` says what False means. Default True.
        allow_unfenced: save even to a store without conditional writes, where two writers of one
            checkpoint are not kept apart. Default False: refuse.
        claim: the claim that `claim_run` returned for the run. Default: none.
        base: a checkpoint of an earlier state, "latest" or a URL: what has not changed since is
            copied by the store instead of uploaded. `ObjectStoreWriter` says more. The same on
            every rank. It is read when the upload begins. Default: upload all.
        local: a folder of this node, as a path or `dos.Local`, for copies from which a job that
            starts again on the node loads. `ObjectStoreWriter` says more. Default None: none.

    Returns:
        A handle with which to wait for the copy and for the commit.

    Raises:
        SaveInProgressError: an earlier save is running, and `on_busy` is "raise".
        DcpObjstoreError: an argument is wrong; or the earlier save failed, its result was not asked
            for on some rank, and this save was not begun.
        RankFailedError: a rank died, or did not make this call within
            `config.peer_timeout_seconds` (the first call also waits for the time-out given to
            `init_process_group`).
    """
    return begin_save(
        _saves.here,
        state,
        url,
        config=config,
        process_group=process_group,
        base=base,
        on_busy=on_busy,
        wait_for_staging=wait_for_staging,
        overwrite=overwrite,
        storage_options=storage_options,
        progress=progress,
        on_event=on_event,
        trace=trace,
        user_metadata=user_metadata,
        stock_metadata=stock_metadata,
        allow_unfenced=allow_unfenced,
        claim=claim,
        local=local,
    )


def begin_save(
    background: BackgroundSaves,
    state: Mapping[str, Any],
    url: str,
    *,
    config: TransferConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
    base: str | None = None,
    on_busy: Literal["wait", "raise"] = "wait",
    wait_for_staging: bool = True,
    planner: MakePlanner = AgreeingSavePlanner,
    **settings: Any,
) -> AsyncSaveHandle:
    """Begin a save, as `async_save` describes.

    Args:
        background: the saves that count as earlier saves of this one, such as those of one manager.
            For other saves of the process this call does not wait, and it raises none of their
            errors: the copy is made at once and waits for its turn in the background.
        planner: a function that makes the planner; `run_save` calls it.
        settings: further arguments of `ObjectStoreWriter`.
    """

    def make_writer() -> ObjectStoreWriter:
        if on_busy not in ("wait", "raise"):
            raise ConfigError(f"on_busy must be 'wait' or 'raise', got {on_busy!r}")
        return ObjectStoreWriter(url, config=config, base=base, **settings)

    writer, refused = capture(make_writer)
    with meeting(url_of(writer), process_group or world_group(), _EVERY_RANK):
        # This thread and the saving thread each have a group, so that their collectives do not mix.
        calls = own_group(CALLS, process_group, config)
        saves = own_group(SAVES, process_group, config)
        raise_on_all(refused, url_of(writer), calls, _EVERY_RANK, same={"base": base})
    assert writer is not None
    save = _StagedSave(writer, saves, planner)
    handle = save.handle
    try:
        _begin_after_earlier(background, handle, on_busy, calls)
    except BaseException as error:
        # All ranks have raised it; or it is Ctrl-C, and `handle` may be the latest save already,
        # for which the next one waits.
        handle._end(None, error)
        raise
    try:
        save.begin_staging(state)
        if wait_for_staging:
            save.finish_staging()
        ready_for_program_end()
        # Not a daemon, so that Python waits for it even where `_wait_for_all` is not registered.
        threading.Thread(target=save.run, name="dcp_objstore-async-save").start()
        if has_ended():
            # An `atexit` handler has made this call; after the handlers Python waits for no thread.
            wait_until(handle._ended)
    except BaseException as error:  # such as Ctrl-C, or no thread can be started
        # The other ranks go on to the collectives of the save. `run` raises the error there.
        save.run(error)
        raise
    save.raise_interrupt()
    return handle


class _StagedSave:
    """One save, from its staging to its end.

    `begin_staging` runs in the caller's thread, `run` in a thread of the save, and
    `finish_staging` in either.
    """

    def __init__(
        self, writer: ObjectStoreWriter, group: dist.ProcessGroup | None, planner: MakePlanner
    ) -> None:
        self.handle = AsyncSaveHandle(str(writer.checkpoint_id))
        self._writer = writer
        self._group = group
        self._planner = planner
        self._staging: Staging | None = None
        self._error: DcpObjstoreError | None = None  # of the staging; `_save` raises it
        # Such as Ctrl-C during the staging, which `raise_interrupt` raises in the user's thread.
        self._interrupt: BaseException | None = None
        self._once = threading.Lock()  # taken by the first call of `run`, and never released

    def begin_staging(self, state: Mapping[str, Any]) -> None:
        """Allocate memory and start the copies from devices. `run` raises what fails here."""
        self._began_at = time.monotonic()

        def begin() -> Staging:
            # `open` imports the store's library. If the saving thread imported it, a child that the
            # program forks during the import could never import it.
            self._writer._target.spec.open()
            converted = self._writer._note_left_out(ConvertedState(state, loading=False))
            return Staging(converted.state_dict, staging_memory())

        self._staging, error = capture(begin)
        self._keep_error(error)

    def finish_staging(self) -> None:
        """Finish the copy, and complete `staging_completion`. A second call does nothing."""
        # `_staging` is None if `begin_staging` has failed: then only the future is completed.
        if self._staging is not None and not self.handle.staging_completion.done():
            _, error = capture(self._staging.finish)
            self._keep_error(error)
            size_bytes = self._staging.state.size_bytes
            self._writer._staged_event = staged_event(
                self.handle.url, current_rank() or 0, size_bytes, self._began_at
            )
        if not self.handle.staging_completion.done():
            if self._error is None:
                self.handle.staging_completion.set_result(None)
            else:
                self.handle.staging_completion.set_exception(self._error)

    def _keep_error(self, error: BaseException | None) -> None:
        """Keep an error that `_save` raises on all ranks, unless there is one already."""
        if error is None or self._error is not None:
            return
        if not isinstance(error, Exception):  # such as Ctrl-C, which `async_save` raises as it is
            self._interrupt = error
        self._error = typed(error, current_rank(), self.handle.url)

    def raise_interrupt(self) -> None:
        """Raise what has interrupted the copy, such as Ctrl-C."""
        if self._interrupt is not None:
            raise self._interrupt

    def run(self, error: BaseException | None = None) -> None:
        """Run the save, unless another thread runs it already.

        Args:
            error: an error of the calling thread with which the save fails on all ranks. Default:
                none.
        """
        if not self._once.acquire(blocking=False):
            return  # Ctrl-C came as the thread was started, and both call this
        report, save_error = None, None
        self.handle._thread = threading.current_thread()
        try:
            self._keep_error(error)
            report = self._save()
        except BaseException as raised:  # noqa: BLE001 - raised by `result` and the next async_save
            save_error = raised
            log_failure(self.handle.url, raised)
            # The frames of the error hold the copy of the state, whose memory the next save needs.
            drop_state(raised)
        finally:
            # `_end` lets the next save begin, which needs the memory of this copy.
            self._staging = None
            self.handle._end(report, save_error)

    def _save(self) -> SaveReport:
        """Save the copy; if this rank could not make its copy, raise the error on all ranks."""
        with reporting_failures(self._writer):
            self.finish_staging()
            self.handle._wait_for_turn()
            raise_on_all(self._error, self.handle.url, self._group)
            assert self._staging is not None
            return run_save(self._writer, self._staging.state, self._group, self._planner)


def _begin_after_earlier(
    background: BackgroundSaves,
    handle: AsyncSaveHandle,
    on_busy: Literal["wait", "raise"],
    group: dist.ProcessGroup | None,
) -> None:
    """Make `handle` the latest of these saves, or raise on every rank if any rank refuses.

    Ranks see the end of the earlier save at different times, and only some may have asked for its
    result. If one rank refused alone, the others would hang in the collectives of the new save.
    """
    saves = _saves.here
    while True:
        earlier, error = background.latest, None
        if earlier is not None and on_busy == "wait":
            _, error = capture(earlier._wait)
        objection = _objection(earlier, handle.url)
        try:
            raise_on_all(error or objection, handle.url, group, _EVERY_RANK)
        except SaveInProgressError:
            raise  # the earlier save still runs on some rank, so its error was not raised
        except DcpObjstoreError:
            # Unless Ctrl-C has ended the wait on a rank, it is the error of the earlier save.
            if earlier is not None:
                earlier._raised = True
            raise
        with saves.lock:
            # If another thread has begun a save in the meantime, the loop looks at that one.
            if background.latest is earlier:
                background.latest = handle
                saves.add(handle)
                return


def _objection(earlier: AsyncSaveHandle | None, url: str) -> DcpObjstoreError | None:
    """Return why this rank cannot begin another save now, or None if it can."""
    if earlier is None:
        return None
    if not earlier.done():
        return SaveInProgressError(f"{earlier.url} is still being saved", url=url)
    if not earlier._has_unseen_error:
        return None
    if isinstance(earlier._error, DcpObjstoreError):
        return earlier._error
    # Such as Ctrl-C in an earlier call: raised again as it is, it would look like a new one.
    return RankFailedError(
        f"{type(earlier._error).__name__}: {earlier._error}", current_rank(), url=earlier.url
    )


def _wait_for_all() -> None:
    """Wait, as the program ends, for all saves that run."""
    for handle in _saves.here.unsettled:
        wait_until(handle._ended)


def _show_unseen_errors() -> None:
    """Print, at exit, the error of each failed save whose result nobody asked for.

    Python calls it after all saves have ended (see `_wait_for_all`).
    """
    unseen = "the background save failed, and the program ended without asking for its result"
    for handle in _saves.here.unsettled:
        if handle._has_unseen_error:
            assert handle._error is not None
            reason = TOO_LATE if handle._outlived else unseen
            show_lost(handle.url, handle._error, reason)


at_program_end(_wait_for_all)
atexit.register(_show_unseen_errors)
