"""Housekeeping in a run: delete steps that no policy keeps, and sweep what they leave.

One rank does this in the background. It deletes after each commit, and now and then it sweeps the
objects of saves that died.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dcp_objstore.checkpoint.catalogue import Entry, Markers
from dcp_objstore.checkpoint.delete import check_deletion_grace, remove_deleted
from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CheckpointPinnedError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.run.retention import RetentionPolicy, StepFacts, plan_deletions
from dcp_objstore.run.steps import STEP_NAMES, StepNames, catalogue
from dcp_objstore.run.sweep import sweep_below
from dcp_objstore.run.upkeep import delete_step
from dcp_objstore.threads import Spawned, spawn

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.stores import StoreSpec
    from dcp_objstore.write.async_save import AsyncSaveHandle

# A sweep costs a listing of the run and a request for each step, and removes what is a day old.
_SWEEP_EVERY_SECONDS = 3600.0


def _facts(number: int, step: Entry) -> StepFacts:
    """Return what policies know about a step. The user may have put anything under `metrics`."""
    metrics = step.marker.user_metadata.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    return StepFacts(step=number, metrics=metrics, pinned=bool(step.marker.pins))


def after_commit(
    handle: AsyncSaveHandle | None,
    work: Callable[[], object],
    previous: Spawned | None = None,
) -> Spawned:
    """Do some upkeep in a thread once a save is committed; not if the save fails.

    It may be left out or cut short without harm, so the thread is a daemon.

    Args:
        handle: the save, or None if it is committed.
        work: the upkeep.
        previous: the thread of earlier upkeep, which this waits for.
    """

    def wait_and_work() -> None:
        if previous is not None:
            previous.join()
        if handle is not None:
            # `handle.exception()` would mark an error as seen, so that nothing else reports it.
            handle._ended.wait()
            if handle._error is not None:
                return
        work()

    return spawn(wait_and_work, "upkeep")


class _PendingRemoval(NamedTuple):
    """A deletion whose objects are removed at a time, by the clock of `Deletions`."""

    due_at: float
    spec: StoreSpec
    commit_id: str


class Deletions:
    """Deletes checkpoints for a job, and removes their objects when a grace period is over.

    Args:
        grace_seconds: how long the objects of a deleted checkpoint stay for readers.
        clock: returns the time in seconds.

    Raises:
        ConfigError: `grace_seconds` is not a number, 0 or more.
    """

    def __init__(self, grace_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds = check_deletion_grace(grace_seconds)
        self._clock = clock
        self._pending: deque[_PendingRemoval] = deque()

    def delete(self, spec: StoreSpec, claim: int | None, *, allow_newest: bool) -> None:
        """Delete a checkpoint, as `upkeep.delete_step` does; then call `remove_due`.

        Args:
            spec: the store's URL and options, with the checkpoint as its root.
            claim: the number of the job's claim, as for `delete_step`.
            allow_newest: as for `delete_step`.
        """
        report = delete_step(
            spec, claim, grace_seconds=self._grace_seconds, allow_newest=allow_newest
        )
        if self._grace_seconds:  # otherwise `delete_step` has removed the objects
            due_at = self._clock() + self._grace_seconds
            self._pending.append(_PendingRemoval(due_at, spec, report.commit_id))
        self.remove_due()

    def remove_due(self) -> None:
        """Remove the objects of deletions whose grace period is over. What fails, a sweep removes.

        Raises:
            DcpObjstoreError: the store refused or failed.
        """
        while self._pending and self._pending[0].due_at <= self._clock():
            _, spec, commit_id = self._pending.popleft()
            remove_deleted(spec.open(), commit_id)


class Retainer:
    """Deletes the steps that a policy does not keep, and sweeps the run.

    Args:
        run: the run.
        policy: what to keep; None to keep everything, without any request.
        grace_seconds: how long the objects of a deleted step stay.
        sweeps: sweep the run after the first commit, and then once an hour.
        names: the names of its steps.
        at_a_time: the most steps that are deleted after one commit, so that it is not followed by
            hours of deletions. The next commit goes on with them.
        clock: returns the time in seconds.

    Attributes:
        names: the names of the run's steps.
        deletions: what deletes its steps.
        resumed: the step that this job resumed from, or None.
        claim: the claim of this job, or None.
    """

    def __init__(
        self,
        run: StoreSpec,
        policy: RetentionPolicy | None = None,
        *,
        grace_seconds: float = 0.0,
        sweeps: bool = True,
        names: StepNames = STEP_NAMES,
        at_a_time: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = names
        self._run = run
        self._policy = policy
        self._at_a_time = at_a_time
        self._clock = clock
        self.deletions = Deletions(grace_seconds, clock)
        self._sweeps = sweeps
        self._swept_at: float | None = None  # when the last sweep began, by the clock
        self._sweeper: Spawned | None = None  # the thread of the last sweep
        self._ended = threading.Event()  # set by `end`
        self._markers = Markers()  # what was read of the run, for the next listing
        self.resumed: int | None = None
        self.claim: RunClaim | None = None

    def committed(self, step: int) -> None:
        """Delete what is no longer kept, now that a step is committed.

        An error is logged, not raised.
        """
        try:
            # The sweep has its own thread: neither deletions nor the end of the job wait for it.
            if self._sweeper is None or not self._sweeper.is_alive():
                self._sweeper = spawn(self.sweep, "sweep")
            if self._policy is not None:
                self._apply(self._policy, step)
                self.deletions.remove_due()
        except Exception as error:  # noqa: BLE001 - the policy may be the user's own
            logger.warning(
                "old steps of %s were not deleted; this is tried again after the next save: %s",
                self._run.url,
                error if isinstance(error, DcpObjstoreError) else repr(error),
            )

    def end(self) -> None:
        """Let a sweep that is under way end before its next checkpoint; do not wait for it."""
        self._ended.set()

    def _apply(self, policy: RetentionPolicy, newest: int) -> None:
        """Delete the steps that the policy does not keep.

        The run is listed each time, because others may have deleted steps that this job knows. A
        step that is gone, or whose index is, must not take the place of one that is there.

        Args:
            policy: what to keep.
            newest: the number of the step that this job has just committed.
        """
        listed = catalogue(self._run, read=self._markers.read)
        self._markers.forget_others(listed.objects_at)
        steps = {
            number: step
            for step in listed.steps
            if (number := self.names.number(step.name)) is not None
            and step.marker.index is not None
            and step.marker.index.key in listed.objects_at[step.name]
        }
        facts = [_facts(number, step) for number, step in steps.items()]
        plan = plan_deletions(facts, policy, in_use={newest, self.resumed})
        for step in [step for step in plan if not steps[step].marker.pins][: self._at_a_time]:
            self._delete(steps[step].name)

    def sweep(self) -> None:
        """Sweep the run, unless that was done in the last hour.

        A crash or the end of the program may cut it short anywhere. A `DcpObjstoreError` is logged,
        not raised.
        """
        now = self._clock()
        is_due = self._swept_at is None or now - self._swept_at >= _SWEEP_EVERY_SECONDS
        if not (self._sweeps and is_due) or self._ended.is_set():
            return
        self._swept_at = now
        try:
            swept = sweep_below(self._run, is_over=self._ended.is_set)
        except UnsupportedError as error:  # no later sweep would do better
            self._sweeps = False
            logger.info("%s is not swept: %s", self._run.url, error)
            return
        except DcpObjstoreError as error:
            logger.warning("%s was not swept: %s", self._run.url, error)
            return
        if swept.deleted or swept.uploads_aborted:
            logger.info(
                "swept %s: %d objects (%d bytes) and %d uploads that are not needed were removed",
                self._run.url,
                swept.deleted,
                swept.deleted_bytes,
                swept.uploads_aborted,
            )

    def _delete(self, name: str) -> None:
        """Delete a step, unless it was deleted or pinned since the run was listed."""
        step = self._run.child(name)
        # 0: a job without a claim deletes no step of any claim.
        number = self.claim.number if self.claim is not None else 0
        try:
            # This is not the newest step, so that needs no check: the plan keeps that one.
            self.deletions.delete(step, number, allow_newest=True)
        except (CheckpointNotFoundError, CheckpointPinnedError):
            return
        logger.info("deleted %s, which no retention policy keeps", step.url)
