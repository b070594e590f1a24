"""Sweep a checkpoint: remove what no commit names and no reader can still be using.

The rule of `commit` that this module implements:

 9. A sweep takes these steps, in this order:

    - Read the marker. If it says `deleting`, finish the deletion, then stop.
    - If it is a committed step that will never count again, delete it (rule 8), then stop. Its
      claim is below the base of its run, which only rises (rule C3 of `claim`); it is older than
      the grace period and has no pin, and no young beacon shows a save that is about to replace it.
      Any job may do this, even one of an earlier claim than the step's: rule C5 is about steps that
      count.
    - List the uploads in progress, then the objects. Candidates are objects with names of our form
      that the committed index does not name (a tombstone names nothing) and that are older than the
      grace period. If there are none, stop.
    - Stop if an unnamed object, an upload or a beacon is younger than the grace period: a save may
      be under way, and a fence would defeat it. (The beacon shows the save even if uploads cannot
      be listed.) Stop if the marker is younger: readers may still be using what it named before.
      (If a sweep stops here or at the step before, and no beacon is young, it still brings
      `.metadata` into line, and fences if that changed it.)
    - **Fence**: change the marker's write_id, or put a tombstone if there is no marker, so that no
      save that began before can commit. Read the marker back, and go on only if it is ours.
    - Bring `.metadata` into line. If that changed it, fence again and stop, because stock readers
      may be using what it named. (Every other job that changes `.metadata` rewrites the marker,
      too.) For the same reason, stop if the marker is no longer that of the fence, or if
      `.metadata` is younger than the grace period.
    - Delete exactly the candidates that were listed before the fence and that are older than the
      grace period by the store's own time, that of the fence.

    This is safe without trusting any clock because the listing comes before the fence: what is
    listed belongs to a save that began before the fence and so cannot commit any more. This host's
    clock only decides whether there may be something to do. Parts of uploads that began longer ago
    than the grace period and never completed are removed, too; such an upload can only fail then.
    So are old beacons and old objects of `probe`, which no commit ever names. A save that begins
    between the listing and the fence, which follow each other at once, is defeated.

A sweep leaves two things alone on purpose: keys that do not have our form, which it reports; and a
prefix with a `.metadata` and no marker, where another library saved (a tombstone would hide that).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock
from dcp_objstore.checkpoint.commit import finish_deleting, put_tombstone, rewrite_marker
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_index_key,
    is_ours,
    is_probe_key,
    is_upload_key,
)
from dcp_objstore.checkpoint.publish import Aligned, Change, DotMetadata, align_dot_metadata
from dcp_objstore.checkpoint.read import Stored, named_keys, read_marker
from dcp_objstore.errors import ConfigError, printable
from dcp_objstore.observe.report import counted, size_text
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, UnfinishedUpload, Uploads
from dcp_objstore.stores.retries import Tries

GRACE_SECONDS: Final = 24 * 3600.0
LEAST_GRACE_SECONDS: Final = 3600.0

SweepOutcome: TypeAlias = Literal[
    "clean", "swept", "waiting", "mended", "lost", "foreign", "damaged"
]

_LOST = "another job changed the marker"


@dataclass(frozen=True, kw_only=True)
class CheckpointSweep:
    """The result of a sweep at one checkpoint, or with `dry_run` what it would do.

    Attributes:
        url: URL of the checkpoint.
        outcome: `clean`: there is nothing to remove. `swept`: objects were removed. `waiting`:
            there is something to remove, but not yet; `reason` says why. `mended`: an unfinished
            deletion was finished, a superseded step was deleted, or `.metadata` was brought into
            line; sweep again after the grace period. `lost`: another job changed the marker
            during the sweep, and nothing was removed. `foreign`: another library's checkpoint, left
            alone. `damaged`: the checkpoint cannot be read and was left alone.
        reason: why the sweep stopped, in words, or None.
        deleted: number of objects that were removed.
        deleted_bytes: their size.
        kept_young: number of unnamed objects that are younger than the grace period.
        unknown: keys that do not have our form; they are left alone.
        uploads_aborted: number of orphaned uploads that were removed.
        uploads_bytes: the size of their parts.
        uploads_young: number of uploads in progress.
        dot_metadata: what was done to `.metadata`, or None.
        finished_delete: the sweep finished a deletion that had been begun before.
        superseded: the sweep deleted a step of a superseded job that will never count again.
        fenced: the marker was rewritten, so a save that was under way here can no longer commit.
        dry_run: nothing was changed.
    """

    url: str
    outcome: SweepOutcome
    reason: str | None = None
    deleted: int = 0
    deleted_bytes: int = 0
    kept_young: int = 0
    unknown: tuple[str, ...] = ()
    uploads_aborted: int = 0
    uploads_bytes: int = 0
    uploads_young: int = 0
    dot_metadata: Change | None = None
    finished_delete: bool = False
    superseded: bool = False
    fenced: bool = False
    dry_run: bool = False

    def __str__(self) -> str:
        """Return what was done here, on one line."""
        would = "would be " if self.dry_run else ""
        parts = []
        if self.deleted:
            size = size_text(self.deleted_bytes)
            parts.append(f"{counted(self.deleted, 'object')}, {size}, {would}removed")
        if self.uploads_aborted:
            uploads, size = self.uploads_aborted, size_text(self.uploads_bytes)
            parts.append(f"{counted(uploads, 'unfinished upload')}, {size}, {would}removed")
        if self.finished_delete:
            parts.append(f"a deletion begun before {would}finished; its objects later")
        if self.superseded:
            parts.append(f"a step that a superseded job saved {would}deleted; its objects later")
        if self.dot_metadata is not None:
            parts.append(f".metadata {would}{self.dot_metadata}")
            if self.fenced:  # there were objects to remove, but readers may use the old `.metadata`
                parts[-1] += "; objects later"
        if self.outcome in ("waiting", "foreign", "lost", "damaged"):
            label = {"waiting": "not yet", "damaged": "cannot be read"}.get(
                self.outcome, "left alone"
            )
            parts.append(f"{label}: {self.reason}")
        return printable(f"{self.url}: {'; '.join(parts) or 'nothing to remove'}")


def sweep(
    store: ObjectStore,
    *,
    dot_metadata: DotMetadata,
    uploads: Uploads | None = None,
    grace_seconds: float = GRACE_SECONDS,
    base: int = 0,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> CheckpointSweep:
    """Sweep the checkpoint at the store's root (rule 9). After a crash, the next sweep continues.

    Args:
        store: the store, rooted at the checkpoint. It needs conditional updates
            (`probe.require_rewrites`).
        dot_metadata: makes and compares the content of `.metadata`.
        uploads: the uploads below the same root, or None to leave them alone.
        grace_seconds: objects that are younger than this are kept. It must be longer than the
            longest save and the longest load, and at least an hour. Default 24 h.
        base: the oldest claim whose steps count in this run; committed steps of earlier
            claims are deleted. Default 0: the run has no claims.
        dry_run: change nothing.
        clock: the clock, which also sets the deadline: by default 60 s after the start.

    Raises:
        ConfigError: the grace period is too short.
        CheckpointCorruptError, UnsupportedError: the marker or the index cannot be read. Nothing
            was removed, because it is not known what the commit names.
        CheckpointGoneError: it was replaced or deleted during the sweep; nothing was removed.
        CommitUnknownError, RetryableError: no success before the deadline; no data object was
            removed.
    """
    check_grace(grace_seconds)
    return _Sweep(
        store=store,
        dot_metadata=dot_metadata,
        uploads=uploads,
        grace_seconds=grace_seconds,
        base=base,
        dry_run=dry_run,
        tries=clock.tries(),
    ).run(clock.utc_now())


def check_grace(grace_seconds: float) -> float:
    """Check and return a grace period, which must let a slow save and a slow reader finish.

    Raises:
        ConfigError: it is not a number, or less than an hour.
    """
    is_number = isinstance(grace_seconds, (int, float))
    if not is_number or not LEAST_GRACE_SECONDS <= grace_seconds < float("inf"):
        raise ConfigError(
            f"grace_seconds must be a number of at least {LEAST_GRACE_SECONDS:.0f} (an hour), got"
            f" {grace_seconds!r}: what is younger may belong to a save that is under way"
        )
    return grace_seconds


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The plan of a sweep at one checkpoint.

    Attributes:
        outcome: `swept` if there is something to remove now; otherwise why there is not.
        candidates: objects to remove, data before indexes.
        young: unnamed objects that are younger than the grace period.
        unknown: keys that do not have our form.
        short_lived: old beacons, and objects that `probe` left; removed whatever the outcome.
        uploads: orphaned uploads; aborted whatever the outcome.
        uploads_young: uploads in progress.
    """

    outcome: SweepOutcome
    reason: str | None
    candidates: tuple[ObjectMeta, ...]
    young: tuple[ObjectMeta, ...]
    unknown: tuple[str, ...]
    short_lived: tuple[ObjectMeta, ...]
    uploads: tuple[UnfinishedUpload, ...]
    uploads_young: tuple[UnfinishedUpload, ...]


def plan_sweep(
    listing: Iterable[ObjectMeta],
    *,
    marker_written_at: datetime | None,
    named: Collection[str],
    uploads: Iterable[UnfinishedUpload],
    now: datetime,
    grace_seconds: float,
) -> SweepPlan:
    """Decide, without any request, what a sweep of one checkpoint may remove.

    Args:
        listing: all objects below the checkpoint. Keys with a slash belong to other checkpoints.
        marker_written_at: the time at which the marker was written, by the store's clock; None if
            there is none.
        named: the keys that the committed index names, and its own; empty for a tombstone.
        uploads: uploads in progress or orphaned, with keys relative to the checkpoint.
        now: the time to measure ages by.
        grace_seconds: the age from which an object is old.
    """
    oldest_kept = now - timedelta(seconds=grace_seconds)
    metas = [meta for meta in listing if "/" not in meta.key]
    unnamed = [meta for meta in metas if is_ours(meta.key) and meta.key not in named]
    candidates = [meta for meta in unnamed if meta.last_modified < oldest_kept]
    short_lived = [meta for meta in metas if is_beacon_key(meta.key) or is_probe_key(meta.key)]
    # A young beacon shows a save that may have no objects yet. A young probe shows a job that is
    # about to save or to sweep.
    young = tuple(meta for meta in (*unnamed, *short_lived) if meta.last_modified >= oldest_kept)
    # On an object store only data objects are uploaded in parts. On `file://` an upload may be of
    # any object, because a crash may leave each of them half written.
    our_uploads = [upload for upload in uploads if is_upload_key(upload.key)]
    uploads_young = tuple(upload for upload in our_uploads if upload.initiated >= oldest_kept)
    known_keys = {MARKER_KEY, DOT_METADATA_KEY, CLAIM_KEY, *named}
    outcome: SweepOutcome = "waiting"
    reason = None
    if marker_written_at is None and any(meta.key == DOT_METADATA_KEY for meta in metas):
        outcome = "foreign"
        reason = (
            "there is a '.metadata' without a marker: another library's checkpoint, or one whose"
            " marker was removed"
        )
    elif young:
        objects = "an object is" if len(young) == 1 else f"{len(young)} objects are"
        reason = f"{objects} younger than the grace period, which a save under way may need"
    elif not candidates:
        outcome = "clean"
    elif uploads_young:
        reason = "an upload is in progress"
    elif marker_written_at is not None and marker_written_at >= oldest_kept:
        reason = "the last change here is younger than the grace period"
    else:
        outcome = "swept"
    return SweepPlan(
        outcome=outcome,
        reason=reason,
        # The index last: as long as it exists, it names the other objects.
        candidates=tuple(sorted(candidates, key=lambda meta: is_index_key(meta.key))),
        young=young,
        unknown=tuple(
            meta.key
            for meta in metas
            if not is_ours(meta.key) and meta not in short_lived and meta.key not in known_keys
        ),
        short_lived=tuple(meta for meta in short_lived if meta.last_modified < oldest_kept),
        uploads=tuple(upload for upload in our_uploads if upload.initiated < oldest_kept),
        uploads_young=uploads_young,
    )


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """One sweep of one checkpoint, step by step."""

    store: ObjectStore
    dot_metadata: DotMetadata
    uploads: Uploads | None
    grace_seconds: float
    base: int
    dry_run: bool
    tries: Tries

    def run(self, now: datetime) -> CheckpointSweep:
        """Remove what no commit names, and return what was done (rule 9).

        It reads what a commit names, then lists. It begins with what a crash left unfinished: a
        deletion, or `.metadata`. Objects that a commit might name are removed only behind a fence,
        by `_remove`; others, such as old beacons, need none.
        """
        stored = read_marker(self.store)
        if stored is not None and stored.record.state == "deleting":
            if not self.dry_run:
                finish_deleting(self.store, stored.record.commit_id, self.tries)
            return CheckpointSweep(
                url=self.store.url, outcome="mended", finished_delete=True, dry_run=self.dry_run
            )
        # `_has_beacon` sends a listing, so it is asked last: only for a step that never counts.
        if stored is not None and self._never_counts(stored, now) and not self._has_beacon(now):
            return self._delete_superseded(stored)
        marker = None if stored is None else stored.record
        named = self._named_keys(marker)
        # Uploads are listed before objects: one that completes in between is seen in both listings,
        # and not in neither.
        uploads = self.uploads.list() if self.uploads is not None else ()
        listing = list(self.store.list())
        plan = plan_sweep(
            listing,
            marker_written_at=None if stored is None else stored.meta.last_modified,
            named=named,
            uploads=uploads,
            now=now,
            grace_seconds=self.grace_seconds,
        )
        if not self.dry_run:
            for upload in plan.uploads:
                assert self.uploads is not None
                self.uploads.abort(upload)
            self._delete(plan.short_lived)
        report = self._report(plan)
        if plan.outcome == "swept":
            return self._remove(report, plan, stored)
        # `.metadata` may be missing or old because the writer of a commit died before it wrote it,
        # or it may have been left beside a tombstone. `_mend` removes no data, so it needs no
        # fence. But after a change it ends with one, which would defeat a save that is under way.
        published = next((meta for meta in listing if meta.key == DOT_METADATA_KEY), None)
        save_is_under_way = any(is_beacon_key(meta.key) for meta in plan.young)
        if stored is not None and not save_is_under_way and _may_be_stale(stored, published):
            return self._mend(report, stored)
        return report

    def _never_counts(self, stored: Stored[Marker], now: datetime) -> bool:
        """Return whether this is a superseded job's step, unpinned and past the grace period."""
        marker, meta = stored
        age = now - meta.last_modified
        superseded = marker.is_committed and marker.claim < self.base
        return superseded and not marker.pins and age > timedelta(seconds=self.grace_seconds)

    def _has_beacon(self, now: datetime) -> bool:
        """Return whether a young beacon shows a save under way, which a deletion would defeat."""
        oldest_kept = now - timedelta(seconds=self.grace_seconds)
        beacons = (meta for meta in self.store.list() if is_beacon_key(meta.key))
        return any(meta.last_modified >= oldest_kept for meta in beacons)

    def _delete_superseded(self, stored: Stored[Marker]) -> CheckpointSweep:
        """Delete the step. A later sweep removes its objects, after the grace period."""
        if not self.dry_run:
            if not rewrite_marker(self.store, stored, "the deletion", self.tries, state="deleting"):
                return CheckpointSweep(url=self.store.url, outcome="lost", reason=_LOST)
            finish_deleting(self.store, stored.record.commit_id, self.tries)
        return CheckpointSweep(
            url=self.store.url, outcome="mended", superseded=True, dry_run=self.dry_run
        )

    def _named_keys(self, marker: Marker | None) -> frozenset[str]:
        """Return the keys that the commit names; none for a tombstone or without a marker."""
        if marker is None or not marker.is_committed:
            return frozenset()
        return frozenset(named_keys(self.store, marker))

    def _delete(self, metas: Iterable[ObjectMeta]) -> None:
        for meta in metas:
            self.store.delete(meta.key)

    def _report(self, plan: SweepPlan) -> CheckpointSweep:
        """Report everything except what happens from the fence on."""
        # `run` removes old beacons and probes even if there is nothing else to remove.
        only_short_lived = plan.outcome == "clean" and plan.short_lived
        return CheckpointSweep(
            url=self.store.url,
            outcome="swept" if only_short_lived else plan.outcome,
            reason=plan.reason,
            deleted=len(plan.short_lived),
            deleted_bytes=sum(meta.size_bytes for meta in plan.short_lived),
            kept_young=len(plan.young),
            unknown=plan.unknown,
            uploads_aborted=len(plan.uploads),
            uploads_bytes=sum(upload.size_bytes for upload in plan.uploads),
            uploads_young=len(plan.uploads_young),
            dry_run=self.dry_run,
        )

    def _align(self, stored: Stored[Marker]) -> Aligned:
        """Bring `.metadata` into line; if that changed it, rewrite the marker.

        So the marker is young, and later sweeps wait for readers of the old `.metadata`. If the
        rewrite is refused, another job has just written the marker, which is as good.
        """
        store, tries = self.store, self.tries
        aligned = align_dot_metadata(
            store, stored, self.dot_metadata, tries=tries, dry_run=self.dry_run
        )
        if aligned.change is not None and not self.dry_run:
            rewrite_marker(store, aligned.stored, "the fence", tries)
        return aligned

    def _mend(self, report: CheckpointSweep, stored: Stored[Marker]) -> CheckpointSweep:
        """Bring `.metadata` into line with the marker, unless the marker has changed since."""
        if not self.dry_run:
            again = read_marker(self.store)
            if again is None or again.record.write_id != stored.record.write_id:
                return replace(report, outcome="lost", reason=_LOST)
            stored = again
        change = self._align(stored).change
        if change is None:
            return report
        outcome: SweepOutcome = "mended" if report.outcome == "clean" else report.outcome
        return replace(report, outcome=outcome, dot_metadata=change)

    def _remove(
        self, report: CheckpointSweep, plan: SweepPlan, stored: Stored[Marker] | None
    ) -> CheckpointSweep:
        """Fence the checkpoint, then delete the candidates that are old by the store's clock.

        Args:
            report: the report so far.
            plan: the plan, made from the listing, which came before the fence.
            stored: the marker as it was read before that; None if there was none.
        """
        if self.dry_run:
            change = None if stored is None else self._align(stored).change
            if change is not None:
                return replace(report, outcome="mended", dot_metadata=change)
            return _with_deleted(report, plan.candidates)
        written = self._fence(stored)
        if written is None:
            return replace(report, outcome="lost", reason=_LOST)
        report = replace(report, fenced=True)
        fence = read_marker(self.store)
        # If another job has changed the marker since, its time is not that of the fence.
        if fence is None or fence.record.write_id != written.write_id:
            return replace(report, outcome="lost", reason=_LOST)
        # From here on, only the store's own time counts.
        oldest_kept = fence.meta.last_modified - timedelta(seconds=self.grace_seconds)
        candidates = [meta for meta in plan.candidates if meta.last_modified < oldest_kept]
        marker_is_old = stored is None or stored.meta.last_modified < oldest_kept
        if not candidates or not marker_is_old:
            reason = "by the store's clock, nothing is older than the grace period"
            return replace(report, outcome="waiting", reason=reason)
        return self._remove_after_fence(report, fence, candidates, oldest_kept)

    def _remove_after_fence(
        self,
        report: CheckpointSweep,
        fence: Stored[Marker],
        candidates: Sequence[ObjectMeta],
        oldest_kept: datetime,
    ) -> CheckpointSweep:
        """Bring `.metadata` into line with the marker; if it was already, delete the candidates.

        Args:
            report: the report so far.
            fence: the marker that this sweep has written.
            candidates: the objects to delete.
            oldest_kept: the beginning of the grace period, by the store's clock.
        """
        aligned = self._align(fence)
        if aligned.change is not None:  # stock readers may still use the old one
            return replace(report, outcome="mended", dot_metadata=aligned.change)
        if aligned.stored.record.write_id != fence.record.write_id:
            return replace(report, outcome="lost", reason=_LOST)
        if aligned.written_at is not None and aligned.written_at >= oldest_kept:
            reason = "'.metadata' is younger than the grace period: stock readers may use the old"
            return replace(report, outcome="waiting", reason=reason)
        self._delete(candidates)
        return _with_deleted(report, candidates)

    def _fence(self, stored: Stored[Marker] | None) -> Marker | None:
        """Rewrite the marker, or put a tombstone; None if another job has changed it."""
        if stored is None:
            return put_tombstone(self.store, self.tries)
        return rewrite_marker(self.store, stored, "the fence", self.tries)


def _may_be_stale(stored: Stored[Marker], published: ObjectMeta | None) -> bool:
    """Return whether `.metadata` may be out of line with the marker, judged by the listing.

    It is certainly in line only if it is not older than the marker of a commit, or missing beside a
    tombstone. Only `align_dot_metadata` reads it, which costs requests.

    Args:
        published: `.metadata`, as the listing shows it; None if there is none.
    """
    marker, meta = stored
    if not marker.is_committed:
        return published is not None
    return published is None or published.last_modified < meta.last_modified


def _with_deleted(report: CheckpointSweep, metas: Collection[ObjectMeta]) -> CheckpointSweep:
    """Return the report with these objects among those that were removed."""
    return replace(
        report,
        deleted=report.deleted + len(metas),
        deleted_bytes=report.deleted_bytes + sum(meta.size_bytes for meta in metas),
    )
