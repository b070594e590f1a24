"""Publish: write and remove `.metadata`, the object by which stock torch readers find a checkpoint.

`compat` knows its content (`DotMetadata`); this module decides when it may be put or removed. The
rule of `commit` that this module implements:

 6. `.metadata` follows the marker: read its version, check that the marker is still ours, put
    `.metadata` against that version, and start again if that failed. So the writer that commits
    last also writes `.metadata` last. A save reads the version as it begins, and its commit is the
    check, unless it has read then that it was superseded. After the PUT the marker is read: if a
    deletion came in between, `.metadata` is removed. Any job may repair what a crash in between
    left (`align_dot_metadata`): `.metadata` is written where a commit stands, and removed where a
    tombstone stands, unless it belongs to another library, which has saved here since. The marker
    is read again after that, because stores delete without conditions and a new commit may have
    come in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, Protocol, TypeAlias

from dcp_objstore.checkpoint.clock import pause_or_raise
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY
from dcp_objstore.checkpoint.probe import if_version
from dcp_objstore.checkpoint.read import Stored, read_index, read_marker, still_stands
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    LostRaceError,
    ObjectNotFoundError,
    RetryableError,
    StoreUnavailableError,
)
from dcp_objstore.stores.protocol import IfAbsent, ObjectStore, Precondition
from dcp_objstore.stores.retries import Tries

# A `.metadata` of another commit may have any size; one that is larger than this is not ours.
MAX_SIZE_BYTES = 4 * 1024**3

Change: TypeAlias = Literal["written", "removed"]


class DotMetadata(Protocol):
    """The content of `.metadata`, which `compat` knows."""

    def derive(self, index: bytes) -> bytes:
        """Make the `.metadata` of a stored index.

        Raises:
            CheckpointCorruptError, UnsupportedError: the index cannot be read.
        """
        ...

    def describes(self, body: bytes, index: bytes) -> bool:
        """Return whether a `.metadata` names exactly what the index names, in any pickle format."""
        ...

    def is_ours(self, body: bytes) -> bool:
        """Return whether a `.metadata` refers only to objects whose names this package writes."""
        ...


def publish_dot_metadata(
    store: ObjectStore,
    commit_id: str,
    body: bytes,
    *,
    tries: Tries,
    condition: Precondition | None = None,
    fenced: bool = True,
) -> bool:
    """Write `.metadata` for stock torch readers, while `commit_id` is the current commit (rule 6).

    The checkpoint is committed whether or not this succeeds, so a save logs an error of this call
    as a warning and goes on.

    Args:
        commit_id: the commit that `body` describes.
        tries: bounds when a PUT may start.
        condition: that `.metadata` is as the save saw it: `dot_metadata` of the commit's result.
            Then the commit has just checked the marker. Default: this call reads the version of
            `.metadata`, and checks the marker.
        fenced: False on a store without conditional writes (rule 11 of `commit`).

    Returns:
        True if it was written. False if the marker no longer belongs to this commit; the job that
        changed the marker takes care of `.metadata`.

    Raises:
        RetryableError: no success before the deadline.
        DcpObjstoreError: the store refused for good.
    """
    may_have_landed = False  # a PUT of this call that did not succeed may have taken effect
    while True:
        if condition is None:
            condition = if_metadata_unchanged(store)
            stored = read_marker(store)
            if not still_stands(stored, commit_id):
                if may_have_landed:
                    _remove_if_deleted(store, stored)
                return False
        try:
            store.put(
                DOT_METADATA_KEY, body, precondition=condition if fenced else None, retry=False
            )
        except (StoreUnavailableError, LostRaceError, ObjectNotFoundError) as error:
            # Even a refusal may be somebody else's answer to a PUT that took effect (rule 5 of
            # `commit`). Without a condition, both objects are read before the next try.
            may_have_landed, condition = True, None
            if not tries.pause():
                raise RetryableError(
                    f"'.metadata' could not be written before the deadline (last answer: {error});"
                    " the checkpoint is committed, but stock torch readers do not see it",
                    url=store.url,
                ) from error
        else:  # a deletion may have come between the check of the marker and the PUT
            return not _remove_if_deleted(store, read_marker(store))


def if_metadata_unchanged(store: ObjectStore) -> Precondition:
    """Return the condition that `.metadata` is still what it is now. One HEAD."""
    try:
        return if_version(store, store.head(DOT_METADATA_KEY).version)
    except ObjectNotFoundError:
        return IfAbsent()


def _remove_if_deleted(store: ObjectStore, stored: Stored[Marker] | None) -> bool:
    """Remove the `.metadata` that we have put if the checkpoint was deleted; return whether it was.

    That deletion may have removed the old `.metadata` before ours was put.

    Args:
        stored: the marker as it was read after our PUT.
    """
    if stored is None or stored.record.is_committed:
        return False  # a later commit writes its own `.metadata`
    store.delete(DOT_METADATA_KEY)
    return True


class _Needed(NamedTuple):
    """What brings `.metadata` into line with a marker.

    Attributes:
        change: the change that is needed; None if there is none.
        body: what to write.
        written_at: the time at which the present `.metadata` was written, if it is in line.
    """

    change: Change | None
    body: bytes = b""
    written_at: datetime | None = None


def _needed_change(store: ObjectStore, marker: Marker, dot_metadata: DotMetadata) -> _Needed:
    """Compare `.metadata` with what a committed marker or a tombstone says."""
    index = read_index(store, marker) if marker.is_committed else None
    try:
        body, meta = store.get(DOT_METADATA_KEY, max_size_bytes=MAX_SIZE_BYTES)
    except (ObjectNotFoundError, CorruptDataError):
        body = None  # missing, or larger than this package writes
    if index is None:  # the marker is a tombstone
        is_left_over = body is not None and dot_metadata.is_ours(body)
        return _Needed("removed" if is_left_over else None)
    if body is not None and dot_metadata.describes(body, index):
        return _Needed(None, body, meta.last_modified)
    return _Needed("written", dot_metadata.derive(index))


@dataclass(frozen=True)
class Aligned:
    """The result of `align_dot_metadata`.

    Attributes:
        stored: the marker that `.metadata` agrees with. It may be later than the one passed in.
        change: the last change that was made, or None. After a change the caller rewrites the
            marker: stock readers may still use what the old `.metadata` named, so a sweep must see
            a young marker.
        written_at: the time at which `.metadata` was written, if it was in line already.
    """

    stored: Stored[Marker]
    change: Change | None
    written_at: datetime | None = None


def align_dot_metadata(
    store: ObjectStore,
    stored: Stored[Marker],
    dot_metadata: DotMetadata,
    *,
    tries: Tries,
    dry_run: bool = False,
) -> Aligned:
    """Bring `.metadata` into line with the marker, which must be committed or a tombstone.

    Args:
        dry_run: return the change that is needed, without making it.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError: the index cannot be read.
        RetryableError: no success before the deadline, or the checkpoint is being deleted.
    """
    change: Change | None = None
    while stored.record.state != "deleting":
        needed, body, written_at = _needed_change(store, stored.record, dot_metadata)
        if needed is None or dry_run:
            # If it is in line now, `change` is what an earlier turn of this loop has done.
            return Aligned(stored, needed or change, written_at)
        if needed == "removed":
            store.delete(DOT_METADATA_KEY)
            change = needed
        elif publish_dot_metadata(store, stored.record.commit_id, body, tries=tries):
            change = needed
        again = read_marker(store)
        if again is None:
            raise CheckpointCorruptError(
                "the marker was removed by something other than dcp_objstore", url=store.url
            )
        if (
            again.record.commit_id == stored.record.commit_id
            and again.record.state == stored.record.state
        ):
            return Aligned(again, change)
        # Another job has committed or deleted since: compare `.metadata` with the new marker.
        stored = again
        pause_or_raise(store, tries)
    raise RetryableError("this checkpoint is being deleted", advice="try again", url=store.url)
