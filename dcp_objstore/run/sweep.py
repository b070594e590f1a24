"""`sweep`: sweep every checkpoint below a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from dcp_objstore import errors
from dcp_objstore.checkpoint import sweep as rule
from dcp_objstore.checkpoint.catalogue import can_be_in_url, list_by_prefix, read_claim
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_ours,
    is_probe_key,
    is_upload_key,
)
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.checkpoint.read import retry_damaged
from dcp_objstore.checkpoint.sweep import GRACE_SECONDS, CheckpointSweep, check_grace
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.observe.report import counted, logger, size_text
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.spec import open_uploads

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores.local import LocalUploads
    from dcp_objstore.stores.s3.unfinished import S3Uploads


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep below a URL, or with `dry_run` what it would do.

    Attributes:
        url: the URL that was swept.
        checkpoints: what was done at each checkpoint, in the order of their URLs.
        uploads_unseen: why orphaned multipart uploads could not be listed; None if they were.
        dry_run: nothing was changed.
    """

    url: str
    checkpoints: tuple[CheckpointSweep, ...]
    uploads_unseen: str | None = None
    dry_run: bool = False

    def __str__(self) -> str:
        """Return a line for each checkpoint at which there was something to do, and the sums."""
        if not self.checkpoints:
            return f"{self.url}\nthere is no checkpoint here, and nothing that one has left"
        busy = [one for one in self.checkpoints if one.outcome != "clean" or one.uploads_aborted]
        lines = [self.url, *(f"  {str(one).removeprefix(f'{self.url}/')}" for one in busy)]
        removed = "would be removed" if self.dry_run else "were removed"
        looked_at = counted(len(self.checkpoints), "checkpoint")
        lines.append(f"{looked_at} looked at, nothing to do at {len(self.checkpoints) - len(busy)}")
        size = size_text(self.deleted_bytes)
        lines.append(f"{counted(self.deleted, 'object')} ({size}) {removed}")
        if self.uploads_unseen is None:
            uploads = counted(self.uploads_aborted, "unfinished upload")
            young = sum(one.uploads_young for one in self.checkpoints)
            more = f"; {young} in progress, or younger than the grace period" if young else ""
            lines.append(f"{uploads} ({size_text(self.uploads_bytes)}) {removed}{more}")
        else:
            lines.append(f"unfinished uploads were not looked at: {self.uploads_unseen}")
        unknown = [f"{one.url}/{key}" for one in self.checkpoints for key in one.unknown]
        if unknown:
            example = unknown[0].removeprefix(f"{self.url}/")
            count = counted(len(unknown), "object")
            lines.append(f"{count} with unknown names left alone, for example {example}")
        return "\n".join(map(errors.printable, lines))

    @property
    def deleted(self) -> int:
        """The number of objects that were removed."""
        return sum(checkpoint.deleted for checkpoint in self.checkpoints)

    @property
    def deleted_bytes(self) -> int:
        """The size of the objects that were removed."""
        return sum(checkpoint.deleted_bytes for checkpoint in self.checkpoints)

    @property
    def uploads_aborted(self) -> int:
        """The number of orphaned multipart uploads that were removed."""
        return sum(checkpoint.uploads_aborted for checkpoint in self.checkpoints)

    @property
    def uploads_bytes(self) -> int:
        """The size of the parts of these uploads."""
        return sum(checkpoint.uploads_bytes for checkpoint in self.checkpoints)

    @property
    def damaged(self) -> tuple[CheckpointSweep, ...]:
        """The checkpoints that cannot be read and were left as they are."""
        return tuple(swept for swept in self.checkpoints if swept.outcome == "damaged")


def sweep(
    url: str,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> SweepReport:
    """Remove the objects below a URL that no commit names and that no job can still be using.

        report = dos.sweep("s3://bucket/run", dry_run=True)
        report.deleted_bytes  # what a sweep would remove

    These are objects of saves that were never committed, objects of checkpoints that were
    overwritten or deleted, and orphaned multipart uploads (S3, with boto3), all older than the
    grace period. In a run that has a claim (see `claim_run`), a sweep also deletes steps that a
    superseded job committed late and that never count, unless they are pinned; it removes their
    objects when another grace period has passed.

    A sweep never removes objects whose names do not have our form, and nothing from a checkpoint to
    which a save may be under way. Each checkpoint is swept on its own. After a crash, the next
    sweep goes on.

    Args:
        url: URL of a checkpoint or a run; everything below it is swept.
        grace_seconds: objects that are younger than this are kept. It must be longer than the
            longest save and the longest load, and at least an hour. Default 24 h.
        dry_run: change nothing. Default False.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        ConfigError: the grace period is too short.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: the store refused or failed. A damaged checkpoint is reported, not raised.
    """
    check_grace(grace_seconds)
    return sweep_below(StoreSpec(url, storage_options, config), grace_seconds, dry_run=dry_run)


def sweep_below(
    spec: StoreSpec,
    grace_seconds: float = GRACE_SECONDS,
    *,
    dry_run: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> SweepReport:
    """Sweep as `sweep` does; stop before the next checkpoint once `is_over` returns True.

    A checkpoint that has only its marker is left out, so that it costs no request: mostly, it is a
    step that was deleted long ago, and a run has ever more of these.
    """
    store = spec.open()
    objects_at = list_by_prefix(store)
    prefixes = {
        prefix
        for prefix, objects in objects_at.items()
        if list(objects) != [MARKER_KEY] and any(map(_is_known, objects))
    }
    uploads: S3Uploads | LocalUploads | None = None
    uploads_unseen = None  # why the uploads in progress could not be listed
    try:
        uploads = open_uploads(spec)
        for upload in uploads.list():
            prefix, _, name = upload.key.rpartition("/")
            if is_upload_key(name) and can_be_in_url(prefix, spec.url):
                prefixes.add(prefix)
    except (errors.InputError, errors.RetryableError) as error:
        # The objects are swept all the same.
        uploads, uploads_unseen = None, error.message
    bases = {
        prefix: _base(spec.child(prefix))
        for prefix, objects in objects_at.items()
        if CLAIM_KEY in objects
    }

    def base_of_run_of(prefix: str) -> int:
        """Return the base of the run that has the checkpoint at a prefix."""
        if not prefix:  # the URL is that of the checkpoint
            run, _ = spec.parent()
            return _base(run)
        parent, _, _ = prefix.rpartition("/")
        return bases.get(parent, 0)

    if prefixes and not dry_run:
        require_rewrites(store, "nothing can be swept")
    swept = tuple(
        _sweep_one(
            spec.child(prefix),
            uploads.below(prefix) if uploads is not None else None,
            grace_seconds,
            base_of_run_of(prefix),
            dry_run=dry_run,
        )
        for prefix in takewhile(lambda _: not is_over(), sorted(prefixes))
    )
    return SweepReport(
        url=spec.url,
        checkpoints=swept,
        uploads_unseen=uploads_unseen,
        dry_run=dry_run,
    )


def _sweep_one(
    spec: StoreSpec,
    uploads: S3Uploads | LocalUploads | None,
    grace_seconds: float,
    base: int,
    *,
    dry_run: bool,
) -> CheckpointSweep:
    """Sweep one checkpoint; what is damaged or lost to another job is an outcome, not an error."""
    store = spec.open()
    try:
        return retry_damaged(
            partial(
                rule.sweep,
                store,
                dot_metadata=StockDotMetadata(),
                uploads=uploads,
                grace_seconds=grace_seconds,
                base=base,
                dry_run=dry_run,
            )
        )
    except (errors.LostRaceError, errors.CorruptDataError, errors.UnsupportedError) as error:
        return CheckpointSweep(
            url=spec.url,
            outcome="lost" if isinstance(error, errors.LostRaceError) else "damaged",
            reason=error.message,
            dry_run=dry_run,
        )


def _base(run: StoreSpec | None) -> int:
    """Return the oldest claim whose steps count in a run; 0 (all count) if it is not known.

    If a job is going back to an earlier step, the base may be higher: then less is swept.
    """
    if run is None:
        return 0
    try:
        claim = read_claim(run.open())
    except (
        errors.CorruptDataError,
        errors.UnsupportedError,
        errors.PermissionDeniedError,
    ) as error:
        logger.warning("steps of superseded jobs in %s are not swept: %s", run.url, error)
        return 0
    return claim.record.base if claim else 0


def _is_known(name: str) -> bool:
    """Return whether a prefix with an object of this name must be swept.

    A save may have died there at any point, even while it was probing the store.
    """
    return name == MARKER_KEY or is_ours(name) or is_beacon_key(name) or is_probe_key(name)
