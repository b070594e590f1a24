"""`async_save`: the state is copied at once, uploaded and committed in the background.

One save at a time in a process: the staging buffers are kept and used again, and belong to the
save that is under way until it has ended. The upload runs in a thread of this process; the
transport holds no GIL while bytes move.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from dcp_objstore.dcp.api import aim, run_save
from dcp_objstore.dcp.failures import agree, attempt, typed_failures
from dcp_objstore.dcp.groups import current_rank, own_group
from dcp_objstore.dcp.report import SaveReport, logger
from dcp_objstore.dcp.state import ConvertedState
from dcp_objstore.dcp.writer import ObjectStoreWriter
from dcp_objstore.errors import (
    ConfigError,
    DcpObjstoreError,
    RankFailedError,
    SaveInProgressError,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    from dcp_objstore.checkpoint.epoch import RunEpoch
    from dcp_objstore.config import TransferConfig

_lock = threading.Lock()
_latest: AsyncSaveHandle | None = None
_stager: DefaultStager | None = None
# What a forked child has of its parent's stager. Never given back there: for pinned memory that
# would take a call of CUDA, which does not work in a forked child.
_inherited: list[DefaultStager | None] = []


def _forget_parent() -> None:
    """In a forked child: the parent's save goes on in the parent, in a thread that is not here."""
    global _lock, _latest, _stager
    _inherited.append(_stager)
    _lock, _latest, _stager = threading.Lock(), None, None


os.register_at_fork(after_in_child=_forget_parent)


class AsyncSaveHandle:
    """A save under way.

    When the program ends while it is, the interpreter waits for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._running = False
        self._ended = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._error_seen = False

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"<AsyncSaveHandle {self.url} {state}>"

    def staged(self, timeout_seconds: float | None = None) -> None:
        """Wait until the state was copied, after which training may change it.

        Returns at once: `async_save` copies before it returns.
        """
        del timeout_seconds

    def done(self) -> bool:
        """Whether the save has ended, one way or the other."""
        return self._ended.is_set()

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """The error of the save, or None if it is committed; waits for its end.

        Args:
            timeout_seconds: how long to wait. Default: until it ends.

        Raises:
            TimeoutError: Python's own: it has not ended within `timeout_seconds`; it goes on.
        """
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"the save of {self.url} is still under way")
        self._error_seen = True
        return self._error

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Wait for the commit and return the report, the same on every rank.

        Args:
            timeout_seconds: how long to wait. Default: until it ends.

        Raises:
            TimeoutError: Python's own, no DcpObjstoreError: the save has not ended within
                `timeout_seconds`. It goes on; ask again.
            Whatever `dcp_objstore.save` raises.
        """
        error = self.exception(timeout_seconds)
        if error is not None:
            raise error
        assert self._report is not None
        return self._report

    def _fail(self, error: BaseException) -> None:
        """End it, unless its thread runs: then that ends it."""
        with _lock:
            if not self._running:
                self._error = error
                self._ended.set()

    def _run(self, save: Any) -> None:
        with _lock:
            if self.done():
                return  # Ctrl-C came as the thread was started
            self._running = True
        try:
            self._report = save()
        except BaseException as error:  # noqa: BLE001 - raised by `result` and the next async_save
            self._error = error
            logger.error("saving %s in the background failed: %s", self.url, error)
        finally:
            self._ended.set()


def async_save(
    state: Mapping[str, Any],
    url: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
    user_metadata: Mapping[str, object] | None = None,
    allow_unfenced: bool = False,
    epoch: RunEpoch | None = None,
    on_busy: Literal["wait", "refuse"] = "wait",
) -> AsyncSaveHandle:
    """Copy the state to host memory, return, and save the copy in the background.

    Called by every rank. The copy takes as much host memory as this rank's shards, kept for the
    next save (pinned where there is a GPU). Collectives of the save run in gloo groups of their
    own, made at the first call; the ranks begin a save, or refuse it, together. Call
    `handle.result()` before `torch.distributed.destroy_process_group()`: without the groups a save
    that is under way fails.

    Args:
        on_busy: what to do while an earlier save is under way: "wait" for it (default), or
            "refuse" with SaveInProgressError.
        progress: show a bar; it would be drawn over the training's output. Default False.
        state, url, process_group, overwrite, storage_options, config, user_metadata,
        allow_unfenced, epoch: see `dcp_objstore.save`.

    Raises:
        SaveInProgressError: see `on_busy`.
        DcpObjstoreError: the earlier save failed and on some rank nobody has asked for its result;
            this one was not begun. Also wrong arguments.
        RankFailedError: a rank died, or did not call within `config.peer_timeout_seconds`.
    """

    def make_writer() -> ObjectStoreWriter:
        if on_busy not in ("wait", "refuse"):
            raise ConfigError(f"on_busy must be 'wait' or 'refuse', got {on_busy!r}")
        return ObjectStoreWriter(
            url,
            overwrite=overwrite,
            storage_options=storage_options,
            config=config,
            progress=progress,
            allow_unfenced=allow_unfenced,
            user_metadata=user_metadata,
            epoch=epoch,
        )

    writer, refused = attempt(make_writer)
    with typed_failures(aim(writer), process_group):
        # Two: collectives of this thread and of the one that saves must not meet in one group.
        calls = own_group("async_save calls", process_group, config)
        saves = own_group("async_save saves", process_group, config)
    agree(refused, aim(writer), calls)
    assert writer is not None
    return _begin(writer, state, on_busy, calls, saves)


def _begin(
    writer: ObjectStoreWriter,
    state: Mapping[str, Any],
    on_busy: Literal["wait", "refuse"],
    calls: dist.ProcessGroup | None,
    saves: dist.ProcessGroup | None,
) -> AsyncSaveHandle:
    """Wait for the turn, copy the state and start the thread that saves it."""
    handle = AsyncSaveHandle(str(writer.checkpoint_id))

    def save() -> SaveReport:
        agree(failed, handle.url, saves)
        assert staged is not None
        return run_save(writer, staged, saves)

    try:
        _take_turn(handle, on_busy, calls)
        # What fails here is raised by the save, where the other ranks are told of it.
        staged, failed = attempt(lambda: _stage(ConvertedState(state, loading=False).state_dict))
        # No daemon: the interpreter waits for it at its end, so that the last save is not lost.
        threading.Thread(target=handle._run, args=(save,), name="dcp_objstore-async-save").start()
    except BaseException as error:  # Ctrl-C, or no thread can be started
        handle._fail(error)
        raise
    return handle


def _take_turn(
    handle: AsyncSaveHandle, on_busy: Literal["wait", "refuse"], group: dist.ProcessGroup | None
) -> None:
    """Make `handle` the latest save; or raise, on every rank if on any.

    Ranks see the end of the earlier save at different times, and its result may have been asked
    for on some only. A rank that refused alone would leave the others in the collectives of the
    new save.
    """
    global _latest  # noqa: PLW0603 - one save at a time in a process
    while True:
        earlier = _latest
        if earlier is not None and on_busy == "wait":
            earlier._ended.wait()
        try:
            agree(_objection(earlier, handle.url), handle.url, group)
        except SaveInProgressError:
            raise
        except DcpObjstoreError:
            if earlier is not None:
                earlier._error_seen = True
            raise
        with _lock:
            if _latest is earlier:
                _latest = handle
                return


def _objection(earlier: AsyncSaveHandle | None, url: str) -> DcpObjstoreError | None:
    """Why this rank cannot begin another save now."""
    if earlier is None:
        return None
    if not earlier.done():
        return SaveInProgressError(f"{earlier.url} is still being saved", url=url)
    if earlier._error is None or earlier._error_seen:
        return None
    if isinstance(earlier._error, DcpObjstoreError):
        return earlier._error
    return RankFailedError(
        f"{type(earlier._error).__name__}: {earlier._error}", current_rank(), url=earlier.url
    )


def _stage(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy in host memory."""
    global _stager  # noqa: PLW0603 - its buffers are kept from save to save
    if _stager is None:
        on_gpu = torch.cuda.is_available()
        _stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
    return _stager.stage(_with_locals_at_start(state_dict))  # type: ignore[return-value]  # no future


def _with_locals_at_start(value: Any) -> Any:
    """With a copy of each DTensor whose local tensor does not begin where its storage does.

    torch (2.13) takes such a DTensor for one with memory of its own, beside its local tensor's, and
    fails to stage it. The copy is on the same device, for as long as the staging takes.
    """
    if type(value) is dict:
        return {key: _with_locals_at_start(item) for key, item in value.items()}
    if type(value) is list:
        return [_with_locals_at_start(item) for item in value]
    if isinstance(value, DTensor) and value._local_tensor.storage_offset():
        return DTensor.from_local(
            value._local_tensor.detach().clone(),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value
