"""`.metadata`: the derived object by which stock torch readers find a checkpoint.

What it must hold is knowledge of the torch floor (`DotMetadata`); when it may be put or removed is
decided here. The rule of `commit` that this module carries out:

 6. `.metadata` follows the marker: read its version, check that the marker is still ours, put it
    against that version, and again when that failed. Whoever committed last also writes last.
    A crash in between is mended by anybody (`align_dot_metadata`): written where a commit stands,
    removed where a tombstone does, unless it is another library's, which has saved here since. The
    marker is read again after that, since stores remove without conditions and a new commit may
    have come in between.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from dcp_objstore.checkpoint.clock import DEADLINE_SECONDS, SYSTEM_CLOCK, Clock, Retries
from dcp_objstore.checkpoint.marker import Marker
from dcp_objstore.checkpoint.names import DOT_METADATA_KEY
from dcp_objstore.checkpoint.opening import Found, read_index, read_marker
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


def needed_change(store: ObjectStore, marker: Marker, dot_metadata: DotMetadata) -> Change | None:
    """What `.metadata` lacks to be in line with a marker; None: nothing. Changes nothing.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError: the index cannot be read.
    """
    return _judge(store, marker, dot_metadata)[0]


def _judge(
    store: ObjectStore, marker: Marker, dot_metadata: DotMetadata
) -> tuple[Change | None, bytes]:
    """The change, and the body to write."""
    index = read_index(store, marker) if marker.is_committed else None
    try:
        body, _ = store.get(DOT_METADATA_KEY, max_size_bytes=_MAX_SIZE_BYTES)
    except (ObjectNotFoundError, CorruptDataError):
        body = None  # missing, or larger than any of ours
    if index is None:
        return ("removed" if body is not None and dot_metadata.is_ours(body) else None), b""
    if body is not None and dot_metadata.describes(body, index):
        return None, b""
    return "written", dot_metadata.derive(index)


def align_dot_metadata(
    store: ObjectStore,
    found: Found,
    dot_metadata: DotMetadata,
    *,
    retries: Retries,
) -> tuple[Found, Change | None]:
    """Bring `.metadata` into line with the marker, which must be committed or a tombstone.

    Args:
        store: rooted at the checkpoint.
        found: the marker as it was just read.
        dot_metadata: derives and judges.
        retries: bounds when a try may start.

    Returns:
        The marker with which it is in line, which may be a later one, and the last change made.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UnsupportedError: the index cannot be read.
        RetryableError: no success until the deadline, or the checkpoint is being deleted.
    """
    change: Change | None = None
    while found[0].state != "deleting":
        needed, body = _judge(store, found[0], dot_metadata)
        if needed is None:
            return found, change
        if needed == "removed":
            store.delete(DOT_METADATA_KEY)
            change = needed
        elif publish_until(store, found[0].commit_id, body, retries=retries):
            change = needed
        again = read_marker(store)
        if again is None:
            raise CheckpointCorruptError(
                "somebody removed the marker without dcp_objstore", url=store.url
            )
        if again[0].commit_id == found[0].commit_id and again[0].state == found[0].state:
            return again, change
        found = again
        if not retries.pause():
            raise RetryableError(
                "others kept changing this checkpoint until the deadline; try again", url=store.url
            )
    raise RetryableError("this checkpoint is being deleted; try again", url=store.url)
