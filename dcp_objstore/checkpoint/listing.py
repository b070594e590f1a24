"""Listings: to check uploads before a commit, and to explain why there is no checkpoint.

No reader and no commit ever takes a listing as proof that a checkpoint exists (rules 4 and 7 of
`commit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint.names import (
    DOT_METADATA_KEY,
    MARKER_KEY,
    is_beacon_key,
    is_ours,
)
from dcp_objstore.errors import CheckpointCorruptError, DcpObjstoreError
from dcp_objstore.stores.protocol import ObjectStore
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.stores import StoreSpec

_LOOK_AROUND_LIMIT = 1000  # keys listed to explain an absence: one page on S3


def check_objects(store: ObjectStore, objects: Sequence[tuple[str, int]]) -> None:
    """Check with a listing that every object is there with its size. Other keys may be there too.

    Args:
        store: rooted at the checkpoint.
        objects: key and size in bytes of each object.

    Raises:
        CheckpointCorruptError: an object is missing or has another size; the error names it.
    """
    missing = dict(objects)
    if not missing:
        return
    for meta in store.list(""):
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


def explain_absence(store: ObjectStore) -> str:
    """Say why there is no checkpoint here if there is no marker. One bounded listing."""
    try:
        keys = [meta.key for meta in islice(store.list(""), _LOOK_AROUND_LIMIT)]
    except DcpObjstoreError as error:
        return f"there is no checkpoint here (what else is here could not be listed: {error})"
    below = sorted({key.removesuffix(f"/{MARKER_KEY}") for key in keys if f"/{MARKER_KEY}" in key})
    if not keys:
        reason = "there is nothing here: no object at all under this URL"
    elif any(is_ours(key) or is_beacon_key(key) for key in keys):
        reason = (
            "a save began here but was never committed: it failed before its end or is still"
            " running; load another checkpoint"
        )
    elif below:
        nearest = f"{store.url.rstrip('/')}/{below[-1]}"
        reason = f"there is no checkpoint here, but there is one below, for example {nearest}"
    elif DOT_METADATA_KEY in keys:
        reason = "there is a '.metadata' here but no marker: not a checkpoint of dcp_objstore"
    else:
        reason = "there is no checkpoint here, only other objects"
    return reason


def explain_object(spec: StoreSpec) -> str | None:
    """Say that the URL is the key of a single object, or return None if it is not. One HEAD."""
    above, _, name = spec.url.rpartition("/")
    if not name or not spec.parsed.prefix.strip("/") or above in ("file:/", "file://"):
        return None
    try:
        found = wait_for(spec.at(above).open().head, name)
    except DcpObjstoreError:
        return None
    return (
        f"there is no checkpoint here, but one object of {found.size_bytes} bytes with exactly this"
        " key; a checkpoint is a prefix with objects below it. If torch.save wrote this object,"
        " torch.load reads it"
    )
