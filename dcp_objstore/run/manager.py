"""`CheckpointManager`: a run of checkpoints that looks after itself.

When to save, what to keep, where to resume and what to do when the machine is taken away; the saves
and loads themselves are those of `dcp`. Rank 0 alone lists and deletes; what it finds, and what
went wrong, is told to all ranks in a process group of our own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dcp_objstore.checkpoint.marker import check_user_metadata
from dcp_objstore.config import TransferConfig
from dcp_objstore.distributed.step_consensus import StepConsensus
from dcp_objstore.distributed.team import Team
from dcp_objstore.errors import ConfigError, DcpObjstoreError
from dcp_objstore.observe.hooks import Hooks
from dcp_objstore.observe.report import LoadReport, SaveReport, logger
from dcp_objstore.read import api as load_api
from dcp_objstore.run import claim_run as taking_over
from dcp_objstore.run import upkeep
from dcp_objstore.run.housekeeping import Retainer, step_numbers, step_url
from dcp_objstore.run.preemption import Notice
from dcp_objstore.run.resume import ResumeReport, SkippedStep, load_newest
from dcp_objstore.run.retention import RetentionPolicy, as_policy
from dcp_objstore.run.saves import Busy, RunSaves, check_busy
from dcp_objstore.run.values import check_step, intervals
from dcp_objstore.stores.target import Target
from dcp_objstore.write import async_save as async_api

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist

    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.observe.events import OnEvent

_PREEMPTED = "preempted"
_TIMER = "timer"


@dataclass(frozen=True)
class _Unsaved:
    """What the last `step` was given, which was not saved then."""

    step: int
    state: Mapping[str, Any]
    metrics: Mapping[str, object] | None
    user_metadata: Mapping[str, object] | None


class _Trained:
    """How far a manager has come, for the message if nobody closes it.

    Refers neither to the manager nor to the state, so that both can be collected.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pid = os.getpid()
        self._step: int | None = None
        self._saved = False

    def last(self, step: int, *, saved: bool) -> None:
        """The last step that the manager was called with, and whether a save of it was begun."""
        self._step, self._saved = step, saved

    def print_unclosed(self) -> None:
        """Print what is lost, if anything was to be saved. When it is collected, or at exit."""
        if self._step is None or os.getpid() != self._pid:
            return
        lost = (
            f"the last save that it began was of step {self._step}"
            if self._saved
            else f"step {self._step}, its last one, was NOT saved"
        )
        print(
            f"dcp_objstore: CheckpointManager({self._url!r}) was not closed; {lost}. Use it in a"
            " `with` block, or call close() at the end.",
            file=sys.stderr,
        )


class CheckpointManager:
    """The checkpoints `step-N` of a run, below one URL.

        with CheckpointManager(url, keep=[KeepLatest(3), KeepEvery(5000)], save_every=500) as run:
            start = run.load(state) or 0
            for step in range(start + 1, steps + 1):
                train(state)
                run.step(step, state)
                if run.preempted():
                    break

    Every rank makes one with the same arguments, and calls its methods in the same order with the
    same steps. Collectives, which all ranks must call: `load`, `save`, `async_save`, `latest`,
    `steps`, `pin`, `unpin`, `close`, entering the block and leaving it without an error. `step` is
    to be called by all ranks too, at each step boundary; between saves it communicates nothing.
    `preempted` is local.

    Leaving the block saves the last step, if `step` did not, waits for the save that is under way,
    and raises its error. So leave the state as it was at that step until then, or pass
    `save_last=False`. After an error in the body, Ctrl-C for one, only the save under way is waited
    for, on this rank alone; what goes wrong with it then is noted on the body's error, which is
    raised. A second Ctrl-C ends the waiting; the program still does not end before the save has. A
    manager that was used to train, and that nobody closes before it is collected or the program
    ends, says so on standard error.

    Args:
        url: the run.
        keep: which steps are kept: a policy, or several, of which any may keep a step. Others are
            deleted, in the background and only after a newer one is durable; never the newest, a
            pinned one, or the one that this job resumed from. Default: all are kept.
        save_every: `step` saves where the number of the step is a multiple of this (or the first
            one after it); or, as a `timedelta`, when so much time has passed since the last save.
        save_every_seconds: the same as a number. May be given beside a number of steps.
        save_last: on leaving the block without an error, and in `close`, save the last step that
            `step` was called with, if it was not saved then. Default True.
        user_metadata: small JSON values for the marker of each checkpoint, which `ls` shows.
        on_busy: what `step` and `async_save` do while a save is under way: "wait" for it (default),
            "skip" this one, or "raise" SaveInProgressError. All ranks do the same.
        save_on_preemption: `step` saves, and waits for the commit, where the ranks agree that the
            job is to end. Default True.
        preemption_signals: which ask for that. Caught from entering the block until leaving it,
            or `close`, if this is the main thread. A handler of yours that was there before is
            called as well; what it raises (`sys.exit`, say) is raised by `step`, after the state
            was saved, or on leaving the block. Default: SIGTERM.
        preemption_check: called in a thread of its own a few times a second, and returns whether
            the job is to end; for machines that announce it otherwise.
        claim_run: with the first `load` or save, make this job the only one that adds to the run;
            see `dcp_objstore.claim_run`. Default True; pass False to look at a run that another
            job is writing, or where the store has no conditional writes (`allow_unfenced`). With
            False, saves to a run that was ever taken over raise SupersededError.
        delete_now: remove the objects of steps that are not kept at once. Default False: they do
            not count any more, and a sweep removes them a day later, so that readers are not
            disturbed.
        sweep: after the first commit of this job, and once an hour from then on, remove what no
            commit names and what is older than a day: objects of deleted steps, of saves that
            died, and orphaned uploads; see `dcp_objstore.sweep`. Default True.
        storage_options: credentials and endpoint in fsspec's spelling (`key`, `secret`, `token`,
            `endpoint_url`, ...). Default: from the environment.
        config: sizes, concurrency and time-outs.
        allow_unfenced: save even to a store without conditional writes, where two writers of one
            checkpoint are not kept apart. Default False: refuse.
        process_group: the ranks that save and load together. Default: all.
        verify: "strict" (default): no unverified byte reaches a tensor. "off": only what is needed
            is read, and not checked.
        trust_pickle: unpickle values that `torch.load(weights_only=True)` refuses, which may run
            code that the checkpoint's author chose. Default False.
        on_event: called with each event of each save and load, in a thread of its own; see
            `ObjectStoreWriter`.
        trace: name of a local file for traces; see `ObjectStoreWriter`. With `{name}` in it the
            traces of all steps are kept, else that of the last save or load.

    Attributes:
        url: the run, in the normal form of its URL.
        claim: of this job, for checkpoints of other names that are saved below the run with
            `dcp_objstore.save`; None before the first `load` or save, or without `claim_run`.
        last_resume: a `ResumeReport` of the last `load`, or None.

    Raises:
        InvalidUrlError, ConfigError: wrong arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: RetentionPolicy | Iterable[RetentionPolicy] | None = None,
        save_every: int | timedelta | None = None,
        save_every_seconds: float | None = None,
        save_last: bool = True,
        user_metadata: Mapping[str, object] | None = None,
        on_busy: Busy = "wait",
        save_on_preemption: bool = True,
        preemption_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        preemption_check: Callable[[], bool] | None = None,
        claim_run: bool = True,
        delete_now: bool = False,
        sweep: bool = True,
        storage_options: Mapping[str, object] | None = None,
        config: TransferConfig | None = None,
        allow_unfenced: bool = False,
        process_group: dist.ProcessGroup | None = None,
        verify: Literal["strict", "off"] = "strict",
        trust_pickle: bool = False,
        on_event: OnEvent | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._url = Target(url, storage_options, config).spec.url.rstrip("/")
        self._every, self._every_seconds = intervals(save_every, save_every_seconds)
        check_busy(on_busy)
        self._on_busy = on_busy
        self._user_metadata = check_user_metadata(user_metadata)
        self._save_on_preemption = save_on_preemption
        self._notice = Notice(preemption_signals, preemption_check)
        self._takes_over = claim_run
        self._group_given = process_group
        self._config = config
        self._access: dict[str, Any] = {"storage_options": storage_options, "config": config}
        Hooks(on_event, trace)  # refused now, and not at the first save
        told: dict[str, Any] = {**self._access, "on_event": on_event, "trace": trace}
        self._saving = {**told, "allow_unfenced": allow_unfenced}
        self._loading = {**told, "verify": verify, "trust_pickle": trust_pickle}
        self._retainer = Retainer(
            self._url, as_policy(keep), now=delete_now, sweeps=sweep, **self._access
        )
        self._list: Callable[[int | None], tuple[int, ...]] = partial(
            step_numbers, self._url, **self._access
        )
        self._saves: RunSaves | None = None
        self._boundaries: StepConsensus | None = None
        self._team: Team
        self._closed = False
        self._last_step: int | None = None
        self._saves_last = save_last
        self._unsaved: _Unsaved | None = None
        self._preempted = False
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
        """Of this job; None before the first `load` or save, or without `claim_run`."""
        return None if self._saves is None else self._saves.claim

    # --- the block

    def __enter__(self) -> CheckpointManager:
        """Begin to watch for signals. A collective."""
        self._begin()
        self._notice.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `close`; after an error in the body not a collective, and that error is raised."""
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def close(self) -> None:
        """Save the last step (see `save_last`), wait for the save under way and for deletions.

        The run is not used after that. A collective. Calling it again does nothing.

        Raises:
            DcpObjstoreError: as `dcp_objstore.save`, where that save or the one under way has
                failed. After a failure of the one under way the last step is saved all the same.
        """
        if self._closed:
            return
        try:
            if self._saves is not None:
                self._save_last()
                self._saves.end()
        finally:
            self._end()
        self._notice.raise_held()

    def _save_last(self) -> None:
        """Save the last step unless it was saved, or is not to be."""
        last, self._unsaved = self._unsaved, None
        if last is None or not self._saves_last:
            return
        if self._preempted and not self._save_on_preemption:
            return
        assert self._saves is not None
        failed = None
        try:
            self._saves.settle()
        except DcpObjstoreError as error:
            failed = error  # on all ranks; the state at hand is worth more
        if not self._saves.knows(last.step):
            self.save(last.step, last.state, metrics=last.metrics, user_metadata=last.user_metadata)
        if failed is not None:
            raise failed

    def _end(self) -> None:
        """Not open any more. Local."""
        self._closed = True
        self._unsaved = None
        self._unclosed.detach()
        if self._boundaries is not None:
            self._boundaries.close()
        self._notice.restore()

    def _abandon(self, error: BaseException) -> None:
        """Wait for the save under way, without the other ranks, which may be anywhere."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._boundaries is not None:
                self._boundaries.close()  # now: other ranks may be waiting to agree with this one
            if self._saves is not None:
                self._saves.abandon(error)
        finally:
            self._end()  # not before: the save is not to be cut short by a signal

    def _begin(self) -> RunSaves:
        """Once: the group, and what the ranks need to agree on a boundary. A collective."""
        if self._closed:
            raise ConfigError("this CheckpointManager was closed; make another one", url=self._url)
        if self._saves is None:
            self._team = Team(self._url, self._group_given, self._config)
            # The thread of the boundaries must not keep alive a manager that nobody closes.
            ask = weakref.WeakMethod(self._ask)
            self._boundaries = StepConsensus(
                lambda: asked() if (asked := ask()) is not None else frozenset(),
                store=self._team.shared_store(),
                rank=self._team.rank,
                world_size=self._team.world_size,
                peer_timeout_seconds=(self._config or TransferConfig()).peer_timeout_seconds,
            )
            self._boundaries.start()
            self._saves = RunSaves(
                self._url,
                self._team,
                self._retainer,
                user_metadata=self._user_metadata,
                saving={**self._saving, "process_group": self._group_given},
                numbers=self._list,
            )
        return self._saves

    # --- saving

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, object] | None = None,
        *,
        user_metadata: Mapping[str, object] | None = None,
    ) -> bool:
        """A step has ended: save, if it is time to. Called by every rank at every step boundary.

        Saves in the background; where the ranks have agreed that the job is to end, it waits for
        the commit. A step that this job has saved, or resumed from, is not saved again. One that
        is not saved here is saved on leaving the block, if it was the last (see `save_last`).

        Args:
            step: number of the step, from 0; higher than in the call before.
            state: as for `dcp_objstore.save`; only looked at when it is saved, and kept until the
                next call.
            metrics: numbers for the marker, by which `KeepBest` ranks; those of rank 0 count.
            user_metadata: more JSON values for the marker.

        Returns:
            Whether a save was begun, or made; the same on every rank.

        Raises:
            DcpObjstoreError: what `async_save` and `save` raise; the error of a background save is
                raised by the next one.
        """
        saves = self._begin()
        assert self._boundaries is not None
        due = self._is_due(step)
        self._unsaved = _Unsaved(step, state, metrics, user_metadata)
        self._trained.last(step, saved=saves.knows(step))
        reasons = self._boundaries.reached()
        if _PREEMPTED in reasons:
            self._preempted = True
            logger.warning("%s: this job is to end; step %d is the last one", self._url, step)
            if self._save_on_preemption:
                saves.settle_quietly()
                known = saves.knows(step)
                if not known:
                    self.save(step, state, metrics=metrics, user_metadata=user_metadata)
                self._notice.raise_held()
                return not known
            self._notice.raise_held()
        if saves.knows(step) or not (due or _TIMER in reasons):
            return False
        return (
            self.async_save(step, state, metrics=metrics, user_metadata=user_metadata) is not None
        )

    def preempted(self) -> bool:
        """Whether the job is to end now. Local; the same on all ranks between two steps.

        True from the `step` on at which the ranks agreed on it, which has saved (with
        `save_on_preemption`). A signal alone does not make it true: the ranks agree within about a
        second, on one of their next steps.
        """
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
            state: as for `dcp_objstore.save`.
            metrics: numbers for the marker, by which `KeepBest` ranks; those of rank 0 count.
            user_metadata: more JSON values for the marker.

        Raises:
            CheckpointExistsError: this job has saved that step, or there is one already; or the
                run has later steps, and this job has loaded none. (After `load`, steps later than
                the one loaded are replaced: this job does them again.)
            DcpObjstoreError: see `dcp_objstore.save`; or the save before has failed.
        """
        report = self._own_run().save(step, state, metrics, user_metadata)
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
            state: as for `dcp_objstore.save`.
            metrics: numbers for the marker, by which `KeepBest` ranks; those of rank 0 count.
            user_metadata: more JSON values for the marker.
            on_busy: while a save is under way; default: that of the run.

        Returns:
            The save; None: one was under way, and this one was skipped.

        Raises:
            DcpObjstoreError: as `save`; the error of this save is raised by the next call that
                saves, or by `close`.
            SaveInProgressError: one is under way on some rank, and `on_busy` is "raise".
        """
        handle = self._own_run().async_save(
            step, state, metrics, user_metadata, on_busy or self._on_busy
        )
        if handle is not None:
            self._note_saved(step)
        return handle

    def _note_saved(self, step: int) -> None:
        self._unsaved = None
        self._trained.last(step, saved=True)

    def _own_run(self) -> RunSaves:
        """Once, before anything is loaded or saved: become the run's only job. A collective."""
        saves = self._begin()
        if self._takes_over and saves.claim is None:
            saves.own(
                taking_over.claim_run(self._url, process_group=self._group_given, **self._access)
            )
        return saves

    def _is_due(self, step: int) -> bool:
        """Whether a multiple of `save_every` lies in what was done since the call before."""
        check_step(step)
        before, self._last_step = self._last_step, step
        if self._every is None:
            return False
        if before is None:
            before = step - 1
        return step // self._every > max(before, 0) // self._every

    def _ask(self) -> frozenset[str]:
        """What this rank wants to be agreed on. In the thread of the boundaries."""
        wanted = set()
        if not self._preempted and self._notice.came():
            wanted.add(_PREEMPTED)
        if self._saves is not None and self._every_seconds is not None and self._team.is_first:
            passed_seconds = time.monotonic() - self._saves.begun_at
            wanted |= {_TIMER} if passed_seconds >= self._every_seconds else set()
        return frozenset(wanted)

    # --- loading

    def load(self, state: MutableMapping[str, Any], step: int | None = None) -> int | None:
        """Load a step into a state, in place. A collective; call it before training.

        Without `step` it loads the newest committed one. Where that is damaged, or goes away while
        it is read, the next older one is loaded instead, with a warning; `last_resume` says which
        were gone past.

        The steps later than the one loaded are this job's to save again. The first save after this
        makes them not count any more, in one change that a crash does not undo: no job resumes
        from them, no policy keeps them. Until then they count, so loading an old step to look at
        it changes nothing. A pinned one stays on the store, and its number cannot be saved before
        the pin is removed. Without `claim_run` that first save is refused, if later steps count.

        Args:
            state: see `dcp_objstore.load`.
            step: load this one, or raise. Default: the newest that can be loaded.

        Returns:
            The number of the step; None: the run has no committed step, and the state is as it was.

        Raises:
            CorruptDataError: there are steps, and all are damaged; the error of the newest.
            CheckpointNotFoundError: `step` was given, and is not committed.
            DcpObjstoreError: see `dcp_objstore.load`; what is not damage is raised at once.
        """
        self._begin().end()  # and of deletions: none may take the step that is loaded
        self._own_run()
        self._unsaved = None  # its state is about to be replaced
        if step is not None:
            check_step(step)
            report = ResumeReport(step, self._load_one(state, step))
            self._resume(report, went_back=True)
            return step
        report = load_newest(
            self._url, self._team, self._list, lambda number: self._load_one(state, number)
        )
        # Without a claim what is damaged is replaced when the job comes to it.
        self._resume(report, went_back=bool(report.skipped) and self._takes_over)
        return report.step

    def _load_one(self, state: MutableMapping[str, Any], step: int) -> LoadReport:
        return load_api.load(
            state,
            step_url(self._url, step),
            progress=False,
            process_group=self._group_given,
            **self._loading,
        )

    def _resume(self, report: ResumeReport, *, went_back: bool) -> None:
        assert self._saves is not None
        self._saves.resume(report.step, went_back=went_back)
        self._last_step = report.step
        self.last_resume = report

    # --- the run

    def latest(self) -> int | None:
        """The newest committed step, or None. A collective; rank 0 makes the requests.

        Two requests, one for each 1,000 objects of the run, and one for the step. (Also one for
        each newer step that was deleted, until a sweep has removed its objects.)
        """
        self._begin()
        found = self._team.on_first(lambda: self._list(1))
        return found[-1] if found else None

    def steps(self) -> tuple[int, ...]:
        """The committed steps, the newest last. A collective; rank 0 makes the requests.

        Two requests, one for each 1,000 objects of the run, and one for each step. (Also one for
        each that was deleted, until a sweep has removed its objects.)
        """
        self._begin()
        return self._team.on_first(lambda: self._list(None))

    def pin(self, step: int, name: str = "pinned") -> None:
        """Protect a step from deletion and overwriting, under a name. A collective.

        Raises:
            CheckpointNotFoundError: that step is not committed.
            DcpObjstoreError: see `dcp_objstore.pin`.
        """
        self._change_pins(step, lambda: upkeep.pin(step_url(self._url, step), name, **self._access))

    def unpin(self, step: int, name: str = "pinned") -> None:
        """Remove a pin; one that is not there is no error. Otherwise as `pin`. A collective."""
        self._change_pins(
            step, lambda: upkeep.unpin(step_url(self._url, step), name, **self._access)
        )

    def _change_pins(self, step: int, change: Callable[[], tuple[str, ...]]) -> None:
        self._begin()
        left = self._team.on_first(change)
        self._retainer.set_pinned(step, pinned=bool(left))


__all__ = ["CheckpointManager", "ResumeReport", "SkippedStep"]
