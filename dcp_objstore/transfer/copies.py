"""Copies that the store makes itself: new objects out of ranges of others, whose bytes stay there.

The request to copy a part keeps the store busy for long, and costs this process nothing. So several
objects are copied at a time, each in several parts. There is a limit, because a store that copies
with its own disks (as SeaweedFS and MinIO do) would have no time for anything else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait

from dcp_objstore.config import MIB, TransferConfig, at_most
from dcp_objstore.errors import DcpObjstoreError, TransferStalledError
from dcp_objstore.observe.events import PartCopied
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.base import cut_range
from dcp_objstore.stores.protocol import CopySource, ObjectStore
from dcp_objstore.transfer.parts import MAX_PARTS
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.upload import Uploaded, run_watched
from dcp_objstore.transfer.workers import DaemonPool

# The least that S3 takes for a part that is not the last of its object.
LEAST_PART_BYTES = 5 * MIB
# A part of this size is copied well within a request's time-out, and costs next to nothing.
_PART_SIZE_BYTES = 64 * MIB
# How many objects are copied at a time, and how many parts of all of them.
_MOST_OBJECTS = 4
_MOST_PARTS = 16


def copied_parts(sources: Sequence[CopySource]) -> list[int]:
    """Return the sizes of the parts in which an object is copied."""
    most_bytes = _part_size_bytes(sources)
    parts = (part for source in sources for part in cut_range(source.start, source.end, most_bytes))
    return [end - start for start, end in parts]


def _part_size_bytes(sources: Sequence[CopySource]) -> int:
    """Return the size of a part: the usual one, unless an object would have too many parts."""
    size_bytes = sum(source.end - source.start for source in sources)
    # Parts end where their source does, so each source may add one.
    return max(_PART_SIZE_BYTES, -(-size_bytes // max(1, MAX_PARTS - len(sources))))


def copy_objects(
    store: ObjectStore,
    objects: Mapping[str, Sequence[CopySource]],
    config: TransferConfig,
    progress: Progress,
) -> dict[str, Uploaded | DcpObjstoreError]:
    """Have the store make objects out of others; return each, or the error that prevented it.

    An object whose copy failed is not visible under its key, unless the copy succeeded and only the
    store's answer was lost.

    Args:
        objects: the sources of each object, by its key.
        progress: an object that receives the bytes that were copied, and may stop the copies.
    """
    if not objects:
        return {}
    threads = min(_MOST_OBJECTS, len(objects))
    parts_each = max(1, at_most(config.upload_concurrency, _MOST_PARTS) // threads)
    futures: dict[str, Future[Uploaded]] = {}
    with DaemonPool(threads, "copy") as pool:
        for key, sources in objects.items():
            futures[key] = pool.submit(_copy, store, key, sources, parts_each, progress)
        try:
            run_watched(lambda: wait(futures.values()), f"copies to {store.url}", progress)
        except TransferStalledError as error:
            # Some copies may have ended. Those that are still under way are not waited for.
            stalled = error
    outcomes: dict[str, Uploaded | DcpObjstoreError] = {}
    for key, future in futures.items():
        # All are done, unless there was a stall: `run_watched` has waited for them.
        failure = future.exception() if future.done() else stalled
        if failure is not None and not isinstance(failure, DcpObjstoreError):
            raise failure  # a defect, or the Ctrl-C that `progress` was stopped with
        outcomes[key] = future.result() if failure is None else failure
    return outcomes


def _copy(
    store: ObjectStore,
    key: str,
    sources: Sequence[CopySource],
    max_concurrency: int,
    progress: Progress,
) -> Uploaded:
    """Have the store make one object out of others, at most `max_concurrency` parts at a time."""
    progress.check_stopped()
    part_sizes: list[int] = []

    def moved(size_bytes: int) -> None:
        """Count a part that the store has copied; raise if the copies must stop."""
        progress.check_stopped()
        part_sizes.append(size_bytes)
        progress.moved(size_bytes)
        limiter_of(store).note_success()
        if progress.channel is not None:
            progress.channel.emit(
                PartCopied, time.monotonic(), object_key=key, size_bytes=size_bytes
            )

    version = store.copy(
        key,
        sources,
        part_size_bytes=_part_size_bytes(sources),
        max_concurrency=max_concurrency,
        moved=moved,
    )
    return Uploaded(size_bytes=sum(part_sizes), version=version, parts=len(part_sizes))
