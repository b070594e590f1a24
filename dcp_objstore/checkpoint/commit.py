"""Commit: the only code that puts a marker. (`opening` is the only code that trusts one.)

The rules, which a model check of two writers, a deleter, a sweeper and a reader (with lost, delayed
and duplicated answers, crashes and pauses) has passed; weakening any of them was caught. They keep
the numbers of the design; 3 is `names`, 6 stands in `publishing`, 7 in `opening`, 8 in `deleting`,
9 in `sweep`, and 10 is about the writer object.

 1. A checkpoint exists exactly while `_COMMIT` says `committed`. The marker is never removed: a
    deleted checkpoint keeps one that says `deleted` (a tombstone), which counts as absent and is
    what the next commit is conditioned on. A commit_id stays through all rewrites of the same
    commit; every new content has a new write_id, so that no two ETags are ever equal.
 2. A save begins with a **beacon**, a small object that says that a save is under way, so that a
    sweep sees it also where a listing shows no upload before its end. Then comes one GET of
    `_COMMIT`, before any rank uploads. Body and version come from that one response; together they
    are the begin token. Where it says `deleting`, the save finishes that (rule 8) and reads again.
    What is committed is replaced only with `overwrite=True`. After the commit the beacon is
    removed; one that a crash left is removed by a sweep.
 4. A commit is one conditional PUT of `_COMMIT` against the begin token, after a listing has shown
    every object with its size and after the index is there. The transport does not retry it; we
    send again, always the same bytes.
 5. Whatever is not a clean success is decided by reading `_COMMIT`. Our commit_id is current or in
    the log: we committed, even if somebody has replaced us since. The begin token still stands:
    send again, and at the deadline say that the outcome is unknown (an answer lost on the way may
    hide a PUT that lands later); but a PUT that was refused for good, and none before it without an
    answer, is not sent again: the save ends with that refusal. Anything else: somebody else was
    first. No refusal is believed before that read, not even the first: something between us and
    the store may have answered, for a PUT that took effect. So the outcome is unknown as long as
    the marker cannot be read. Nothing is deleted here, because an object that looks useless may
    belong to a commit that is about to land. Rewrites of a marker (`rewrite_marker`: deleting,
    fencing, pinning) are decided alike, by their write_id.
11. All this needs a store with conditional writes: see `probe`. `fenced=False` sends the same PUTs
    without conditions, for users who have promised that there is only one writer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.compare_and_swap import Outcome, compare_and_swap
from dcp_objstore.checkpoint.listing import check_objects
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
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.checkpoint.read import (
    Found,
    explain_missing,
    open_committed,
    open_found,
    read_marker,
)
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CommitLostError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    RetryableError,
    StoreUnavailableError,
    SupersededError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectStore, Precondition, Version

_log = logging.getLogger("dcp_objstore")


@dataclass(frozen=True)
class BeginToken:
    """What `_COMMIT` was when the save began. Picklable.

    Attributes:
        url: the checkpoint.
        marker: the content; a tombstone or, with overwrite, a committed marker; None: there is
            none or, with overwrite, one that cannot be read.
        version: the store's token of that state; None: there is no marker.
        claim: of the job that saves; 0: none.
        beacon: key of the object that shows sweeps that this save is under way.
    """

    url: str
    marker: Marker | None
    version: Version | None
    claim: int = 0
    beacon: str = field(default="", compare=False)

    @property
    def precondition(self) -> Precondition:
        """What the commit is conditioned on."""
        return IfAbsent() if self.version is None else IfVersion(self.version)


@dataclass(frozen=True)
class Committed:
    """A commit that took effect.

    Attributes:
        commit_id: of this commit.
        superseded: somebody has replaced or deleted it since, before we saw our answer.
        marker: as this commit wrote it.
        attempts: PUTs of the marker that were sent.
    """

    commit_id: str
    superseded: bool
    marker: Marker
    attempts: int = 1


def begin(
    store: ObjectStore,
    *,
    overwrite: bool,
    claim: int = 0,
    nonce: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> BeginToken:
    """Put the beacon of a save and take its begin token (rule 2).

    One PUT and one GET; a HEAD where there is no marker, for what another library may have saved;
    and what finishing a deletion takes, where one was begun and not finished (rule 8). A save that
    is refused leaves no beacon.

    Args:
        store: rooted at the checkpoint.
        overwrite: replace what is committed, or damaged. What an earlier claim than ours has
            committed does not count any more and is replaced in any case (rule C5 of `claim`).
        claim: of the job that saves; 0: none.
        nonce: of the save; names the beacon. Default: a new one.
        deadline_seconds: no change of the marker begins later than this. Default 60.
        clock: for tests.

    Raises:
        SupersededError: the marker is of a later claim than ours (rule C5).
        CheckpointExistsError: it is committed and `overwrite` is False, or it is pinned; or,
            without `overwrite`, there is a `.metadata` without a marker.
        CommitUnknownError, RetryableError: a deletion could not be finished until the deadline.
        CheckpointCorruptError: the marker is damaged, and `overwrite` is False.
        UnsupportedError: a newer version wrote the marker.
    """
    beacon = beacon_key(nonce or new_nonce())
    _light(store, beacon)
    try:
        token = _take_token(
            store, Retries(deadline_seconds, clock), overwrite=overwrite, claim=claim
        )
    except (InputError, LostRaceError, CorruptDataError):
        # Not where the store does not answer: the save would fail later, and gain nothing.
        remove_beacon(store, beacon)
        raise
    return replace(token, beacon=beacon)


def _light(store: ObjectStore, key: str) -> None:
    body = b"A save is under way here, or died before its end.\n"
    try:
        store.put(key, body, retry=False)
    except StoreUnavailableError:
        # Where a web server answers instead of a store, a GET says so at once; a PUT is retried.
        with suppress(CorruptDataError, UnsupportedError):
            read_marker(store)
        store.put(key, body)


def remove_beacon(store: ObjectStore, key: str) -> None:
    """Remove the beacon of a save that has ended. What fails is left to a sweep, and logged."""
    try:
        store.delete(key)
    except DcpObjstoreError as error:
        _log.debug("the beacon %s/%s stays until a sweep: %s", store.url, key, error)


def _take_token(store: ObjectStore, retries: Retries, *, overwrite: bool, claim: int) -> BeginToken:
    try:
        found = read_marker(store)
    except CheckpointCorruptError as error:
        if not overwrite:
            raise
        return _begin_on_damage(store, error, claim)
    if found is None:
        if not overwrite:
            _refuse_foreign(store)
        return BeginToken(store.url, None, None, claim)
    marker, version = found
    refuse_later(store, marker, claim)
    if marker.state == "deleting":
        # Before the uploads, because whoever finishes it later would defeat this save.
        finish_deleting(store, marker.commit_id, retries)
        return _take_token(store, retries, overwrite=overwrite, claim=claim)
    if marker.is_committed and not overwrite and marker.claim == claim:
        raise CheckpointExistsError(
            f"a checkpoint is committed here already (commit {marker.commit_id}); save under"
            " another URL, or pass overwrite=True to replace it",
            url=store.url,
        )
    if marker.is_committed and marker.pins:
        raise CheckpointExistsError(
            f"the checkpoint here is pinned ({', '.join(marker.pins)}) and is not overwritten;"
            " remove the pin or save under another URL",
            url=store.url,
        )
    return BeginToken(store.url, marker, version, claim)


def _begin_on_damage(store: ObjectStore, error: CheckpointCorruptError, claim: int) -> BeginToken:
    """The token of a marker that nobody can read any more: a run must not end for ever at it.

    What it named stays where it is, until a sweep finds that no commit names it.
    """
    try:
        version = store.head(MARKER_KEY).version
        # Read again after the version was: if it is whole now, somebody else is at work here.
        read_marker(store)
    except CheckpointCorruptError:
        if version == Version():
            raise  # no PUT can be conditioned on that: it is hardly the store that answers
        _log.warning("the checkpoint at %s is to be replaced: %s", store.url, error)
        return BeginToken(store.url, None, version, claim)
    raise RetryableError(
        "the marker changed while it was being read; another writer is at work", url=store.url
    )


def refuse_later(store: ObjectStore, marker: Marker, claim: int) -> None:
    """Rule C5 of `claim`: nobody replaces or deletes a marker of a later claim than its own.

    Raises:
        SupersededError: it is one.
    """
    if marker.claim > claim:
        own = f"this job has claim {claim}" if claim else "this job has none"
        raise SupersededError(
            f"this step belongs to claim {marker.claim} of its run, and {own}: a newer job took the"
            " run over. Nothing was changed. Stop this job; if it is the newer one, let it call"
            " dcp_objstore.claim_run and pass the claim",
            url=store.url,
        )


def _refuse_foreign(store: ObjectStore) -> None:
    """Our commit would replace the `.metadata` by which stock readers find another's data."""
    try:
        store.head(DOT_METADATA_KEY)
    except ObjectNotFoundError:
        return
    raise CheckpointExistsError(
        "there is a '.metadata' here without a commit marker: a checkpoint that another library"
        " wrote. Save under another URL, or pass overwrite=True to replace it",
        url=store.url,
    )


def commit(
    store: ObjectStore,
    begin: BeginToken,
    *,
    index: bytes,
    objects: Sequence[tuple[str, int]],
    counts: Counts,
    world_size: int,
    user_metadata: Mapping[str, object] | None,
    nonce: str,
    deadline_seconds: float = DEADLINE_SECONDS,
    fenced: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    on_retry: Callable[[int, Exception], None] | None = None,
) -> Committed:
    """Make the checkpoint exist (rules 4 and 5). Call once, after all ranks have reported.

    Args:
        store: rooted at the checkpoint.
        begin: from `begin`, taken before the uploads.
        index: the encoded index.
        objects: key and size in bytes of every data object.
        counts: for listings.
        world_size: ranks that saved.
        user_metadata: see `marker.check_user_metadata`.
        nonce: of this save; names the index.
        deadline_seconds: no PUT of the marker starts later than this after the first; a request
            that is under way may take the transport's time-out longer.
        fenced: False on a store without conditional writes (rule 11).
        clock: for tests.
        on_retry: see `Retries`.

    Raises:
        CheckpointCorruptError: an object is missing or of another size; nothing was committed.
        CommitLostError: another writer, or a sweep, changed the marker since `begin`; nothing was
            committed. But what only jobs of earlier claims have committed since is replaced.
        SupersededError: a job of a later claim changed it; nothing was committed.
        CommitUnknownError: no clear answer until the deadline; it may still take effect.
        InputError: the store refused the PUT for good (rights, credentials), the begin token is
            of another checkpoint, or `user_metadata` is not JSON; nothing was committed.
    """
    if begin.url != store.url:
        raise InputError(f"the begin token is of {begin.url}", url=store.url)
    make = partial(
        next_marker,
        commit_id=new_id(),
        index=IndexRef(
            key=index_key(nonce), size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()
        ),
        counts=counts,
        world_size=world_size,
        user_metadata=check_user_metadata(user_metadata),
        created_at=datetime.now(UTC),
        claim=begin.claim,
    )
    marker = make(begin.marker)
    ours = marker.commit_id
    encode_marker(marker)  # refused, if it is, before any request
    try:
        check_objects(store, objects)
    except CheckpointCorruptError:
        # Whoever removes what a save has uploaded, as a sweep does, has changed the marker before.
        found = read_marker(store)
        if (found[1] if found is not None else None) != begin.version:
            raise _lost(store, found[0] if found is not None else None, begin.claim) from None
        raise
    store.put(index_key(nonce), index)
    if begin.marker is None and begin.version is not None:
        marker = msgspec.structs.replace(marker, put_on="")  # it is not known on what
    token, retries = (begin.marker, begin.version), Retries(deadline_seconds, clock, on_retry)
    beaten = 0
    while True:
        outcome = put_marker(
            store,
            marker,
            token[1],
            retries,
            f"commit {ours}",
            landed=lambda seen: seen.knows(ours),
            fenced=fenced,
        )
        seen = outcome.seen
        if outcome.landed:
            superseded = seen is not None and (seen.commit_id != ours or not seen.is_committed)
            return Committed(ours, superseded, marker, retries.tries + beaten)
        if outcome.found is None or not _yields(outcome.found[0], token[0], begin.claim):
            raise _lost(store, seen, begin.claim)
        token, beaten = outcome.found, beaten + 1
        marker = make(token[0])


def _yields(seen: Marker, token: Marker | None, claim: int) -> bool:
    """Whether what beat our commit does not count (rule C5 of `claim`), and nothing else came.

    Put directly on the marker that we had seen, and not rewritten since: so it has no pins, and
    there was no sweep in between, which removes what it found without a commit, ours too.
    """
    on = ON_NOTHING if token is None else token.write_id
    return seen.is_committed and seen.claim < claim and seen.put_on == on


def _lost(store: ObjectStore, seen: Marker | None, claim: int) -> LostRaceError:
    if seen is not None and seen.claim > claim:
        return SupersededError(
            f"a newer job took this run over while this save was under way (claim {seen.claim},"
            f" this job has {claim or 'none'}); this save was not committed. Stop this job",
            url=store.url,
        )
    winner = f"commit {seen.commit_id}" if seen is not None else "the marker was removed"
    return CommitLostError(
        f"another writer, or a sweep, changed this checkpoint since the save began ({winner}); this"
        " save was not committed, and what the other one wrote is whole",
        url=store.url,
    )


def rewrite_marker(
    store: ObjectStore, found: Found, what: str, retries: Retries, **changes: Any
) -> Marker | None:
    """Put the marker that was found with other fields and a new write_id (rule 5).

    Args:
        store: rooted at the checkpoint.
        found: as read; the PUT is conditioned on its version.
        what: the change in words, for errors.
        retries: bounds when a PUT may start, and is shared with what the caller does around it.
        changes: fields of `Marker`; none: only the write_id changes (a fence).

    Returns:
        The new marker; None: somebody else has changed the marker, before ours or after it (only
        where its answer was lost). Read it again.

    Raises:
        CommitUnknownError: no clear answer until the deadline; it may still take effect.
        InputError: the store refused for good; nothing was changed.
    """
    claim = changes.get("claim", found[0].claim)
    marker = msgspec.structs.replace(
        found[0],
        **{"write_id": new_id(), "put_on": "", "format": format_of(claim), **changes},
    )
    return marker if put_marker(store, marker, found[1], retries, what).landed else None


def finish_deleting(store: ObjectStore, commit_id: str, retries: Retries) -> bool:
    """Bring a `deleting` of this commit to its end, whoever began it (rule 8, in `deleting`).

    Returns:
        Whether another save has committed here since, so that `.metadata` may need mending: our
        removal of the old one may have met the new one.

    Raises:
        CommitUnknownError, RetryableError: not until the deadline.
    """
    while True:
        found = read_marker(store)
        if found is None or found[0].commit_id != commit_id:
            return True
        if found[0].state != "deleting":
            return False
        store.delete(DOT_METADATA_KEY)
        if rewrite_marker(store, found, "the tombstone", retries, state="deleted", pins=()):
            return False
        pause_or_raise(store, retries)


def pause_or_raise(store: ObjectStore, retries: Retries) -> None:
    """Pause before the next try.

    Raises:
        RetryableError: the deadline has come.
    """
    if not retries.pause():
        raise RetryableError(
            "others kept changing this checkpoint until the deadline; try again", url=store.url
        )


def put_tombstone(store: ObjectStore, retries: Retries) -> Marker | None:
    """Put a tombstone where there is no marker: what was begun before cannot commit any more.

    Returns:
        The tombstone, or None if somebody else put a marker first.

    Raises:
        As `rewrite_marker`.
    """
    marker = Marker(
        state="deleted",
        commit_id=new_id(),
        write_id=new_id(),
        generation=1,
        index=None,
        world_size=0,
        created_at=datetime.now(UTC),
    )
    return marker if put_marker(store, marker, None, retries, "a tombstone").landed else None


def put_marker(
    store: ObjectStore,
    marker: Marker,
    version: Version | None,
    retries: Retries,
    what: str,
    *,
    landed: Callable[[Marker], bool] | None = None,
    fenced: bool = True,
) -> Outcome[Marker]:
    """Rules 4 and 5, of the marker: see `compare_and_swap`.

    Args:
        marker: what to put.
        version: of the marker that it replaces; None: there must be none.
        landed: tells by a marker read later that ours took effect. Default: by its write_id.
    """
    return compare_and_swap(
        store,
        MARKER_KEY,
        encode_marker(marker),
        version,
        retries,
        what,
        read=read_marker,
        landed=landed or (lambda seen: seen.write_id == marker.write_id),
        fenced=fenced,
    )


__all__ = [
    "BeginToken",
    "Committed",
    "Found",
    "begin",
    "commit",
    "explain_missing",
    "finish_deleting",
    "open_committed",
    "open_found",
    "pause_or_raise",
    "publish_dot_metadata",
    "put_marker",
    "put_tombstone",
    "read_marker",
    "refuse_later",
    "remove_beacon",
    "rewrite_marker",
]
