"""`ObjectStoreWriter`: DCP's StorageWriter, which leads a save from its set-up to its commit.

All ranks upload. Only the coordinator reads the begin token, before any rank starts, and commits
after all ranks have reported (`checkpoint.commit` has the rules). Everything that belongs to one
save is kept in a `Save`, so a writer can be used for one save after another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_objstore.checkpoint.claim import RunClaim, check_claim
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.marker import LEFT_OUT, check_user_metadata
from dcp_objstore.config import LocalFolder, TransferConfig, local_of
from dcp_objstore.contexts import contextmanager
from dcp_objstore.distributed.failures import on_first
from dcp_objstore.distributed.plugin import Target, plugin_errors, same_url
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.errors import ConfigError, UnsupportedError
from dcp_objstore.observe.dispatch import Channel, EventSettings
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import SaveReport, warn
from dcp_objstore.state.dcp_metadata import describe
from dcp_objstore.state.state_dict import ConvertedState
from dcp_objstore.stores.urls import is_supported_url
from dcp_objstore.torch_private import is_in_default_group
from dcp_objstore.write.base import Base, check_base, open_base, report_not_copied
from dcp_objstore.write.layout import check_item
from dcp_objstore.write.results import PlannedIndex, Results, build_index, planned_index
from dcp_objstore.write.session import Save
from dcp_objstore.write.staging.stager import KeptStager, OnBusy
from dcp_objstore.write.staging.state import StagedState
from dcp_objstore.write.upload_items import upload_items

# Attributes that a pickled writer leaves behind. All others are settings.
_OF_SAVES = frozenset({"_background", "_of_thread", "_warned_keys", "last_save", "save_id"})


class ObjectStoreWriter(KeptStager, StorageWriter):
    """A writer for `dcp.save` and `dcp.async_save` to an object store.

        dcp.save(state, storage_writer=dos.ObjectStoreWriter("s3://bucket/run/step-1520"))

    Every rank makes a writer with the same arguments. Tensors are sent from their own memory, which
    must not change until the save returns. For `dcp.async_save` the writer first makes a copy, in
    memory that is kept for the next save of any writer of this process. Readers see the checkpoint
    only once rank 0 has committed it, and then it is whole.

    Args:
        url: URL of the checkpoint, such as `s3://bucket/run/step-1000` (also `gs://`, `az://`,
            `file://`, `memory://`). May be left out if `dcp.save(..., checkpoint_id=url)` gives
            it. A different `checkpoint_id` in the first save is refused; in a later save it
            re-targets the writer.
        overwrite: replace a committed checkpoint at this URL. The old data objects stay until a
            sweep removes them, so readers of the old checkpoint are not disturbed. Default False:
            refuse.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, `profile`, `anon`, ...). Default: taken from the environment.
        config: sizes, concurrency and time-outs.
        progress: show a progress bar on rank 0 if standard error is a terminal. Default True.
        on_event: callable that receives each event of a save on this rank, one of the types in
            `dcp_objstore.observe.events`. It runs in another thread and receives the events of
            a save in order, one at a time, the last one before the save returns or raises.
            Concurrent saves and loads each call it, so it must be thread-safe. An exception that it
            raises is logged once per save, and the save goes on. The save also goes on if, at its
            end, a call takes more than 10 s. In process mode of `async_save` the callable is
            pickled and called in the child.
        trace: name of a local file to write a trace of each save to, for Perfetto
            (https://ui.perfetto.dev) or chrome://tracing; written even if the save fails. Each save
            replaces the file, unless its name contains `{name}`, which stands for the last element
            of the URL. With several ranks each writes its own file: `{rank}` stands for the number
            of the rank; without it "save.json" becomes "save.rank3.json".
        allow_unfenced: save even to a store without conditional writes, where two writers of one
            checkpoint are not kept apart. Default False: refuse.
        user_metadata: small JSON values to store in the commit marker (metrics, step, config).
        stock_metadata: write `.metadata`, by which stock torch and other libraries find the
            checkpoint. It is written after the commit, and takes some 1 s per million chunks. If
            False, only this library reads the checkpoint until `dcp-objstore repair` or a sweep
            writes `.metadata`; over a checkpoint that is replaced, stock readers still find the old
            one until then. Default True.
        claim: the claim that `claim_run` returned for the run; the checkpoint must lie directly
            below the run. Once another job has claimed the run, no save of this job counts any
            more, and each save raises SupersededError. Without a claim, a save into a run that was
            ever claimed raises SupersededError.
        base: a checkpoint of an earlier state: "latest" (the newest one directly below the prefix
            in which this checkpoint lies) or a URL, on the same store with the same credentials.
            Tensors that have not changed since are not uploaded but copied by the store, into
            objects of this checkpoint: it stays whole without the base. What cannot be copied is
            uploaded, with a warning and a `NotCopied` event; "latest" without a checkpoint
            gives no warning. Default: upload all.
        on_busy: what `dcp.async_save` with this writer does while an earlier save of the writer is
            running: "wait" for it before the state is copied (default), or "raise"
            SaveInProgressError.
        local: a folder of this node, as a path or `dos.Local`: each object is also written there,
            while it is uploaded, and a job that starts again here with the same setting reads the
            copies instead of the store. They take two states of the node's ranks, and can never
            fail a save. They lack what the store copies from a base. Default None: none.

    Attributes:
        last_save: the `SaveReport` of the last finished save, or None. On rank 0 it covers all
            ranks. In process mode of `async_save` it stays in the child process.
        save_id: identifier of this rank's latest save, or None. Rank 0's is the `save_id` of the
            stored `StorageMeta`, as with torch's writers.

    The DCP call raises these errors as `CheckpointException.failures`; `dos.save` raises them
    directly. Unless an error says otherwise, no checkpoint became visible, and an existing one is
    untouched.

    Raises:
        CheckpointExistsError: a checkpoint is committed at this URL, and `overwrite` is False.
        CommitLostError: another writer committed this checkpoint during the save; theirs is whole.
        CommitUnknownError: the store never answered the commit, which may have taken effect.
        SupersededError: a newer job claimed the run; what this job saves does not count.
        SaveInProgressError: an earlier save of this writer is running, and `on_busy` is "raise".
        StoreUnavailableError: the store did not answer, after all retries.
        TransferStalledError: no part was completed for `config.stall_timeout_seconds`.
        CredentialsError: credentials are missing, wrong or expired.
        PermissionDeniedError: the credentials do not allow the request.
        BucketNotFoundError: the bucket does not exist.
        UnsupportedError: the store or the state does not support what was asked.
        ConfigError: an argument has a wrong type or value.

    A writer handles one save at a time: `dcp.save` waits for a save of `dcp.async_save` that runs
    in the background. Saves that several threads make with one writer do not disturb each other. A
    pickled writer carries its settings without secrets, except when it is sent to a child process
    that `multiprocessing` starts.
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
        stock_metadata: bool = True,
        claim: RunClaim | None = None,
        base: str | None = None,
        on_busy: OnBusy = "wait",
        local: LocalFolder = None,
    ) -> None:
        """Make a writer, with the arguments of the class; check what can be checked now."""
        KeptStager.__init__(self, on_busy)
        self._target = Target(url, storage_options, config)
        self._overwrite = overwrite
        self._progress = progress
        self._event_settings = EventSettings(on_event, trace)
        self._allow_unfenced = allow_unfenced
        # Checked here, because it is stored only after all data was uploaded.
        self._user_metadata = check_user_metadata(user_metadata)
        self._stock_metadata = stock_metadata
        self._claim = claim
        self._base = base
        self._local = local_of(local)
        # Without a URL, these are checked when a save begins.
        if self._target.url is not None:
            check_claim(claim, self._target.spec)
            check_base(base, self._target.spec)
        self._forget_saves()

    def _forget_saves(self) -> None:
        """Be a writer that has not saved yet."""
        self._of_thread = threading.local()
        self._warned_keys: set[str] = set()
        self.last_save: SaveReport | None = None
        self.save_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, without secrets, locks or the current save."""
        return {name: value for name, value in vars(self).items() if name not in _OF_SAVES}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore a writer with these settings that has not saved yet."""
        self.__dict__.update(state)
        self._background = None
        self._forget_saves()

    def __repr__(self) -> str:
        return f"ObjectStoreWriter({self.checkpoint_id!r}, overwrite={self._overwrite})"

    @property
    def checkpoint_id(self) -> str | None:
        """The URL of the checkpoint that the next save writes."""
        return self._target.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL that a writer can save to."""
        return isinstance(checkpoint_id, str) and is_supported_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim at another checkpoint and keep every option; None keeps the URL.

        A save that runs in another thread keeps its URL.

        Raises:
            ConfigError: the writer was made with another URL and has saved nothing yet.
        """
        # First, so that the thread of the save is known even if the URL is refused below.
        self._note_thread()
        if checkpoint_id is not None:
            self._target.aim(checkpoint_id)  # type: ignore[arg-type]  # StoreSpec checks it

    def stage(self, state_dict: Mapping[str, Any], **settings: Any) -> StagedState:
        """Return a copy of the state in host memory. `dcp.async_save` calls it.

        Warns of a save whose collectives would run in the default group, in a thread.

        Raises:
            SaveInProgressError: an earlier save is running, and `on_busy` is "raise". Raised on
                this rank only. If ranks may differ in what is running,
                `dcp_objstore.async_save` makes them agree.
        """
        if is_in_default_group():
            warn(
                "dcp.async_save was called without process_group=, and can hang with training on"
                ' CPUs: pass process_group=torch.distributed.new_group(backend="gloo"), made once,'
                " or call dcp_objstore.async_save"
            )
        return super().stage(state_dict, **settings)

    def storage_meta(self) -> StorageMeta:
        """Return the StorageMeta to store. The first call that a save makes in its thread."""
        self._wait_for_earlier()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # The parameter must be called `kwargs`: DCP looks for that name before it passes them.
    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Begin a save; the coordinator reads the begin token and checks that it could commit."""
        rank = kwargs.get("rank")
        url = self.checkpoint_id
        channel = self._event_settings.channel("save", str(url), *rank_and_world_size())
        with self._logged(), channel.watching(), plugin_errors(rank, url):
            channel.show(bar=self._progress and is_coordinator, summary=is_coordinator)
            self._check_ranks()
            if not kwargs.get("use_collectives", True):
                raise UnsupportedError(
                    "use_collectives=False makes every rank write a checkpoint of its own; a commit"
                    " needs all ranks together, so leave it at True"
                )
            check_claim(self._claim, self._target.spec)
            check_base(self._base, self._target.spec)
            save = self._begin_save(rank or 0, is_coordinator, channel)
            if is_coordinator:
                save.start(
                    overwrite=self._overwrite,
                    claim=self._claim,
                    allow_unfenced=self._allow_unfenced,
                    clock=self._clock,
                )
            else:
                save.open()  # so that a store that cannot be opened fails before any upload

    @property
    def _clock(self) -> Clock:
        """The clock of a commit, whose deadline fits the stall time-out."""
        return Clock.of_job(self._target.config.stall_timeout_seconds)

    def _note_left_out(self, state: ConvertedState) -> ConvertedState:
        """Note what the next save leaves out of its modules, for its marker; return the state.

        Raises:
            ConfigError: the marker has no room for it beside the user's metadata.
        """
        left_out = {
            ".".join(place): count for place, count in state.left_out.items() if count["tensors"]
        }
        try:
            if left_out:
                with_note = {LEFT_OUT: left_out, **self._user_metadata}
                self._user_metadata = check_user_metadata(with_note)
        except ConfigError as error:
            error.message += (
                f". What the {len(left_out)} dos.trainable(...) of the state leave out is noted"
                " there: pass less metadata, or put the modules into one (torch.nn.ModuleDict)"
            )
            raise
        return state

    def _begin_save(self, rank: int, is_coordinator: bool, channel: Channel) -> Save:
        """Make the `Save` of this thread's next save; pass on the event of its staging."""
        self._of_thread.save = save = Save(self._target.used_now(), rank, is_coordinator, channel)
        self.save_id = save.nonce
        staged_event, self._staged_event = self._staged_event, None
        if staged_event is not None:
            channel.pass_on(staged_event)
        return save

    @property
    def _save(self) -> Save | None:
        """This thread's latest save: DCP makes all calls of one save from one thread."""
        return getattr(self._of_thread, "save", None)

    def _typed_errors(self) -> AbstractContextManager[None]:
        """Return a context that turns errors into ours, with the rank and URL of the save."""
        save = self._save
        if save is None:
            return plugin_errors(None, self.checkpoint_id)
        return plugin_errors(save.rank, save.spec.url)

    def _current_save(self) -> Save:
        """Return this thread's save; raise UnsupportedError if it has begun none."""
        save = self._save
        if save is None:
            raise UnsupportedError(
                "no save was begun with this writer in this thread; call set_up_storage_writer and"
                " all methods after it in the same thread, as DCP does"
            )
        return save

    @contextmanager
    def _watched(self) -> Iterator[Save]:
        """Deliver events of this thread's save while the block runs, and turn errors into ours."""
        with self._typed_errors():
            save = self._current_save()
        with save.channel.watching(), self._typed_errors():
            yield save

    def _report_failure(self, error: BaseException) -> None:
        """Report that this thread's save has failed outside of the methods of this class."""
        save = self._save
        if save is not None:
            save.abandon(error)
            return
        # The save had not begun, so there is only the failure to report.
        channel = self._event_settings.channel(
            "save", str(self.checkpoint_id), *rank_and_world_size()
        )
        channel.fail(error)
        channel.flush()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what cannot be saved, before anything is sent.

        The plan is not changed: names are chosen per save and not passed through the plan, which
        DCP may cache.
        """
        with self._typed_errors():
            for item in plan.items:
                check_item(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged; note the number of ranks for the marker."""
        with self._typed_errors():
            self._current_save().world_size = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items and return when all of them are on the store."""
        with self._logged(), self._watched() as save:
            base = self._opened_base(save)
            results, objects = upload_items(
                save,
                plan,
                planner,
                config=self._target.config,
                warned_keys=self._warned_keys,
                base=base,
                local=self._local,
            )
            # The coordinator's report is on all ranks: `finish` makes it.
            if not save.is_coordinator:
                self.last_save = save.report(objects, None)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _share_base(self, group: dist.ProcessGroup | None) -> None:
        """Read the base on the group's first rank, for the next save of all. A collective.

        Otherwise each rank reads it by itself.
        """
        base = self._base
        if base is not None:
            spec = self._target.spec
            self._of_thread.base = on_first(lambda: open_base(base, spec), spec.url, group)

    def _opened_base(self, save: Save) -> Base | None:
        """Return the base of this save, or None if there is none or it cannot be copied from."""
        if self._base is None:
            return None
        shared: Base | None = vars(self._of_thread).pop("base", None)  # from `_share_base`
        base = shared or open_base(self._base, save.spec)
        if base.why_not and save.is_coordinator:
            report_not_copied(save, base.url, base.why_not, 0)
        return None if base.index is None else base

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the save. DCP calls it on the coordinator after all ranks have reported."""
        with self._logged(), self._watched() as save:
            url = save.spec.url
            reported = [Results.of(of_rank) for of_rank in results]
            # Each rank has uploaded where its own writer points.
            same_url([rank.objects[0].url if rank.objects else url for rank in reported])
            planned = metadata.planner_data
            if not isinstance(planned, PlannedIndex):  # a planner that is not ours
                planned = planned_index(metadata)
            meta = StorageMeta(checkpoint_id=url, save_id=save.nonce)
            index = save.commit_index(
                *build_index(planned, reported, meta),
                user_metadata=self._user_metadata,
                stock_metadata=self._stock_metadata,
                claim=self._claim,
                clock=self._clock,
                on_committed=partial(setattr, self, "last_save"),
            )
            # DCP hands `metadata` to all ranks, pickled, which takes seconds for many chunks as
            # objects. `describe` makes these only when somebody looks at them.
            vars(metadata).update(vars(describe(index)))
