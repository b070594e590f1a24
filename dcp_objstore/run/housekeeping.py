"""Housekeeping in a run: delete steps that no policy keeps, and sweep what they leave.

One rank does this in the background. It deletes after each commit, and now and then it sweeps the
objects of deleted steps and of saves that died. The run belongs to this job, so its steps are
listed only once: the job knows what it commits and deletes, until it goes back to an earlier step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_objstore.errors import (
    CheckpointNotFoundError,
    CheckpointPinnedError,
    DcpObjstoreError,
    UnsupportedError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.run.gc import sweep
from dcp_objstore.run.retention import RetentionPolicy, StepFacts, plan_deletions
from dcp_objstore.run.steps import step_number, step_url, steps
from dcp_objstore.run.upkeep import delete_step
from dcp_objstore.stores import StoreSpec

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.run.steps import RunStep

# The most steps that are deleted after one commit, so that it is not followed by hours of
# deletions. The next commit goes on with them.
_AT_A_TIME = 64
# A sweep costs a listing of the run and a request for each step, and removes what is a day old.
_SWEEP_EVERY_SECONDS = 3600.0


def facts_of(one: RunStep) -> StepFacts | None:
    """Return what policies know about a step, or None if its name has no step number."""
    number = step_number(one.name)
    if number is None:
        return None
    metrics = one.user_metadata.get("metrics")
    return StepFacts(
        step=number,
        metrics=metrics if isinstance(metrics, Mapping) else {},
        pinned=bool(one.pins),
    )


class Retainer:
    """Deletes the steps that a policy does not keep, and sweeps the run.

    Args:
        run_url: URL of the run.
        policy: what to keep; None to keep everything, without any request.
        now: remove the objects of a deleted step at once, not after a sweep's grace period.
        sweeps: sweep the run after the first commit, and then once an hour.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Attributes:
        resumed: the step that this job resumed from, or None.
        claim: the claim of this job, or None.
    """

    def __init__(
        self,
        run_url: str,
        policy: RetentionPolicy | None,
        *,
        now: bool,
        sweeps: bool,
        storage_options: Mapping[str, object] | None,
        config: TransferConfig | None,
    ) -> None:
        self._run_url = run_url
        self._policy = policy
        self._now = now
        self._sweeps = sweeps
        self._swept_at: float | None = None
        self._storage_options = storage_options
        self._config = config
        self._lock = threading.Lock()
        self._known: dict[int, StepFacts] | None = None
        # Whether this job pinned or unpinned steps, kept until the steps are listed.
        self._pinned: dict[int, bool] = {}
        self.resumed: int | None = None
        self.claim: RunClaim | None = None

    def set_pinned(self, step: int, *, pinned: bool) -> None:
        """Record that this job has pinned a step, or removed its last pin."""
        self._pinned[step] = pinned

    def resume(self, step: int | None) -> None:
        """Record that this job resumed from a step: never delete it, and list the steps again."""
        self.resumed = step
        self._known = None

    def committed(self, step: int, metrics: Mapping[str, object]) -> None:
        """Delete what is no longer kept, now that a newer step is committed.

        A `DcpObjstoreError` is logged, not raised.
        """
        with self._lock:
            try:
                if self._policy is not None:
                    self._apply(StepFacts(step=step, metrics=metrics))
            except DcpObjstoreError as error:
                logger.warning(
                    "old steps of %s were not deleted; this is tried again after the next save: %s",
                    self._run_url,
                    error,
                )
            self.sweep()

    def _apply(self, newest: StepFacts) -> None:
        if self._known is None:
            found = steps(self._run_url, storage_options=self._storage_options, config=self._config)
            facts = [facts_of(one) for one in found]
            self._known = {one.step: one for one in facts if one is not None}
        self._known[newest.step] = newest
        for step, pinned in list(self._pinned.items()):
            if step in self._known:
                old = self._known[step]
                self._known[step] = StepFacts(step=step, metrics=old.metrics, pinned=pinned)
        in_use = {newest.step} | ({self.resumed} if self.resumed is not None else set())
        for step in plan_deletions(self._known.values(), self._policy, in_use=in_use)[:_AT_A_TIME]:
            self._delete(step)

    def sweep(self) -> None:
        """Sweep the run, unless that was done in the last hour.

        A `DcpObjstoreError` is logged, not raised.
        """
        now = time.monotonic()
        rested = self._swept_at is None or now - self._swept_at >= _SWEEP_EVERY_SECONDS
        if not (self._sweeps and rested):
            return
        self._swept_at = now
        try:
            swept = sweep(self._run_url, storage_options=self._storage_options, config=self._config)
        except UnsupportedError as error:
            self._sweeps = False
            logger.info("%s is not swept: %s", self._run_url, error)
            return
        except DcpObjstoreError as error:
            logger.warning("%s was not swept: %s", self._run_url, error)
            return
        if swept.deleted or swept.uploads_aborted:
            logger.info(
                "swept %s: %d objects (%d bytes) and %d uploads that are not needed were removed",
                self._run_url,
                swept.deleted,
                swept.deleted_bytes,
                swept.uploads_aborted,
            )

    def _delete(self, step: int) -> None:
        assert self._known is not None
        url = step_url(self._run_url, step)
        try:
            # It is not the newest: the plan was made with a list of the whole run.
            delete_step(
                StoreSpec(url, self._storage_options, self._config),
                self.claim.number if self.claim is not None else 0,
                now=self._now,
                even_newest=True,
            )
        except CheckpointNotFoundError:
            pass  # it was deleted already
        except CheckpointPinnedError:
            self._pinned[step] = True
            return
        del self._known[step]
        logger.info("deleted %s, which no retention policy keeps", url)
