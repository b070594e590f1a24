"""Repair a checkpoint: finish what a crash after the commit or during a deletion left undone."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock
from dcp_objstore.checkpoint.commit import finish_deleting, rewrite_marker
from dcp_objstore.checkpoint.probe import can_rewrite
from dcp_objstore.checkpoint.publish import Change, DotMetadata, align_dot_metadata
from dcp_objstore.checkpoint.read import not_committed, read_marker
from dcp_objstore.errors import printable
from dcp_objstore.stores.protocol import ObjectStore


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """The result of a repair, or with `dry_run` what it would do.

    Attributes:
        url: URL of the checkpoint.
        state: state of the marker afterwards: `committed` or `deleted`.
        commit_id: the commit that the marker names.
        finished_delete: this call finished a deletion that had been begun before.
        dot_metadata: what was done to `.metadata`, by which stock torch finds the checkpoint. None
            if it was in line with the marker.
        dry_run: nothing was changed.
    """

    url: str
    state: str
    commit_id: str
    finished_delete: bool
    dot_metadata: Change | None
    dry_run: bool

    def __str__(self) -> str:
        """Return what was repaired, on one line."""
        would = "would be " if self.dry_run else ""
        done = []
        if self.finished_delete:
            done.append(f"its deletion, begun before, {would or 'was '}finished")
        if self.dot_metadata is not None:
            done.append(f".metadata {would or 'was '}{self.dot_metadata}")
        return f"{printable(self.url)} ({self.state}): {'; '.join(done) or 'nothing to repair'}"


def repair(
    store: ObjectStore,
    *,
    dot_metadata: DotMetadata,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> RepairReport:
    """Finish a deletion that was begun, and bring `.metadata` into line with the marker (rule 6).

    No data object is touched. If this changes `.metadata` while a save that overwrites is under way
    here, that save ends with `CommitLostError`.

    Args:
        store: the store, rooted at the checkpoint.
        dot_metadata: makes and compares the content of `.metadata`.
        dry_run: change nothing.
        clock: the time, and the deadline. Default: 60 s.

    Raises:
        CheckpointNotFoundError: there is no marker: another library wrote the checkpoint, or none
            was ever committed.
        CheckpointCorruptError, UnsupportedError: the marker or the index cannot be read.
        CheckpointGoneError: it was replaced or deleted during the repair; repair it again.
        CommitUnknownError, RetryableError: no success before the deadline; repair it again.
    """
    tries = clock.tries()
    finished = False
    stored = read_marker(store)
    # In a loop, because the deletion of a later commit may have begun since.
    while stored is not None and stored.record.state == "deleting":
        finished = True
        if dry_run:
            return RepairReport(
                url=store.url,
                state="deleted",
                commit_id=stored.record.commit_id,
                finished_delete=True,
                dot_metadata=None,
                dry_run=True,
            )
        finish_deleting(store, stored.record.commit_id, tries)
        stored = read_marker(store)
    if stored is None:
        raise not_committed(store, stored)
    aligned = align_dot_metadata(store, stored, dot_metadata, tries=tries, dry_run=dry_run)
    # The marker is written again so that a sweep finds it young, and waits for the readers of the
    # old `.metadata`. A store without conditional writes has no sweeps, and there this PUT might
    # undo a save.
    if aligned.change is not None and not dry_run and can_rewrite(store):
        rewrite_marker(store, aligned.stored, "the fence", tries)
    return RepairReport(
        url=store.url,
        state=aligned.stored.record.state,
        commit_id=aligned.stored.record.commit_id,
        finished_delete=finished,
        dot_metadata=aligned.change,
        dry_run=dry_run,
    )
