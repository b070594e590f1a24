"""`Save`: the state of one save on one rank, from its set-up to its end.

It needs no torch, because a copy of a checkpoint is a save, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import commit, index as ix, probe
from dcp_objstore.checkpoint.claim import RunClaim, check_claim, confirm, refuse_uncounted
from dcp_objstore.checkpoint.clock import Clock
from dcp_objstore.checkpoint.commit import BeginToken
from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import MARKER_KEY, new_nonce
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.compat.dot_metadata import encode_metadata
from dcp_objstore.errors import (
    DcpObjstoreError,
    InputError,
    RankFailedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import Committed, Saved
from dcp_objstore.observe.report import SaveReport, logger
from dcp_objstore.state.stored import StoredObject
from dcp_objstore.stores import ObjectStore, StoreSpec
from dcp_objstore.transfer import workers

if TYPE_CHECKING:
    from dcp_objstore.local.copies import SaveCopies


@dataclass(slots=True)
class Save:
    """One save on one rank.

    Attributes:
        is_coordinator: whether this rank commits the save.
        nonce: the random part of the names of this save's objects and of its commit.
        token: the state of the URL before the save; None until the coordinator has read it.
        fenced: whether the store keeps two writers of one checkpoint apart.
        copies: the copies of its objects on this node.
    """

    spec: StoreSpec
    rank: int
    is_coordinator: bool
    channel: Channel
    nonce: str = field(default_factory=new_nonce)
    token: BeginToken | None = None
    fenced: bool = True
    world_size: int = 1
    copies: SaveCopies | None = None

    def open(self) -> ObjectStore:
        """Open the store, rooted at the checkpoint."""
        return self.spec.open()

    def start(
        self, *, overwrite: bool, claim: RunClaim | None, allow_unfenced: bool, clock: Clock
    ) -> None:
        """Put the beacon, read the begin token, and check that this rank could commit.

        The beacon is a small object that shows sweeps that a save is under way; the begin token is
        the state of the URL before the save (rule 2 of `checkpoint.commit`).
        """
        store, claim_number = self.open(), check_claim(claim, self.spec)
        self.token = commit.take_begin_token(
            store,
            overwrite=overwrite,
            claim=claim_number or 0,
            nonce=self.nonce,
            check=partial(_refuse_uncounted, claim, self.spec),
            clock=clock,
        )
        try:
            capabilities = probe.require_fencing(
                store,
                replaces=self.token.version is not None,
                # With a claim the promise does not count: a claim itself needs conditional writes.
                allow_unfenced=allow_unfenced and claim_number is None,
                clock=clock,
            )
        except InputError:
            # This store can never commit. After other errors it may not answer, and a sweep removes
            # the beacon.
            commit.remove_beacon(store, self.token.beacon)
            raise
        self.fenced = capabilities.conditional_create

    def commit_index(
        self,
        built: ix.Index,
        objects: Sequence[StoredObject],
        *,
        user_metadata: Mapping[str, object] | None,
        stock_metadata: bool = True,
        claim: RunClaim | None,
        clock: Clock,
        on_committed: Callable[[SaveReport], object],
    ) -> ix.Index:
        """Commit an index; return it as a reader decodes it.

        Args:
            on_committed: a function that receives the report when the checkpoint is committed and
                counts in its run. Without a claim it is also called before `.metadata` is written.
        """
        store, channel = self.open(), self.channel
        index, index_body = _read_back(built)
        goes_back = claim is not None and claim.goes_back
        assert self.token is not None
        committed = _commit_with_events(
            self,
            store,
            index,
            index_body,
            user_metadata=user_metadata,
            goes_back=goes_back,
            clock=clock,
        )
        report = self.report(objects, committed.commit_id)
        if claim is None:
            # Already now, because Ctrl-C may interrupt what follows. With a claim it is too early:
            # `confirm` raises if the checkpoint does not count in its run.
            on_committed(report)
        requests = [partial(commit.remove_beacon, store, self.token.beacon)]
        if stock_metadata:
            requests.append(partial(_publish, self, store, committed, index=index, clock=clock))
        if claim is not None:
            run = self.spec.at(claim.url).open()
            requests.append(partial(confirm, run, claim.number, goes_back=goes_back, clock=clock))
        workers.concurrently(*requests)
        on_committed(report)
        channel.emit(Saved, channel.began_at, seconds=report.seconds, report=report)
        return index

    def abandon(self, error: BaseException) -> None:
        """Report that the save has failed, and remove its beacon and its copies on this node.

        Errors of these removals are logged or ignored and never raised, so the report always comes.
        """
        # A save keeps the newest copies on the node and writes over all others. If the copies of
        # this failed save stayed, the next save would write over those of the last good checkpoint.
        if self.copies is not None:
            self.copies.give_up()
        # The beacon is the object that shows sweeps that a save is under way (see `start`). If the
        # store may not answer, or the user has pressed Ctrl-C, it stays until a sweep removes it.
        if self.token is not None and not isinstance(error, RetryableError | KeyboardInterrupt):
            commit.remove_beacon(self.open(), self.token.beacon)
        self.channel.fail(error)
        self.channel.flush()

    def report(self, objects: Sequence[StoredObject], commit_id: str | None) -> SaveReport:
        """Return a report on objects: those of all ranks on the coordinator, or this rank's own."""
        return SaveReport(
            url=self.spec.url,
            total_bytes=sum(stored.entry.size_bytes for stored in objects),
            copied_bytes=sum(stored.entry.size_bytes for stored in objects if stored.copied),
            seconds=time.monotonic() - self.channel.began_at,
            objects=len(objects),
            parts=sum(stored.parts for stored in objects),
            commit_id=commit_id,
        )


def _commit_with_events(
    save: Save,
    store: ObjectStore,
    index: ix.Index,
    index_body: bytes,
    *,
    user_metadata: Mapping[str, object] | None,
    goes_back: bool,
    clock: Clock,
) -> commit.CommitResult:
    """Commit the checkpoint and emit events of that. Raises what `commit_checkpoint` raises."""
    assert save.token is not None
    began_at = time.monotonic()

    def emit_retry(attempt: int, error: Exception, first_at: float) -> None:
        text = f"{type(error).__name__}: {error}"
        save.channel.retried("commit", MARKER_KEY, attempt=attempt, error=text, began_at=first_at)

    committed = commit.commit_checkpoint(
        store,
        save.token,
        index=index_body,
        objects=[(entry.key, entry.size_bytes) for entry in index.objects],
        counts=Counts.of(index),
        world_size=save.world_size,
        user_metadata=user_metadata,
        nonce=save.nonce,
        goes_back=goes_back,
        fenced=save.fenced,
        clock=clock,
        on_retry=emit_retry,
    )
    save.channel.emit(
        Committed, began_at, commit_id=committed.commit_id, attempts=committed.attempts
    )
    return committed


def _publish(
    save: Save,
    store: ObjectStore,
    committed: commit.CommitResult,
    *,
    index: ix.Index,
    clock: Clock,
) -> None:
    """Write `.metadata`. The checkpoint is committed already, so a failure only warns."""
    try:
        publish_dot_metadata(
            store,
            committed.commit_id,
            encode_metadata(index),
            tries=clock.tries(),
            condition=committed.dot_metadata,
            fenced=save.fenced,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the save has succeeded
        logger.warning(
            "%s is committed, but its .metadata, which stock torch readers need, could not be"
            " written: %s",
            store.url,
            error,
        )


def _refuse_uncounted(claim: RunClaim | None, step: StoreSpec) -> None:
    """Raise, before a save, if its checkpoint would not count in its run. Costs one GET.

    Without a claim, the run is the prefix above the checkpoint. If that cannot be read (for example
    with rights to the checkpoint only), the save goes on: the prefix may well not be a run.

    Raises:
        SupersededError: another job has taken the run over.
        DcpObjstoreError: the run's claim cannot be used, or the store failed.
    """
    if claim is not None:
        refuse_uncounted(step.at(claim.url).open(), claim.number)
        return
    try:
        run, _ = step.parent()
        if run is not None:
            refuse_uncounted(run.open(), 0)
    except UnsupportedError:  # a subclass of InputError: `_CLAIM` was read, and cannot be used
        raise
    except InputError as error:
        logger.debug(
            "%s: cannot read the prefix above, so no claim is checked: %s", step.url, error
        )


def _read_back(index: ix.Index) -> tuple[ix.Index, bytes]:
    """Encode the index; return it as a reader decodes it, and its stored form.

    Raises:
        RankFailedError: readers would refuse the index, so it must not be committed.
    """
    body = ix.encode(index)
    try:
        return ix.decode(body), body
    except DcpObjstoreError as error:
        raise RankFailedError(
            f"the save is not committed, because its index could not be read back: {error.message}",
            key=error.key,
            object_key=error.object_key,
        ) from error
