"""Sweeping a checkpoint: removing what no commit names and nobody is using any more.

The rule of `commit` that this module carries out:

 9. Sweep, in this order: read the marker (finish a `deleting`, then stop). List the uploads in
    progress, then the objects; candidates are objects with names of our own that the committed
    index does not name (a tombstone names nothing) and that are older than the grace period. None:
    stop. Also stop where an unnamed object or an upload is younger (a save may be under way, and a
    fence would defeat it), and where the marker is (readers may still be using what it named
    before). **Fence**: change the marker's write_id, or put a tombstone where there is no marker,
    so that no save that began before can commit any more; read it back and go on only if it is
    ours. Bring `.metadata` into line; if that was needed, fence again and stop, because stock
    readers may be using what it named. Delete exactly the candidates that were listed before the
    fence and that are older than the grace period by the store's own time, that of the fence.

    Listing before fencing is what makes this safe without trusting any clock: what is listed
    belongs to a save that began before the fence and so cannot commit any more. This host's clock
    only decides whether there may be something to do. Parts of uploads that were begun longer ago
    than the grace period, and never completed, are removed too; such an upload can only fail then.

Two things are left alone on purpose: keys of other forms than ours, which are reported; and a
prefix with a `.metadata` and no marker, where another library saved (a tombstone would hide that).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias

from dcp_objstore.checkpoint import index as ix
from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.commit import put_tombstone, rewrite_marker
from dcp_objstore.checkpoint.deleting import finish_deleting
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_ours,
    parse_data_key,
    parse_index_key,
)
from dcp_objstore.checkpoint.opening import Found, find_marker, read_index
from dcp_objstore.checkpoint.publishing import (
    Change,
    DotMetadata,
    align_dot_metadata,
    needed_change,
)
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore
from dcp_objstore.stores.uploads import Upload, Uploads

GRACE_SECONDS: Final = 24 * 3600.0
LEAST_GRACE_SECONDS: Final = 3600.0

Outcome: TypeAlias = Literal["clean", "swept", "waiting", "mended", "lost", "foreign", "damaged"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSweep:
    """What a sweep did at one checkpoint; with `dry_run` what it would do.

    Attributes:
        url: the checkpoint.
        outcome: `clean`: nothing to remove. `swept`: objects were removed. `waiting`: there is
            something to remove, and not yet; `reason` says why. `mended`: an unfinished deletion
            was finished, or `.metadata` brought into line; sweep again after the grace period.
            `lost`: somebody else changed the marker meanwhile, and nothing was removed. `foreign`:
            another library's checkpoint, left alone. `damaged`: it cannot be read, and was left.
        reason: in words, or None.
        deleted: objects that were removed.
        deleted_bytes: their sizes.
        kept_young: unnamed objects that are younger than the grace period.
        unknown: keys that are not of our form; left alone.
        uploads_aborted: orphaned uploads that were removed.
        uploads_bytes: the sizes of their parts.
        uploads_young: uploads in progress.
        dot_metadata: what was done to `.metadata`.
        finished_delete: a deletion that somebody had begun was finished.
        fenced: the marker was rewritten: a save that was under way here cannot commit any more.
        dry_run: nothing was changed.
    """

    url: str
    outcome: Outcome
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
    fenced: bool = False
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep would do, by one look.

    Attributes:
        outcome: `swept` where there is something to remove now.
        reason: see `CheckpointSweep`.
        candidates: objects to remove, data before indexes.
        young: unnamed objects that are younger than the grace period.
        unknown: keys that are not ours.
        uploads: orphaned uploads to abort, whatever the outcome.
        uploads_young: uploads in progress.
    """

    outcome: Outcome
    reason: str | None
    candidates: tuple[ObjectMeta, ...]
    young: tuple[ObjectMeta, ...]
    unknown: tuple[str, ...]
    uploads: tuple[Upload, ...]
    uploads_young: tuple[Upload, ...]


def plan_sweep(
    listing: Iterable[ObjectMeta],
    *,
    marker_written_at: datetime | None,
    named: Collection[str],
    uploads: Iterable[Upload],
    now: datetime,
    grace_seconds: float,
) -> SweepPlan:
    """Decide, without any request, what a sweep of one checkpoint may remove.

    Args:
        listing: everything below the checkpoint, itself included; what lies deeper (keys with a
            slash) belongs to other checkpoints.
        marker_written_at: when the store says that the marker was written; None: there is none.
        named: keys that the committed index names, and its own; empty for a tombstone.
        uploads: in progress or orphaned, relative to the checkpoint.
        now: the time to measure ages by.
        grace_seconds: older than this is old.
    """
    oldest_kept = now - timedelta(seconds=grace_seconds)
    here = [meta for meta in listing if "/" not in meta.key]
    loose = [meta for meta in here if is_ours(meta.key) and meta.key not in named]
    candidates = [meta for meta in loose if meta.last_modified < oldest_kept]
    young = tuple(meta for meta in loose if meta.last_modified >= oldest_kept)
    ours = [upload for upload in uploads if parse_data_key(upload.key) is not None]
    uploads_young = tuple(upload for upload in ours if upload.initiated >= oldest_kept)
    kept = {MARKER_KEY, DOT_METADATA_KEY, *named}
    outcome: Outcome = "waiting"
    reason = None
    if marker_written_at is None and any(meta.key == DOT_METADATA_KEY for meta in here):
        outcome, reason = "foreign", "there is a '.metadata' without a marker: another library's"
    elif young:
        objects = "an object is" if len(young) == 1 else f"{len(young)} objects are"
        reason = f"{objects} younger than the grace period: a save may be under way"
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
        # The index last, as long as it is there it says what else was.
        candidates=tuple(
            sorted(candidates, key=lambda meta: parse_index_key(meta.key) is not None)
        ),
        young=young,
        unknown=tuple(meta.key for meta in here if not is_ours(meta.key) and meta.key not in kept),
        uploads=tuple(upload for upload in ours if upload.initiated < oldest_kept),
        uploads_young=uploads_young,
    )


def check_grace(grace_seconds: float) -> float:
    """Return it, or refuse what would not let a slow save or a reader end.

    Raises:
        ConfigError: no number, or less than an hour.
    """
    number = isinstance(grace_seconds, (int, float)) and not isinstance(grace_seconds, bool)
    if not number or not LEAST_GRACE_SECONDS <= grace_seconds < float("inf"):
        raise ConfigError(
            f"grace_seconds must be a number of at least {LEAST_GRACE_SECONDS:.0f} (an hour), got"
            f" {grace_seconds!r}: what is younger may belong to a save that is under way"
        )
    return grace_seconds


def sweep(
    store: ObjectStore,
    *,
    dot_metadata: DotMetadata,
    uploads: Uploads | None = None,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> CheckpointSweep:
    """Sweep the checkpoint at the store's root (rule 9). After a crash, the next sweep goes on.

    Args:
        store: rooted at the checkpoint; with conditional updates (see `probe.require_rewrites`).
        dot_metadata: what the torch floor knows of `.metadata`.
        uploads: those below the same root; None: they are not looked at.
        grace_seconds: at least an hour. Default 24 h. It must be longer than the longest save and
            the longest load.
        dry_run: only look.
        deadline_seconds: no change of the marker begins later than this.
        clock: for tests.

    Raises:
        ConfigError: the grace period is too short.
        CheckpointCorruptError, UnsupportedError: marker or index cannot be read; nothing was
            removed, as nobody knows what the commit names.
        CheckpointGoneError: somebody replaced or deleted it meanwhile; nothing was removed.
        CommitUnknownError, RetryableError: not until the deadline; nothing was removed.
    """
    check_grace(grace_seconds)
    return _Sweep(
        store, dot_metadata, uploads, grace_seconds, dry_run, Retries(deadline_seconds, clock)
    ).run(clock.utc_now())


@dataclass(frozen=True)
class _Sweep:
    """One sweep of one checkpoint, step by step."""

    store: ObjectStore
    dot_metadata: DotMetadata
    uploads: Uploads | None
    grace_seconds: float
    dry_run: bool
    retries: Retries

    def run(self, now: datetime) -> CheckpointSweep:
        found = find_marker(self.store)
        if found is not None and found[0].state == "deleting":
            if not self.dry_run:
                finish_deleting(self.store, found[0].commit_id, self.retries)
            return CheckpointSweep(
                url=self.store.url, outcome="mended", finished_delete=True, dry_run=self.dry_run
            )
        marker = None if found is None else found[0]
        named = self._named(marker)
        # Uploads first: one that completes in between is then seen twice, not never.
        uploads = self.uploads.list() if self.uploads is not None else ()
        listing = list(self.store.list())
        plan = plan_sweep(
            listing,
            marker_written_at=None if found is None else found[1].last_modified,
            named=named,
            uploads=uploads,
            now=now,
            grace_seconds=self.grace_seconds,
        )
        if self.uploads is not None and not self.dry_run:
            for upload in plan.uploads:
                self.uploads.abort(upload)
        done = self._report(plan)
        if plan.outcome != "swept":
            has_dot_metadata = any(meta.key == DOT_METADATA_KEY for meta in listing)
            if marker is None or has_dot_metadata == marker.is_committed:
                return done
            # No objects are removed, so this needs no fence: a commit whose writer died before it
            # wrote `.metadata`, or a `.metadata` left beside a tombstone.
            return self._mend(done, marker)
        if self.dry_run:
            change = needed_change(self.store, marker, self.dot_metadata) if marker else None
            if change is not None:
                return replace(done, outcome="mended", dot_metadata=change)
            size = sum(meta.size_bytes for meta in plan.candidates)
            return replace(done, deleted=len(plan.candidates), deleted_bytes=size)
        return self._remove(done, plan, found)

    def _named(self, marker: Marker | None) -> frozenset[str]:
        if marker is None or not marker.is_committed or marker.index is None:
            return frozenset()
        index = ix.decode(read_index(self.store, marker))
        return frozenset({marker.index.key, *(entry.key for entry in index.objects)})

    def _report(self, plan: SweepPlan) -> CheckpointSweep:
        looked = self.uploads is not None
        return CheckpointSweep(
            url=self.store.url,
            outcome=plan.outcome,
            reason=plan.reason,
            kept_young=len(plan.young),
            unknown=plan.unknown,
            uploads_aborted=len(plan.uploads) if looked else 0,
            uploads_bytes=sum(upload.size_bytes for upload in plan.uploads),
            uploads_young=len(plan.uploads_young),
            dry_run=self.dry_run,
        )

    def _mend(self, done: CheckpointSweep, marker: Marker) -> CheckpointSweep:
        if self.dry_run:
            change = needed_change(self.store, marker, self.dot_metadata)
        else:
            found = find_marker(self.store)
            if found is None or found[0].write_id != marker.write_id:
                return replace(done, outcome="lost", reason="somebody else changed the marker")
            _, change = align_dot_metadata(
                self.store, _token(found), self.dot_metadata, retries=self.retries
            )
        if change is None:
            return done
        outcome: Outcome = "mended" if done.outcome == "clean" else done.outcome
        return replace(done, outcome=outcome, dot_metadata=change)

    def _remove(
        self,
        done: CheckpointSweep,
        plan: SweepPlan,
        found: tuple[Marker, ObjectMeta] | None,
    ) -> CheckpointSweep:
        fence = self._fence(found)
        if fence is None:
            return replace(done, outcome="lost", reason="somebody else changed the marker")
        # From here on by the store's own time alone.
        oldest_kept = fence[1].last_modified - timedelta(seconds=self.grace_seconds)
        candidates = [meta for meta in plan.candidates if meta.last_modified < oldest_kept]
        marker_is_old = found is None or found[1].last_modified < oldest_kept
        if not candidates or not marker_is_old:
            reason = "by the store's clock, nothing is older than the grace period"
            return replace(done, outcome="waiting", reason=reason, fenced=True)
        aligned, change = align_dot_metadata(
            self.store, _token(fence), self.dot_metadata, retries=self.retries
        )
        if change is not None:
            rewrite_marker(self.store, aligned, "the fence", self.retries)
            return replace(done, outcome="mended", dot_metadata=change, fenced=True)
        for meta in candidates:
            self.store.delete(meta.key)
        return replace(
            done,
            deleted=len(candidates),
            deleted_bytes=sum(meta.size_bytes for meta in candidates),
            fenced=True,
        )

    def _fence(self, found: tuple[Marker, ObjectMeta] | None) -> tuple[Marker, ObjectMeta] | None:
        """Rewrite the marker, and read it back: ours, or None."""
        if found is None:
            written = put_tombstone(self.store, self.retries)
        else:
            written = rewrite_marker(self.store, _token(found), "the fence", self.retries)
        if written is None:
            return None
        fence = find_marker(self.store)
        ours = fence is not None and fence[0].write_id == written.write_id
        return fence if ours else None


def _token(found: tuple[Marker, ObjectMeta]) -> Found:
    return found[0], found[1].version
