"""Plan a sweep: decide what it may remove from one checkpoint, without any request.

The rule for it is number 9, in `sweep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias

from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_ours,
    is_probe_key,
    is_upload_key,
    parse_index_key,
)
from dcp_objstore.errors import ConfigError
from dcp_objstore.stores.protocol import ObjectMeta, UnfinishedUpload

GRACE_SECONDS: Final = 24 * 3600.0
LEAST_GRACE_SECONDS: Final = 3600.0

SweepOutcome: TypeAlias = Literal[
    "clean", "swept", "waiting", "mended", "lost", "foreign", "damaged"
]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep would do at one checkpoint.

    Attributes:
        outcome: `swept` if there is something to remove now; otherwise why there is not.
        candidates: objects to remove, data before indexes.
        young: unnamed objects that are younger than the grace period.
        unknown: keys that do not have our form.
        passing: old beacons, and objects that `probe` left; removed whatever the outcome.
        uploads: orphaned uploads; aborted whatever the outcome.
        uploads_young: uploads in progress.
    """

    outcome: SweepOutcome
    reason: str | None
    candidates: tuple[ObjectMeta, ...]
    young: tuple[ObjectMeta, ...]
    unknown: tuple[str, ...]
    passing: tuple[ObjectMeta, ...]
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
        marker_written_at: when the marker was written, by the store's time; None if there is none.
        named: the keys that the committed index names, and its own; empty for a tombstone.
        uploads: uploads in progress or orphaned, with keys relative to the checkpoint.
        now: the time to measure ages by.
        grace_seconds: the age from which an object is old.
    """
    oldest_kept = now - timedelta(seconds=grace_seconds)
    here = [meta for meta in listing if "/" not in meta.key]
    loose = [meta for meta in here if is_ours(meta.key) and meta.key not in named]
    candidates = [meta for meta in loose if meta.last_modified < oldest_kept]
    passing = [meta for meta in here if is_beacon_key(meta.key) or is_probe_key(meta.key)]
    # A young beacon shows a save that may have no objects yet. A young probe shows a job that is
    # about to save or to sweep.
    young = tuple(meta for meta in (*loose, *passing) if meta.last_modified >= oldest_kept)
    # Uploads of data; on `file://` also the marker and `.metadata`, which a crash may leave half
    # written there, like any object.
    ours = [one for one in uploads if is_upload_key(one.key)]
    uploads_young = tuple(upload for upload in ours if upload.initiated >= oldest_kept)
    kept = {MARKER_KEY, DOT_METADATA_KEY, CLAIM_KEY, *named}
    outcome: SweepOutcome = "waiting"
    reason = None
    if marker_written_at is None and any(meta.key == DOT_METADATA_KEY for meta in here):
        outcome = "foreign"
        reason = "there is a '.metadata' without a marker: another library's checkpoint"
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
        # The index last: as long as it exists, it names the other objects.
        candidates=tuple(
            sorted(candidates, key=lambda meta: parse_index_key(meta.key) is not None)
        ),
        young=young,
        unknown=tuple(
            meta.key
            for meta in here
            if not is_ours(meta.key) and meta not in passing and meta.key not in kept
        ),
        passing=tuple(meta for meta in passing if meta.last_modified < oldest_kept),
        uploads=tuple(upload for upload in ours if upload.initiated < oldest_kept),
        uploads_young=uploads_young,
    )


def check_grace(grace_seconds: float) -> float:
    """Check and return a grace period, which must let a slow save and a slow reader finish.

    Raises:
        ConfigError: it is not a number, or less than an hour.
    """
    number = isinstance(grace_seconds, (int, float)) and not isinstance(grace_seconds, bool)
    if not number or not LEAST_GRACE_SECONDS <= grace_seconds < float("inf"):
        raise ConfigError(
            f"grace_seconds must be a number of at least {LEAST_GRACE_SECONDS:.0f} (an hour), got"
            f" {grace_seconds!r}: what is younger may belong to a save that is under way"
        )
    return grace_seconds
