"""`.metadata`: the derived object by which stock torch readers find a checkpoint.

What it must hold is knowledge of the torch floor (`DotMetadata`); when it may be put or removed is
decided here. The rule of `commit` that this module carries out:

 6. `.metadata` follows the marker: read its version, check that the marker is still ours, put it
    against that version, and again when that failed. Whoever committed last also writes last.
    After it the marker is read again: where a deletion came in between, `.metadata` is removed.
    A crash in between is mended by anybody (`align_dot_metadata`): written where a commit stands,
    removed where a tombstone does, unless it is another library's, which has saved here since. The
    marker is read again after that, since stores remove without conditions and a new commit may
    have come in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY
from dcp_objstore.checkpoint.read import Found, read_index, read_marker
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CorruptDataError,
    LostRaceError,
    ObjectNotFoundError,
    RetryableError,
    StoreUnavailableError,
)
from dcp_objstore.stores.protocol import IfAbsent, IfVersion, ObjectStore, Precondition

# A `.metadata` of another commit may have any size; what is larger than this is not ours.
_MAX_SIZE_BYTES = 4 * 1024**3

Change: TypeAlias = Literal["written", "removed"]


class DotMetadata(Protocol):
    """What the torch floor knows of `.metadata`."""

    def derive(self, index: bytes) -> bytes:
        """The body that belongs to an index as it lies on the store.

        Raises:
            CheckpointCorruptError, UnsupportedError: the index cannot be read.
        """
        ...

    def describes(self, body: bytes, index: bytes) -> bool:
        """Whether a body names exactly what the index names, however it is pickled."""
        ...

    def is_ours(self, body: bytes) -> bool:
        """Whether a body names only objects with names of ours."""
        ...


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
    return publish_until(store, commit_id, body, retries=retries, fenced=fenced)


def publish_until(
    store: ObjectStore, commit_id: str, body: bytes, *, retries: Retries, fenced: bool = True
) -> bool:
    """As `publish_dot_metadata`, within a deadline that is shared with what the caller does."""
    may_be_there = False
    while True:
        try:
            token = store.head(DOT_METADATA_KEY).version
            precondition: Precondition = IfVersion(token)
        except ObjectNotFoundError:
            precondition = IfAbsent()
        found = read_marker(store)
        if found is None or not found[0].is_committed or found[0].commit_id != commit_id:
            if may_be_there:
                _take_back(store, found)
            return False
        try:
            store.put(
                DOT_METADATA_KEY, body, precondition=precondition if fenced else None, retry=False
            )
        except (StoreUnavailableError, LostRaceError, ObjectNotFoundError) as error:
            may_be_there = True
            if not retries.pause():
                raise RetryableError(
                    f"'.metadata' could not be written until the deadline (last: {error}); the"
                    " checkpoint is committed, but stock torch readers do not see it",
                    url=store.url,
                ) from error
        else:
            return not _take_back(store, read_marker(store))


def _take_back(store: ObjectStore, found: Found | None) -> bool:
    """A deletion that crossed us may have removed `.metadata` before ours came: then it goes."""
    if found is None or found[0].is_committed:
        return False
    store.delete(DOT_METADATA_KEY)
    return True


def needed_change(store: ObjectStore, marker: Marker, dot_metadata: DotMetadata) -> Change | None:
    """What `.metadata` lacks to be in line with a marker; None: nothing. Changes nothing.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError: the index cannot be read.
    """
    return _judge(store, marker, dot_metadata).change


@dataclass(frozen=True)
class _Judgement:
    """The change that is needed, the body to write, and when what is there was written."""

    change: Change | None
    body: bytes = b""
    written_at: datetime | None = None


def _judge(store: ObjectStore, marker: Marker, dot_metadata: DotMetadata) -> _Judgement:
    index = read_index(store, marker) if marker.is_committed else None
    try:
        body, meta = store.get(DOT_METADATA_KEY, max_size_bytes=_MAX_SIZE_BYTES)
    except (ObjectNotFoundError, CorruptDataError):
        body = None  # missing, or larger than any of ours
    if index is None:
        removed = body is not None and dot_metadata.is_ours(body)
        return _Judgement("removed" if removed else None)
    if body is not None and dot_metadata.describes(body, index):
        return _Judgement(None, written_at=meta.last_modified)
    return _Judgement("written", dot_metadata.derive(index))


@dataclass(frozen=True)
class Aligned:
    """`.metadata` in line with a marker.

    Attributes:
        found: that marker, which may be a later one.
        change: the last change that was made; None: none. After one, the caller rewrites the
            marker: stock readers may still use what the old `.metadata` named, so a sweep has to
            see that the marker is young.
        written_at: when the `.metadata` was written, where it was there and in line.
    """

    found: Found
    change: Change | None
    written_at: datetime | None = None


def align_dot_metadata(
    store: ObjectStore,
    found: Found,
    dot_metadata: DotMetadata,
    *,
    retries: Retries,
) -> Aligned:
    """Bring `.metadata` into line with the marker, which must be committed or a tombstone.

    Args:
        store: rooted at the checkpoint.
        found: the marker as it was just read.
        dot_metadata: derives and judges.
        retries: bounds when a try may start.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError: the index cannot be read.
        RetryableError: no success until the deadline, or the checkpoint is being deleted.
    """
    change: Change | None = None
    while found[0].state != "deleting":
        needed = _judge(store, found[0], dot_metadata)
        if needed.change is None:
            return Aligned(found, change, needed.written_at)
        if needed.change == "removed":
            store.delete(DOT_METADATA_KEY)
            change = needed.change
        elif publish_until(store, found[0].commit_id, needed.body, retries=retries):
            change = needed.change
        again = read_marker(store)
        if again is None:
            raise CheckpointCorruptError(
                "somebody removed the marker without dcp_objstore", url=store.url
            )
        if again[0].commit_id == found[0].commit_id and again[0].state == found[0].state:
            return Aligned(again, change)
        found = again
        if not retries.pause():
            raise RetryableError(
                "others kept changing this checkpoint until the deadline; try again", url=store.url
            )
    raise RetryableError("this checkpoint is being deleted; try again", url=store.url)
