"""Opening a checkpoint: from the marker to the index, and what it means that something is missing.

The rule of `commit` that this module carries out:

 7. Readers go from `_COMMIT` to the index to the objects and never trust a listing. If something
    is missing, the marker is read again: the same commit_id means damage, another one means that
    the checkpoint was replaced or deleted meanwhile. Only commit_ids are compared, since a sweep
    may rewrite the marker of the same commit.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

from dcp_objstore.checkpoint.listing import explain_absence
from dcp_objstore.checkpoint.marker import MAX_MARKER_SIZE_BYTES, Marker, decode_marker
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
)
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, Version

# A marker and the version of the same response.
Found: TypeAlias = tuple[Marker, Version]


def read_marker(store: ObjectStore) -> Found | None:
    """The marker with the version of the same response, or None if there is none. One GET.

    A tombstone is returned like any marker; only one with `is_committed` is a checkpoint.

    Raises:
        CheckpointCorruptError, UnsupportedError: see `marker.decode_marker`.
    """
    found = find_marker(store)
    return None if found is None else (found[0], found[1].version)


def find_marker(store: ObjectStore) -> tuple[Marker, ObjectMeta] | None:
    """As `read_marker`, with all that the store says of the object, its time for one."""
    try:
        body, meta = store.get(MARKER_KEY, max_size_bytes=MAX_MARKER_SIZE_BYTES)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        raise CheckpointCorruptError(
            f"the marker is damaged: {error.message}", object_key=MARKER_KEY, url=store.url
        ) from error
    try:
        return decode_marker(body), meta
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


def open_found(store: ObjectStore, found: Found | None) -> tuple[Marker, bytes]:
    """As `open_committed`, of what `read_marker` has just given."""
    if found is None or not found[0].is_committed:
        raise not_committed(store, found)
    return found[0], read_index(store, found[0])


def not_committed(store: ObjectStore, found: Found | None) -> CheckpointNotFoundError:
    """The error for a URL at which nothing is committed. At most one listing."""
    if found is None:
        reason = explain_absence(store)
    elif found[0].state == "deleted":
        reason = "the checkpoint that was here was deleted"
    else:
        reason = "the checkpoint here is being deleted"
    return CheckpointNotFoundError(reason, url=store.url)


def read_index(store: ObjectStore, marker: Marker) -> bytes:
    """The index that a marker names, in whatever state, its size and SHA-256 verified. One GET.

    Raises:
        CheckpointCorruptError: it is damaged; or it is missing, or none is named, and the marker
            says committed.
        CheckpointGoneError: it is missing, and the marker no longer says that this is committed.
    """
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
    return body


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
