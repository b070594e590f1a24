"""`delete`, `repair`, `pin` and `unpin`: change one existing checkpoint.

The rules are those of `checkpoint`. The functions here take a URL, and `delete` guards the newest
step of a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from dcp_objstore.checkpoint import pins
from dcp_objstore.checkpoint.catalogue import (
    Objects,
    commit_time,
    counts,
    list_by_prefix,
    read_standing,
    read_steps,
)
from dcp_objstore.checkpoint.claim import RunClaim, check_claim
from dcp_objstore.checkpoint.delete import (
    DeleteReport,
    check_deletion_grace,
    delete as delete_checkpoint,
)
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import CLAIM_KEY, is_index_key
from dcp_objstore.checkpoint.probe import can_rewrite, require_rewrites
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.checkpoint.repair import RepairReport, repair as repair_checkpoint
from dcp_objstore.compat.dot_metadata import StockDotMetadata
from dcp_objstore.config import TransferConfig
from dcp_objstore.errors import InputError
from dcp_objstore.run.steps import step_number
from dcp_objstore.stores import ObjectStore, StoreSpec

Options = Mapping[str, object]


def delete(
    url: str,
    *,
    grace_seconds: float = 0.0,
    allow_newest: bool = False,
    dry_run: bool = False,
    claim: RunClaim | None = None,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> DeleteReport:
    """Delete a checkpoint. One process calls it; after a crash, call it again to go on.

        dos.delete("s3://bucket/run/step-1000")

    When it returns, the checkpoint no longer exists, and its objects are removed: exactly those
    that the commit named. A tombstone stays, which the next save at this URL replaces. A job that
    is reading the checkpoint gets a CheckpointGoneError that names the next step, or under stock
    torch that reader's own error. Pin a checkpoint that must not go while it is read.

    Args:
        url: URL of the checkpoint.
        grace_seconds: keep the objects for readers that are under way. The same call removes them
            once the deletion is this old, or a `sweep` after 24 h or more. Default 0: remove them.
        allow_newest: delete it even if no newer checkpoint is committed under the same parent URL,
            so that a job would resume from this one. In a run that has a claim, only steps that
            count are compared. Two deletions at the same time may each take the other's checkpoint
            for a newer one.
        dry_run: change nothing, but refuse what would be refused. Default False.
        claim: the claim of the job that deletes, from `claim_run`; a checkpoint of a later claim is
            refused.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: nothing is committed here.
        CheckpointPinnedError: the checkpoint is pinned; the error names the pins.
        InputError: it is the newest of its run, or not a step of the claim's run.
        ConfigError: `grace_seconds` is not a number, 0 or more.
        SupersededError: a newer job has claimed the run, and the step belongs to that job.
        LostRaceError: another save replaced it; nothing was deleted.
        CommitUnknownError: the store did not answer; the same call goes on from there.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: the store refused or failed.
    """
    spec = StoreSpec(url, storage_options, config)
    return delete_step(
        spec,
        check_claim(claim, spec),
        grace_seconds=check_deletion_grace(grace_seconds),
        allow_newest=allow_newest,
        dry_run=dry_run,
    )


def delete_step(
    spec: StoreSpec,
    number: int | None,
    *,
    grace_seconds: float,
    allow_newest: bool,
    dry_run: bool = False,
) -> DeleteReport:
    """Delete a checkpoint as `delete` does, with the number of a claim.

    Args:
        spec: the store's URL and options, with the checkpoint as its root.
        number: number of the claim of the job that deletes. 0 if the job has none; it may not
            delete steps of any claim. None if the caller is not a job; then claims do not matter.
        grace_seconds: as for `delete`.
        allow_newest: delete it even if it is the newest committed checkpoint of its run.
        dry_run: change nothing, but refuse what would be refused.
    """
    store = spec.open()
    stored = read_marker(store)
    if (
        stored is not None
        and stored.record.is_committed  # otherwise this finishes a deletion
        and not stored.record.pins  # with pins, the deletion itself raises
        and not allow_newest
    ):
        _refuse_newest(spec, stored.record)
    if stored is not None and not dry_run:
        require_rewrites(store, "no checkpoint can be deleted")
    report = delete_checkpoint(store, grace_seconds=grace_seconds, dry_run=dry_run, claim=number)
    if report.superseded:
        # The deletion may have removed the `.metadata` of the save that came next.
        repair_checkpoint(store, dot_metadata=StockDotMetadata())
    return report


def _refuse_newest(spec: StoreSpec, marker: Marker) -> None:
    """Raise if a checkpoint is the newest committed one of its run.

    Of `step-N`, the one with the highest number is the newest, of other names the one that was
    committed last. This is a guard against mistakes; no rule relies on it.
    """
    run, name = spec.parent()
    if run is not None:  # otherwise nothing can be newer
        store = run.open()
        objects_at = list_by_prefix(store)
        is_claimed = CLAIM_KEY in objects_at.get("", ())
        base = read_standing(store, run.open_child, expected=True).base if is_claimed else 0
        if not counts(marker, base):
            return  # no job resumes from it
        number, committed_at = step_number(name), commit_time(marker, objects_at.get(name, {}))

        def is_later(other: str) -> bool | None:
            """Return whether another step has a higher number; None if one of them has none."""
            others_number = step_number(other)
            return None if number is None or others_number is None else others_number > number

        def has_index_since(objects: Objects) -> bool:
            """Return whether an index among these objects is as new as this commit, or newer."""
            indices = [meta for key, meta in objects.items() if is_index_key(key)]
            return any(index.last_modified >= committed_at.by_store for index in indices)

        # Only steps that may be newer are read, so mostly the first of them decides.
        candidates = {
            other: objects
            for other, objects in objects_at.items()
            if is_later(other) or (is_later(other) is None and has_index_since(objects))
        }
        candidates.pop(name, None)
        for other in read_steps(candidates, run.open_child, wave=1):
            is_newer = is_later(other.name) or other.committed_at > committed_at
            if is_newer and counts(other.marker, base):
                return
    raise InputError(
        "this is the newest committed checkpoint of its run, from which a job would resume",
        advice="pass allow_newest=True (--allow-newest) to delete it anyway",
        url=spec.url,
    )


def repair(
    url: str,
    *,
    dry_run: bool = False,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> RepairReport:
    """Finish what a crash left undone: a deletion, or the change of `.metadata`.

        report = dos.repair("s3://bucket/run/step-1000")

    If a save dies after its commit and before it writes `.metadata`, dcp_objstore loads the
    checkpoint, but stock torch does not see it, or sees the one before. A repair writes `.metadata`
    then. No data object is touched. If a save that overwrites is under way here, a repair that
    changes `.metadata` ends it with `CommitLostError`.

    Args:
        url: URL of the checkpoint.
        dry_run: change nothing. Default False.
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: nothing was ever committed here.
        CheckpointCorruptError, UnsupportedError: the marker or the index cannot be read.
        RetryableError: no success before the deadline; repair it again.
        DcpObjstoreError: the store refused or failed.
    """
    store = StoreSpec(url, storage_options, config).open()
    if not dry_run:
        # This finds out how the server compares ETags. A store that cannot rewrite is no obstacle.
        can_rewrite(store)
    return repair_checkpoint(store, dot_metadata=StockDotMetadata(), dry_run=dry_run)


def pin(
    url: str,
    name: str = "pinned",
    *,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> tuple[str, ...]:
    """Protect a checkpoint from deletion and from being overwritten.

        dos.pin("s3://bucket/run/step-1000", "paper")

    If the checkpoint already has this pin, nothing changes.

    Args:
        url: URL of the checkpoint.
        name: name of the pin, 1 to 200 characters: what the checkpoint is kept for, such as "paper"
            or "release 1". Default "pinned".
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Returns:
        All pins that the checkpoint now has.

    Raises:
        CheckpointNotFoundError: nothing is committed here.
        ConfigError: the name has another form, or the checkpoint has 64 pins already.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: the store refused or failed.
    """
    return pins.pin(_pinnable(url, storage_options, config), name)


def unpin(
    url: str,
    name: str = "pinned",
    *,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> tuple[str, ...]:
    """Remove a pin of a checkpoint, if it is there.

        dos.unpin("s3://bucket/run/step-1000", "paper")

    Args:
        url: URL of the checkpoint.
        name: name of the pin. Default "pinned".
        storage_options: credentials and endpoint, as for `save`.
        config: time-outs and retries.

    Returns:
        All pins that the checkpoint still has.

    Raises:
        CheckpointNotFoundError: nothing is committed here.
        ConfigError: the name has another form than that of a pin.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: the store refused or failed.
    """
    return pins.unpin(_pinnable(url, storage_options, config), name)


def _pinnable(
    url: str, storage_options: Options | None, config: TransferConfig | None
) -> ObjectStore:
    """Open the store of a checkpoint whose pins are to be changed.

    Raises:
        UnsupportedError: the store has no conditional writes. Not if nothing is committed here,
            which the change itself reports.
    """
    store = StoreSpec(url, storage_options, config).open()
    if read_marker(store) is not None:
        require_rewrites(store, "no pin can be set or removed")
    return store
