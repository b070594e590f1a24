"""Commit: the only code that puts a marker. (`read` is the only code that trusts one.)

These rules have passed a model check of two writers, a deleter, a sweeper and a reader, with lost,
delayed and duplicated answers, and with crashes and pauses. The check caught every attempt to
weaken one of them. The rules keep the numbers of the design. Rule 3 is in `names`, 6 in `publish`,
7 in `read`, 8 in `delete` and 9 in `sweep`; 10 is about the writer object.

 1. A checkpoint exists exactly while `_COMMIT` says `committed`. The marker is never removed: a
    deleted checkpoint keeps one that says `deleted` (a tombstone). It counts as absent, and the
    next commit is conditioned on it. A commit_id stays through all rewrites of the same commit.
    Every new content has a new write_id, so that no two ETags are ever equal.
 2. A save begins with a **beacon**, a small object that shows a sweep that a save is under way,
    even if a listing shows no upload before its end. At the same time the version of `.metadata` is
    read (rule 6). Then comes one GET of `_COMMIT`, before any rank uploads. Body and version come
    from that one response; together they are the begin token. If the marker says `deleting`, the
    save finishes the deletion (rule 8) and reads again. A committed checkpoint is replaced only
    with `overwrite=True`. After the commit the save removes the beacon; a sweep removes one that a
    crash left.
 4. A commit is one conditional PUT of `_COMMIT` against the begin token, after a listing has shown
    every object with its size, and after the index has been put, in any order. The transport does
    not retry the PUT; this code sends it again, always with the same bytes.
 5. Anything but a clean success is decided by reading `_COMMIT`. If our commit_id is current or in
    the log, we committed, even if another writer has replaced us since. If the begin token still
    stands, the PUT is sent again; at the deadline the outcome is unknown, because an unanswered PUT
    may land later. But if the PUT was refused for good, and no PUT before it went unanswered, it is
    not sent again: the save ends with that refusal. In all other cases another writer was first.
    No refusal is believed before that read, not even the first: something between us and the store
    may have answered, for a PUT that took effect. So the outcome is unknown as long as the marker
    cannot be read. Nothing is deleted here, because an object that looks useless may belong to a
    commit that is about to land. Rewrites of a marker (`rewrite_marker`, to delete, fence or pin)
    are decided in the same way, by their write_id.
11. All this needs a store with conditional writes, which `probe` tests. `fenced=False` sends the
    same PUTs without conditions, for users who have promised that there is only one writer.
12. A save may have the store copy its data from another checkpoint, its base (`write.base`). It
    reads the base by rule 7, and the store copies an object only in the state whose ETag is in the
    base's index. So the copied bytes have the digests of that index, even if others delete, sweep
    or overwrite the base during the save. Copies are data of this save like any other (rules 3 and
    4). All else is uploaded, under another key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, pause_or_raise
from dcp_objstore.checkpoint.compare_and_swap import SwapOutcome, compare_and_swap
from dcp_objstore.checkpoint.marker import (
    ON_NOTHING,
    Counts,
    IndexRef,
    Marker,
    check_user_metadata,
    encode_marker,
    format_of,
    new_id,
    next_marker,
)
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    beacon_key,
    index_key,
    new_nonce,
)
from dcp_objstore.checkpoint.publish import if_metadata_unchanged
from dcp_objstore.checkpoint.read import Stored, read_marker, still_stands
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CommitLostError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    RetryableError,
    StoreUnavailableError,
    SupersededError,
)
from dcp_objstore.observe.report import logger
from dcp_objstore.stores.protocol import IfAbsent, ObjectStore, Precondition, Version
from dcp_objstore.stores.retries import Tries
from dcp_objstore.transfer import workers


@dataclass(frozen=True)
class BeginToken:
    """The state of `_COMMIT` when the save began.

    Attributes:
        marker: the marker: a tombstone or, with overwrite, a committed one. None if there is no
            marker or, with overwrite, if it cannot be read.
        version: the store's version of the marker; None if there is no marker.
        claim: number of the claim of the job that saves; 0 for none.
        beacon: key of the object that shows sweeps that this save is under way.
        dot_metadata: the condition that `.metadata` is still what it was.
    """

    marker: Marker | None
    version: Version | None
    claim: int
    beacon: str
    dot_metadata: Precondition


@dataclass(frozen=True)
class CommitResult:
    """A commit that took effect.

    Attributes:
        marker: the marker as this commit wrote it.
        attempts: the number of PUTs of the marker that were sent.
        dot_metadata: the condition that `.metadata` is still what it was when the save began; None
            if another job replaced or deleted the commit before this save knew its outcome, because
            then it does not prove that `.metadata` must be written (rule 6 in `publish`).
    """

    commit_id: str
    marker: Marker
    attempts: int
    dot_metadata: Precondition | None


def take_begin_token(
    store: ObjectStore,
    *,
    overwrite: bool,
    claim: int = 0,
    nonce: str | None = None,
    check: Callable[[], object] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> BeginToken:
    """Put the beacon of a save and take its begin token (rule 2).

    Sends a PUT and a HEAD at the same time, then a GET. If a deletion was begun and not finished,
    also the requests that finish it (rule 8). A save that is refused leaves no beacon.

    Args:
        overwrite: replace a committed or damaged checkpoint. One that was committed under an
            earlier claim no longer counts and is replaced in any case (rule C5 of `claim`).
        claim: number of the claim of the job that saves; 0 for none.
        nonce: the nonce of the save, which names the beacon. Default: a new one.
        check: a function that is called while the beacon is being put. Its error ends the
            save.

    Raises:
        SupersededError: the marker has a later claim than this job (rule C5 of `claim`).
        CheckpointExistsError: a checkpoint is committed and `overwrite` is False, or it is pinned;
            or, without `overwrite`, there is a `.metadata` without a marker.
        CommitUnknownError, RetryableError: a deletion could not be finished before the deadline.
        CheckpointCorruptError: the marker is damaged, and `overwrite` is False.
        UnsupportedError: a newer version wrote the marker.
    """
    beacon = beacon_key(nonce or new_nonce())
    try:
        *_, dot_metadata = workers.concurrently(
            check, partial(_put_beacon, store, beacon), partial(if_metadata_unchanged, store)
        )
        tries = clock.tries()
        marker, version = _take_token(store, dot_metadata, tries, overwrite=overwrite, claim=claim)
    except (InputError, LostRaceError, CorruptDataError):
        # Not after other errors: then the store does not answer, and another request would only
        # delay the error. A sweep removes the beacon.
        remove_beacon(store, beacon)
        raise
    return BeginToken(marker, version, claim, beacon=beacon, dot_metadata=dot_metadata)


def _put_beacon(store: ObjectStore, key: str) -> None:
    """Put the beacon of a save."""
    body = b"A save is under way here, or died before its end.\n"
    try:
        store.put(key, body, retry=False)
    except StoreUnavailableError:
        # Perhaps a web server answers instead of a store. Then this GET raises ConfigError, which
        # ends the save at once; the PUT below would be retried for long. A damaged marker does not
        # matter yet: `_take_token` reads it again.
        with suppress(CorruptDataError):
            read_marker(store)
        store.put(key, body)


def remove_beacon(store: ObjectStore, key: str) -> None:
    """Remove the beacon of a save that has ended. If that fails, log it; a sweep removes it."""
    try:
        store.delete(key)
    except DcpObjstoreError as error:
        logger.debug("the beacon %s/%s stays until the next sweep: %s", store.url, key, error)


def _take_token(
    store: ObjectStore, dot_metadata: Precondition, tries: Tries, *, overwrite: bool, claim: int
) -> tuple[Marker | None, Version | None]:
    """Return the marker and its version; raise if it forbids the save (rule 2).

    Args:
        dot_metadata: the condition that `.metadata` has not changed since the save began.
    """
    try:
        # Where a `.metadata` is, a marker should be, so a 404 is asked again.
        stored = read_marker(store, expected=dot_metadata != IfAbsent())
    except CheckpointCorruptError as error:
        if not overwrite:
            raise
        return None, _damaged_version(store, error)
    if stored is None:
        if not overwrite and dot_metadata != IfAbsent():
            raise CheckpointExistsError(
                "there is a '.metadata' here: another library wrote a checkpoint",
                advice="save under another URL, or pass overwrite=True to replace it",
                url=store.url,
            )
        return None, None
    marker = stored.record
    refuse_later(store, marker, claim)
    if marker.state == "deleting":
        # Finish the deletion now, before the uploads: another job that finished it later would
        # change the marker and so defeat this save.
        finish_deleting(store, marker.commit_id, tries)
        return _take_token(store, dot_metadata, tries, overwrite=overwrite, claim=claim)
    # A commit of an earlier claim does not count and is replaced in any case (rule C5 of `claim`).
    if marker.is_committed and not overwrite and marker.claim == claim:
        raise CheckpointExistsError(
            f"a checkpoint is committed here already (commit {marker.commit_id})",
            advice="save under another URL, or pass overwrite=True to replace it",
            url=store.url,
        )
    if marker.pins:  # they protect a commit from `overwrite` and from a later claim, too
        raise CheckpointExistsError(
            f"the checkpoint here is pinned ({', '.join(marker.pins)}) and is not overwritten",
            advice="remove the pin or save under another URL",
            url=store.url,
        )
    return marker, stored.version


def _damaged_version(store: ObjectStore, error: CheckpointCorruptError) -> Version:
    """Return the version of a damaged marker: the begin token of a save with `overwrite=True`.

    If it could not be replaced, no save at this URL would succeed again. The objects that the
    marker named stay until a sweep finds that no commit names them.
    """
    try:
        version = store.head(MARKER_KEY).version
        # If the marker can be read now, the version may be that of a whole marker, which another
        # writer has put since. Then this function raises RetryableError below.
        read_marker(store)
    except CheckpointCorruptError:
        if version == Version():
            raise  # no PUT can be conditioned on it; probably it was not the store that answered
        logger.warning("the damaged checkpoint at %s will be replaced: %s", store.url, error)
        return version
    raise RetryableError(
        "the marker changed while it was being read; another writer is at work", url=store.url
    )


def refuse_later(store: ObjectStore, marker: Marker, claim: int) -> None:
    """Refuse to replace or delete a marker of a later claim, or with a later base (rule C5).

    Args:
        claim: number of the claim of this job; 0 for none.

    Raises:
        SupersededError: the marker has a later claim or base than this job's claim.
    """
    later = max(marker.claim, marker.base)
    if later > claim:
        own = f"this job has claim {claim}" if claim else "this job has none"
        raise SupersededError(
            f"this step belongs to claim {later} of its run, and {own}: a newer job has the run",
            advice="stop this job; if it is the newer one, pass the claim of claim_run",
            url=store.url,
        )


def commit_checkpoint(
    store: ObjectStore,
    begin: BeginToken,
    *,
    index: bytes,
    objects: Sequence[tuple[str, int]],
    counts: Counts,
    world_size: int,
    user_metadata: Mapping[str, object] | None,
    nonce: str,
    goes_back: bool = False,
    fenced: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    on_retry: Callable[[int, Exception, float], None] | None = None,
) -> CommitResult:
    """Make the checkpoint exist (rules 4 and 5). Call once, after all ranks have reported.

    Args:
        objects: key and size in bytes of every data object.
        user_metadata: the user's own JSON values, or None.
        nonce: the nonce of this save, which names the index.
        goes_back: steps of earlier claims stop counting with this commit (rule C2 of `claim`).
        fenced: False on a store without conditional writes (rule 11).
        on_retry: a function that is called before each retry with the number of the try (from 2),
            the last error and the time of the first try.

    Raises:
        CheckpointCorruptError: an object is missing or has another size; nothing was committed.
        CommitLostError: another writer, or a sweep, changed the marker since the save began;
            nothing was committed. (A commit of an earlier claim is replaced instead.)
        SupersededError: a job of a later claim changed the marker; nothing was committed.
        CommitUnknownError: no clear answer before the deadline; the commit may still take effect.
        InputError: the store refused the PUT for good (rights, credentials), or `user_metadata` is
            not JSON; nothing was committed.
    """
    commit_id = new_id()
    marker_after = partial(  # makes the marker of this commit, which replaces another marker
        next_marker,
        commit_id=commit_id,
        index=IndexRef(
            key=index_key(nonce), size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()
        ),
        counts=counts,
        world_size=world_size,
        user_metadata=check_user_metadata(user_metadata),
        created_at=datetime.now(UTC),
        claim=begin.claim,
        base=begin.claim if goes_back else 0,
    )
    try:
        workers.concurrently(
            partial(check_objects, store, objects), partial(_put_index, store, nonce, index)
        )
    except CheckpointCorruptError:
        # Perhaps a sweep has removed the object. A sweep changes the marker before it removes what
        # a save has uploaded, so if the marker has changed, this save has lost to another job.
        stored = read_marker(store)
        if (stored and stored.version) != begin.version:
            raise _lost(store, stored, begin.claim) from None
        raise
    marker = marker_after(begin.marker)
    if begin.marker is None and begin.version is not None:
        # There is a marker, but it is damaged, so its write_id, which `put_on` names, is not known.
        marker = msgspec.structs.replace(marker, put_on="")
    replaced, version, tries = begin.marker, begin.version, clock.tries(on_retry)
    rivals = 0  # commits of earlier claims that came first and that this commit replaces
    while True:
        outcome = put_marker(
            store,
            marker,
            version,
            tries=tries,
            what=f"commit {commit_id}",
            landed=lambda seen: seen.knows(commit_id),
            fenced=fenced,
        )
        stored = outcome.stored  # None if the answer to the PUT was clear, or there is no marker
        if outcome.landed:
            # The marker that was read shows whether another job has replaced this commit since.
            superseded = stored is not None and not still_stands(stored, commit_id)
            return CommitResult(
                commit_id,
                marker,
                attempts=tries.retries + 1 + rivals,
                dot_metadata=None if superseded else begin.dot_metadata,
            )
        if stored is None or not _may_replace(stored.record, replaced, begin.claim):
            raise _lost(store, stored, begin.claim)
        replaced, version = stored.record, stored.version
        rivals += 1
        marker = marker_after(replaced)


def _put_index(store: ObjectStore, nonce: str, index: bytes) -> None:
    """Put the index. If the store's answer names no version, look whether the index is there."""
    if store.put(index_key(nonce), index) == Version():
        # Perhaps it was not the store that answered: a success names the object's state.
        check_objects(store, [(index_key(nonce), len(index))])


def check_objects(store: ObjectStore, objects: Sequence[tuple[str, int]]) -> None:
    """Check with a listing that every object is there with its size. Other keys may be there too.

    Raises:
        CheckpointCorruptError: an object is missing or has another size; the error names it.
    """
    missing = dict(objects)
    if not missing:
        return
    for meta in store.list():
        size = missing.pop(meta.key, None)
        if size is not None and size != meta.size_bytes:
            raise CheckpointCorruptError(
                f"the object has {meta.size_bytes} bytes on the store, but {size} were uploaded;"
                " nothing was committed",
                object_key=meta.key,
                url=store.url,
            )
        if not missing:
            return
    raise CheckpointCorruptError(
        f"{len(missing)} of {len(objects)} uploaded objects are not on the store; nothing was"
        " committed",
        object_key=next(iter(missing)),
        url=store.url,
    )


def _may_replace(rival: Marker, replaced: Marker | None, claim: int) -> bool:
    """Return whether our commit may replace that of a rival, which came first but does not count.

    It must have an earlier claim (rule C5 of `claim`), must replace the very marker that this save
    began with, and must not have been rewritten since. Then it has no pins, and no sweep came in
    between, which would have removed the objects without a commit, ours included.

    Args:
        replaced: the marker that our PUT was to replace; None if there was none.
        claim: number of our claim.
    """
    expected_put_on = ON_NOTHING if replaced is None else replaced.write_id
    return rival.claim < claim and rival.put_on == expected_put_on


def _lost(store: ObjectStore, stored: Stored[Marker] | None, claim: int) -> LostRaceError:
    """Return the error of a save that another job has defeated by changing the marker.

    Args:
        stored: the marker as it is now; None if there is none.
        claim: number of the claim of the job that saves; 0 for none.
    """
    later = max(stored.record.claim, stored.record.base) if stored else 0
    if later > claim:
        return SupersededError(
            f"a newer job took over this run while this save was under way (claim {later}, this job"
            f" has {claim or 'none'}), and nothing was committed. Stop this job",
            url=store.url,
        )
    winner = f"commit {stored.record.commit_id}" if stored else "the marker was removed"
    return CommitLostError(
        f"another writer, or a sweep, changed this checkpoint after the save began ({winner}); this"
        " save was not committed, and what the other writer wrote is whole",
        url=store.url,
    )


def rewrite_marker(
    store: ObjectStore, stored: Stored[Marker], what: str, tries: Tries, **changes: Any
) -> Marker | None:
    """Rewrite a marker with other fields, a new write_id and an empty `put_on` (rule 5).

    Args:
        stored: the marker as it was read; the PUT is conditioned on its version.
        what: the change in words, for errors.
        tries: bounds when a PUT may start; the caller may use it for its own requests, too.
        changes: fields of `Marker`. If there are none, only the write_id changes (a fence).

    Returns:
        The new marker, or None if another job has changed the marker: before this PUT or, if the
        answer to it was lost, possibly after it. Read the marker again then.

    Raises:
        CommitUnknownError: no clear answer before the deadline; the PUT may still take effect.
        InputError: the store refused the PUT for good; nothing was changed.
    """
    # The larger of the new marker's claim and base: with either, it needs the format that has them.
    claim = max(changes.get(name, getattr(stored.record, name)) for name in ("claim", "base"))
    marker = msgspec.structs.replace(
        stored.record,
        **{"write_id": new_id(), "put_on": "", "format": format_of(claim), **changes},
    )
    outcome = put_marker(store, marker, stored.version, tries=tries, what=what)
    return marker if outcome.landed else None


def finish_deleting(store: ObjectStore, commit_id: str, tries: Tries) -> bool:
    """Finish the deletion of this commit, whichever job began it (rule 8 in `delete`).

    Returns:
        Whether another save has committed here since. Then `.metadata` may need a repair, because
        this call may have removed the new one instead of the old one.

    Raises:
        CommitUnknownError, RetryableError: no success before the deadline.
    """
    while True:
        stored = read_marker(store, expected=True)
        if stored is None or stored.record.commit_id != commit_id:
            return True  # or there is no marker, so another program is at work here
        if stored.record.state != "deleting":
            return False
        store.delete(DOT_METADATA_KEY)
        if rewrite_marker(store, stored, "the tombstone", tries, state="deleted"):
            return False
        pause_or_raise(store, tries)


def put_tombstone(store: ObjectStore, tries: Tries, *, base: int = 0) -> Marker | None:
    """Put a tombstone where there is no marker, so that no save that began before can commit.

    Args:
        base: the number of the claim that does so. No job of an earlier one may save here.

    Returns:
        The tombstone, or None if another job put a marker first.

    Raises:
        CommitUnknownError: no clear answer before the deadline; the PUT may still take effect.
        InputError: the store refused the PUT for good; nothing was changed.
    """
    marker = Marker(
        format=format_of(base),
        state="deleted",
        commit_id=new_id(),
        write_id=new_id(),
        generation=1,
        index=None,
        world_size=0,
        base=base,
        created_at=datetime.now(UTC),
    )
    outcome = put_marker(store, marker, None, tries=tries, what="a tombstone")
    return marker if outcome.landed else None


def put_marker(
    store: ObjectStore,
    marker: Marker,
    version: Version | None,
    *,
    tries: Tries,
    what: str,
    landed: Callable[[Marker], bool] | None = None,
    fenced: bool = True,
) -> SwapOutcome[Marker]:
    """Put a marker until the outcome is known (rules 4 and 5), by `compare_and_swap`.

    Args:
        version: the version of the marker to replace; None if there must be none.
        tries: bounds when a PUT may start.
        what: the change in words, for errors.
        landed: decides from a marker that was read later whether this PUT took effect. Default: by
            its write_id.
        fenced: whether to send the PUT with its condition (rule 11).
    """
    return compare_and_swap(
        store,
        MARKER_KEY,
        encode_marker(marker),
        version,
        tries=tries,
        what=what,
        read=read_marker,
        landed=landed or (lambda seen: seen.write_id == marker.write_id),
        fenced=fenced,
    )
