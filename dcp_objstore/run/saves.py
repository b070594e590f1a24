"""`RunSaves`: the saves of a job in its run, one after the other, and the deletions that follow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.distributed as dist

from dcp_objstore.checkpoint.claim import RunClaim
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.distributed.failures import capture, from_all, from_first, on_first, raise_on_all
from dcp_objstore.distributed.groups import is_first
from dcp_objstore.distributed.plugin import typed
from dcp_objstore.distributed.ranks import current_rank
from dcp_objstore.errors import (
    CheckpointExistsError,
    ConfigError,
    DcpObjstoreError,
    RetryableError,
    SaveInProgressError,
)
from dcp_objstore.observe.report import SaveReport, logger
from dcp_objstore.run.claim_run import go_back
from dcp_objstore.run.housekeeping import Retainer, after_commit
from dcp_objstore.run.steps import check_step, described_by, newest_step
from dcp_objstore.stores import StoreSpec
from dcp_objstore.threads import Spawned
from dcp_objstore.write import api, async_save as async_api
from dcp_objstore.write.base import LATEST
from dcp_objstore.write.planner import AgreeingSavePlanner

Busy: TypeAlias = Literal["wait", "skip", "raise"]


def check_busy(on_busy: object) -> None:
    """Raise ConfigError unless the value is one of `Busy`."""
    if on_busy not in ("wait", "skip", "raise"):
        raise ConfigError(f"on_busy must be 'wait', 'skip' or 'raise', got {on_busy!r}")


class _Pending(NamedTuple):
    """A background save whose outcome the ranks have not agreed on yet."""

    step: int
    handle: async_api.AsyncSaveHandle
    was_raised: bool = False  # whether its error was raised on this rank


class FailedSave(NamedTuple):
    """A background save that has failed."""

    step: int
    error: DcpObjstoreError


class RunSaves:
    """The saves of this job in a run. All ranks call its methods, except those marked "Local".

    Args:
        run: the run.
        group: the ranks that save; None if this process is alone.
        retainer: deletes steps after a save. It also has the names of the run's steps, the job's
            claim, and the step that the job has resumed from.
        user_metadata: values for the marker of each step.
        max_failed: the number of background saves in a row that may fail without an error.
        saving: arguments that each save gets besides.

    Attributes:
        failed: the number of background saves that have failed since the last commit; the same on
            all ranks.
    """

    def __init__(
        self,
        run: StoreSpec,
        group: dist.ProcessGroup | None,
        retainer: Retainer,
        *,
        user_metadata: Mapping[str, Any],
        max_failed: int,
        saving: Mapping[str, Any],
    ) -> None:
        self._run = run
        self._url = run.url
        self._group = group
        self._retainer = retainer
        self._user_metadata = user_metadata
        self._max_failed = max_failed
        self._saving = saving
        self._background = async_api.BackgroundSaves()
        self._pending: _Pending | None = None
        self._retention: Spawned | None = None  # the thread that deletes after the last save
        self._loaded = False  # whether `resume` was called: then this job may replace later steps
        # Whether steps may count that are later than the one that was loaded. A save ends that.
        self._may_be_behind = True
        self._saved: set[int] = set()  # the steps that this job has saved, or is saving
        # The steps of saves that are under way in the foreground or have failed. Such a step may be
        # committed all the same.
        self._tried: set[int] = set()
        self.failed = 0
        self._begun = 0  # how often a save has begun, or the job has resumed
        self._begun_at = time.monotonic()  # when that last happened

    def _note_begin(self) -> None:
        """Record that a save begins, or that the job has resumed: the timer counts from here."""
        self._begun += 1
        self._begun_at = time.monotonic()

    @property
    def next_timed(self) -> str:
        """The request for the save after the last one that has begun; the same on all ranks.

        It is void once that save, or another, has begun: the ranks agree on it a while after the
        timer has asked, and the timer asks again until a save begins.
        """
        return f"timer-{self._begun}"

    def is_time(self, every_seconds: float) -> bool:
        """Return whether no save is under way, and the last one began so long ago. Local."""
        return self.is_idle() and time.monotonic() - self._begun_at >= every_seconds

    def is_idle(self) -> bool:
        """Return whether no save is under way in the background of this rank. Local."""
        pending = self._pending
        return pending is None or pending.handle.done()

    def resume(self, step: int | None, *, went_back: bool) -> None:
        """Record that the job resumed from a step, so that it may replace later steps. Local.

        Args:
            step: the number of the step; None if the run has none.
            went_back: whether later steps may count. They go on to count until a save succeeds: a
                job that only looks at an old step leaves the run as it is.
        """
        self._loaded = True
        self._may_be_behind = went_back
        # What this job knows of later steps does not hold for those that it will train again.
        for steps in (self._saved, self._tried):
            steps -= {later for later in steps if step is None or later > step}
        self._retainer.resumed = step
        self._note_begin()

    def knows(self, step: int) -> bool:
        """Return whether this job has saved the step, or resumed from it. Local."""
        return step in self._saved or step == self._retainer.resumed

    def _url_of(self, step: int) -> str:
        return self._run.child(self._retainer.names.name(step)).url

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        planner: api.MakePlanner = AgreeingSavePlanner,
        **described: Any,
    ) -> SaveReport:
        """Save a step and wait for its commit, as `CheckpointManager.save` describes."""
        keywords = self._prepare(step, "wait", described, may_fail=False)
        assert keywords is not None
        self._tried.add(step)  # before the save, because Ctrl-C may come after its commit
        report = api.save_planned(state, self._url_of(step), planner=planner, **keywords)
        self._saved.add(step)
        self._note_committed(step)
        self._retain(step, None)
        return report

    def _note_committed(self, step: int) -> None:
        """Record that this job has committed a step."""
        self._tried.discard(step)
        self._may_be_behind = False
        self.failed = 0

    def async_save(
        self,
        step: int,
        state: Mapping[str, Any],
        on_busy: Busy,
        planner: api.MakePlanner = AgreeingSavePlanner,
        **described: Any,
    ) -> async_api.AsyncSaveHandle | None:
        """Save a step in the background, as `CheckpointManager.async_save` describes."""
        keywords = self._prepare(step, on_busy, described, may_fail=True)
        if keywords is None:
            return None
        before = self._background.latest
        try:
            handle = async_api.begin_save(
                self._background, state, self._url_of(step), planner=planner, **keywords
            )
        finally:
            begun = self._background.latest
            # There is a new save: it has begun on all ranks, even if `begin_save` raises on this
            # one.
            if begun is not None and begun is not before:
                self._pending = _Pending(step, begun)
                self._saved.add(step)
        self._retain(step, handle)
        return handle

    def _prepare(
        self, step: int, on_busy: Busy, described: Mapping[str, Any], *, may_fail: bool
    ) -> dict[str, Any] | None:
        """Wait for the save under way; return the arguments of the next one.

        Args:
            step: the number of the step of the next save.
            on_busy: what to do if a save is under way: "wait", "skip" or "raise".
            described: values for the step's marker, as for `described_by`.
            may_fail: whether the next save may fail without an error, as a background save may.

        Returns:
            The arguments. None if the next save is skipped, or if the store is away and that is
            tolerated.
        """

        def describe() -> dict[str, Any]:
            check_step(step)
            check_busy(on_busy)
            return described_by(step, self._user_metadata, **described)

        values, refused = capture(describe)
        # Ranks whose arguments differ would wait for each other in vain.
        same = {"base": self._saving.get("base"), "max_failed_saves": self._max_failed}
        raise_on_all(refused, self._url, self._group, same=same)
        # All ranks have begun the same saves, so `_pending` is set on all of them or on none.
        if (pending := self._pending) is not None:
            # Ranks see the end of a save at different times, so they ask each other.
            if on_busy != "wait" and any(from_all(not self.is_idle(), self._url, self._group)):
                if on_busy == "raise":
                    number, handle, _ = pending
                    raise SaveInProgressError(f"step {number} is still being saved", url=handle.url)
                logger.info("%s: step %d was skipped: another save is under way", self._url, step)
                return None
            # Before `_saved` is looked at: a save that has failed takes its step out of there.
            try:
                self.finish_pending()
            except RetryableError as error:
                self._tolerate(pending.step, error)
        if step in self._saved:
            raise CheckpointExistsError(f"this job has saved step {step} already", url=self._url)
        try:
            claim = self._claim_for(step)
        except RetryableError as error:
            if not may_fail:
                raise
            self._tolerate(step, error)
            self._note_begin()  # so that the timer asks for the next save, not for this one again
            return None
        # The job may replace steps that it trains again after it went back to an earlier step.
        resumed = self._retainer.resumed
        overwrites = self._loaded and (resumed is None or step > resumed)
        # A save of this step has failed. It may have been committed all the same: then the step is
        # this job's own, and may be replaced.
        if not overwrites and step in self._tried:
            overwrites = on_first(partial(self._has_committed, step), self._url, self._group)
        base = self._base()
        self._note_begin()
        return {
            **self._saving,
            "base": base,
            "overwrite": overwrites,
            "user_metadata": values,
            "claim": claim,
            "progress": False,
        }

    def _base(self) -> str | None:
        """Return the URL of the checkpoint from which the next save copies what has not changed.

        For "latest", it is that of the newest step that this job knows of; if there is none,
        return "latest". None if each save uploads all.
        """
        base: str | None = self._saving.get("base")
        if base != LATEST:
            return base
        newest = self.newest()
        return base if newest is None else self._url_of(newest)

    def newest(self) -> int | None:
        """Return the newest step that this job has saved or resumed from, or None.

        That is what the first rank knows: another may not have seen the end of a save.
        """
        resumed = self._retainer.resumed
        known = self._saved if resumed is None else {*self._saved, resumed}
        return from_first(max(known, default=None), self._url, self._group)

    def _claim_for(self, step: int) -> RunClaim | None:
        """Return the claim for a save.

        Until a save has succeeded, look for later steps that count. If there are some, the commit
        of this step makes them stop counting. Otherwise retention would keep them instead of what
        this job saves from now on, and the next job would resume from them.
        """
        if not self._may_be_behind:
            return self._retainer.claim

        def claim_for() -> RunClaim | None:
            claim, resumed = self._retainer.claim, self._retainer.resumed
            newest = newest_step(self._run, self._retainer.names)
            has_no_later = newest is None or newest <= (step if resumed is None else resumed)
            # A later step may also be this job's own, committed in a save that has failed.
            if has_no_later or (newest in self._tried and self._has_committed(newest)):
                return claim
            later = f"the run has later steps (up to {newest}), from which the next job resumes"
            if resumed is None:
                raise CheckpointExistsError(
                    f"step {step} was not saved: this job has loaded no step of the run, and"
                    f" {later}",
                    advice="call load() first, or load(step=...), or save to another run",
                    url=self._url,
                )
            if claim is None:
                raise CheckpointExistsError(
                    f"step {step} was not saved: this job went back to step {resumed}, and {later}",
                    advice="pass claim_run=True, so that the next save makes them stop counting; or"
                    " delete them, or save to another run",
                    url=self._url,
                )
            return go_back(self._run, claim, resumed, step, self._retainer.names)

        claim = on_first(claim_for, self._url, self._group)
        # Only this save goes back; the ones after it do not.
        self._retainer.claim = claim and replace(claim, goes_back=False)
        return claim

    def _has_committed(self, step: int) -> bool:
        """Return whether this job has committed a step, although its save has failed.

        That the marker has this job's claim does not prove it: to claim the run, the job has
        rewritten the markers of the steps that counted. But a marker with this job's claim that was
        not rewritten since its commit (`put_on` is set) is of this job's own commit.
        """
        stored = read_marker(self._run.at(self._url_of(step)).open())
        claim = self._retainer.claim
        if stored is None or claim is None:  # without a claim, nothing proves it
            return False
        return stored.record.claim == claim.number and bool(stored.record.put_on)

    def tolerates(self, error: DcpObjstoreError) -> bool:
        """Return whether the error of a background save may be only logged. Local."""
        return isinstance(error, RetryableError) and self._max_failed > 0

    def _tolerate(self, step: int, error: RetryableError) -> None:
        """Count and log a background save that has failed; raise its error if too many have failed.

        All ranks have this error, so all do the same.
        """
        self.failed += 1
        if self.failed > self._max_failed:
            raise error
        newest = self.newest()
        logger.error(
            "%s: step %d was not saved, and training goes on (failure %d in a row of the %d that"
            " max_failed_saves allows). The newest step that this job has is %s. %s: %s",
            self._url,
            step,
            self.failed,
            self._max_failed,
            "none" if newest is None else newest,
            type(error).__name__,
            error,
        )

    def finish_pending(self, only: async_api.AsyncSaveHandle | None = None) -> None:
        """Wait for the save under way; raise its error on all ranks if it failed on any.

        If Ctrl-C ends the wait on a rank, it is raised there and a RankFailedError on the others,
        and the next call waits for the save again. A rank's own error of the save is raised once.

        Args:
            only: do nothing if another save is under way than this one.
        """
        if self._pending is None or only not in (None, self._pending.handle):
            return
        step, handle, was_raised = self._pending
        # `error` is the save's. `failed` is what this rank has to raise: so far, what has ended the
        # wait, such as Ctrl-C.
        error, failed = capture(handle.exception)
        if error is not None:
            self._saved.discard(step)
            self._tried.add(step)
            failed = None if was_raised else typed(error, current_rank(), handle.url)
        try:
            raise_on_all(failed, self._url, self._group)
        except BaseException:
            # Ctrl-C may have ended the wait of some rank. So the save stays pending on all, and the
            # next call asks for its outcome again; a rank that has raised its error does not then.
            self._pending = _Pending(step, handle, was_raised=error is not None)
            raise
        self._pending = None
        if error is None:
            self._note_committed(step)

    def finish_pending_quietly(self) -> FailedSave | None:
        """Wait for the save under way; if it fails, log its error and return it.

        The error is not raised, because the current state is worth more and may still be saved.
        """
        if (pending := self._pending) is None:
            return None
        try:
            self.finish_pending()
        except DcpObjstoreError as error:
            logger.error("%s: an earlier save failed: %s", self._url, error)
            return FailedSave(pending.step, error)
        return None

    def end(self) -> None:
        """Wait for the save under way, as `finish_pending` does, and for deletions."""
        try:
            self.finish_pending()
        finally:  # after a save that failed, too
            if self._retention is not None:
                self._retention.join()

    def abandon(self, error: BaseException) -> None:
        """Wait for the save under way on this rank alone: other ranks may be anywhere. Local.

        If the save fails, the error that ends the job gets a note.
        """
        handle = self._background.latest
        # If the ranks have agreed on the outcome of the last save, its error was raised before.
        ranks_agreed = self._pending is None or self._pending.was_raised
        if handle is None or (ranks_agreed and handle.done()):
            return
        self._pending = None
        failed = handle.exception()
        if failed is not None:
            note = f"{handle.url} was being saved at that time, and failed, too: {failed}"
            logger.error("%s", note)
            error.add_note(note)

    def _retain(self, step: int, handle: async_api.AsyncSaveHandle | None) -> None:
        """Delete what is not kept once the step is committed; on rank 0, in a thread."""
        if is_first(self._group):
            self._retention = after_commit(
                handle, partial(self._retainer.committed, step), self._retention
            )
