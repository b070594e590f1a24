"""`follow`: yield the steps of a run as they are committed, for a job that evaluates them.

It needs no process group and no torch. Rule C3 of `checkpoint.claim` says which steps count.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

from dcp_objstore import errors
from dcp_objstore.checkpoint.catalogue import Catalogue, Entry, Markers
from dcp_objstore.checkpoint.names import MARKER_KEY, natural_order
from dcp_objstore.checkpoint.pins import check_name
from dcp_objstore.checkpoint.read import retry_damaged
from dcp_objstore.config import TransferConfig, check_number
from dcp_objstore.observe.report import logger
from dcp_objstore.run import upkeep
from dcp_objstore.run.listing import ListedCheckpoint, as_listed
from dcp_objstore.run.steps import as_step, catalogue, check_step, step_name
from dcp_objstore.stores import StoreSpec
from dcp_objstore.threads import wait_until

_Order: TypeAlias = list[str | int]  # what `natural_order` returns
_LEAST_SECONDS = {"timeout_seconds": 0.0, "poll_seconds": 0.001}


def follow(
    url: str,
    *,
    after: int | str | None = None,
    until: int | str | None = None,
    skip_to_newest: bool = False,
    timeout_seconds: float | None = None,
    poll_seconds: float = 30.0,
    pin: str | None = None,
    on_dropped: Callable[[ListedCheckpoint], object] | None = None,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> Generator[ListedCheckpoint, None, None]:
    """Yield the committed steps of a run that count, and wait for the next ones. One process.

        for step in dos.follow("s3://bucket/run", pin="evaluator", until=2000):
            weights = dos.read_state_dict(step.url, "model.*")

    Steps come in the order of `steps`. Each commit comes once; a step that is saved again, after
    the job went back or with `overwrite`, is a new commit and comes again. A step that is deleted
    before its turn does not come, and one that does not count never does.

    It ends when the run is finished (`CheckpointManager.finish`), at `until`, or after
    `timeout_seconds`. Leaving the loop ends it, too. It begins with a run that does not exist yet.

    A step may be deleted while it is read, if it is not pinned: then the load raises
    CheckpointGoneError, or CheckpointNotFoundError if it had not begun, and both say which step is
    next. `continue` then goes on.

    The run is listed when the loop asks for a step and the listing is older than `poll_seconds`.
    That takes two requests for the run's `_CLAIM`, one listing (a page for each 1,000 objects), and
    one request for each marker that is new or was written again. If the store does not answer, a
    warning is logged and the next poll tries again; the first poll raises the error.

    Args:
        url: URL of the run; its steps are the checkpoints directly below.
        after: the number of a step, or its name if it is not `step-N`. Neither this step nor any
            before it comes, not even if it is saved again. Default: all come.
        until: number or name of the last step that may come. The iteration ends when that step or
            a later one counts. Default: no limit.
        skip_to_newest: yield only the newest of several new steps; the others never come.
        timeout_seconds: end if the loop has waited so long for a step; the time in its body does
            not count. 0: yield what is there. Default: no limit.
        poll_seconds: the least time from the end of one poll to the beginning of the next.
        pin: name of a pin that each step has while the body of the loop uses it, so that no
            deletion takes it. If the program is killed, the pin stays until a follower with this
            name begins, which removes it. So each follower needs a different name. A pinned step
            cannot be saved again: a job that goes back past it gets CheckpointExistsError there.
            Default None: nothing is written.
        on_dropped: called with each step that was yielded and no longer counts, because the job
            went back or the step was saved again; its state is then `superseded`. A step that was
            deleted is not one. Called when the loop asks for the next step. Default: log a warning.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        ConfigError: an argument is wrong.
        PermissionDeniedError: these credentials may not read or list the run, or with `pin`, not
            write.
        CheckpointCorruptError: the run's `_CLAIM` is damaged.
        UnsupportedError: a newer version wrote the run; with `pin`, the store has no conditional
            writes.
        RetryableError: the store does not answer: at the first poll, or still after
            `timeout_seconds`.
        DcpObjstoreError: the store refused or failed.
    """
    follower = _Follower(
        run=StoreSpec(url, storage_options, config),
        after=_order(after),
        until=_order(until),
        skip_to_newest=skip_to_newest,
        timeout_seconds=math.inf if timeout_seconds is None else timeout_seconds,
        poll_seconds=poll_seconds,
        pin=pin,
        on_dropped=on_dropped or _log_dropped,
    )
    return follower.steps()


def _order(bound: int | str | None) -> _Order | None:
    """Return the sort key of `after` or `until`: a name, or the number of a `step-N`."""
    if bound is None or isinstance(bound, str):
        return None if bound is None else natural_order(bound)
    step = as_step(bound)
    check_step(step)
    return natural_order(step_name(step))


def _log_dropped(step: ListedCheckpoint) -> None:
    logger.warning(
        "%s was yielded and no longer counts: its job went back, or the step was saved again",
        step.url,
    )


@dataclass(kw_only=True)
class _Follower:
    """A job that follows a run. The settings are those of `follow`.

    Attributes:
        poll_at: no poll but the first begins earlier, by `monotonic`.
        listed: the latest listing; None before the first one.
        markers: the markers that were read, by the names of their steps.
        seen: the ids of the commits that have come, or never will.
        yielded: the steps that have come and count, by commit_id.
    """

    run: StoreSpec
    after: _Order | None
    until: _Order | None
    skip_to_newest: bool
    timeout_seconds: float
    poll_seconds: float
    pin: str | None
    on_dropped: Callable[[ListedCheckpoint], object]
    poll_at: float = math.inf
    listed: Catalogue | None = None
    markers: Markers = field(default_factory=Markers)
    seen: set[str] = field(default_factory=set)
    yielded: dict[str, ListedCheckpoint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.pin is not None:
            check_name(self.pin)
        for name, least in _LEAST_SECONDS.items():
            check_number(name, getattr(self, name), least, whole=False)

    def steps(self) -> Generator[ListedCheckpoint, None, None]:
        """Yield the steps; if there is a pin, `_next` sets it, and it ends with the next step."""
        while (step := self._next()) is not None:
            try:
                yield step
            finally:
                if self.pin is not None:
                    self._unpin(step.url, self.pin)

    def _next(self) -> ListedCheckpoint | None:
        """Wait for the next step and return it; None at the end."""
        give_up_at = monotonic() + self.timeout_seconds
        # The error of the last poll, if it failed. The listing of the poll before is still used.
        failure = None
        while True:
            try:
                if self.listed is None or monotonic() >= self.poll_at:
                    self.listed = self._poll()
                    failure = None
                step = self._take(self.listed)
                if step is not None or self._is_over(self.listed):
                    return step
            except errors.RetryableError as error:
                if self.listed is None:  # the first poll has failed
                    raise
                logger.warning("%s: the next poll tries again: %s", self.run.url, error)
                failure = error
            now = monotonic()
            if now >= give_up_at:
                if failure is not None:
                    raise failure
                logger.info("%s: no new step in %g s", self.run.url, self.timeout_seconds)
                return None
            # Nothing sets the event: this only sleeps, and Ctrl-C ends it.
            wait_until(threading.Event(), min(self.poll_at, give_up_at) - now)

    def _poll(self) -> Catalogue:
        """List the run; on the way, report dropped steps and remove pins that were left."""
        try:
            listed = catalogue(self.run, read=self.markers.read)
        finally:  # after a poll that failed, too
            self.poll_at = monotonic() + self.poll_seconds
        self.markers.forget_others(listed.objects_at)
        self._report_dropped(listed)
        if self.listed is None and not listed.objects_at:
            logger.warning("%s: there is no step yet; waiting for the first", self.run.url)
        if self.pin is not None:
            self._unpin_stale(self.pin, listed)
        return listed

    def _report_dropped(self, listed: Catalogue) -> None:
        """Call `on_dropped` for yielded steps that no longer count, unless they were deleted."""
        counting = {step.marker.commit_id for step in listed.steps}
        for commit_id in [each for each in self.yielded if each not in counting]:
            step = self.yielded.pop(commit_id)
            latest = self.markers.get(step.name)
            # The step is gone, its marker cannot be read, or it was deleted.
            if latest is None or latest.stored is None or not latest.marker.is_committed:
                continue
            # The marker of a deleted step is not read any more once the step's objects are gone. So
            # `latest` may be from before the deletion, unless its object is still the one listed.
            if latest.objects[MARKER_KEY] == listed.objects_at[step.name].get(MARKER_KEY):
                self.on_dropped(replace(step, state="superseded"))

    # --- the next step

    def _wanted(self, listed: Catalogue) -> list[Entry]:
        """Return the listed steps that were neither yielded nor skipped, the oldest first."""
        return [
            step
            for step in listed.steps
            if step.marker.commit_id not in self.seen and self._is_within(natural_order(step.name))
        ]

    def _is_within(self, order: _Order) -> bool:
        return (self.after is None or order > self.after) and (
            self.until is None or order <= self.until
        )

    def _chosen(self, wanted: list[Entry]) -> Entry:
        """Return the wanted step to yield next."""
        return wanted[-1 if self.skip_to_newest else 0]

    def _take(self, listed: Catalogue) -> ListedCheckpoint | None:
        """Return the next step, pinned if `pin` is set; None if there is none.

        A step that was deleted before it could be pinned is left out.
        """
        while wanted := self._wanted(listed):
            step = self._chosen(wanted)
            exists = self.pin is None or self._pin(step.store.url, self.pin)
            # If the newest step was deleted, the older ones are not skipped for its sake.
            yielded_or_skipped = wanted if exists and self.skip_to_newest else [step]
            self.seen |= {entry.marker.commit_id for entry in yielded_or_skipped}
            if exists:
                checkpoint = as_listed(step, listed.base)
                self.yielded[step.marker.commit_id] = checkpoint
                return checkpoint
        return None

    def _is_over(self, listed: Catalogue) -> bool:
        """Return whether no more steps come."""
        claim, until = listed.claim, self.until
        if claim is not None and claim.finished:
            return True
        return until is not None and any(natural_order(step.name) >= until for step in listed.steps)

    # --- pins

    def _pin(self, url: str, name: str) -> bool:
        """Pin a step; return False if it was deleted."""
        settings: Any = {"storage_options": self.run.storage_options, "config": self.run.config}
        try:
            # Ask twice before the step is believed to be deleted: the first answer may be damaged,
            # and then the step would never come.
            pin = partial(upkeep.pin, url, name, **settings)
            retry_damaged(pin, errors.CheckpointNotFoundError)
        except errors.CheckpointNotFoundError:
            return False
        except errors.PermissionDeniedError as error:
            error.message += (
                "; a pin is written into the step's marker, so to follow with a pin takes the right"
                " to write there (s3:PutObject); without one nothing is written"
            )
            raise
        return True

    def _unpin(self, url: str, name: str) -> None:
        """Remove the pin of a step; an error is logged."""
        settings: Any = {"storage_options": self.run.storage_options, "config": self.run.config}
        try:
            with suppress(errors.CheckpointNotFoundError):  # the step was deleted, with its pin
                upkeep.unpin(url, name, **settings)
        except errors.DcpObjstoreError as error:
            logger.warning(
                "%s is still pinned as %r; the next poll with this name tries again: %s",
                url,
                name,
                error,
            )

    def _unpin_stale(self, name: str, listed: Catalogue) -> None:
        """Remove the pins that a follower with this name has left.

        It was killed, or this one could not remove a pin when its step was done with.
        """
        wanted = self._wanted(listed)
        for step in self.markers.values():
            if step.stored is None or name not in step.marker.pins:
                continue
            # The step that comes next keeps its pin, which it would get again at once.
            if not wanted or step is not self._chosen(wanted):
                self._unpin(step.store.url, name)
