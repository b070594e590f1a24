"""`delete`, `repair`, `pin` and `unpin`: what is done to one checkpoint that is there.

The rules are those of `checkpoint`; here they get a URL, and a run's newest step its guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import delete as deleting
from dcp_objstore.checkpoint import pins
from dcp_objstore.checkpoint import repair as repairing
from dcp_objstore.checkpoint.claim import counts, read_claim
from dcp_objstore.checkpoint.names import CLAIM_KEY, step_of
from dcp_objstore.checkpoint.probe import require_rewrites
from dcp_objstore.checkpoint.read import read_marker
from dcp_objstore.compat.derived import StockDotMetadata
from dcp_objstore.errors import InputError
from dcp_objstore.stores.target import Target
from dcp_objstore.transfer.interruptible import InterruptibleStore
from dcp_objstore.write.claim import above, check_claim

if TYPE_CHECKING:
    from dcp_objstore.checkpoint.claim import RunClaim
    from dcp_objstore.checkpoint.delete import DeleteReport
    from dcp_objstore.checkpoint.marker import Marker
    from dcp_objstore.checkpoint.repair import RepairReport
    from dcp_objstore.config import TransferConfig
    from dcp_objstore.stores import ObjectStore, StoreSpec

Options = Mapping[str, object]


def delete(
    url: str,
    *,
    now: bool = False,
    even_newest: bool = False,
    dry_run: bool = False,
    claim: RunClaim | None = None,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> DeleteReport:
    """Delete a checkpoint. Called by one process; called again after a crash, it goes on.

    When it returns, the checkpoint does not exist any more; a tombstone stays, which the next save
    at this URL builds on. Its objects stay, so that readers under way can end, until a `sweep`
    removes them 24 h later, or later.

    Args:
        url: the checkpoint.
        now: remove the objects at once: exactly those that the commit named. Who is reading it
            gets a CheckpointGoneError; who reads with stock torch, whatever that says.
        even_newest: delete it even if nothing newer is committed beside it (under the same parent
            URL), where a job would resume from. Two deletions at once may each see the other's.
            In a run that was taken over, only steps that count are looked at.
        dry_run: only look; refuse what would be refused. Default False.
        claim: of the job that deletes, from `claim_run`: what belongs to a later one is refused.
        storage_options: as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: nothing is committed here.
        CheckpointPinnedError: it is pinned; names the pins.
        InputError: it is the newest of its run, or not a step of the claim's run.
        SupersededError: a newer job has taken the run over, and the step belongs to that.
        LostRaceError: another save replaced it meanwhile; nothing was deleted.
        CommitUnknownError: the store never answered; the same call goes on from there.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: as the store says.
    """
    spec = Target(url, storage_options, config).spec
    return delete_step(
        spec, check_claim(claim, spec), now=now, even_newest=even_newest, dry_run=dry_run
    )


def delete_step(
    spec: StoreSpec, number: int | None, *, now: bool, even_newest: bool, dry_run: bool = False
) -> DeleteReport:
    """As `delete`, by the number of a claim.

    Args:
        spec: the checkpoint.
        number: of the claim of the job that deletes; 0: a job that has none, which deletes nothing
            of a run that was taken over; None: somebody who belongs to no job.
        now, even_newest, dry_run: see `delete`.
    """
    store = InterruptibleStore(spec.open())
    found = read_marker(store)
    if found is not None and found[0].is_committed and not found[0].pins and not even_newest:
        _refuse_newest(spec, found[0])
    if found is not None and not dry_run:
        require_rewrites(store, "no checkpoint can be deleted")
    report = deleting.delete(store, now=now, dry_run=dry_run, claim=number)
    if report.superseded:
        # Our removal of the old `.metadata` may have met that of the save that came next.
        repairing.repair(store, dot_metadata=StockDotMetadata())
    return report


def _refuse_newest(spec: StoreSpec, marker: Marker) -> None:
    """Raise if nothing newer is committed beside a checkpoint.

    By the clocks of the hosts that committed; a guard against mistakes, on which no rule relies.
    """
    run, name = above(spec)
    if run is not None:
        store = InterruptibleStore(run.open())
        listed = [
            (meta, step_of(meta.key))
            for meta in store.list()
            if meta.key == CLAIM_KEY or step_of(meta.key)
        ]
        base = 0
        if any(other is None for _, other in listed):
            claim = read_claim(store)
            base = claim[0].base if claim is not None else 0
        if not counts(marker, base):
            return  # no job resumes from it
        # The last written first: the first one that is read decides, mostly.
        for _, other in sorted(listed, key=lambda pair: pair[0].last_modified, reverse=True):
            if other and other != name and _is_newer(run.at(f"{run.url}/{other}"), marker, base):
                return
    raise InputError(
        "this is the newest committed checkpoint of its run, from which a job would resume; pass"
        " even_newest=True (--even-newest) to delete it all the same",
        url=spec.url,
    )


def _is_newer(spec: StoreSpec, marker: Marker, base: int) -> bool:
    found = read_marker(InterruptibleStore(spec.open()))
    return found is not None and counts(found[0], base) and found[0].created_at > marker.created_at


def repair(
    url: str,
    *,
    dry_run: bool = False,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> RepairReport:
    """Do what a crash left undone: finish a deletion, and write or remove `.metadata`.

    A save that dies between its commit and `.metadata` leaves a checkpoint that we load and stock
    torch does not see, or sees as it was before; this mends it. No data object is touched.

    Args:
        url: the checkpoint.
        dry_run: only look. Default False.
        storage_options: as for `save`.
        config: time-outs and retries.

    Raises:
        CheckpointNotFoundError: nothing was ever committed here.
        CheckpointCorruptError, UnsupportedError: the marker or the index cannot be read.
        RetryableError: no success until the deadline; repair it again.
        DcpObjstoreError: as the store says.
    """
    store = InterruptibleStore(Target(url, storage_options, config).spec.open())
    return repairing.repair(store, dot_metadata=StockDotMetadata(), dry_run=dry_run)


def pin(
    url: str,
    name: str,
    *,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> tuple[str, ...]:
    """Protect a checkpoint from being deleted and overwritten, under a name. Pinning again is fine.

    Args:
        url: the checkpoint.
        name: 1 to 200 characters that say what for ("paper", "release 1").
        storage_options: as for `save`.
        config: time-outs and retries.

    Returns:
        All pins that it now has.

    Raises:
        CheckpointNotFoundError: nothing is committed here.
        ConfigError: the name is of another form, or there are 64 pins.
        UnsupportedError: the store has no conditional writes.
        DcpObjstoreError: as the store says.
    """
    return pins.pin(_pinnable(url, storage_options, config), name)


def unpin(
    url: str,
    name: str,
    *,
    storage_options: Options | None = None,
    config: TransferConfig | None = None,
) -> tuple[str, ...]:
    """Remove a pin; one that is not there is no error. Otherwise as `pin`."""
    return pins.unpin(_pinnable(url, storage_options, config), name)


def _pinnable(
    url: str, storage_options: Options | None, config: TransferConfig | None
) -> ObjectStore:
    store = InterruptibleStore(Target(url, storage_options, config).spec.open())
    if read_marker(store) is not None:
        require_rewrites(store, "no pin can be set or removed")
    return store
