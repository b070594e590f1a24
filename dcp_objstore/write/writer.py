"""`ObjectStoreWriter`: DCP's StorageWriter, which leads a save from its set-up to its commit.

All ranks upload; the coordinator alone reads the begin token before any of them starts, and
commits after all have reported (the rules are in `checkpoint.commit`). Whatever belongs to one
save lives in a `Save`, so a writer can be used for one save after another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_objstore.checkpoint import commit, probe
from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.clock import deadline_seconds_for
from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.distributed.groups import rank_and_world_size
from dcp_objstore.distributed.plugin import plugin_errors
from dcp_objstore.errors import (
    CorruptDataError,
    RankFailedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.observe.events import Saved
from dcp_objstore.observe.hooks import Hooks, show
from dcp_objstore.observe.report import SaveReport
from dcp_objstore.state.dcp_metadata import build_index, stock_metadata
from dcp_objstore.stores.target import Target
from dcp_objstore.stores.urls import is_supported_url
from dcp_objstore.transfer.workers import wait_for
from dcp_objstore.write.claim import check_claim, confirm, refuse_uncounted
from dcp_objstore.write.finish import commit_save, publish_for_stock_readers
from dcp_objstore.write.layout import check_item
from dcp_objstore.write.planner import same_url
from dcp_objstore.write.session import Save
from dcp_objstore.write.staging.stager import KeptStager, OnBusy, note_children
from dcp_objstore.write.upload_items import upload_items

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.observe.events import OnEvent


class ObjectStoreWriter(KeptStager, StorageWriter):
    """Saves with `dcp.save` and `dcp.async_save` to an object store.

    Every rank makes one with the same arguments. Tensors are sent from their own memory; it must
    not change until the save returns. For `dcp.async_save` the writer makes a copy first, in memory
    that is kept for the next save of any writer of this process. The checkpoint exists for readers
    once rank 0 has committed it, whole, and not before.

    Args:
        url: the checkpoint, as `s3://bucket/run/step-1000` (also `gs://`, `az://`, `file://`,
            `memory://`). May be left out when `dcp.save(..., checkpoint_id=url)` gives it.
            Another `checkpoint_id` in the first save is refused; a later one re-targets the writer.
        overwrite: replace a committed checkpoint at this URL. Its data objects stay until a sweep
            removes them, so readers of the old one are not disturbed. Default False: refuse.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, `profile`, `anon`, ...). Default: from the environment.
        config: sizes, concurrency and time-outs.
        progress: show a bar on rank 0 where standard error is a terminal. Default True.
        on_event: called with each thing that happens in a save on this rank; see
            `dcp_objstore.events`. It is called in a thread of its own, with one event of a save at
            a time, in their order, and with the last before the save returns or raises; saves and
            loads under way at the same time each call it, so it must be thread-safe. What it raises
            is logged, once in a save, which goes on; so it does where a call takes more than 10 s
            at its end. In process mode of `async_save` it is pickled and called in the child.
        trace: name of a local file that gets each save as a trace for Perfetto
            (https://ui.perfetto.dev) or chrome://tracing, also if the save fails. Each save
            replaces it, unless it holds `{name}`, for the last element of the URL. Where there are
            several ranks each writes its own: `{rank}` stands for the number, else "save.json"
            becomes "save.rank3.json". See `dcp_objstore.merge_traces`.
        allow_unfenced: save even to a store without conditional writes, where two writers of one
            checkpoint are not kept apart. Default False: refuse.
        user_metadata: small JSON values stored in the commit marker (metrics, step, config).
        claim: from `claim_run` of the run that the checkpoint lies directly below: once another
            job has taken the run over, no save of this one counts any more, and each says so.
            Without it, a save into a run that was ever taken over raises SupersededError.
        on_busy: what `dcp.async_save` with this writer does while the writer's earlier save is
            under way: "wait" for it before the state is copied (default), or "raise" with
            SaveInProgressError.

    Attributes:
        last_save: a `SaveReport` of the last finished save, or None. On rank 0 it covers all
            ranks. In process mode of `async_save` it stays in the child process.
        save_id: names the latest save of this rank, or None; rank 0's is the `save_id` of the
            `StorageMeta` that is stored, as with torch's writers.

    The DCP call raises these errors as `CheckpointException.failures`; `dos.save` raises them
    plainly. Unless they say otherwise, no checkpoint became visible and the one that was there is
    untouched.

    Raises:
        CheckpointExistsError: committed already, and `overwrite` was not given.
        CommitLostError: another writer committed this checkpoint meanwhile; it is whole.
        CommitUnknownError: the store never answered the commit; it may have happened.
        SupersededError: a newer job took the run over; what this job saves does not count.
        SaveInProgressError: see `on_busy`.
        StoreUnavailableError: the store did not answer, after all retries.
        TransferStalledError: no part was completed for `config.stall_timeout_seconds`.
        CredentialsError: there are no credentials, or they are wrong or expired.
        PermissionDeniedError: the credentials do not allow it.
        BucketNotFoundError: there is no such bucket.
        UnsupportedError: the store or the state cannot do what was asked.
        ConfigError: an argument has a wrong type or value.

    One writer serves one save at a time: `dcp.save` waits for what `dcp.async_save` has under way
    in the background. Saves that several threads make with one writer do not disturb each other. A
    pickled writer carries its settings without secrets, except on the way to a child process that
    `multiprocessing` starts.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        progress: bool = True,
        on_event: OnEvent | None = None,
        trace: str | os.PathLike[str] | None = None,
        allow_unfenced: bool = False,
        user_metadata: Mapping[str, object] | None = None,
        claim: RunClaim | None = None,
        on_busy: OnBusy = "wait",
    ) -> None:
        KeptStager.__init__(self, on_busy)
        self._target = Target(url, storage_options, config)
        self._overwrite = overwrite
        self._progress = progress
        self._hooks = Hooks(on_event, trace)
        self._allow_unfenced = allow_unfenced
        # Checked here and not only when it is stored, after all the data was uploaded.
        self._user_metadata = check_user_metadata(user_metadata)
        self._claim = claim
        if self._target.url is not None:
            check_claim(claim, self._target.spec)
        self._of_thread = threading.local()
        self._warned_keys: set[str] = set()
        self.last_save: SaveReport | None = None
        self.save_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings only, without secrets, locks or the save under way."""
        kept = ("_target", "_overwrite", "_progress", "_allow_unfenced", "_user_metadata")
        of_saves = ("_claim", "_on_busy", "_hooks", "_staged")
        return {name: getattr(self, name) for name in kept + of_saves}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A writer with these settings that has not saved yet."""
        self.__dict__.update(state)
        self._background = None
        self._of_thread = threading.local()
        self._warned_keys = set()
        self.last_save = None
        self.save_id = None

    def __repr__(self) -> str:
        return f"ObjectStoreWriter({self.checkpoint_id!r}, overwrite={self._overwrite})"

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint that is saved next."""
        return self._target.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL that we can save to."""
        return isinstance(checkpoint_id, str) and is_supported_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint, keeping every option; None keeps the URL.

        A save that another thread has under way keeps its own URL.

        Raises:
            ConfigError: the writer was made with another URL and has saved nothing yet.
        """
        self._runs_here()  # also where the URL is refused
        if checkpoint_id is not None:
            self._target.aim(checkpoint_id)  # type: ignore[arg-type]  # StoreSpec checks it

    def storage_meta(self) -> StorageMeta:
        """Stored with the checkpoint, for observability. The first call of a save in its thread."""
        self._take_turn()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # The parameter must be called `kwargs`: DCP looks for that name before it passes them.
    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Begin a save: on the coordinator, read the begin token and refuse what cannot be."""
        rank = kwargs.get("rank")
        url = self.checkpoint_id
        channel = self._hooks.channel("save", str(url), *rank_and_world_size())
        with self._logged(), channel.watching(), plugin_errors(rank, url):
            show(channel, bar=self._progress and is_coordinator, summary=is_coordinator)
            self._check_ranks()
            if not kwargs.get("use_collectives", True):
                raise UnsupportedError(
                    "use_collectives=False makes every rank write a checkpoint of its own;"
                    " a commit needs all ranks together, so leave it at True"
                )
            number = check_claim(self._claim, self._target.spec)
            save = self._begin_save(rank or 0, is_coordinator, channel)
            store = save.open()
            if is_coordinator:
                refuse_uncounted(self._claim, self._target.spec)
                save.begin = wait_for(
                    commit.begin,
                    store,
                    overwrite=self._overwrite,
                    claim=number or 0,
                    nonce=save.nonce,
                    deadline_seconds=self._deadline_seconds,
                )
                try:
                    found = wait_for(
                        probe.require_fencing,
                        store,
                        overwrite=self._overwrite,
                        # A claim is nothing without conditional writes.
                        allow_unfenced=self._allow_unfenced and number is None,
                        begin=save.begin,
                        deadline_seconds=min(probe.DEADLINE_SECONDS, self._deadline_seconds),
                    )
                except UnsupportedError:
                    wait_for(commit.remove_beacon, store, save.begin.beacon)
                    raise
                save.fenced = found.conditional_create

    @property
    def _deadline_seconds(self) -> float:
        return deadline_seconds_for(self._target.config.stall_timeout_seconds)

    def _begin_save(self, rank: int, is_coordinator: bool, channel: Channel) -> Save:
        self._of_thread.save = save = Save(self._target.begin(), rank, is_coordinator, channel)
        self.save_id = save.nonce
        staged, self._staged = self._staged, None
        if staged is not None:
            channel.pass_on(staged)
        return save

    @property
    def _save(self) -> Save | None:
        """This thread's latest: DCP makes all calls of one save from one thread."""
        return getattr(self._of_thread, "save", None)

    def _errors(self) -> AbstractContextManager[None]:
        save = self._save
        if save is None:
            return plugin_errors(None, self.checkpoint_id)
        return plugin_errors(save.rank, save.spec.url)

    def _current_save(self) -> Save:
        save = self._save
        if save is None:
            raise UnsupportedError(
                "no save was begun with this writer in this thread; set_up_storage_writer and all"
                " that follows it must be called in one thread, as DCP does"
            )
        return save

    @contextmanager
    def _watched(self) -> Iterator[Save]:
        """Around a part of the save that this thread began, which is told of meanwhile."""
        with self._errors():
            save = self._current_save()
        with save.channel.watching(), self._errors():
            yield save

    def _tell_failed(self, error: BaseException) -> None:
        """Tell of the end of this thread's save, for what fails outside of the methods here."""
        save = self._save
        if save is not None:
            channel = save.channel
            if save.begin is not None and not isinstance(error, RetryableError | KeyboardInterrupt):
                # Where the store may not answer, a sweep removes it.
                wait_for(commit.remove_beacon, save.open(), save.begin.beacon)
        else:
            channel = self._hooks.channel("save", str(self.checkpoint_id), *rank_and_world_size())
        channel.fail(error)
        channel.settle()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what cannot be saved, before anything is sent.

        Nothing to add: names are chosen per save, not through the plan, which DCP may cache.
        """
        with self._errors():
            for item in plan.items:
                check_item(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add; remembers the number of ranks for the marker."""
        with self._errors():
            self._current_save().world_size = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items; returns when all of them are on the store."""
        with self._logged(), self._watched() as save:
            results, objects = upload_items(
                save, plan, planner, self._target.config, self._warned_keys
            )
            if not save.is_coordinator:
                self.last_save = save.report(objects, None)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have reported: commit."""
        with self._logged(), self._watched() as save:
            self._commit(save, metadata, results)

    def _commit(
        self, save: Save, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
    ) -> None:
        own = save.spec.url
        same_url([found[0].storage_data.object.url if found else own for found in results])
        store, channel = save.open(), save.channel
        metadata.storage_meta = StorageMeta(checkpoint_id=save.spec.url, save_id=save.nonce)
        index, objects = build_index(metadata, results)
        stock = stock_metadata(metadata, index)
        assert save.begin is not None
        commit_id = commit_save(
            save,
            store,
            index,
            _encoded(index),
            user_metadata=self._user_metadata,
            deadline_seconds=self._deadline_seconds,
        )
        report = save.report(objects, commit_id)
        if self._claim is None:
            # Now, because what follows may be interrupted, and the checkpoint is committed.
            self.last_save = report
        metadata.storage_data, metadata.version = stock.storage_data, stock.version
        publish_for_stock_readers(
            store,
            commit_id,
            stock,
            deadline_seconds=self._deadline_seconds,
            fenced=save.fenced,
        )
        wait_for(commit.remove_beacon, store, save.begin.beacon)
        if self._claim is not None:
            wait_for(confirm, self._claim, save.spec)
            self.last_save = report
        channel.emit(
            Saved,
            channel.began_at,
            seconds=report.seconds,
            size_bytes=report.total_bytes,
            objects=report.objects,
            parts=report.parts,
            commit_id=commit_id,
        )


def _encoded(index: ix.Index) -> bytes:
    """The index as it is stored, once it was decoded as every reader does.

    Raises:
        RankFailedError: readers would refuse it, so it must not be committed.
    """
    body = ix.encode(index)
    try:
        ix.decode(body)
    except (CorruptDataError, UnsupportedError) as error:
        raise RankFailedError(
            "the save is not committed, because its index could not be read again:"
            f" {error.message}",
            key=error.key,
            object_key=error.object_key,
        ) from error
    return body


note_children(ObjectStoreWriter)
