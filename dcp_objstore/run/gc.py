"""`sweep`: every checkpoint below a URL, each on its own, and what the bucket should do itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import sweep as rule
from dcp_objstore.checkpoint.claim import read_claim
from dcp_objstore.checkpoint.names import (
    CLAIM_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_ours,
    is_probe_key,
)
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.checkpoint.sweep import GRACE_SECONDS, CheckpointSweep, check_grace
from dcp_objstore.compat.derived import StockDotMetadata
from dcp_objstore.errors import (
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    PermissionDeniedError,
    RetryableError,
    UnsupportedError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.target import Target
from dcp_objstore.stores.uploads.lifecycle import covering_days, lifecycle_configuration
from dcp_objstore.stores.uploads.open import open_uploads
from dcp_objstore.transfer.interruptible import InterruptibleStore
from dcp_objstore.write.claim import above

if TYPE_CHECKING:
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import StoreSpec
    from dcp_objstore.stores.uploads.local import LocalUploads
    from dcp_objstore.stores.uploads.s3 import S3Uploads


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A sweep of everything below a URL; with `dry_run` what it would do.

    Attributes:
        url: what was swept.
        checkpoints: what was done at each, in the order of their URLs.
        uploads_unseen: why orphaned multipart uploads were not looked at, or None: they were.
        lifecycle_days: after how many days the bucket itself removes such uploads here; None: it
            does not, or could not be asked.
        lifecycle_json: the lifecycle configuration that the bucket should have, as JSON; None
            where it has one, or where there are no multipart uploads. For S3 with the rules that
            the bucket has, if those could be read.
        lifecycle_unread: why the bucket's rules could not be read, or None: they were. Putting
            `lifecycle_json` would then lose them.
        dry_run: nothing was changed.
    """

    url: str
    checkpoints: tuple[CheckpointSweep, ...]
    uploads_unseen: str | None = None
    lifecycle_days: int | None = None
    lifecycle_json: str | None = None
    lifecycle_unread: str | None = None
    dry_run: bool = False

    @property
    def deleted(self) -> int:
        """Objects that were removed."""
        return sum(one.deleted for one in self.checkpoints)

    @property
    def deleted_bytes(self) -> int:
        """Their sizes."""
        return sum(one.deleted_bytes for one in self.checkpoints)

    @property
    def uploads_aborted(self) -> int:
        """Orphaned multipart uploads that were removed."""
        return sum(one.uploads_aborted for one in self.checkpoints)

    @property
    def uploads_bytes(self) -> int:
        """The sizes of their parts."""
        return sum(one.uploads_bytes for one in self.checkpoints)

    @property
    def damaged(self) -> tuple[CheckpointSweep, ...]:
        """Checkpoints that cannot be read, and were left as they are."""
        return tuple(one for one in self.checkpoints if one.outcome == "damaged")


def sweep(
    url: str,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    config: TransferConfig | None = None,
) -> SweepReport:
    """Remove what no commit names below a URL, and what nobody is using any more.

    That is: objects of saves that were never committed, of checkpoints that were overwritten or
    deleted, and orphaned multipart uploads (S3, with boto3), all of them older than the grace
    period. In a run that was taken over (see `claim_run`), steps that a superseded job committed
    late and that never count are deleted, unless they are pinned; their objects go when another
    grace period has passed. Never what another form of name has, and never anything beside which a
    save may be under way. Each checkpoint is swept on its own; after a crash the next sweep goes
    on.

    Args:
        url: a checkpoint, or a run: everything below is looked at.
        grace_seconds: what is younger stays. At least an hour; default 24 h. It must be longer
            than the longest save and the longest load.
        dry_run: only look. Default False.
        storage_options: as for `save`.
        config: time-outs and retries.

    Raises:
        ConfigError: the grace period is too short.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: as the store says. A damaged checkpoint is reported, not raised.
    """
    check_grace(grace_seconds)
    spec = Target(url, storage_options, config).spec
    store = InterruptibleStore(spec.open())
    listed = [meta.key for meta in store.list()]
    uploads: S3Uploads | LocalUploads | None = None
    unseen = None
    try:
        uploads = open_uploads(spec)
        listed += [one.key for one in uploads.list()]
    except (InputError, RetryableError) as error:
        uploads, unseen = None, error.message
    names = {_above(key) for key in listed if _is_known(_name(key))}
    runs = {_above(key) for key in listed if _name(key) == CLAIM_KEY}
    bases = {run: _base(spec.at(f"{spec.url}/{run}") if run else spec) for run in runs}
    if names and not dry_run:
        require_rewrites(store, "nothing can be swept")
    swept = tuple(
        _sweep_one(
            spec.at(f"{spec.url}/{name}") if name else spec,
            uploads.below(name) if uploads is not None else None,
            grace_seconds,
            bases.get(_above(name), 0) if name else _base(above(spec)[0]),
            dry_run=dry_run,
        )
        for name in sorted(names)
    )
    days, text, unread = _lifecycle(spec, uploads)
    return SweepReport(
        url=spec.url,
        checkpoints=swept,
        uploads_unseen=unseen,
        lifecycle_days=days,
        lifecycle_json=text,
        lifecycle_unread=unread,
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
    store = InterruptibleStore(spec.open())
    try:
        return rule.sweep(
            store,
            dot_metadata=StockDotMetadata(),
            uploads=uploads,
            grace_seconds=grace_seconds,
            base=base,
            dry_run=dry_run,
        )
    except LostRaceError as error:
        return CheckpointSweep(url=spec.url, outcome="lost", reason=error.message, dry_run=dry_run)
    except (CorruptDataError, UnsupportedError) as error:
        return CheckpointSweep(
            url=spec.url, outcome="damaged", reason=error.message, dry_run=dry_run
        )


def _base(run: StoreSpec | None) -> int:
    """The oldest claim whose steps count in a run; 0, below which there is none, if not known."""
    if run is None:
        return 0
    try:
        found = read_claim(InterruptibleStore(run.open()))
    except (CorruptDataError, UnsupportedError, PermissionDeniedError) as error:
        logger.warning("steps of superseded jobs in %s are not looked for: %s", run.url, error)
        return 0
    return found[0].base if found is not None else 0


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _above(key: str) -> str:
    return key.rpartition("/")[0]


def _is_known(name: str) -> bool:
    """Whether a prefix with an object of this name is one to sweep: a save may have died at any
    point there, also while it tried the store out.
    """
    return name == MARKER_KEY or is_ours(name) or is_beacon_key(name) or is_probe_key(name)


def _lifecycle(
    spec: StoreSpec, uploads: S3Uploads | LocalUploads | None
) -> tuple[int | None, str | None, str | None]:
    """Days that the bucket waits, else the configuration that it lacks; why that is not known."""
    url = spec.parsed
    if url.scheme not in ("s3", "gs"):
        return None, None, None
    prefix = f"{url.prefix}/" if url.prefix else ""
    if uploads is None:
        text = lifecycle_configuration(url.scheme, prefix)
        return None, text, "they cannot be read here"
    try:
        rules = uploads.lifecycle_rules()
    except DcpObjstoreError as error:
        return None, lifecycle_configuration(url.scheme, prefix), error.message
    days = covering_days(rules, prefix)
    return days, None if days else lifecycle_configuration(url.scheme, prefix, rules), None
