"""Executing a rank's read plan: plan all requests, fetch them, hand what arrives to its place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_objstore.dcp.gather import Backlog, GatherRead
from dcp_objstore.dcp.reads import (
    Block,
    Read,
    TensorRead,
    check_destination,
    consume,
    is_value,
    plan_spans,
    stored_of,
    warn_if_lossy,
)
from dcp_objstore.dcp.report import LoadReport, progress_bar
from dcp_objstore.dcp.values import check_safe
from dcp_objstore.errors import CheckpointCorruptError, CorruptDataError, ObjectNotFoundError
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, plan_requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.dcp.source import Source
    from dcp_objstore.stores import ObjectStore


def load_items(
    store: ObjectStore,
    source: Source,
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    config: TransferConfig,
    *,
    verify: bool,
    trust_pickle: bool,
    started_at: float,
    bar_shown: bool,
) -> LoadReport:
    """Read every item of a plan into what the planner resolves it to.

    Args:
        store: rooted at the checkpoint.
        source: the opened checkpoint.
        items: of the final local plan.
        verify, trust_pickle: see `ObjectStoreReader`.
        started_at: `time.monotonic()` when the load began, for the report.
        bar_shown: show a progress bar where standard error is a terminal.

    Raises:
        CheckpointCorruptError, CheckpointGoneError, UntrustedPickleError, StateMismatchError,
        UnsupportedError, and the store's errors.
    """
    destinations: dict[int, torch.Tensor] = {}
    backlog = Backlog(config.memory_budget_bytes)
    reads = list(_resolve(source, items, planner, destinations, backlog))
    keys = [item.dest_index.fqn for item in items]
    spans = plan_spans(reads, keys, verify=verify)
    requests = plan_requests(spans, request_size_bytes=config.request_size_bytes)
    total_bytes = sum(request.end - request.start for request in requests)

    def finish(read: GatherRead) -> None:
        if read.error is not None:
            raise read.error
        if is_value(read.item):
            body = read.take()
            check_safe(body.getvalue(), read.item.dest_index.fqn, trust_pickle=trust_pickle)
            planner.load_bytes(read.item, body)
            progress.alive()  # workers may have waited for this

    with closing(progress_bar("load", total_bytes, shown=bar_shown)) as bar:
        progress = Progress(config.stall_timeout_seconds, bar.update)

        def take_in(request: RangeRequest[Block], body: Buffer) -> None:
            backlog.wait_for_room(progress)
            consume(request, body)

        arriving = fetch_ranges(store, source.object_keys, requests, take_in, config, progress)
        try:
            with closing(arriving):
                backlog.drain(finish)  # items without bytes
                for _ in arriving:
                    backlog.drain(finish)
        except ObjectNotFoundError as error:
            raise source.explain(store, error) from error
        except CheckpointCorruptError:
            raise
        except CorruptDataError as error:  # an object shorter than the index says
            raise CheckpointCorruptError(
                error.message, error.rank, error.key, error.object_key, error.url
            ) from error
    for item, read in zip(items, reads, strict=True):
        if isinstance(read, TensorRead):
            read.finish()
        if not is_value(item):
            planner.commit_tensor(item, destinations[id(item)])
    return LoadReport(
        url=store.url,
        total_bytes=total_bytes,
        needed_bytes=sum(_needed_bytes(read) for read in reads),
        seconds=time.monotonic() - started_at,
        objects=len({request.object_number for request in requests}),
        requests=len(requests),
        commit_id=source.commit_id,
    )


def _resolve(
    source: Source,
    items: Iterable[ReadItem],
    planner: LoadPlanner,
    destinations: dict[int, torch.Tensor],
    backlog: Backlog,
) -> Iterable[Read]:
    """A read for every item; tensors' destinations are kept by the identity of their item."""
    warned = False
    for item in items:
        stored = stored_of(source, item)
        if is_value(item):
            yield GatherRead(item, stored, None, backlog.add)
            continue
        destination = check_destination(item, planner.resolve_tensor(item))
        destinations[id(item)] = destination
        if stored.dtype is None:
            yield GatherRead(item, stored, destination, backlog.add)
            continue
        warned = warned or warn_if_lossy(item, stored.dtype, destination)
        yield TensorRead(item, stored, destination)


def _needed_bytes(read: Read) -> int:
    if isinstance(read, TensorRead):
        return read.needed_bytes
    return read.stored.payload_length
