"""Housekeeping in a run: delete steps that no policy keeps, and sweep what they leave.

One rank does this in the background. It deletes after each commit, and now and then it sweeps the
objects of deleted steps and of saves that died. The run belongs to this job, so its steps are
listed only once: the job knows what it commits and deletes, until it goes back to an earlier step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CheckpointPinnedError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.run.retention import RetentionPolicy, StepFacts, plan_deletions
from dcp_objstore.run.steps import catalogue, step_number, step_url
from dcp_objstore.run.sweep import sweep_below
from dcp_objstore.run.upkeep import delete_step
from dcp_objstore.threads import Spawned, spawn

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.stores import StoreSpec
    from dcp_objstore.write.async_save import AsyncSaveHandle

# The most steps that are deleted after one commit, so that it is not followed by hours of
# deletions. The next commit goes on with them.
_AT_A_TIME = 64
# A sweep costs a listing of the run and a request for each step, and removes what is a day old.
_SWEEP_EVERY_SECONDS = 3600.0


def _facts(number: int, user_metadata: Mapping[str, object], *, pinned: bool = False) -> StepFacts:
    """Return what policies know about a step. The user may have put anything under `metrics`."""
    metrics = user_metadata.get("metrics")
    return StepFacts(
        step=number, metrics=metrics if isinstance(metrics, Mapping) else {}, pinned=pinned
    )


def after_commit(
    handle: AsyncSaveHandle | None,
    work: Callable[[], object],
    before: Spawned | None = None,
) -> Spawned:
    """Do some upkeep in a thread once a save is committed, after another thread; not if it fails.

    It may be left out or cut short without harm, so the thread is a daemon. `handle` is None if the
    save is committed.
    """

    def follow() -> None:
        if before is not None:
            before.join()
        if handle is not None:
            # `exception` would mark the error as seen, so that nothing reports it.
            handle._ended.wait()
            if handle._error is not None:
                return
        work()

    return spawn(follow, "upkeep")


class Retainer:
    """Deletes the steps that a policy does not keep, and sweeps the run.

    Args:
        run: the run.
        policy: what to keep; None to keep everything, without any request.
        remove_objects: remove the objects of a deleted step at once, not after a sweep's grace
            period.
        sweeps: sweep the run after the first commit, and then once an hour.

    Attributes:
        resumed: the step that this job resumed from, or None.
        claim: the claim of this job, or None.
    """

    def __init__(
        self,
        run: StoreSpec,
        policy: RetentionPolicy | None = None,
        *,
        remove_objects: bool = False,
        sweeps: bool = True,
    ) -> None:
        self._run = run
        self._policy = policy
        self._remove_objects = remove_objects
        self._sweeps = sweeps
        self._swept_at: float | None = None
        self._sweeper: Spawned | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._known: dict[int, StepFacts] | None = None
        self._held: list[int] = []
        self.resumed: int | None = None
        self.claim: RunClaim | None = None

    def hold(self, step: int) -> None:
        """Plan no deletion of a step, which is to be exported, until it is released."""
        self._held.append(step)

    def release(self, step: int) -> None:
        """End one `hold` of a step."""
        self._held.remove(step)

    def settle(self) -> None:
        """Wait for the deletions that are planned already."""
        with self._lock:
            pass

    def resume(self, step: int | None) -> None:
        """Record that this job resumed from a step: never delete it, and list the steps again."""
        self.resumed = step
        self._known = None

    def committed(self, step: int, user_metadata: Mapping[str, object]) -> None:
        """Delete what is no longer kept, now that a newer step is committed.

        An error is logged, not raised.
        """
        with self._lock:
            try:
                # In its own thread: neither deletions nor the end of the job wait for it.
                if self._sweeper is None or not self._sweeper.is_alive():
                    self._sweeper = spawn(self.sweep, "sweep")
                if self._policy is not None:
                    self._apply(self._policy, _facts(step, user_metadata))
            except Exception as error:  # noqa: BLE001 - the policy may be the user's own
                logger.warning(
                    "old steps of %s were not deleted; this is tried again after the next save: %s",
                    self._run.url,
                    error if isinstance(error, DcpObjstoreError) else repr(error),
                )

    def end(self) -> None:
        """Let a sweep that is under way end before its next checkpoint; do not wait for it."""
        self._ended.set()

    def _apply(self, policy: RetentionPolicy, newest: StepFacts) -> None:
        if self._known is None:
            self._known = {
                number: _facts(number, step.marker.user_metadata, pinned=bool(step.marker.pins))
                for step in catalogue(self._run).steps
                if (number := step_number(step.name)) is not None
            }
        known = self._known
        known[newest.step] = newest
        in_use = {newest.step, self.resumed, *self._held}
        plan = plan_deletions(known.values(), policy, in_use=in_use)
        # What was pinned when it was listed, or tried, may no longer be, as pins of `follow` come
        # and go. Each costs a request, so one of them is tried, the one tried longest ago.
        pinned = [step for step, facts in known.items() if facts.pinned and step in plan]
        free = [step for step in plan if not known[step].pinned]
        for step in (*free[:_AT_A_TIME], *pinned[:1]):
            self._delete(step, known)

    def sweep(self) -> None:
        """Sweep the run, unless that was done in the last hour. It may be cut short anywhere.

        A `DcpObjstoreError` is logged, not raised.
        """
        now = time.monotonic()
        rested = self._swept_at is None or now - self._swept_at >= _SWEEP_EVERY_SECONDS
        if not (self._sweeps and rested) or self._ended.is_set():
            return
        self._swept_at = now
        try:
            swept = sweep_below(self._run, is_over=self._ended.is_set)
        except UnsupportedError as error:
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

    def _delete(self, step: int, known: dict[int, StepFacts]) -> None:
        url = step_url(self._run.url, step)
        try:
            # It is not the newest: the plan was made with a list of the whole run.
            delete_step(
                self._run.at(url),
                self.claim.number if self.claim is not None else 0,
                remove_objects=self._remove_objects,
                allow_newest=True,
            )
        except CheckpointNotFoundError:
            pass  # it was deleted already
        except CheckpointPinnedError:
            known[step] = replace(known.pop(step), pinned=True)  # the last in the order of turns
            return
        del known[step]
        logger.info("deleted %s, which no retention policy keeps", url)
