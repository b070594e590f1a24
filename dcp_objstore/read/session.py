"""One rank's load: plan from the index alone, bind to tensors, fetch, and put in place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.planner import LoadPlanner

from dcp_objstore.compat.values import check_safe
from dcp_objstore.config import at_most
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dcp_objstore.observe.events import Loaded, Planned
from dcp_objstore.observe.report import LoadReport
from dcp_objstore.read.item_read import CompletionQueue, ItemRead
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.read.tensor_read import (
    Block,
    TensorRead,
    check_destination,
    consume,
    is_value,
    warn_if_lossy,
)
from dcp_objstore.state.device import Inbound, lanes_into, plan_ring, settle_streams
from dcp_objstore.state.memory import copy_elements, fill_order
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.wrappers import PinnedStore
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, grown_request_size, plan_requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.config import TransferConfig
    from dcp_objstore.observe.dispatch import Channel
    from dcp_objstore.read.peers.exchange import Exchange
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint
    from dcp_objstore.stores import ObjectStore


def run_load(
    store: ObjectStore,
    planned: PlannedLoad,
    planner: LoadPlanner,
    config: TransferConfig,
    *,
    trust_pickle: bool,
    channel: Channel,
    exchange: Exchange | None = None,
) -> LoadReport:
    """Read every item of a plan into the destination that the planner gives it.

    A plan can be run only once.

    Args:
        trust_pickle: whether to unpickle values that `torch.load(weights_only=True)` refuses.
        exchange: the part of the load that the ranks do together; None if this rank loads alone.

    Raises:
        CheckpointCorruptError: objects are missing or differ from what was saved.
        CheckpointGoneError: the checkpoint was deleted or replaced during the load.
        UntrustedPickleError: a value needs `trust_pickle` or a declared safe global.
        StateMismatchError: a destination does not fit what is stored.
        UnsupportedError: a destination cannot be written in place.
        DcpObjstoreError: any error of the store.
    """
    if planned.checkpoint.versions is not None:
        store = PinnedStore(store, planned.checkpoint.versions)
    shared_bytes = 0 if exchange is None else exchange.memory_bytes
    completed = CompletionQueue(config.memory_budget_bytes)
    destinations, after = _bind(planned, planner, completed)
    alone = planned.spans if exchange is None else exchange.alone()
    requests = [
        *(() if exchange is None else exchange.requests),
        *plan_requests(
            alone,
            request_size_bytes=config.request_size_bytes
            if exchange is not None
            else _request_size(store, alone, destinations.values(), config),
        ),
    ]
    total_bytes = sum(request.end - request.start for request in requests)
    budget_bytes = config.memory_budget_bytes - shared_bytes
    inbound, budget_bytes = _way_in(planned.reads, destinations, requests, config, budget_bytes)

    def finish(read: ItemRead) -> None:
        if read.error is not None:
            raise read.error
        if is_value(read.item):
            key = read.item.dest_index.fqn
            body = read.location.undone(read.take(), key)
            check_safe(body.getvalue(), key, trust_pickle=trust_pickle)
            planner.load_bytes(read.item, body)

    def take_in(request: RangeRequest[Block], body: Buffer) -> bool:
        completed.wait_for_room(progress)
        with nullcontext() if inbound is None else inbound.taking(request):
            consume(request, body)
        if exchange is not None:
            exchange.keep(request)
        return completed.is_full

    def admit(request: RangeRequest[Block], progress: Progress) -> memoryview | None:
        into = None if exchange is None else exchange.admit(request, progress)
        if into is None and inbound is not None and _is_sent(request):
            into = inbound.admit(request, progress)
        return into

    def go_on() -> None:
        if exchange is not None:
            exchange.advance()
        completed.drain(finish)
        progress.alive()  # workers may have waited for this call, which is no stall

    def explain(request: RangeRequest[Block], error: DcpObjstoreError) -> DcpObjstoreError:
        return _explained(planned.checkpoint, store, request, error)

    objects = len({request.object_number for request in requests})
    channel.emit(
        Planned,
        channel.began_at,
        operation=channel.operation,
        items=len(planned.items),
        size_bytes=total_bytes,
        objects=objects,
        requests=len(requests),
    )
    with nullcontext() if inbound is None else inbound:
        progress = Progress(config.stall_timeout_seconds, channel)
        arriving = fetch_ranges(
            store,
            planned.checkpoint.object_keys,
            requests,
            take_in,
            config,
            progress,
            budget_bytes=budget_bytes,
            admit=None if exchange is None and inbound is None else admit,
            explain=explain,
        )
        with closing(arriving):
            go_on()  # items without bytes, and rounds in which only others fetch
            for _ in arriving:
                go_on()
        go_on()
    _finish(planned, planner, destinations, after)
    report = LoadReport(
        url=store.url,
        total_bytes=total_bytes,
        needed_bytes=sum(read.needed_bytes for read in planned.reads),
        received_bytes=0 if exchange is None else exchange.received_bytes,
        seconds=time.monotonic() - channel.began_at,
        objects=objects,
        requests=len(requests),
        retries=channel.retries if "open_range" in store.reports_throttling else None,
        slow_ranges=channel.slow_ranges,
        commit_id=planned.checkpoint.commit_id,
    )
    channel.emit(
        Loaded,
        channel.began_at,
        seconds=report.seconds,
        size_bytes=total_bytes,
        needed_bytes=report.needed_bytes,
        received_bytes=report.received_bytes,
        objects=objects,
        requests=len(requests),
        slow_ranges=report.slow_ranges,
        commit_id=report.commit_id,
    )
    return report


def _request_size(
    store: ObjectStore,
    spans: Sequence[Span[Block]],
    destinations: Iterable[torch.Tensor],
    config: TransferConfig,
) -> int:
    """Return the request size: larger than configured where requests are sent ahead."""
    if not store.range_reading.ahead or any(to.device.type != "cpu" for to in destinations):
        return config.request_size_bytes
    total_bytes = sum(span.end - span.start for span in spans)
    is_near = config.download_concurrency != "auto" or limiter_of(store).window.is_near
    return grown_request_size(total_bytes, config.request_size_bytes, is_near=is_near)


def _bind(
    planned: PlannedLoad, planner: LoadPlanner, completed: CompletionQueue
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Give every read its destination.

    If keys share memory, as tied weights do, the last of them fills it, as with torch.

    Returns:
        The destinations by the identity of their item, and of items that are to be copied there
        only when all others have arrived, the tensors that are filled until then.
    """
    destinations = {
        id(item): check_destination(item, planner.resolve_tensor(item))
        for item in planned.items
        if not is_value(item)
    }
    of_keys: dict[str, list[torch.Tensor]] = {}
    for item in planned.items:
        if id(item) in destinations:
            of_keys.setdefault(item.dest_index.fqn, []).append(destinations[id(item)])
    covered, after = fill_order(of_keys)
    filled_first: dict[int, torch.Tensor] = {}
    warned = False
    for item, read in zip(planned.items, planned.reads, strict=True):
        destination = destinations.get(id(item))
        if destination is not None and item.dest_index.fqn in after:
            destination = torch.empty_like(destination, memory_format=torch.contiguous_format)
            filled_first[id(item)] = destination
        if isinstance(read, ItemRead):
            read.bind(destination, completed.add)
        else:
            assert destination is not None and read.location.dtype is not None
            warned = warned or warn_if_lossy(item, read.location.dtype, destination)
            read.bind(destination)
    if covered:
        for span in planned.spans:
            reads = span.tag.reads
            reads[:] = [read for read in reads if read.item.dest_index.fqn not in covered]
    return destinations, filled_first


def _finish(
    planned: PlannedLoad,
    planner: LoadPlanner,
    destinations: Mapping[int, torch.Tensor],
    after: Mapping[int, torch.Tensor],
) -> None:
    """Finish all tensors, now that their bytes have arrived, and tell the planner of them."""
    for item, read in zip(planned.items, planned.reads, strict=True):
        if isinstance(read, TensorRead):
            read.finish()
        if id(item) in after:
            copy_elements(after[id(item)], destinations[id(item)])
    for item in planned.items:
        if not is_value(item):
            planner.commit_tensor(item, destinations[id(item)])


def _way_in(
    reads: Sequence[TensorRead | ItemRead],
    destinations: Mapping[int, torch.Tensor],
    requests: Sequence[RangeRequest[Block]],
    config: TransferConfig,
    budget_bytes: int,
) -> tuple[Inbound | None, int]:
    """Return the path to destinations on a GPU, if any, and the budget left for fetching."""
    devices = {destination.device for destination in destinations.values()}
    if any(device.type != "cpu" for device in devices):
        settle_streams()
    lanes = lanes_into(devices)
    if not lanes:
        return None, budget_bytes
    largest_bytes = max((request.end - request.start for request in requests), default=0)
    concurrency = min(at_most(config.download_concurrency), max(1, len(requests)))
    slots, slot_bytes, budget_bytes = plan_ring(largest_bytes, concurrency, budget_bytes)
    inbound = Inbound(lanes, slots, slot_bytes)
    for read in reads:
        if isinstance(read, TensorRead):
            read.send_through(inbound)
    return inbound, budget_bytes


def _is_sent(request: RangeRequest[Block]) -> bool:
    """Whether part of a request goes to a device."""
    return any(
        isinstance(read, TensorRead) and read.is_sent
        for span in request.spans
        for read in span.tag.reads
    )


def _explained(
    checkpoint: StoredCheckpoint,
    store: ObjectStore,
    request: RangeRequest[Block],
    error: DcpObjstoreError,
) -> DcpObjstoreError:
    """Say what a GET's error means for the checkpoint, and add what the GET was for."""
    if isinstance(error, ObjectNotFoundError):
        error = checkpoint.explain(store, error)
    elif isinstance(error, PreconditionFailedError):
        error = CheckpointGoneError(
            "while it was being read, another writer replaced the checkpoint; load it again",
            *(error.rank, error.key, error.object_key, error.url),
        )
    elif isinstance(error, CorruptDataError):  # the object is too short, or the answer was wrong
        error = CheckpointCorruptError(
            error.message, error.rank, error.key, error.object_key, error.url
        )
    blocks = [
        f"block {span.tag.position // BLOCK_SIZE_BYTES} of {span.tag.key}"
        for span in (request.spans[0], request.spans[-1])
    ]
    place = " to ".join(dict.fromkeys(blocks))
    error.message += f" (reading bytes [{request.start}, {request.end}) of the object, {place})"
    return error.at(key=request.spans[0].tag.key)
