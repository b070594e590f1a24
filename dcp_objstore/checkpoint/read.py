"""Reading a checkpoint: from the marker to the index, and what it means if an object is missing.

The rule of `commit` that this module implements:

 7. Readers go from `_COMMIT` to the index to the objects, and never trust a listing. If something
    is missing, the marker is read again: the same commit_id means damage, another one means that
    the checkpoint was replaced or deleted. Only commit_ids are compared, because a sweep
    may rewrite the marker of the same commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from dcp_objstore.checkpoint.marker import (
    MARKER_NAME,
    MAX_MARKER_SIZE_BYTES,
    Marker,
    damaged,
    decode_marker,
)
from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    TORCH_SUFFIXES,
    is_beacon_key,
    is_ours,
)
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    UnsupportedError,
)
from dcp_objstore.stores import StoreSpec
from dcp_objstore.stores.protocol import ObjectMeta, ObjectStore, Version

T = TypeVar("T")

LOOK_AROUND_LIMIT = 1000  # one page on S3
_WEIGHTS_ADVICE = (
    "dos.load, inspect, diff and export read it as it is, but it has no commit to list, pin, copy"
    " or delete; 'dcp-objstore import' makes a checkpoint of it"
)


class Stored(NamedTuple, Generic[T]):
    """A marker or a `_CLAIM`, and the metadata of the object that has it, from one response."""

    record: T
    meta: ObjectMeta

    @property
    def version(self) -> Version:
        """The object's version, on which a PUT that replaces it is conditioned."""
        return self.meta.version


def read_marker(store: ObjectStore, *, expected: bool = False) -> Stored[Marker] | None:
    """Read the marker and its object's metadata; return None if there is none. One GET.

    A tombstone is returned like any marker; only a marker with `is_committed` is a checkpoint.

    Args:
        expected: as for `read_record`.

    Raises:
        CheckpointCorruptError: the marker is damaged.
        UnsupportedError: a newer version wrote it in a format that this one does not know.
    """
    return read_record(
        store,
        MARKER_KEY,
        decode_marker,
        what=MARKER_NAME,
        max_size_bytes=MAX_MARKER_SIZE_BYTES,
        expected=expected,
    )


def read_record(
    store: ObjectStore,
    key: str,
    decode: Callable[[bytes], T],
    *,
    what: str,
    max_size_bytes: int,
    expected: bool = False,
) -> Stored[T] | None:
    """Read and decode a small object, or return None if there is none. One GET, or two.

    Args:
        decode: returns what the body says, or raises `CorruptDataError`.
        what: the object, in words, for errors.
        expected: the object is known to be there. So after a 404 the GET is sent once more, as it
            is after a damaged answer.

    Raises:
        CheckpointCorruptError: the object is damaged.
        UnsupportedError: `decode` has raised it.
    """

    def read() -> Stored[T]:
        body, meta = store.get(key, max_size_bytes=max_size_bytes)
        return Stored(decode(body), meta)

    try:
        return retry_damaged(read, *((ObjectNotFoundError,) if expected else ()))
    except ObjectNotFoundError:
        return None
    except (CheckpointCorruptError, UnsupportedError) as error:
        error.at(object_key=key, url=store.url)
        raise
    except CorruptDataError as error:  # the base class: `store.get` got an object of wrong size
        raise damaged(what, error.message).at(object_key=key, url=store.url) from error


def still_stands(stored: Stored[Marker] | None, commit_id: str) -> bool:
    """Return whether the marker that was just read still says `committed`, and of this commit."""
    if stored is None:
        return False
    return stored.record.is_committed and stored.record.commit_id == commit_id


def retry_damaged(read: Callable[[], T], *also: type[DcpObjstoreError]) -> T:
    """Return what `read` returns; if it raises CorruptDataError, call it once more.

    Perhaps only this one answer was damaged, and not the object. If `read` fails again, the error
    is believed and raised.

    Args:
        also: other errors after which `read` is called once more.
    """
    doubted: tuple[type[DcpObjstoreError], ...] = (CorruptDataError, *also)
    try:
        return read()
    except doubted:
        return read()


def open_committed(store: ObjectStore) -> tuple[Marker, bytes]:
    """Read the marker of a committed checkpoint and its index; check its SHA-256 (rule 7).

    Raises:
        CheckpointNotFoundError: nothing is committed here; the message says what is here instead.
        CheckpointCorruptError: the marker or the index is damaged, or the index is missing.
        CheckpointGoneError: the checkpoint was replaced or deleted between the two requests.
        UnsupportedError: a newer version wrote the marker in a format that this one does not know.
    """
    return open_marked(store, read_marker(store))


def open_marked(store: ObjectStore, stored: Stored[Marker] | None) -> tuple[Marker, bytes]:
    """Return the marker that `read_marker` has just returned, and the index that it names.

    Raises:
        CheckpointNotFoundError: there is no marker, or it says that the checkpoint was deleted.
        CheckpointCorruptError, CheckpointGoneError: as `read_index`.
    """
    if stored is None or not stored.record.is_committed:
        raise not_committed(store, stored)
    return stored.record, read_index(store, stored.record)


def not_committed(store: ObjectStore, stored: Stored[Marker] | None) -> CheckpointNotFoundError:
    """Make the error for a URL at which nothing is committed. At most one listing."""
    if stored is None:
        reason = explain_absence(store)
    elif stored.record.state == "deleted":
        reason = "the checkpoint that was here was deleted"
    else:
        reason = "the checkpoint here is being deleted"
    return CheckpointNotFoundError(reason, url=store.url)


def read_index(store: ObjectStore, marker: Marker) -> bytes:
    """Read the index that a marker names, in any state, and check its SHA-256. One GET, or two.

    Raises:
        CheckpointCorruptError: the index is damaged, or the marker names none; or the index is
            missing although the marker still says that this is committed.
        CheckpointGoneError: it is missing, and the marker no longer says that this is committed.
    """
    ref = marker.index
    if ref is None:  # `decode_marker` lets only a tombstone have none
        raise CheckpointCorruptError("the marker names no index", url=store.url)

    def check_digest(body: bytes) -> bytes:
        """Return the index; raise unless it is the one that was committed."""
        if hashlib.sha256(body).hexdigest() != ref.sha256:
            difference = f"{len(body)} bytes that are not the {ref.size_bytes} bytes that were"
            raise damaged("the index", f"{difference} committed")
        return body

    stored = read_record(
        store, ref.key, check_digest, what="the index", max_size_bytes=ref.size_bytes, expected=True
    )
    if stored is None:
        raise explain_missing(store, marker.commit_id, ref.key)
    return stored.record


def named_keys(store: ObjectStore, marker: Marker) -> list[str]:
    """Return the keys that a commit names: those in its index, then the index's own. One GET.

    Raises:
        UnsupportedError: a newer version wrote the index.
        CheckpointCorruptError, CheckpointGoneError: as `read_index`.
    """
    from dcp_objstore.checkpoint import index as ix  # imports NumPy, which listings rarely need

    index = ix.decode(read_index(store, marker))
    assert marker.index is not None  # `read_index` has read it
    return [*(entry.key for entry in index.objects), marker.index.key]


def explain_missing(store: ObjectStore, commit_id: str, object_key: str | None) -> DcpObjstoreError:
    """Make the error for an object of the commit that a reader did not find (rule 7). One GET.

    Returns:
        `CheckpointCorruptError` if the commit still stands, `CheckpointGoneError` if it does not,
        or the error that prevented the check.
    """
    try:
        stored = read_marker(store, expected=True)
    except DcpObjstoreError as error:
        return error
    if still_stands(stored, commit_id):
        return CheckpointCorruptError(
            "the checkpoint is committed, but this object of it is missing: it was removed by"
            " something other than dcp_objstore; load another checkpoint",
            object_key=object_key,
            url=store.url,
        )
    if stored is not None and stored.record.is_committed:
        fate = f"replaced by commit {stored.record.commit_id}; load it again"
    else:
        fate = "deleted; load another checkpoint"
    return CheckpointGoneError(
        f"while it was being read, the checkpoint was {fate}", object_key=object_key, url=store.url
    )


def look_around(store: ObjectStore) -> dict[str, ObjectMeta]:
    """List the first objects below a URL that has no marker, by their keys. One listing.

    It lists 1000; or 10,000 if none of these is this library's, so that a save is found among many
    objects of another program.

    Raises:
        CheckpointNotFoundError: they could not be listed.
    """
    try:
        listing = store.list("")
        metas = {meta.key: meta for meta in islice(listing, LOOK_AROUND_LIMIT)}
        if not any(is_ours(key.rpartition("/")[2]) for key in metas):
            metas |= {meta.key: meta for meta in islice(listing, 9 * LOOK_AROUND_LIMIT)}
    except DcpObjstoreError as error:
        raise CheckpointNotFoundError(
            f"there is no checkpoint here (what else is here could not be listed: {error})",
            url=store.url,
        ) from error
    return metas


def is_unfinished(keys: Iterable[str]) -> bool:
    """Return whether some of the keys below a URL without a marker are those of a save."""
    return any(is_ours(key) or is_beacon_key(key) for key in keys)


def explain_absence(store: ObjectStore) -> str:
    """Say why there is no checkpoint here if there is no marker. One bounded listing.

    Raises:
        CheckpointNotFoundError: the objects here could not be listed.
    """
    return explain_keys(store.url, look_around(store))


def explain_keys(url: str, keys: Collection[str]) -> str:
    """Say why there is no checkpoint at a URL, where these keys are and no marker is.

    The keys are relative to the URL. The most probable of the reasons that fit is given.
    """
    if not keys:
        return "there is nothing here: no object at all under this URL"
    if is_unfinished(keys):
        why = "it failed before its end or is still running"
        if DOT_METADATA_KEY in keys:
            why += f"; or it was committed, and its marker ({MARKER_KEY}) was removed"
        return f"a save began here but was never committed: {why}; load another checkpoint"
    if DOT_METADATA_KEY not in keys and any(map(_is_weights, keys)):
        return f"there is no checkpoint here, but a folder of safetensors: {_WEIGHTS_ADVICE}"
    # Of several, the last by name, which in a run is most often the newest.
    marker_below = max((key for key in keys if key.endswith(f"/{MARKER_KEY}")), default="")
    if marker_below:
        nearest = f"{url.rstrip('/')}/{marker_below}".removesuffix(f"/{MARKER_KEY}")
        return f"there is no checkpoint here, but there is one below, for example {nearest}"
    text = "there is no checkpoint here, only other objects"
    torch_files = [key for key in keys if "/" not in key and key.endswith(TORCH_SUFFIXES)]
    if DOT_METADATA_KEY in keys:
        text = "there is a '.metadata' here but no marker: not a checkpoint of dcp_objstore"
    elif torch_files:
        text = (
            f"there is no checkpoint here, but a file of torch.save: {min(torch_files)};"
            " 'dcp-objstore import' makes a checkpoint of one such file, by its name"
        )
    return text


def _is_weights(key: str) -> bool:
    return "/" not in key and key.endswith(".safetensors")


def explain_object(spec: StoreSpec) -> str | None:
    """Say that the URL is the key of a single object, or return None if it is not. One HEAD."""
    parent, name = spec.parent()
    if parent is None:  # the URL is a bucket's
        return None
    try:
        meta = parent.open().head(name)
    except DcpObjstoreError:
        return None  # no such object, or nobody can tell: this is only a hint in another error
    if _is_weights(name):
        return f"there is no checkpoint here, but a file of safetensors: {_WEIGHTS_ADVICE}"
    return (
        f"there is no checkpoint here, but one object of {meta.size_bytes} bytes with exactly this"
        " key; a checkpoint is a prefix with objects below it. If torch.save wrote this object,"
        " torch.load reads it"
    )
