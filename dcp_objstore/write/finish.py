"""The end of a save on the coordinator: commit it, then write `.metadata` for stock readers.

`checkpoint.commit` has the rules of a commit; this module also emits its events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_objstore.checkpoint import commit, index as ix
from dcp_objstore.checkpoint.marker import Counts
from dcp_objstore.checkpoint.names import MARKER_KEY
from dcp_objstore.checkpoint.publish import publish_dot_metadata
from dcp_objstore.compat.dot_metadata import encode_metadata
from dcp_objstore.observe.events import Committed
from dcp_objstore.observe.report import logger
from dcp_objstore.transfer.workers import wait_for

if TYPE_CHECKING:
    from dcp_objstore.stores import ObjectStore
    from dcp_objstore.write.session import Save


def commit_save(
    save: Save,
    store: ObjectStore,
    index: ix.Index,
    index_body: bytes,
    *,
    user_metadata: Mapping[str, object] | None,
    deadline_seconds: float,
) -> commit.CommitResult:
    """Make the checkpoint exist. Called once in a save, after all ranks have reported.

    Args:
        save: the save, whose begin token was read.
        store: the store, rooted at the checkpoint.
        index: the index to commit.
        index_body: the index in its stored form.
        user_metadata: small JSON values to store in the marker.
        deadline_seconds: time after which no further attempt begins.

    Returns:
        The commit that took effect.

    Raises:
        CheckpointCorruptError: an object is missing or has the wrong size; nothing was committed.
        CommitLostError: another writer, or a sweep, changed the marker during the save; nothing was
            committed.
        SupersededError: a job with a later claim changed the marker; nothing was committed.
        CommitUnknownError: the store gave no clear answer until the deadline; the commit may still
            take effect.
        InputError: the store refused the PUT for good; nothing was committed.
    """
    assert save.begin is not None
    began_at = time.monotonic()

    def retried(attempt: int, error: Exception, first_at: float) -> None:
        text = f"{type(error).__name__}: {error}"
        save.channel.retried("commit", MARKER_KEY, attempt, text, first_at)

    committed = wait_for(
        commit.commit,
        store,
        save.begin,
        index=index_body,
        objects=[(entry.key, entry.size_bytes) for entry in index.objects],
        counts=Counts(
            tensors=len(index.tensors),
            blobs=len(index.blobs),
            objects=len(index.objects),
            total_bytes=sum(entry.size_bytes for entry in index.objects),
        ),
        world_size=save.world_size,
        user_metadata=user_metadata,
        nonce=save.nonce,
        deadline_seconds=deadline_seconds,
        fenced=save.fenced,
        on_retry=retried,
    )
    save.channel.emit(
        Committed, began_at, commit_id=committed.commit_id, attempts=committed.attempts
    )
    return committed


def publish_for_stock_readers(
    save: Save,
    store: ObjectStore,
    committed: commit.CommitResult,
    index: ix.Index,
    *,
    deadline_seconds: float,
) -> None:
    """Write `.metadata`. The checkpoint is committed already, so a failure only warns."""
    try:
        publish_dot_metadata(
            store,
            committed.commit_id,
            encode_metadata(index),
            seen=committed.dot_metadata,
            deadline_seconds=deadline_seconds,
            fenced=save.fenced,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the save has succeeded
        logger.warning(
            "%s is committed, but its .metadata, which stock torch readers need, could not be"
            " written: %s",
            store.url,
            error,
        )
