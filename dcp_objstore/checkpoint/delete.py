"""Delete a checkpoint, so that no reader ever sees half of it and any job can finish.

The rule of `commit` that this module implements:

 8. Delete: change the marker to `deleting`, with a conditional PUT against what was read, so that a
    pin or a commit that came first wins. From here on readers find no checkpoint. Read the marker
    again; while it is `deleting` and belongs to the same commit, remove `.metadata` and change the
    marker to `deleted`. The marker still names the index and stays for ever. Then remove the
    objects: exactly the keys that the index named, never a prefix, data first and the index last,
    so that a crash can be resumed. With a grace period they stay until it is over, for readers that
    have begun; no rule needs one, because a reader that misses an object reads the marker again
    (rule 7). A sweep removes what a deletion leaves. Any job may finish a `deleting`
    (`commit.finish_deleting`); a save that begins here does so. This module refuses to delete a
    pinned checkpoint; its callers protect the newest committed step of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, pause_or_raise
from dcp_objstore.checkpoint.commit import finish_deleting, refuse_later, rewrite_marker
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import is_ours
from dcp_objstore.checkpoint.read import Stored, named_keys, not_committed, read_marker
from dcp_objstore.config import check_number
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointPinnedError,
    LostRaceError,
    UnsupportedError,
    printable,
)
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.stores.retries import Tries
from dcp_objstore.transfer.workers import in_waves


@dataclass(frozen=True, kw_only=True)
class DeleteReport:
    """The result of a deletion, or with `dry_run` what it would do.

    Attributes:
        url: URL of the checkpoint.
        commit_id: id of the commit that was deleted.
        objects: number of its data objects, according to the marker.
        total_bytes: their size, according to the marker.
        removed_objects: objects that were removed, data and index; 0 within the grace period.
        finished: this call finished a deletion that had been begun before.
        superseded: another save has committed here since; what it wrote is untouched.
        index_damaged: the index cannot be read, so no objects were removed; a sweep removes them
            when they are older than its grace period.
        dry_run: nothing was changed.
    """

    url: str
    commit_id: str
    objects: int
    total_bytes: int
    removed_objects: int
    finished: bool
    superseded: bool
    index_damaged: bool
    dry_run: bool

    def __str__(self) -> str:
        """Return what was deleted, how much of it, and what stays, on a few lines."""
        size = f"{counted(self.objects, 'data object')}, {size_text(self.total_bytes)}"
        text = f"{'would delete' if self.dry_run else 'deleted'} {printable(self.url)} ({size})"
        if self.finished:
            text += "\n  its deletion had begun before; this finishes it"
        if self.index_damaged:
            text += "\n  its index is damaged: only a sweep can remove its objects, after a day"
        elif not self.removed_objects:
            text += "\n  its objects stay for jobs that are reading it: the same call removes them"
            text += " after the grace period, or a sweep after 24 h"
        elif self.dry_run:
            text += "\n  and remove its objects; a job that is reading it gets an error"
        else:
            removed = counted(self.removed_objects, "object")
            text += f"\n  removed {removed}, the index among them"
        if self.superseded:
            text += "\n  a new save has been committed here since; it is untouched"
        return text


def delete(
    store: ObjectStore,
    *,
    grace_seconds: float = 0.0,
    dry_run: bool = False,
    claim: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> DeleteReport:
    """Delete the checkpoint at the store's root (rule 8). After a crash, call it again to go on.

    Args:
        store: the store, rooted at the checkpoint. It needs conditional updates
            (`probe.require_rewrites`).
        grace_seconds: keep the objects until the deletion is this old. By default they are removed
            now, and a job that is reading the checkpoint gets a CheckpointGoneError. On a tombstone
            that is old enough, by this host's clock, remove what the commit left.
        dry_run: change nothing, but refuse what would be refused.
        claim: number of the claim of the job that deletes, 0 if it has none (rule C5 of `claim`);
            None if the caller is not such a job, so that claims do not matter.
        clock: the time, and the deadline. Default: 60 s.

    Raises:
        CheckpointNotFoundError: nothing is committed here (any more).
        CheckpointPinnedError: the checkpoint is pinned; the error names the pins.
        SupersededError: the checkpoint has a later claim than the job.
        LostRaceError: another save replaced the checkpoint; nothing was deleted.
        CommitUnknownError: no clear answer before the deadline; the same call goes on from there.
        CheckpointCorruptError, UnsupportedError: the marker cannot be read.
    """
    tries = clock.tries()
    stored = read_marker(store)
    if stored is None:
        raise not_committed(store, stored)
    marker = stored.record
    if claim is not None:
        refuse_later(store, marker, claim)
    _refuse_pinned(store, marker)
    age_seconds = 0.0
    if marker.state == "deleted":
        age_seconds = (clock.utc_now() - stored.meta.last_modified).total_seconds()
    # Without a grace period the age does not matter: the store's clock may be ahead of this host's,
    # so that it is negative.
    grace_is_over = not grace_seconds or age_seconds >= grace_seconds
    # The index is read before the marker changes, because afterwards a sweep may remove it at any
    # time. `keys` is None if it cannot be read.
    keys = _own_keys(store, marker) if grace_is_over else ()
    if marker.state == "deleted" and not keys:
        # Nothing is left, the grace period is not over, or the index cannot be read.
        raise not_committed(store, stored)
    was_begun = marker.state != "committed"
    superseded = False
    if not dry_run:
        if not was_begun:
            _begin_deleting(store, stored, claim, tries)
        superseded = finish_deleting(store, marker.commit_id, tries)
        _remove(store, keys or ())
    return DeleteReport(
        url=store.url,
        commit_id=marker.commit_id,
        objects=marker.counts.objects,
        total_bytes=marker.counts.total_bytes,
        removed_objects=len(keys or ()),
        finished=was_begun,
        superseded=superseded,
        index_damaged=keys is None,
        dry_run=dry_run,
    )


def remove_deleted(store: ObjectStore, commit_id: str) -> None:
    """Remove the objects of a commit whose deletion had a grace period, which is over.

    Does nothing if another save has written to this URL since, or if the index cannot be read.
    """
    stored = read_marker(store)
    if stored is None or stored.record.commit_id != commit_id:
        return
    if stored.record.state == "deleted":
        keys = _own_keys(store, stored.record)
        if keys is not None:
            _remove(store, keys)


def check_deletion_grace(grace_seconds: float) -> float:
    """Check and return the seconds for which the objects of a deleted checkpoint stay.

    Raises:
        ConfigError: it is not a number of seconds, 0 or more.
    """
    check_number("grace_seconds", grace_seconds, 0, whole=False)
    return float(grace_seconds)


def _remove(store: ObjectStore, keys: Sequence[str]) -> None:
    """Remove objects, and the index, which is the last key, only when all others are gone.

    So after a crash the index still says what there is to remove.
    """
    for _ in in_waves(store.delete, keys[:-1]):
        pass
    for key in keys[-1:]:
        store.delete(key)


def _refuse_pinned(store: ObjectStore, marker: Marker) -> None:
    """Raise CheckpointPinnedError if the marker is that of a pinned commit."""
    if marker.is_committed and marker.pins:
        raise CheckpointPinnedError(
            f"the checkpoint is pinned ({', '.join(marker.pins)}) and was not deleted",
            advice="unpin it first",
            url=store.url,
        )


def _own_keys(store: ObjectStore, marker: Marker) -> tuple[str, ...] | None:
    """Return exactly the keys of a commit, the index last, or None if its index cannot be read.

    A key that does not have our form is left out, because this package never wrote it.
    """
    try:
        named = named_keys(store, marker)
    except (CheckpointCorruptError, CheckpointGoneError, UnsupportedError):
        return None
    return tuple(key for key in dict.fromkeys(named) if is_ours(key))


def _begin_deleting(
    store: ObjectStore, stored: Stored[Marker], claim: int | None, tries: Tries
) -> None:
    """Change the marker to `deleting`, even if others rewrite it at the same time."""
    marker = stored.record
    while not rewrite_marker(store, stored, "the deletion", tries, state="deleting"):
        again = read_marker(store)
        if again is None or again.record.commit_id != marker.commit_id:
            raise LostRaceError(
                "another save replaced this checkpoint before it was deleted; nothing was deleted",
                url=store.url,
            )
        if again.record.state != "committed":
            return  # another deleter was first
        if claim is not None:
            refuse_later(store, again.record, claim)
        _refuse_pinned(store, again.record)
        stored = again
        pause_or_raise(store, tries)
