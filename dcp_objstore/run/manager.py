"""`CheckpointManager`: a run of checkpoints that manages itself.

It decides when to save, what to keep, where to resume and what to do when the machine is taken
away. The saves and loads themselves are those of `dcp`. Rank 0 alone lists and deletes; it sends
results and errors to all ranks.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.config import LocalFolder, TransferConfig, check_number, local_of
from dcp_objstore.distributed.failures import capture, meeting, on_first, raise_on_all
from dcp_objstore.distributed.groups import count_ranks, rank_in, sync_group, world_group
from dcp_objstore.distributed.ranks import rank_and_world_size
from dcp_objstore.distributed.step_consensus import StepConsensus, shared_store
from dcp_objstore.errors import ConfigError
from dcp_objstore.observe.dispatch import EventSettings
from dcp_objstore.observe.events import OnEvent
from dcp_objstore.observe.report import LoadReport, SaveReport, logger
from dcp_objstore.read import api as load_api
from dcp_objstore.run import claim_run as run_claim, upkeep
from dcp_objstore.run.housekeeping import Retainer
from dcp_objstore.run.listing import ListedCheckpoint, list_steps
from dcp_objstore.run.preemption import BY_SIGTERM, Preemption, PreemptionWatch
from dcp_objstore.run.resume import ResumeReport, load_newest
from dcp_objstore.run.retention import RetentionPolicy, as_policy
from dcp_objstore.run.saves import Busy, RunSaves, check_busy
from dcp_objstore.run.steps import as_step, check_step, newest_step, step_url
from dcp_objstore.stores import StoreSpec
from dcp_objstore.write import async_save as async_api
from dcp_objstore.write.base import check_base

T = TypeVar("T")
_PREEMPTED = "preempted"
# After this many steps of a job that must end, and that nobody asks `preempted`, a line says so.
_STEPS_UNASKED = 10


@dataclass
class _Trained:
    """The progress of a manager, for the message if the program does not close it.

    It refers neither to the manager nor to the state, so that both can be collected.

    Attributes:
        last_step: the step that the manager was last called with.
        is_saved: whether a save of that step has begun.
    """

    url: str
    last_step: int | None = None
    is_saved: bool = False
    pid: int = field(default_factory=os.getpid)

    def print_unclosed(self) -> None:
        """Print what is lost, if the manager was used to train.

        `weakref.finalize` calls this when the manager is collected, or when the program ends.
        """
        # A forked child has a copy of the manager, which is not its own to close.
        if self.last_step is None or os.getpid() != self.pid:
            return
        lost = (
            f"the last save that it began was that of step {self.last_step}"
            if self.is_saved
            else f"step {self.last_step}, its last one, was NOT saved"
        )
        print(
            f"dcp_objstore: CheckpointManager({self.url!r}) was not closed; {lost}. Use it in a"
            " `with` block, or call close() at the end.",
            file=sys.stderr,
        )


class _Unsaved(NamedTuple):
    """The arguments of a call of `step` that has not saved."""

    step: int
    state: Mapping[str, Any]
    described: dict[str, Any]


class CheckpointManager:
    """The checkpoints `step-N` of a run, below one URL.

        keep = [dos.KeepLatest(3), dos.KeepEvery(5000)]
        with dos.CheckpointManager(url, keep=keep, save_every=500) as run:
            start = run.load(state) or 0
            for step in range(start + 1, steps + 1):
                train(state)
                run.step(step, state)
                if run.preempted():
                    break
            else:
                run.finish()  # tells jobs that follow the run that no more steps come

    Every rank makes one with the same arguments, and calls its methods in the same order with the
    same steps. Collectives, which all ranks must call: `load`, `save`, `async_save`, `latest`,
    `steps`, `pin`, `unpin`, `close`, `finish`, entering the block and leaving it without an error.
    All ranks must also call `step`, at each step boundary; between saves it does not communicate.
    `preempted` is local.

    Leaving the block saves the last step, if `step` did not, waits for the save that is under way,
    and raises its error. So do not change the state after that step, or pass `save_last=False`. If
    the body raises an error, such as Ctrl-C, leaving the block only waits for what is under way, on
    this rank alone. The body's error is raised; if the save fails, too, the error gets a note. A
    second Ctrl-C ends the wait, but the program still does not end before the save has. A signal of
    `preemption` that came too late for a `step` takes effect when the block has been left: SIGTERM
    ends the program then. If a manager was used to train and is not closed before it is collected
    or the program ends, it prints a message on standard error.

    Args:
        url: URL of the run.
        keep: which steps to keep: a policy, or several, any of which may keep a step. Other steps
            are deleted in the background, with their objects, only after a newer step is committed.
            The newest step, pinned steps and the step that this job resumed from are never deleted.
            Default: keep all.
        save_every: `step` saves if the number of the step is a multiple of this, or is the first
            after a multiple. Or a `timedelta`: the time between the beginnings of two saves. A save
            that takes longer is not waited for: the next one begins at the first steps after its
            end.
        save_last: on leaving the block without an error, and in `close`, save the last step that
            `step` was called with, if it was not saved. Default True.
        user_metadata: small JSON values for the marker of each checkpoint, which `ls` shows.
        on_busy: what `step` and `async_save` do while a save of this manager is under way: "wait"
            for it, "skip" the new one, or "raise" SaveInProgressError. All ranks do the same.
            Default "wait".
        max_failed_saves: how many background saves in a row may fail without ending the training,
            because the store was away or too slow (a RetryableError). Each is logged as an error,
            with the newest step, and the next save is tried when it is due. The one
            after them raises, as do at once the save of the last step, a save that was refused or
            has lost a race, and `save`. Default 0: every failure raises.
        preemption: how the job learns that it must end, and whether it saves then. Default: by
            SIGTERM, and it saves.
        claim_run: with the first `load` or save, make this job the only one that adds to the run,
            by `dcp_objstore.claim_run`. Pass False to look at a run that another job is writing, or
            if the store has no conditional writes (`allow_unfenced`). With False, saves to a run
            that ever had a claim raise SupersededError. Default True.
        grace_seconds: keep the objects of a deleted step this long, for jobs that are reading it.
            They go after the first commit when it is over; what is left when this job ends goes by
            a sweep, a day later. By default they are removed with the step: a reader gets
            CheckpointGoneError, unless it has pinned the step, as `follow(pin=)` does. Default 0.
        sweep: after the first commit of this job, and then once an hour, remove what no commit
            names and what is older than a day, by `dcp_objstore.sweep`: objects of saves that died
            and of steps that were replaced, and orphaned uploads. Leaving the block does not wait
            for it: a later one removes what it has not reached. Default True.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: from the environment.
        config: sizes, concurrency and time-outs.
        stock_metadata: after each commit, write `.metadata`, by which stock torch finds the
            checkpoint. `ObjectStoreWriter` says what False means. Default True.
        allow_unfenced: save even to a store without conditional writes, which cannot keep two
            writers of one checkpoint apart. Default False: refuse.
        base: "latest", or the URL of a checkpoint: what has not changed since the newest step (or
            since that checkpoint) is copied by the store instead of uploaded. `ObjectStoreWriter`
            says more. Default: upload all.
        process_group: the ranks that save and load together. Default: all.
        verify: let no unverified byte reach a tensor. With False, only the bytes that are needed
            are read, and they are not checked. Default True.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses. This may run
            code that the checkpoint's author chose. Default False.
        on_event: a function that is called with each event of each save and load, in a separate
            thread.
        trace: name of a local file for traces. With `{name}` in it, the traces of all steps are
            kept; otherwise that of the last save or load.
        local: a folder on each node, as a path or `dos.Local`, for copies of the newest step. A job
            that starts again on its nodes loads these, and from the store only what no node has;
            `last_resume` says how much that was. Default None: no copies.

    Attributes:
        url: the run, in the normal form of its URL.
        claim: the claim of this job, for checkpoints with other names that `dcp_objstore.save`
            saves below the run. None before the first `load` or save, or without `claim_run`.
        last_resume: the `ResumeReport` of the last `load`, or None.

    Raises:
        InvalidUrlError, ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: RetentionPolicy | Iterable[RetentionPolicy] | None = None,
        save_every: int | timedelta | None = None,
        save_last: bool = True,
        user_metadata: Mapping[str, object] | None = None,
        on_busy: Busy = "wait",
        max_failed_saves: int = 0,
        preemption: Preemption = BY_SIGTERM,
        claim_run: bool = True,
        grace_seconds: float = 0.0,
        sweep: bool = True,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        stock_metadata: bool = True,
        allow_unfenced: bool = False,
        base: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        verify: bool = True,
        trust_pickle: bool = False,
        on_event: OnEvent | None = None,
        trace: str | os.PathLike[str] | None = None,
        local: LocalFolder = None,
    ) -> None:
        """Check and keep the arguments. No request is sent before the first method is called."""
        self._run = StoreSpec(url, storage_options, config)
        self._url = self._run.url
        check_base(base, self._run)
        self._every, self._every_seconds = _intervals(save_every)
        check_busy(on_busy)
        self._on_busy = on_busy
        check_number("max_failed_saves", max_failed_saves, 0)
        self._max_failed_saves = max_failed_saves
        self._user_metadata = check_user_metadata(user_metadata)
        if not isinstance(preemption, Preemption):
            raise ConfigError(f"preemption must be a dcp_objstore.Preemption, got {preemption!r}")
        self._saves_preempted = preemption.save
        self._preemption = PreemptionWatch(preemption)
        # If the manager is collected and was not closed, nobody asks the watch any more.
        weakref.finalize(self, self._preemption.restore)
        self._claims_run = claim_run
        self._group_given = process_group
        self._access: dict[str, Any] = {"storage_options": storage_options, "config": config}
        EventSettings(on_event, trace)  # refuses wrong values now, rather than at the first save
        shared: dict[str, Any] = {**self._access, "on_event": on_event, "trace": trace}
        shared["local"] = local_of(local)
        self._saving = {
            **shared,
            "stock_metadata": stock_metadata,
            "allow_unfenced": allow_unfenced,
            "base": base,
        }
        self._loading = {**shared, "verify": verify, "trust_pickle": trust_pickle}
        self._retainer = Retainer(
            self._run, as_policy(keep), grace_seconds=grace_seconds, sweeps=sweep
        )
        self._saves: RunSaves | None = None
        self._consensus: StepConsensus | None = None
        self._group: dist.ProcessGroup | None  # set by `_set_up`
        self._closed = False
        self._last_step: int | None = None  # the step that was loaded, or passed to `step` since
        self._saves_last = save_last
        self._unsaved: _Unsaved | None = None  # the last step, if it was not saved
        self._preempted = False  # whether the ranks have agreed that the job must end
        self._steps_unasked = 0  # calls of `step` since then, without one of `preempted`
        self.last_resume: ResumeReport | None = None
        self._trained = _Trained(self._url)
        self._unclosed = weakref.finalize(self, self._trained.print_unclosed)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._url!r})"

    @property
    def url(self) -> str:
        """The run, in the normal form of its URL."""
        return self._url

    @property
    def claim(self) -> RunClaim | None:
        """The claim of this job; None before the first `load` or save, or without `claim_run`."""
        return self._retainer.claim

    @property
    def failed_saves(self) -> int:
        """The number of saves that have failed since the last commit. The same on all ranks.

        A save under way, or one that no later call has waited for, is not in it.
        """
        return 0 if self._saves is None else self._saves.failed

    # --- the block

    def __enter__(self) -> CheckpointManager:
        """Start to catch signals. A collective."""
        self._set_up()
        self._preemption.install()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Close the run; after an error in the body, wait for the save under way on this rank."""
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def close(self) -> None:
        """Save the last step, if `save_last` is set; wait for what is under way and for deletions.

        A collective. The manager cannot be used after that. A second call has nothing left to do.

        Raises:
            DcpObjstoreError: the save of the last step, or the save under way, has failed. If only
                the save under way fails, the last step is saved all the same.
        """
        self._close(lambda: None)

    def _close(self, note: Callable[[], object]) -> None:
        """Do what `close` does; call `note` when all that was to be saved is committed."""
        try:
            if self._saves is not None:
                self._save_last(self._saves)
                self._saves.end()
            note()
        finally:
            self._end()  # last, because a signal that was put off may end the program here

    def finish(self) -> None:
        """Close the manager, and note in the run that it is finished: `follow` ends. A collective.

        Call it when the last step of the training is done, not when this job must end and another
        one goes on. A job that claims the run later takes the note back.

        Raises:
            ConfigError: the manager does not claim the run, or was closed.
            SupersededError: another job has claimed the run.
            DcpObjstoreError: `close` would raise it, or the store refused or failed. Then the run
                is not finished.
        """
        if not self._claims_run:
            raise ConfigError("with claim_run=False, no run can be finished", url=self._url)
        self._own_run()

        def note() -> None:
            # `_own_run` has set it; the save of the last step may have changed it (`go_back`).
            assert self.claim is not None
            run_claim.finish(self._run, self.claim)

        self._close(lambda: on_first(note, self._url, self._group))

    def _save_last(self, saves: RunSaves) -> None:
        """Save the last step, unless it was saved or the settings forbid it."""
        last, self._unsaved = self._unsaved, None
        if last is None or not self._saves_last or (self._preempted and not self._saves_preempted):
            return
        failed = saves.finish_pending_quietly()  # the same on all ranks
        # The step may be saved all the same: Ctrl-C may have come just after its save had begun.
        if not saves.knows(last.step):
            self.save(last.step, last.state, **last.described)
        # Raise the error of the save before, unless its step is saved now or that is tolerated.
        if failed is None or saves.knows(failed.step) or saves.tolerates(failed.error):
            return
        raise failed.error

    def _end(self) -> None:
        """Release everything. Local."""
        self._closed = True
        self._unsaved = None
        self._unclosed.detach()
        self._retainer.end()
        if self._consensus is not None:
            self._consensus.close()
        self._preemption.end()

    def _abandon(self, error: BaseException) -> None:
        """Wait for the save under way on this rank alone: other ranks may be anywhere."""
        assert self._consensus is not None  # `__enter__` has made both
        assert self._saves is not None
        try:
            self._consensus.close()  # first: other ranks may be waiting to agree with this one
            self._saves.abandon(error)
        finally:
            self._end()  # last, so that no signal cuts the save short

    def _set_up(self) -> RunSaves:
        """On the first call, make the ranks' group, the consensus and the saves. A collective."""
        if self._closed:
            raise ConfigError(
                "this CheckpointManager was closed", advice="make another one", url=self._url
            )
        if self._saves is None:
            with meeting(self._url, self._group_given or world_group()):
                self._group = sync_group(self._group_given, self._run.config)
            # By a weak reference, so that the thread of the consensus does not keep a manager alive
            # that is never closed.
            ask_ref = weakref.WeakMethod(self._ask)
            self._consensus = StepConsensus(
                lambda: ask() if (ask := ask_ref()) is not None else frozenset(),
                store=shared_store(self._url, self._group),
                rank=rank_in(self._group),
                world_size=count_ranks(self._group),
                peer_timeout_seconds=self._run.config.peer_timeout_seconds,
            )
            self._saves = RunSaves(
                self._run,
                self._group,
                self._retainer,
                user_metadata=self._user_metadata,
                max_failed=self._max_failed_saves,
                saving={**self._saving, "process_group": self._group_given},
            )
            self._consensus.start()
        elif self._group is None and rank_and_world_size()[1] > 1:
            raise ConfigError(
                "the process group was made after this CheckpointManager began, so its ranks cannot"
                " agree when to save: call torch.distributed.init_process_group() before the block",
                url=self._url,
            )
        return self._saves

    # --- saving

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, object] | None = None,
        user_metadata: Mapping[str, object] | None = None,
    ) -> bool:
        """Report the end of a step, and save if it is time to.

        Every rank calls it at every step boundary. It saves in the background; if the ranks have
        agreed that the job must end, it waits for the commit. A step that this job has saved, or
        resumed from, is not saved again. The last step is saved on leaving the block if it was not
        saved here, unless `save_last` is False.

        Args:
            step: number of the step, from 0; higher than in the call before.
            state: the state, as for `dcp_objstore.save`. It is read only if it is saved, and kept
                until the next call.
            metrics: numbers for the marker, by which `KeepBest` ranks steps; those of rank 0 count.
            user_metadata: more JSON values for the marker.

        Returns:
            Whether a save was begun or made; the same on every rank.

        Raises:
            DcpObjstoreError: a save was refused or has failed. The error of a background save is
                raised by the next save, unless `max_failed_saves` allows it.
        """
        step = as_step(step)
        saves = self._set_up()
        assert self._consensus is not None
        due = self._is_due(step)
        described: dict[str, Any] = {"metrics": metrics, "user_metadata": user_metadata}
        known = saves.knows(step)
        self._unsaved = None if known else _Unsaved(step, state, described)
        self._trained.last_step, self._trained.is_saved = step, known
        # What the ranks have agreed to do at this step boundary: mostly nothing.
        reasons = self._consensus.reached()
        timed = saves.next_timed in reasons  # the timer of some rank has asked for the next save
        self._steps_unasked += self._preempted
        if self._steps_unasked == _STEPS_UNASKED:
            logger.warning(
                "%s: this job must end, but its loop has not asked run.preempted() for %d steps;"
                " leave the loop once it returns True",
                self._url,
                _STEPS_UNASKED,
            )
        if _PREEMPTED in reasons:
            self._preempted = True
            self._preemption.answer()
            logger.warning("%s: this job must end; step %d is its last one", self._url, step)
            if self._saves_preempted:
                saves.finish_pending_quietly()
                known = saves.knows(step)  # asked again: the save may just have failed
                if not known:
                    self.save(step, state, **described)
                self._preemption.raise_held()
                return not known
            self._preemption.raise_held()
        if known or not (due or timed):
            return False
        # A rank's timer only asks after the end of the rank's last save. So that save is about to
        # end on the other ranks, too, and the wait for it is short.
        on_busy = self._on_busy if due else "wait"
        return self.async_save(step, state, on_busy=on_busy, **described) is not None

    def preempted(self) -> bool:
        """Return whether the job must end now. Local; the same on all ranks between two steps.

        It is True from the call of `step` at which the ranks agreed on it; that call has saved,
        unless `preemption` says that none is wanted. A signal alone does not make it True: the
        ranks agree within about a second, at one of their next steps.
        """
        self._steps_unasked = 0
        return self._preempted

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, object] | None = None,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Save a step and wait for its commit. A collective.

        Waits for a save under way first.

        Args:
            step: number of the step, from 0.
            state: the state, as for `dcp_objstore.save`.
            metrics: numbers for the marker, by which `KeepBest` ranks steps; those of rank 0 count.
            user_metadata: more JSON values for the marker.

        Raises:
            CheckpointExistsError: this job has saved that step, or it exists already; or the run
                has later steps, and this job has loaded none. (After `load`, this job trains the
                steps after the loaded one again, so saves replace them.)
            DcpObjstoreError: this save, or the save before, has failed.
        """
        step = as_step(step)
        report = self._own_run().save(step, state, metrics=metrics, user_metadata=user_metadata)
        self._note_saved(step)
        return report

    def async_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, object] | None = None,
        user_metadata: Mapping[str, object] | None = None,
        on_busy: Busy | None = None,
    ) -> async_api.AsyncSaveHandle | None:
        """Copy the state, and save the copy in the background. A collective.

        Args:
            step: number of the step, from 0.
            state: the state, as for `dcp_objstore.save`.
            metrics: numbers for the marker, by which `KeepBest` ranks steps; those of rank 0 count.
            user_metadata: more JSON values for the marker.
            on_busy: what to do while a save is under way: "wait", "skip" or "raise". Default: the
                manager's `on_busy`.

        Returns:
            A handle of the save, or None if it was skipped because another one was under way, or
            could not begin and `max_failed_saves` allows that.

        Raises:
            SaveInProgressError: a save is under way on some rank, and `on_busy` is "raise".
            CheckpointExistsError: `save` would raise it, for the same reasons.
            DcpObjstoreError: the save before has failed, and `max_failed_saves` does not allow it.
                The error of this save is raised by the next call that saves, or by `close`.
        """
        step = as_step(step)
        handle = self._own_run().async_save(
            step,
            state,
            on_busy or self._on_busy,
            metrics=metrics,
            user_metadata=user_metadata,
        )
        if handle is not None:
            self._note_saved(step)
        return handle

    def _note_saved(self, step: int) -> None:
        """Record that a save has begun. That of an earlier step does not save the last one."""
        if self._unsaved is None or step >= self._unsaved.step:
            self._unsaved = None
            self._trained.last_step, self._trained.is_saved = step, True

    def _own_run(self) -> RunSaves:
        """Claim the run, on the first call, before anything is loaded or saved. A collective."""
        saves = self._set_up()
        if self._claims_run and self._retainer.claim is None:
            # If the group of `_set_up` was destroyed since, this raises. Without that group, each
            # rank would claim the run for itself.
            self._retainer.claim = run_claim.claim_run(
                self._url, process_group=self._group, **self._access
            )
        return saves

    def _is_due(self, step: int) -> bool:
        """Return whether the steps since the call before include a multiple of `save_every`."""
        check_step(step)
        before, self._last_step = self._last_step, step
        if self._every is None:
            return False
        if before is None:  # on the first call, only this step can be a multiple
            before = step - 1
        # Step 0 is none: `max` keeps it from being due.
        return step // self._every > max(before, 0) // self._every

    def _ask(self) -> frozenset[str]:
        """Return what this rank wants all ranks to do. Called in the thread of the consensus."""
        wanted = set()
        if not self._preempted and self._preemption.announced():
            wanted.add(_PREEMPTED)
        saves = self._saves
        assert saves is not None
        if self._every_seconds is not None and saves.is_time(self._every_seconds):
            wanted.add(saves.next_timed)
        return frozenset(wanted)

    # --- loading

    def load(self, state: MutableMapping[str, Any], step: int | None = None) -> int | None:
        """Load a step into a state, in place. A collective; call it before training.

        Without `step` it loads the newest committed step. If that is damaged (a verification has to
        agree), or is deleted while it is read, it loads the next older one and logs a warning;
        `last_resume` names the steps that were skipped.

        This job may save the steps after the loaded one again. With the commit of its first save
        they stop counting, in one change that a crash does not undo: no job resumes from them, and
        no policy keeps them. Until then they count, so you can load an old step to look at it
        without any effect, and a save that is refused changes nothing. A pinned step stays on the
        store, and its number cannot be saved before the pin is removed. Without `claim_run`, that
        first save is refused if later steps count.

        Args:
            state: the state to fill, as for `dcp_objstore.load`.
            step: number of the step to load. Default: the newest that can be loaded.

        Returns:
            The number of the step, or None if the run has no committed step; then the state is
            unchanged.

        Raises:
            CorruptDataError: there are steps, but all are damaged; this is the error of the newest.
            RetryableError: the load met damage that a verification does not find.
            CheckpointGoneError: the last step was deleted while it was read, so that the state may
                be partly filled.
            CheckpointNotFoundError: `step` was passed and is not committed.
            DcpObjstoreError: the load failed for another reason; raised at once.
        """
        step = as_step(step)
        saves = self._set_up()
        saves.end()  # waits for deletions, too: none may take the step that is loaded
        # A step that is wrong, or not the same, on some rank is refused on all.
        _, refused = capture(lambda: None if step is None else check_step(step))
        raise_on_all(refused, self._url, self._group, same={"step": step})
        self._own_run()
        # The load replaces the state of the last step, which can then not be saved any more.
        self._unsaved = self._trained.last_step = None
        load = partial(self._load_one, state)
        if step is not None:
            report = ResumeReport(step, load(step))
        else:
            report = load_newest(self._run, self._group, load)
        # Newer steps that were skipped still count. With a claim, the next save goes back behind
        # them. Without one, a damaged step is only replaced when the job saves it again.
        passed_over = bool(report.skipped) and self._claims_run
        saves.resume(report.step, went_back=step is not None or passed_over)
        self._last_step = report.step
        self.last_resume = report
        return report.step

    def _load_one(self, state: MutableMapping[str, Any], step: int) -> LoadReport:
        """Load one step of the run into the state. A collective."""
        return load_api.load(
            state,
            step_url(self._url, step),
            progress=False,
            process_group=self._group_given,
            **self._loading,
        )

    # --- the run

    def latest(self) -> int | None:
        """Return the newest committed step, or None. A collective; rank 0 makes the requests.

        Sends two requests, one for each 1,000 objects of the run, and one for the step. (Also one
        for each newer step that was deleted, until a sweep has removed its objects.) Once the
        manager is closed, each rank that calls it asks by itself.
        """
        return self._asked(lambda: newest_step(self._run))

    def steps(self) -> tuple[ListedCheckpoint, ...]:
        """List the committed steps `step-N` that count, the newest last. A collective.

            saved = [listed.step for listed in run.steps()]

        Rank 0 makes the requests: two, one for each 1,000 objects of the run, and one for each
        step. (Also one for each step that was deleted, until a sweep has removed its objects.) Once
        the manager is closed, each rank that calls it asks by itself.
        """
        return self._asked(
            lambda: tuple(step for step in list_steps(self._run) if step.step is not None)
        )

    def _asked(self, ask: Callable[[], T]) -> T:
        """Return what rank 0 learns, or this rank alone if the manager is closed."""
        if self._closed:
            return ask()
        self._set_up()
        return on_first(ask, self._url, self._group)

    def pin(self, step: int, name: str = "pinned") -> tuple[str, ...]:
        """Protect a step from deletion and from being overwritten. A collective.

        Args:
            step: number of the step.
            name: name of the pin. Default "pinned".

        Returns:
            All pins that the step now has.

        Raises:
            CheckpointNotFoundError: that step is not committed.
            DcpObjstoreError: the pin was refused, or the store failed.
        """
        return self._change_pins(upkeep.pin, step, name)

    def unpin(self, step: int, name: str = "pinned") -> tuple[str, ...]:
        """Remove a pin of a step, if it is there. A collective.

        Args:
            step: number of the step.
            name: name of the pin. Default "pinned".

        Returns:
            All pins that the step still has.

        Raises:
            CheckpointNotFoundError: that step is not committed.
            DcpObjstoreError: the change was refused, or the store failed.
        """
        return self._change_pins(upkeep.unpin, step, name)

    def _change_pins(
        self, change: Callable[..., tuple[str, ...]], step: int, name: str
    ) -> tuple[str, ...]:
        """Call `upkeep.pin` or `upkeep.unpin` on rank 0; return its result on all ranks."""
        self._set_up()
        url = step_url(self._url, step)
        return on_first(lambda: change(url, name, **self._access), self._url, self._group)


def _intervals(every: int | timedelta | None) -> tuple[int | None, float | None]:
    """Return the interval between saves in steps or in seconds; None for what is not given.

    Raises:
        ConfigError: the interval is not positive.
    """
    if isinstance(every, timedelta):
        if every <= timedelta():
            raise ConfigError(f"the time between saves must be positive, got {every!r}")
        return None, every.total_seconds()
    if every is not None:
        check_number("save_every", every, 1, unless="a timedelta or ")
    return every, None
