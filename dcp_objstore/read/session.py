"""One rank's load: plan from the index alone, bind to tensors, fetch, and put in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from dcp_objstore.config import TransferConfig, at_most
from dcp_objstore.errors import (
    CheckpointCorruptError,
    CheckpointGoneError,
    CorruptDataError,
    DcpObjstoreError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dcp_objstore.observe.dispatch import Channel
from dcp_objstore.observe.events import Loaded, Planned
from dcp_objstore.observe.report import LoadReport
from dcp_objstore.read.item_read import CompletionQueue, Destination, ItemRead, Takes
from dcp_objstore.read.mismatch import OnDtype, refuse_other_dtypes
from dcp_objstore.read.plan import PlannedLoad
from dcp_objstore.read.tensor_read import (
    Block,
    TensorRead,
    check_destination,
    consume,
    memory_for,
    warn_if_lossy,
)
from dcp_objstore.state.device import Inbound, lanes_into, plan_ring, wait_for_streams
from dcp_objstore.state.memory import copy_elements, fill_order, with_own_memory
from dcp_objstore.stores import ObjectStore
from dcp_objstore.stores.admission.limiter import limiter_of
from dcp_objstore.stores.wrappers import PinnedStore
from dcp_objstore.transfer.digests import BLOCK_SIZE_BYTES
from dcp_objstore.transfer.download import fetch_ranges
from dcp_objstore.transfer.progress import Progress
from dcp_objstore.transfer.ranges import RangeRequest, Span, grown_request_size, plan_requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dcp_objstore.local.copies import LoadCopies
    from dcp_objstore.read.peers.exchange import Exchange
    from dcp_objstore.read.stored_checkpoint import StoredCheckpoint


class _LateCopy(NamedTuple):
    """A tensor that is filled in place of a destination, and copied to it when all has arrived."""

    filled: torch.Tensor
    destination: torch.Tensor


def run_load(
    store: ObjectStore,
    planned: PlannedLoad,
    destinations: Sequence[Destination],
    config: TransferConfig,
    *,
    trust_pickle: bool,
    channel: Channel,
    exchange: Exchange | None = None,
    copies: LoadCopies | None = None,
    on_dtype: OnDtype = "warn",
    takes: Takes | None = None,
) -> LoadReport:
    """Read every item of a plan into its destination.

    A plan can be run only once. The caller reports the end of the load with `report_loaded`.

    Args:
        destinations: the destination of each of `planned.reads`, in the same order. Values are
            passed on in the calling thread.
        trust_pickle: whether to unpickle values that `torch.load(weights_only=True)` refuses.
        exchange: the part of the load that the ranks do together; None if this rank loads alone.
        copies: the copies on this node, which are read first. Blocks must have digests.
        on_dtype: what to do if a destination has another dtype than the stored tensor.
        takes: see `ItemRead.takes`.

    Raises:
        CheckpointCorruptError: objects are missing or differ from what was saved.
        CheckpointGoneError: the checkpoint was deleted or replaced during the load.
        UntrustedPickleError: a value needs `trust_pickle` or a declared safe global.
        StateMismatchError: a destination does not fit what is stored; it has another dtype and
            `on_dtype` is "error".
        UnsupportedError: a destination cannot be written in place.
        DcpObjstoreError: any error of the store.
    """
    if planned.checkpoint.versions is not None:
        store = PinnedStore(store, planned.checkpoint.versions)
    local_first = None if copies is None else copies.before(store)
    completed = CompletionQueue(config.memory_budget_bytes)
    if on_dtype == "error":
        _refuse_other_dtypes(planned, destinations)
    for read in planned.reads:
        if isinstance(read, ItemRead):
            read.is_trusted, read.takes = trust_pickle, takes
    late_copies = _bind(planned, destinations, completed)
    devices = {tensor.device for tensor in destinations if isinstance(tensor, torch.Tensor)}
    requests = _plan_requests(store, planned, devices, config, exchange)
    shared_bytes = 0 if exchange is None else exchange.memory_bytes
    inbound, budget_bytes = _open_inbound(
        planned.reads,
        devices,
        requests,
        config=config,
        budget_bytes=config.memory_budget_bytes - shared_bytes,
    )
    total_bytes = sum(request.end - request.start for request in requests)
    objects = len({request.object_number for request in requests})
    channel.emit(
        Planned,
        channel.began_at,
        operation=channel.operation,
        items=len(planned.reads),
        size_bytes=total_bytes,
        objects=objects,
        requests=len(requests),
    )
    with nullcontext() if inbound is None else inbound:
        progress = Progress(config.stall_timeout_seconds, channel)
        _fetch(
            local_first or store,
            planned.checkpoint.object_keys,
            requests,
            _Intake(exchange, inbound, completed, progress, trust_pickle),
            config=config,
            local=() if copies is None else copies.numbers,
            budget_bytes=budget_bytes,
            explain=partial(explained, planned.checkpoint, store),
        )
    for read in planned.reads:
        if isinstance(read, TensorRead):
            read.finish()
    for filled, destination in late_copies:
        copy_elements(filled, destination)
    if copies is not None:
        copies.keep()
    return LoadReport(
        url=channel.url,
        total_bytes=total_bytes,
        needed_bytes=sum(read.needed_bytes for read in planned.reads),
        received_bytes=0 if exchange is None else exchange.received_bytes,
        seconds=time.monotonic() - channel.began_at,
        objects=objects,
        requests=len(requests),
        # Where the transport sends GETs again by itself, the number of retries is not known.
        retries=channel.retries if "open_range" in store.reports_throttling else None,
        slow_ranges=channel.slow_ranges,
        commit_id=planned.checkpoint.commit_id,
        local_bytes=0 if local_first is None else local_first.local_bytes,
        unverified=any(span.tag.digest is None for span in planned.spans),
    )


@dataclass
class _Intake:
    """The handling of a load's ranges: memory for them, their destinations, other ranks.

    Workers call `admit` and `take_in`, the thread of the load `go_on`.

    Args:
        completed: the items that wait for the thread of the load.
    """

    exchange: Exchange | None
    inbound: Inbound | None
    completed: CompletionQueue
    progress: Progress
    trust_pickle: bool

    def take_in(self, request: RangeRequest[Block], body: Buffer) -> bool:
        """Bring a range to its destinations; return whether the queue of items must be drained."""
        self.completed.wait_for_room(self.progress)
        with nullcontext() if self.inbound is None else self.inbound.taking(request):
            consume(request, body)
        if self.exchange is not None:
            self.exchange.keep(request, self.progress)
        return self.completed.is_full

    def admit(self, request: RangeRequest[Block], progress: Progress) -> memoryview | None:
        """Wait for memory for a range, and return it; None if it takes none."""
        memory = None if self.exchange is None else self.exchange.admit(request, progress)
        if memory is None and self.inbound is not None and _goes_to_device(request):
            memory = self.inbound.admit(request, progress)
        return memory

    def go_on(self) -> None:
        """Exchange what has arrived, and finish items."""
        if self.exchange is not None:
            self.exchange.advance()
        self.completed.drain(partial(ItemRead.finish, trust_pickle=self.trust_pickle))
        self.progress.alive()  # workers may have waited for this call, which is not a stall


def _fetch(
    store: ObjectStore,
    object_keys: Sequence[str],
    requests: Sequence[RangeRequest[Block]],
    intake: _Intake,
    *,
    config: TransferConfig,
    local: Collection[int],
    budget_bytes: int,
    explain: Callable[[RangeRequest[Block], DcpObjstoreError], DcpObjstoreError],
) -> None:
    """Send the requests, and bring what arrives to its destinations and to other ranks."""
    exchange, inbound = intake.exchange, intake.inbound
    arriving = fetch_ranges(
        store,
        object_keys,
        requests,
        intake.take_in,
        config=config,
        progress=intake.progress,
        local=local,
        budget_bytes=budget_bytes,
        admit=None if exchange is None and inbound is None else intake.admit,
        # The ring of a device does not say whether it has room, so `admit` may wait for it.
        may_begin=exchange.may_begin if exchange is not None and inbound is None else None,
        in_place=memory_for,
        explain=explain,
    )
    with closing(arriving):
        # No request belongs to items without bytes and to rounds in which only others fetch.
        intake.go_on()
        for _ in arriving:
            intake.go_on()


def report_loaded(channel: Channel, report: LoadReport) -> None:
    """Emit the event that ends a load."""
    channel.emit(Loaded, channel.began_at, seconds=report.seconds, report=report)


def _plan_requests(
    store: ObjectStore,
    planned: PlannedLoad,
    devices: Iterable[torch.device],
    config: TransferConfig,
    exchange: Exchange | None,
) -> Sequence[RangeRequest[Block]]:
    """Return this rank's requests: first those whose bytes it also hands to other ranks."""
    alone = planned.spans if exchange is None else exchange.alone()
    request_size_bytes = _request_size(store, alone, devices, config)
    requests = plan_requests(alone, request_size_bytes=request_size_bytes)
    return requests if exchange is None else [*exchange.requests, *requests]


def _request_size(
    store: ObjectStore,
    spans: Sequence[Span[Block]],
    devices: Iterable[torch.device],
    config: TransferConfig,
) -> int:
    """Return the request size: larger than configured where requests are sent ahead."""
    # On the way to a device the whole body of a request lies in the ring, so it must not grow.
    if not store.range_reading.ahead or any(device.type != "cpu" for device in devices):
        return config.request_size_bytes
    total_bytes = sum(span.end - span.start for span in spans)
    # Only an automatic concurrency finds out whether the store is far. With a fixed one it counts
    # as near.
    is_near = config.download_concurrency != "auto" or limiter_of(store).window.is_near
    return grown_request_size(total_bytes, config.request_size_bytes, is_near=is_near)


def _refuse_other_dtypes(planned: PlannedLoad, destinations: Sequence[Destination]) -> None:
    """Raise a StateMismatchError if destinations have other dtypes than what is stored."""
    dtypes = {
        read.item.dest_index.fqn: destination.dtype
        for read, destination in zip(planned.reads, destinations, strict=True)
        if isinstance(destination, torch.Tensor)
    }
    saved = {key: planned.checkpoint.items.tensor(key) for key in dtypes}
    refuse_other_dtypes(
        (key, tensor.dtype, dtypes[key]) for key, tensor in saved.items() if tensor is not None
    )


def _bind(
    planned: PlannedLoad, destinations: Sequence[Destination], completed: CompletionQueue
) -> list[_LateCopy]:
    """Give every read its destination.

    If keys share memory, as tied weights do, the last of them fills it, as with torch.

    Returns:
        The tensors that are copied to their destination only when all others have arrived.
    """
    tensors: dict[str, list[torch.Tensor]] = {}
    for read, destination in zip(planned.reads, destinations, strict=True):
        if isinstance(destination, torch.Tensor):
            check_destination(read.item, destination)
            tensors.setdefault(read.item.dest_index.fqn, []).append(destination)
    covered, after_others = fill_order(tensors)
    late_copies: list[_LateCopy] = []
    has_warned = False
    for read, destination in zip(planned.reads, destinations, strict=True):
        filled = destination
        # The key shares elements with an earlier one. So a tensor with memory of its own is filled,
        # and copied to the destination when all others have arrived.
        if isinstance(destination, torch.Tensor) and read.item.dest_index.fqn in after_others:
            filled = with_own_memory(destination)
            late_copies.append(_LateCopy(filled, destination))
        if isinstance(read, ItemRead):
            read.bind(filled, completed.add)
        else:
            assert isinstance(filled, torch.Tensor) and read.location.dtype is not None
            # One warning for a load is enough.
            has_warned = has_warned or warn_if_lossy(read.item, read.location.dtype, filled)
            read.bind(filled)
    if covered:  # other keys fill all of their memory later, so these keys receive nothing
        for span in planned.spans:
            reads = span.tag.reads
            reads[:] = [read for read in reads if read.item.dest_index.fqn not in covered]
    return late_copies


def _open_inbound(
    reads: Sequence[TensorRead | ItemRead],
    devices: set[torch.device],
    requests: Sequence[RangeRequest[Block]],
    *,
    config: TransferConfig,
    budget_bytes: int,
) -> tuple[Inbound | None, int]:
    """Return the path to destinations on a GPU, if any, and the budget left for fetching."""
    if any(device.type != "cpu" for device in devices):
        wait_for_streams()  # work that is queued there may still use the memory of destinations
    lanes = lanes_into(devices)
    if not lanes:
        return None, budget_bytes
    largest_bytes = max((request.end - request.start for request in requests), default=0)
    concurrency = min(at_most(config.download_concurrency), max(1, len(requests)))
    plan = plan_ring(largest_bytes, concurrency, budget_bytes)
    inbound = Inbound(lanes, plan.slots, plan.slot_bytes)
    for read in reads:
        if isinstance(read, TensorRead):
            read.send_through(inbound)
    return inbound, plan.fetch_budget_bytes


def _goes_to_device(request: RangeRequest[Block]) -> bool:
    """Whether part of a request goes to a device."""
    return any(
        isinstance(read, TensorRead) and read.inbound is not None
        for span in request.spans
        for read in span.tag.reads
    )


def explained(
    checkpoint: StoredCheckpoint,
    store: ObjectStore,
    request: RangeRequest[Block],
    error: DcpObjstoreError,
) -> DcpObjstoreError:
    """Say what a GET's error means for the checkpoint, and add what the GET was for."""
    # These are in the order in which the constructors of errors take them.
    where = error.rank, error.key, error.object_key, error.url
    if isinstance(error, ObjectNotFoundError):
        error = checkpoint.explain(store, error)
    elif isinstance(error, PreconditionFailedError):
        text = "while it was being read, another writer replaced the checkpoint"
        error = CheckpointGoneError(text, *where, advice="load it again")
    elif isinstance(error, CorruptDataError):  # the object is too short, or the answer was wrong
        error = CheckpointCorruptError(error.message, *where)
    first_and_last = [
        f"block {span.tag.position // BLOCK_SIZE_BYTES} of {span.tag.key}"
        for span in (request.spans[0], request.spans[-1])
    ]
    blocks = " to ".join(dict.fromkeys(first_and_last))
    error.message += f" (reading bytes [{request.start}, {request.end}) of the object, {blocks})"
    return error.at(key=request.spans[0].tag.key)
