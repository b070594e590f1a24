"""Commit: the only code that puts a marker or trusts one.

The rules, which a model check of two writers, a deleter, a sweeper and a reader (with lost, delayed
and duplicated answers, crashes and pauses) has passed; weakening any of them was caught. They keep
the numbers of the design; 3 is `names`, 8 to 10 are about deleting, sweeping and the writer object.

 1. A checkpoint exists exactly while `_COMMIT` says `committed`. The marker is never removed: a
    deleted checkpoint keeps one that says `deleted` (a tombstone), which counts as absent and is
    what the next commit is conditioned on. A commit_id stays through all rewrites of the same
    commit; every new content has a new write_id, so that no two ETags are ever equal.
 2. A save begins with one GET of `_COMMIT`, before any rank uploads. Body and version come from
    that one response; together they are the begin token. What is committed is replaced only with
    `overwrite=True`.
 4. A commit is one conditional PUT of `_COMMIT` against the begin token, after a listing has shown
    every object with its size and after the index is there. The transport does not retry it; we
    send again, always the same bytes.
 5. Whatever is not a clean success is decided by reading `_COMMIT`. Our commit_id is current or in
    the log: we committed, even if somebody has replaced us since. The begin token still stands:
    send again, and at the deadline say that the outcome is unknown (an answer lost on the way may
    hide a PUT that lands later). Anything else: somebody else was first. Nothing is deleted here,
    because an object that looks useless may belong to a commit that is about to land.
 6. `.metadata` follows the marker: read its version, check that the marker is still ours, put it
    against that version, and again when that failed. Whoever committed last also writes last.
 7. Readers go from `_COMMIT` to the index to the objects and never trust a listing. If something
    is missing, the marker is read again: the same commit_id means damage, another one means that
    the checkpoint was replaced or deleted meanwhile. Only commit_ids are compared, since a sweep
    may rewrite the marker of the same commit.
11. All this needs a store with conditional writes: see `probe`. `fenced=False` sends the same PUTs
    without conditions, for users who have promised that there is only one writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dcp_objstore.checkpoint.clock import SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.listing import check_objects, explain_absence
from dcp_objstore.checkpoint.marker import (
    MAX_MARKER_SIZE_BYTES,
    Counts,
    IndexRef,
    Marker,
    check_user_metadata,
    decode_marker,
    encode_marker,
    new_id,
    next_marker,
)
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY, MARKER_KEY, index_key
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CommitLostError,
    CommitUnknownError,
    CorruptDataError,
    DcpObjstoreError,
    InputError,
    LostRaceError,
    ObjectNotFoundError,
    RetryableError,
    StoreUnavailableError,
    UnsupportedError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectStore, Precondition, Version

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class BeginToken:
    """What `_COMMIT` was when the save began. Picklable.

    Attributes:
        url: the checkpoint.
        marker: the content; a tombstone or, with overwrite, a committed marker; None: none.
        version: the store's token of that state; None exactly where `marker` is.
    """

    url: str
    marker: Marker | None
    version: Version | None

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
    """

    commit_id: str
    superseded: bool
    marker: Marker


def begin(store: ObjectStore, *, overwrite: bool) -> BeginToken:
    """Take the begin token of a save (rule 2). One GET; and where nothing of ours is, a HEAD for
    what another library may have saved there.

    Raises:
        CheckpointExistsError: it is committed and `overwrite` is False, or it is pinned; or,
            without `overwrite`, there is a `.metadata` without a marker.
        RetryableError: somebody is deleting it.
        CheckpointCorruptError, UnsupportedError: the marker cannot be read.
    """
    found = read_marker(store)
    if found is None:
        if not overwrite:
            _refuse_foreign(store)
        return BeginToken(store.url, None, None)
    marker, version = found
    if marker.state == "deleting":
        raise RetryableError(
            "this checkpoint is being deleted; wait until that is done and save again, or save"
            " under another URL",
            url=store.url,
        )
    if marker.is_committed and not overwrite:
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
    return BeginToken(store.url, marker, version)


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

    Raises:
        CheckpointCorruptError: an object is missing or of another size; nothing was committed.
        CommitLostError: another writer changed the marker since `begin`; nothing was committed.
        CommitUnknownError: no clear answer until the deadline; it may still take effect.
        InputError: the store refused the first PUT for good (rights, credentials), the begin
            token is of another checkpoint, or `user_metadata` is not JSON; nothing was committed.
    """
    if begin.url != store.url:
        raise InputError(f"the begin token is of {begin.url}", url=store.url)
    marker = next_marker(
        begin.marker,
        commit_id=new_id(),
        index=IndexRef(
            key=index_key(nonce), size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()
        ),
        counts=counts,
        world_size=world_size,
        user_metadata=check_user_metadata(user_metadata),
        created_at=datetime.now(UTC),
    )
    body = encode_marker(marker)
    check_objects(store, objects)
    store.put(index_key(nonce), index)
    precondition = begin.precondition if fenced else None
    return _put_marker(store, begin, marker, body, precondition, Retries(deadline_seconds, clock))


def publish_dot_metadata(
    store: ObjectStore,
    commit_id: str,
    body: bytes,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    fenced: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> bool:
    """Write `.metadata` for stock torch readers, while `commit_id` is the current commit (rule 6).

    The checkpoint is committed whether or not this succeeds, so a caller that saves logs what is
    raised here as a warning and goes on.

    Args:
        store: rooted at the checkpoint.
        commit_id: the commit that `body` describes.
        body: the pickled `Metadata`.
        deadline_seconds, fenced, clock: as for `commit`.

    Returns:
        True if ours was written; False if the marker is no longer of this commit, in which case
        whoever changed it takes care of `.metadata`.

    Raises:
        RetryableError: no success until the deadline.
        DcpObjstoreError: the store refused for good.
    """
    retries = Retries(deadline_seconds, clock)
    while True:
        try:
            token = store.head(DOT_METADATA_KEY).version
            precondition: Precondition = IfVersion(token)
        except ObjectNotFoundError:
            precondition = IfAbsent()
        found = read_marker(store)
        if found is None or not found[0].is_committed or found[0].commit_id != commit_id:
            return False
        try:
            store.put(
                DOT_METADATA_KEY, body, precondition=precondition if fenced else None, retry=False
            )
        except (StoreUnavailableError, LostRaceError, ObjectNotFoundError) as error:
            if not retries.pause():
                raise RetryableError(
                    f"'.metadata' could not be written until the deadline (last: {error}); the"
                    " checkpoint is committed, but stock torch readers do not see it",
                    url=store.url,
                ) from error
        else:
            return True


def read_marker(store: ObjectStore) -> tuple[Marker, Version] | None:
    """The marker with the version of the same response, or None if there is none. One GET.

    A tombstone is returned like any marker; only one with `is_committed` is a checkpoint.

    Raises:
        CheckpointCorruptError, UnsupportedError: see `marker.decode_marker`.
    """
    try:
        body, meta = store.get(MARKER_KEY, max_size_bytes=MAX_MARKER_SIZE_BYTES)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        raise CheckpointCorruptError(
            f"the marker is damaged: {error.message}", object_key=MARKER_KEY, url=store.url
        ) from error
    try:
        return decode_marker(body), meta.version
    except DcpObjstoreError as error:
        error.at(object_key=MARKER_KEY, url=store.url)
        raise


def open_committed(store: ObjectStore) -> tuple[Marker, bytes]:
    """The marker of a committed checkpoint and its index, size and SHA-256 verified (rule 7).

    Raises:
        CheckpointNotFoundError: nothing is committed here; the message says what is here instead.
        CheckpointCorruptError: the marker or the index is damaged, or the index is missing.
        CheckpointGoneError: the checkpoint was replaced or deleted between the two requests.
        UnsupportedError: written in a newer format.
    """
    return open_found(store, read_marker(store))


def open_found(store: ObjectStore, found: tuple[Marker, Version] | None) -> tuple[Marker, bytes]:
    """As `open_committed`, of what `read_marker` has just given."""
    if found is None or not found[0].is_committed:
        if found is None:
            reason = explain_absence(store)
        elif found[0].state == "deleted":
            reason = "the checkpoint that was here was deleted"
        else:
            reason = "the checkpoint here is being deleted"
        raise CheckpointNotFoundError(reason, url=store.url)
    marker = found[0]
    ref = marker.index
    if ref is None:  # `decode_marker` lets only a tombstone have none
        raise CheckpointCorruptError("the marker names no index", url=store.url)
    try:
        body, _ = store.get(ref.key, max_size_bytes=ref.size_bytes)
    except ObjectNotFoundError as error:
        raise explain_missing(store, marker.commit_id, ref.key) from error
    except CorruptDataError as error:
        raise CheckpointCorruptError(
            f"the index is damaged: {error.message}", object_key=ref.key, url=store.url
        ) from error
    if len(body) != ref.size_bytes or hashlib.sha256(body).hexdigest() != ref.sha256:
        raise CheckpointCorruptError(
            f"the index is damaged: {len(body)} bytes that are not the {ref.size_bytes} bytes that"
            " were committed",
            object_key=ref.key,
            url=store.url,
        )
    return marker, body


def explain_missing(store: ObjectStore, commit_id: str, object_key: str) -> DcpObjstoreError:
    """The error for an object of the commit that was not found while reading (rule 7). One GET.

    Returns:
        `CheckpointCorruptError` if the commit still stands, `CheckpointGoneError` if it does not,
        or the error that kept us from finding out.
    """
    try:
        found = read_marker(store)
    except DcpObjstoreError as error:
        return error
    if found is not None and found[0].commit_id == commit_id and found[0].is_committed:
        return CheckpointCorruptError(
            "the checkpoint is committed but this object of it is missing: somebody removed it"
            " without dcp_objstore; load another checkpoint",
            object_key=object_key,
            url=store.url,
        )
    if found is not None and found[0].is_committed:
        now = f"replaced by commit {found[0].commit_id}; load it again"
    else:
        now = "deleted; load another checkpoint"
    return CheckpointGoneError(
        f"while it was being read, the checkpoint was {now}", object_key=object_key, url=store.url
    )


def _put_marker(
    store: ObjectStore,
    begin: BeginToken,
    marker: Marker,
    body: bytes,
    precondition: Precondition | None,
    retries: Retries,
) -> Committed:
    """Rules 4 and 5: send until the outcome is known or the deadline has come."""
    may_still_land = False
    while True:
        try:
            store.put(MARKER_KEY, body, precondition=precondition, retry=False)
            return Committed(marker.commit_id, False, marker)
        except DcpObjstoreError as error:
            if _had_no_effect(error) and not may_still_land:
                error.at(object_key=MARKER_KEY, url=store.url)
                raise
            # A refusal of this PUT says nothing of an earlier one that was never answered.
            refused = isinstance(error, (LostRaceError, InputError))
            may_still_land = may_still_land or not refused
            last: DcpObjstoreError = error
        try:
            found = read_marker(store)
        except (CheckpointCorruptError, UnsupportedError) as error:
            raise _unknown(store, marker, error) from error
        except DcpObjstoreError as error:
            last = error
        else:
            outcome = _outcome(store, begin, marker, found)
            if outcome is not None:
                return outcome
        if not retries.pause():
            raise _unknown(store, marker, last) from last


def _outcome(
    store: ObjectStore,
    begin: BeginToken,
    marker: Marker,
    found: tuple[Marker, Version] | None,
) -> Committed | None:
    """Rule 5: what became of our PUT, by the marker found after it; None: not decided yet.

    Raises:
        CommitLostError: the begin token no longer stands, and not by us.
    """
    if found is not None and found[0].knows(marker.commit_id):
        current = found[0]
        superseded = current.commit_id != marker.commit_id or not current.is_committed
        return Committed(marker.commit_id, superseded, marker)
    if (found[1] if found is not None else None) == begin.version:
        return None
    winner = f"commit {found[0].commit_id}" if found is not None else "the marker was removed"
    raise CommitLostError(
        f"another writer changed this checkpoint since the save began ({winner}); this save was"
        " not committed, and what the other one wrote is whole",
        url=store.url,
    )


def _had_no_effect(error: DcpObjstoreError) -> bool:
    """Whether the store, or the client before it, refused the request for good.

    404 is left out: it is AWS's answer to `If-Match` where there is no object any more.
    """
    return isinstance(error, InputError) and not isinstance(error, ObjectNotFoundError)


def _unknown(store: ObjectStore, marker: Marker, last: DcpObjstoreError) -> CommitUnknownError:
    return CommitUnknownError(
        f"the store never said whether commit {marker.commit_id} took effect, and it still may"
        f" (last: {last}); nothing was deleted. Look at the checkpoint before saving it again",
        url=store.url,
    )


__all__ = [
    "BeginToken",
    "Committed",
    "begin",
    "commit",
    "explain_missing",
    "open_committed",
    "open_found",
    "publish_dot_metadata",
    "read_marker",
]
